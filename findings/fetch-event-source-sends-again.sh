#!/bin/sh
# @microsoft/fetch-event-source 2.0.1: a heartbeat is an empty message, and a handler that cannot parse it sends the
# POST again.
#
# Guess before: a comment in a stream (`: waiting`) reaches no handler, and a POST is sent once. The standard of
# events drops an event without data; this client gives one with the text "" to `onmessage` for each empty line, so
# also behind a comment, a `retry:` and an `id:` alone. `JSON.parse("")` throws, as in any handler for chunks of JSON.
# The client takes an error of the handler for one of the connection: unless `onerror` throws, it waits a second and
# sends the request again, so that the model begins the same answer anew, time after time, and what has been read
# comes twice. Without a comment one request is all. A handler that returns where `data` is empty, and an `onerror`
# that throws, stop it.
# Orca sends a comment every ten seconds while a stream waits; `X-Stream-Comments: off` asks for none.
#
# Seen with: @microsoft/fetch-event-source 2.0.1, Node 20.20. Prints the requests that the server sees, and fails when
# that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --ignore-scripts --prefix "$folder" @microsoft/fetch-event-source@2.0.1
cat > "$folder/read.mjs" <<'NODE'
import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer } from "node:http";
import sources from "@microsoft/fetch-event-source";

// A page, as far as the client asks for one: timers, and a document that is visible.
globalThis.window = globalThis;
globalThis.document = new EventTarget();
const chunk = (text) => `data: ${JSON.stringify({ choices: [{ index: 0, delta: { content: text } }] })}\n\n`;
const end = "data: [DONE]\n\n";
let stream;
let requests;
const server = createServer((request, answer) => {
  requests += 1;
  request.resume();
  answer.setHeader("Content-Type", "text/event-stream");
  answer.end(stream);
});
await once(server.listen(0, "127.0.0.1"), "listening");
const url = `http://127.0.0.1:${server.address().port}/v1/chat/completions`;

// Reads the stream until its end, or until the third request for it.
const read = async (strict) => {
  const texts = [];
  const errors = [];
  requests = 0;
  await sources.fetchEventSource(url, {
    method: "POST",
    body: "{}",
    onmessage({ data }) {
      if (data === "[DONE]" || (strict && data === "")) return;
      texts.push(JSON.parse(data).choices[0].delta.content);
    },
    onerror(error) {
      errors.push(error.name);
      if (requests === 3) throw error; // An error from here ends it.
    },
  }).catch((error) => assert(error instanceof SyntaxError));
  return [requests, texts.join(""), [...new Set(errors)].join()];
};
for (const [name, text, strict, ...expected] of [
  ["no comment", chunk("a") + chunk("b") + end, false, 1, "ab", ""],
  ["a comment", chunk("a") + ": waiting\n\n" + chunk("b") + end, false, 3, "aaa", "SyntaxError"],
  ["retry at the start", "retry: 1000\n\n" + chunk("a") + end, false, 3, "", "SyntaxError"],
  ["a comment, a handler that looks", chunk("a") + ": waiting\n\n" + chunk("b") + end, true, 1, "ab", ""],
]) {
  stream = text;
  const found = await read(strict);
  console.log(`${name}: ${found[0]} request(s), text ${JSON.stringify(found[1])}, ${found[2] || "no error"}`);
  assert.deepEqual(found, expected);
}
server.close();
server.closeAllConnections();
NODE
node "$folder/read.mjs"
