// OpenAI's agents for Node.js: a tool, streamed or not, by responses and by chats.
import assert from 'node:assert';
import { readFileSync } from 'node:fs';
import { Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, setTracingDisabled, tool } from '@openai/agents';
import OpenAI from 'openai';
import { z } from 'zod';

setTracingDisabled(true);
const client = new OpenAI({ baseURL: `${process.env.ORCA}/v1`, apiKey: 'none', maxRetries: 0 });
const weather = tool({ name: 'weather', description: 'weather', parameters: z.object({ city: z.string() }), execute: async ({ city }) => `5 degrees in ${city}` });
for (const Model of [OpenAIResponsesModel, OpenAIChatCompletionsModel]) {
  const agent = new Agent({ name: 'a', instructions: 'Be brief', model: new Model(client, 'tiny'), tools: [weather] });
  assert.equal((await new Runner().run(agent, 'Bern?')).finalOutput, 'It is 5 degrees in Bern.');
  const streamed = await new Runner().run(agent, 'Bern?', { stream: true });
  await streamed.completed;
  assert.equal(streamed.finalOutput, 'It is 5 degrees in Bern.');
}
console.log('openai-agents (Node.js)', JSON.parse(readFileSync('node_modules/@openai/agents/package.json')).version);
