// Anthropic's client for Node.js: a text, a stream with a call, the turn after it, and a count.
import assert from 'node:assert';
import { readFileSync } from 'node:fs';
import Anthropic from '@anthropic-ai/sdk';

const client = new Anthropic({ baseURL: process.env.ORCA, apiKey: 'none', maxRetries: 0 });
const user = { role: 'user', content: 'Bern?' };
const schema = { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] };
const asked = { model: 'tiny', max_tokens: 100, tools: [{ name: 'weather', input_schema: schema }] };
const answer = await client.messages.stream({ ...asked, messages: [user] }).finalMessage();
const [call] = answer.content;
assert.deepEqual([call.type, call.input], ['tool_use', { city: 'Bern' }]);
const result = { role: 'user', content: [{ type: 'tool_result', tool_use_id: call.id, content: '5' }] };
const last = await client.messages.create({ ...asked, messages: [user, { role: 'assistant', content: answer.content }, result] });
assert.equal(last.content[0].text, 'It is 5 degrees in Bern.');
assert((await client.messages.countTokens({ model: 'tiny', messages: [user] })).input_tokens > 0);
console.log('anthropic (Node.js)', JSON.parse(readFileSync('node_modules/@anthropic-ai/sdk/package.json')).version);
