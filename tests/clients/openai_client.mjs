// OpenAI's client for Node.js: responses whole, parsed, streamed with a call, and a stream taken up behind an event; chats with tools.
import assert from 'node:assert';
import OpenAI from 'openai';
import { zodResponseFormat, zodTextFormat } from 'openai/helpers/zod';
import { VERSION } from 'openai/version';
import { z } from 'zod';

const client = new OpenAI({ baseURL: `${process.env.ORCA}/v1`, apiKey: 'none', maxRetries: 0 });
const asked = { model: 'tiny', input: 'Bern?' };
assert.equal((await client.responses.create(asked)).output_text, 'It is 5 degrees in Bern.');
const format = zodTextFormat(z.object({ city: z.string() }), 'city');
assert.deepEqual((await client.responses.parse({ ...asked, text: { format } })).output_parsed, { city: 'Bern' });
const parameters = { type: 'object', properties: { city: { type: 'string' } }, required: ['city'], additionalProperties: false };
const stream = client.responses.stream({ ...asked, tools: [{ type: 'function', name: 'weather', parameters, strict: true }] });
const seen = [];
for await (const event of stream) seen.push(event.sequence_number);
const final = await stream.finalResponse();
assert.equal(final.output[0].arguments, '{"city": "Bern"}');
const rest = [];
for await (const event of await client.responses.retrieve(final.id, { stream: true, starting_after: 5 })) rest.push(event.sequence_number);
assert.deepEqual(rest, seen.slice(6));

const chat = { model: 'tiny', messages: [{ role: 'user', content: 'Bern?' }] };
const parsed = await client.chat.completions.parse({ ...chat, response_format: zodResponseFormat(z.object({ city: z.string() }), 'city') });
assert.deepEqual(parsed.choices[0].message.parsed, { city: 'Bern' });
const weather = { type: 'function', function: { name: 'weather', parameters, parse: JSON.parse, function: ({ city }) => `5 degrees in ${city}` } };
for (const more of [{}, { stream: true }]) {
  const runner = client.chat.completions.runTools({ ...chat, ...more, tools: [weather] });
  assert.equal(await runner.finalContent(), 'It is 5 degrees in Bern.');
}
console.log('openai (Node.js)', VERSION);
