// Runs the cases of gRPC's interop test descriptions that apply to orca.v1, with @grpc/grpc-js.
//
//     node client.js [-tls FOLDER] -compressed CODE -beyond CODE ADDRESS
//
// The server's engine is played by tests/interop/engine.py. Each case prints one line; a failure ends with status 1.

import assert from "node:assert/strict";
import { randomUUID } from "node:crypto";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { parseArgs } from "node:util";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";
import protobuf from "protobufjs";

const LARGE_REQUEST = 271_828; // bytes, as in the descriptions
const LARGE_RESPONSE = 314_159;
const TOO_LARGE = 9 << 19; // 4.5 MB: above the limit of a message
const MISSING = "\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP 😈\t\n";
const GZIP = grpc.compressionAlgorithms.gzip;
const DETAILS = protobuf.parse(`syntax = "proto3";
  message Status { int32 code = 1; string message = 2; repeated Any details = 3; }
  message Any { string type_url = 1; bytes value = 2; }
  message ErrorInfo { string reason = 1; string domain = 2; }
  message BadRequest { repeated FieldViolation field_violations = 1; }
  message FieldViolation { string field = 1; }`, { keepCase: true }).root;

const { values, positionals } = parseArgs({
  args: process.argv.slice(2).map((word) => word.replace(/^-(?=\w)/, "--")),
  options: { tls: { type: "string" }, compressed: { type: "string" }, beyond: { type: "string" } },
  allowPositionals: true,
});
const address = positionals[0];
const folder = (name) => readFileSync(join(values.tls, name));
const credentials = values.tls
  ? grpc.credentials.createSsl(folder("ca.crt"), folder("tls.key"), folder("tls.crt"))
  : grpc.credentials.createInsecure();

const { Orca } = load(join(import.meta.dirname, "../../../protos"), "orca/v1/orca.proto").orca.v1;
const installed = dirname(createRequire(import.meta.url).resolve("@grpc/reflection"));
const shared = load(join(installed, "../proto"), "grpc/reflection/v1/reflection.proto");
const { ServerReflection } = shared.grpc.reflection.v1;

function load(root, file) {
  const options = { keepCase: true, longs: Number, enums: String, defaults: true, oneofs: true, includeDirs: [root] };
  return grpc.loadPackageDefinition(loader.loadSync(file, options));
}

const orca = new Orca(address, credentials);
const reflection = new ServerReflection(address, credentials);
const GetModel = Orca.service.GetModel;

const cases = {
  async empty_unary() {
    assert((await unary("GetModel", {})).vocab_size > 0);
  },

  /** Sends a large prompt, and asks for a large answer. */
  async large_unary() {
    assert.equal((await unary("GenerateText", request("answer", LARGE_REQUEST, 3))).token_ids.length, 3);
    const scored = { ...request("answer", 1500, 3), prompt_logprobs: true, top_logprobs: 20 };
    const answer = await unary("GenerateText", scored);
    assert.equal(answer.prompt.length, 1500);
    assert(Orca.service.GenerateText.responseSerialize(answer).length >= LARGE_RESPONSE);
  },

  async large_unary_beyond_the_limit() {
    await ends(unary("GenerateText", request("answer", TOO_LARGE, 3)), values.beyond);
  },

  async client_compressed_unary() {
    const compressing = new Orca(address, credentials, { "grpc.default_compression_algorithm": GZIP });
    try {
      await ends(unary("GetModel", {}, compressing), values.compressed);
    } finally {
      compressing.close();
    }
  },

  async server_streaming() {
    await read(orca.Generate(request("answer", 3, 60), deadline()), 3, 60);
  },

  /** Asks one question after the answer to the one before. */
  async ping_pong() {
    const call = reflection.ServerReflectionInfo(deadline());
    const answers = call[Symbol.asyncIterator]();
    for (const symbol of ["orca.v1.Orca", "orca.v1.Token", "grpc.health.v1.Health", "orca.v1.Orca"]) {
      call.write({ file_containing_symbol: symbol });
      const { value } = await answers.next();
      assert(value.file_descriptor_response.file_descriptor_proto.length > 0, symbol);
    }
    call.end();
    assert((await answers.next()).done);
  },

  async empty_stream() {
    const call = reflection.ServerReflectionInfo(deadline());
    call.end();
    for await (const answer of call) assert.fail(`an answer to no question: ${JSON.stringify(answer)}`);
  },

  /** Reads an error's details, which are binary trailing metadata. */
  async custom_metadata() {
    const error = await ends(unary("GenerateText", { max_new_tokens: 1 }), "INVALID_ARGUMENT");
    const details = new Map(statusOf(error).details.map(({ type_url, value }) => {
      const name = type_url.split(".").at(-1);
      return [name, DETAILS.lookupType(name).decode(value)];
    }));
    assert.equal(details.get("ErrorInfo").domain, "orca.serving");
    assert.equal(details.get("ErrorInfo").reason, "INVALID_FIELD");
    assert.equal(details.get("BadRequest").field_violations[0].field, "prompt");
  },

  async status_code_and_message() {
    const error = await ends(unary("Cancel", { request_id: "nobody" }), "NOT_FOUND");
    assert(error.details.includes("nobody"), error.details);
  },

  /** Compares the percent-encoded sentence with the same one in the binary details. */
  async special_status_message() {
    const error = await ends(unary("GenerateText", { ...request("answer", 3, 3), model: MISSING }), "NOT_FOUND");
    assert.equal(error.details, statusOf(error).message);
    assert(error.details.includes("☺") && error.details.includes("😈"), error.details);
  },

  async unimplemented_method() {
    await ends(invoke("/orca.v1.Orca/UnimplementedCall"), "UNIMPLEMENTED");
  },

  async unimplemented_service() {
    await ends(invoke("/orca.v1.UnimplementedService/UnimplementedCall"), "UNIMPLEMENTED");
  },

  async cancel_after_begin() {
    const call = orca.Generate(request("silent", 3, 3), deadline());
    call.cancel();
    await ends(read(call, 3, 3), "CANCELLED");
  },

  async cancel_after_first_response() {
    const call = orca.Generate(request("silent", 3, 3), deadline());
    call.once("data", () => call.cancel());
    await ends(new Promise((resolve, reject) => call.on("error", reject).on("end", resolve)), "CANCELLED");
  },

  async timeout_on_sleeping_server() {
    await ends(read(orca.Generate(request("silent", 3, 3), deadline(300)), 3, 3), "DEADLINE_EXCEEDED");
  },

  /** Reads 100 streams of one connection. Each has other tokens. */
  async concurrent_streams() {
    const prompts = Array.from({ length: 100 }, (_, n) => n + 1);
    const stream = (prompt) => read(orca.Generate(request("answer", prompt, 40), deadline()), prompt, 40);
    await Promise.all(prompts.map(stream));
  },

  /** Reads a silent stream for 5 s with a ping every second. */
  async pings() {
    const options = { "grpc.keepalive_time_ms": 1000, "grpc.keepalive_timeout_ms": 1000 };
    const pinging = new Orca(address, credentials, options);
    try {
      await ends(read(pinging.Generate(request("silent", 3, 3), deadline(5000)), 3, 3), "DEADLINE_EXCEEDED");
    } finally {
      pinging.close();
    }
  },
};

/** A call's deadline, some milliseconds from now. */
function deadline(milliseconds = 20_000) {
  return { deadline: Date.now() + milliseconds };
}

function unary(method, message, client = orca) {
  return new Promise((resolve, reject) =>
    client[method](message, deadline(), (error, answer) => (error ? reject(error) : resolve(answer))));
}

/** Calls a method that no file describes, with an empty message. */
function invoke(path) {
  const { requestSerialize, responseDeserialize } = GetModel;
  return new Promise((resolve, reject) =>
    orca.makeUnaryRequest(path, requestSerialize, responseDeserialize, {}, new grpc.Metadata(), deadline(),
      (error, answer) => (error ? reject(error) : resolve(answer))));
}

/** Asks for tokens after a prompt of so many. The played engine reads in the id's first word what to do. */
function request(word, prompt, tokens) {
  return { request_id: `${word}-${randomUUID()}`, token_ids: { ids: Array(prompt).fill(7) }, max_new_tokens: tokens };
}

/** Checks a whole stream of an answer: `accepted` first, each index once and in order, `finished` last. */
async function read(call, prompt, tokens) {
  let next = 0;
  let messages = 0;
  let finished = false;
  for await (const response of call) {
    assert(!finished && (response.accepted !== null) === (messages === 0), `message ${messages} is out of order`);
    for (const token of response.tokens) {
      assert.equal(token.index, next);
      assert.equal(token.token_id, 1 + ((prompt * 31 + next) % 500));
      next += 1;
    }
    finished = response.finished !== null;
    messages += 1;
  }
  assert(next === tokens && finished, `${next} tokens, finished: ${finished}`);
}

/** Waits for a call that must end with a status. Returns its error; undefined for OK. */
async function ends(call, code) {
  const error = await call.then(() => undefined, (error) => error);
  assert.equal(grpc.status[error ? error.code : grpc.status.OK], code, error?.message);
  return error;
}

function statusOf(error) {
  return DETAILS.lookupType("Status").decode(error.metadata.get("grpc-status-details-bin")[0]);
}

for (const [name, run] of Object.entries(cases)) {
  try {
    await run();
    console.log("ok", name);
  } catch (error) {
    process.exitCode = 1;
    console.log(`FAILED ${name}: ${JSON.stringify(error.message)}`);
  }
}
orca.close();
reflection.close();
