// The AI SDK of Vercel with its provider for OpenAI, by responses (its default) and by chats, and the one for all that speak its API: a text, a tool in two steps, a stream, a schema.
import assert from 'node:assert';
import { readFileSync } from 'node:fs';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, Output, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

const baseURL = `${process.env.ORCA}/v1`;
const openai = createOpenAI({ baseURL, apiKey: 'none' });
const compatible = createOpenAICompatible({ name: 'orca', baseURL, includeUsage: true, supportsStructuredOutputs: true });
const city = z.object({ city: z.string() });
const weather = tool({ description: 'weather', inputSchema: city, execute: async ({ city }) => `5 degrees in ${city}` });
const said = 'It is 5 degrees in Bern.';
for (const model of [openai('tiny'), openai.chat('tiny'), compatible('tiny')]) {
  const asked = { model, prompt: 'Bern?', maxRetries: 0 };
  assert.equal((await generateText(asked)).text, said);
  const stepped = await generateText({ ...asked, tools: { weather }, stopWhen: stepCountIs(3) });
  assert.deepEqual([stepped.text, stepped.steps.length], [said, 2]);
  const stream = streamText({ ...asked, tools: { weather }, stopWhen: stepCountIs(3), onError: ({ error }) => { throw error; } });
  let text = '';
  for await (const piece of stream.textStream) text += piece;
  assert.equal(text, said);
  assert.deepEqual((await generateText({ ...asked, output: Output.object({ schema: city }) })).output, { city: 'Bern' });
}
console.log('ai', JSON.parse(readFileSync('node_modules/ai/package.json')).version);
