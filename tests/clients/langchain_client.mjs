// LangChain's model of OpenAI for Node.js: a text, a stream, a tool, and an answer by a schema.
import assert from 'node:assert';
import { readFileSync } from 'node:fs';
import { tool } from '@langchain/core/tools';
import { ChatOpenAI } from '@langchain/openai';
import { z } from 'zod';

const said = 'It is 5 degrees in Bern.';
const city = z.object({ city: z.string() });
const model = new ChatOpenAI({ model: 'tiny', apiKey: 'none', configuration: { baseURL: `${process.env.ORCA}/v1` }, maxRetries: 0 });
assert.equal((await model.invoke('Bern?')).content, said);
let text = '';
for await (const chunk of await model.stream('Bern?')) text += chunk.content;
assert.equal(text, said);
const weather = tool(async ({ city }) => `5 degrees in ${city}`, { name: 'weather', description: 'weather', schema: city });
const bound = model.bindTools([weather]);
const called = await bound.invoke('Bern?');
const result = await weather.invoke(called.tool_calls[0]);
assert.equal((await bound.invoke([{ role: 'user', content: 'Bern?' }, called, result])).content, said);
assert.deepEqual(await model.withStructuredOutput(city).invoke('Bern?'), { city: 'Bern' });
console.log('@langchain/openai', JSON.parse(readFileSync('node_modules/@langchain/openai/package.json')).version);
