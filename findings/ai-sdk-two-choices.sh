#!/bin/sh
# @ai-sdk/openai-compatible 3.0.92: two answers to one request, streamed, are one text that changes its speaker by
# chunk.
#
# Guess before: who asks for `n: 2` (the AI SDK hands on what it does not know) gets the first answer, or an error,
# since a text of the SDK is one answer. A chunk of a stream says with its `index` which choice it goes on with. The
# provider reads whatever choice comes first in a chunk, without its index, and joins all their pieces: "It No,
# is.not". The reason to finish is the one that came last, of either. No warning says so. openai's own client has both
# answers.
# Orca streams the choices of a request as their tokens come, each with its index, so that they alternate.
#
# Seen with: @ai-sdk/openai-compatible 3.0.92, ai 7.0.173, openai 6.49.0, Node 20.20. Prints what both clients read,
# and fails when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --ignore-scripts --prefix "$folder" \
  @ai-sdk/openai-compatible@3.0.92 ai@7.0.173 openai@6.49.0
cat > "$folder/read.mjs" <<'NODE'
import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer } from "node:http";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { streamText } from "ai";
import OpenAI from "openai";

const chunk = (index, content, finish_reason = null) => {
  const choices = [{ index, delta: { role: "assistant", content }, finish_reason }];
  return `data: ${JSON.stringify({ id: "c", object: "chat.completion.chunk", created: 1, model: "m", choices })}\n\n`;
};
const first = [chunk(0, "It "), chunk(0, "is.", "stop")];
const second = [chunk(1, "No, "), chunk(1, "not", "length")];
const end = "data: [DONE]\n\n";
let stream;
let asked;
const server = createServer(async (request, answer) => {
  let body = "";
  for await (const part of request) body += part;
  asked = JSON.parse(body);
  answer.setHeader("Content-Type", "text/event-stream");
  answer.end(stream);
});
await once(server.listen(0, "127.0.0.1"), "listening");
const baseURL = `http://127.0.0.1:${server.address().port}/v1`;
const model = createOpenAICompatible({ name: "orca", baseURL }).chatModel("m");
const openai = new OpenAI({ baseURL, apiKey: "any" });
const both = [["It is.", "stop"], ["No, not", "length"]];
for (const [name, pieces, expected, choices] of [
  ["one answer", first, ["It is.", "stop"], both.slice(0, 1)],
  ["one behind the other", [...first, ...second], ["It is.No, not", "length"], both],
  ["in turn", [first[0], second[0], first[1], second[1]], ["It No, is.not", "length"], both],
]) {
  stream = pieces.join("") + end;
  const result = streamText({ model, prompt: "Is it?", providerOptions: { orca: { n: choices.length } } });
  const found = [await result.text, await result.finishReason];
  assert.equal(asked.n, choices.length);
  assert.deepEqual((await result.warnings) ?? [], []);
  const messages = [{ role: "user", content: "Is it?" }];
  const all = await openai.chat.completions.stream({ model: "m", n: choices.length, messages }).finalChatCompletion();
  const others = all.choices.map((choice) => [choice.message.content, choice.finish_reason]);
  console.log(`${name}: AI SDK ${JSON.stringify(found)}; openai ${JSON.stringify(others)}`);
  assert.deepEqual(found, expected);
  assert.deepEqual(others, choices);
}
server.close();
NODE
node "$folder/read.mjs"
