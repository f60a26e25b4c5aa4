// The AI SDK of Vercel with its openai provider, whose default is responses: a text, a tool in two steps, a stream, a schema.
import assert from 'node:assert';
import { readFileSync } from 'node:fs';
import { createOpenAI } from '@ai-sdk/openai';
import { generateText, Output, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

const model = createOpenAI({ baseURL: `${process.env.ORCA}/v1`, apiKey: 'none' })('tiny');
const city = z.object({ city: z.string() });
const weather = tool({ description: 'weather', inputSchema: city, execute: async ({ city }) => `5 degrees in ${city}` });
const asked = { model, prompt: 'Bern?', maxRetries: 0 };
const said = 'It is 5 degrees in Bern.';
assert.equal((await generateText(asked)).text, said);
const stepped = await generateText({ ...asked, tools: { weather }, stopWhen: stepCountIs(3) });
assert.deepEqual([stepped.text, stepped.steps.length], [said, 2]);
const stream = streamText({ ...asked, tools: { weather }, stopWhen: stepCountIs(3), onError: ({ error }) => { throw error; } });
let text = '';
for await (const piece of stream.textStream) text += piece;
assert.equal(text, said);
assert.deepEqual((await generateText({ ...asked, output: Output.object({ schema: city }) })).output, { city: 'Bern' });
console.log('ai', JSON.parse(readFileSync('node_modules/ai/package.json')).version);
