// Orca from JavaScript, without a file of ours: the server's reflection tells the contract.
//
//     npm ci
//     node client.js [ADDRESS]

import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { promisify } from "node:util";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const address = process.argv[2] ?? "127.0.0.1:50051";
const credentials = grpc.credentials.createInsecure();
const options = { keepCase: true, enums: String, longs: Number, oneofs: true };

/** The packages that a server's reflection describes, as far as `symbol` needs them. */
async function reflect(symbol) {
  const installed = createRequire(import.meta.url).resolve("@grpc/reflection");
  const file = join(dirname(installed), "../proto/grpc/reflection/v1alpha/reflection.proto");
  const { ServerReflection } = grpc.loadPackageDefinition(loader.loadSync(file, options)).grpc.reflection.v1alpha;
  const call = new ServerReflection(address, credentials).ServerReflectionInfo();
  call.write({ file_containing_symbol: symbol });
  call.end();
  for await (const response of call) {
    if (response.error_response) throw new Error(response.error_response.error_message);
    const files = response.file_descriptor_response.file_descriptor_proto;
    return grpc.loadPackageDefinition(loader.loadFileDescriptorSetFromBuffer(descriptorSet(files), options));
  }
}

/** Serialized FileDescriptorProtos as one FileDescriptorSet: field 1, once for each. */
function descriptorSet(files) {
  return Buffer.concat(files.flatMap((file) => [Buffer.from([10, ...varint(file.length)]), file]));
}

function varint(value) {
  return value < 128 ? [value] : [(value & 127) | 128, ...varint(value >>> 7)];
}

const { orca } = await reflect("orca.v1.Orca");
const client = new orca.v1.Orca(address, credentials);
const request = { text: "import os", max_new_tokens: 16, sampling: { temperature: 0.7, seed: 1 } };

const answer = await promisify(client.GenerateText.bind(client))(request);
console.log(`${answer.token_ids.length} tokens at once: ${JSON.stringify(answer.text)}`);

// A message of a stream holds what is there together: read all three.
for await (const response of client.Generate(request)) {
  if (response.accepted) console.log("request", response.accepted.request_id);
  for (const token of response.tokens ?? []) process.stdout.write(token.text);
  if (response.finished) console.log(`\n${response.finished.output_tokens} tokens, ${response.finished.reason}`);
}
