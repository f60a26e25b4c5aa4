// Ollama's client for JavaScript: models, a stream with a call and the turn after it, an answer by a schema, a prompt.
import assert from 'node:assert';
import fs from 'node:fs';
import { Ollama } from 'ollama';

const { version } = JSON.parse(fs.readFileSync('node_modules/ollama/package.json'));
const client = new Ollama({ host: process.env.ORCA });
assert.equal((await client.list()).models[0].name, 'tiny');
const parameters = { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] };
const tools = [{ type: 'function', function: { name: 'weather', description: 'The weather', parameters } }];
const messages = [{ role: 'user', content: 'Bern?' }];
const told = [];
for await (const part of await client.chat({ model: 'tiny', messages, tools, stream: true })) told.push(part);
const called = told.find((part) => part.message.tool_calls).message;
assert.deepEqual(called.tool_calls[0].function.arguments, { city: 'Bern' });
const result = { role: 'tool', tool_name: 'weather', content: '5' };
const last = await client.chat({ model: 'tiny', messages: [...messages, called, result], tools });
assert.equal(last.message.content, 'It is 5 degrees in Bern.');
const city = await client.generate({ model: 'tiny', prompt: 'Bern?', format: parameters, options: { num_predict: 50 } });
assert.deepEqual(JSON.parse(city.response), { city: 'Bern' });
console.log('ollama (Node.js)', version);
