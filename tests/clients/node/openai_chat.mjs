// openai-node: chat completions.

import OpenAI from 'openai';
import { zodResponseFormat } from 'openai/helpers/zod';
import { z } from 'zod';
import {
  ABOUT_ANNA, FOLLOW_UP, KEY, MODEL, QUESTION, SLOW_URL, TOKENS, TOOL_TOKENS, URL, WEATHER, WEATHER_SCHEMA, chatText, check,
  checkCancelled, checkPerson, checkPieces, checkRunning, checkUsage, equal, fails, run,
} from './flows.mjs';

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: KEY, maxRetries: 0 });
const slow = new OpenAI({ baseURL: `${SLOW_URL}/v1`, apiKey: KEY, maxRetries: 0 });
const user = (content) => ({ role: 'user', content });
const ASK = [user(QUESTION)];
const GREEDY = { model: MODEL, temperature: 0, max_completion_tokens: TOKENS };
const FUNCTION = { name: 'get_weather', description: 'Return the weather in a city.', parameters: WEATHER_SCHEMA };
const Person = z.object({ name: z.string(), age: z.int() });
const whole = () => client.chat.completions.create({ messages: ASK, ...GREEDY });

run('openai', {
  async chat() {
    equal((await whole()).choices[0].message.content, await chatText(QUESTION), 'the answer');
  },

  async stream() {
    const expected = (await whole()).choices[0].message.content;
    const pieces = [];
    for await (const chunk of await client.chat.completions.create({ messages: ASK, stream: true, ...GREEDY })) {
      pieces.push(chunk.choices[0]?.delta.content ?? '');
    }
    checkPieces(pieces, expected);
    const helper = client.chat.completions.stream({ messages: ASK, ...GREEDY });
    equal(await helper.finalContent(), expected, "the helper's text");
  },

  async second_turn() {
    const first = (await whole()).choices[0].message;
    const messages = [...ASK, first, user(FOLLOW_UP)];
    const second = await client.chat.completions.create({ messages, ...GREEDY });
    const text = second.choices[0].message.content;
    equal(text, await chatText(QUESTION, first.content, FOLLOW_UP), 'the second answer');
    check(second.usage.prompt_tokens_details.cached_tokens > 0, 'no cached tokens in the second turn');
  },

  async tools() {
    const called = [];
    const runner = client.chat.completions.runTools({
      model: MODEL,
      messages: [user(WEATHER)],
      temperature: 0,
      max_completion_tokens: TOOL_TOKENS,
      tools: [{
        type: 'function',
        function: { ...FUNCTION, parse: JSON.parse, function: (given) => (called.push(given), '{"weather": "sunny"}') },
      }],
    });
    const text = await runner.finalContent();
    equal(called.map((given) => Object.keys(given)), [['city']], 'the arguments of the calls');
    equal(runner.messages.map((message) => message.role), ['user', 'assistant', 'tool', 'assistant'], 'the messages');
    check(text, 'no text after the result');
  },

  async structured() {
    const completion = await client.chat.completions.parse({
      model: MODEL, messages: [user(ABOUT_ANNA)], temperature: 0, max_completion_tokens: 400,
      response_format: zodResponseFormat(Person, 'person'),
    });
    checkPerson(completion.choices[0].message.parsed);
  },

  async usage() {
    const { usage } = await whole();
    checkUsage(usage.prompt_tokens, usage.completion_tokens, usage.total_tokens);
    const options = { stream: true, stream_options: { include_usage: true } };
    const chunks = await Array.fromAsync(await client.chat.completions.create({ messages: ASK, ...options, ...GREEDY }));
    equal([chunks.at(-1).choices, chunks.at(-1).usage.total_tokens], [[], usage.total_tokens], 'the last chunk');
  },

  async error() {
    const missing = () => client.chat.completions.create({ model: 'nonsense', messages: ASK });
    await fails(missing, OpenAI.NotFoundError, 404, 'nonsense', 'does not exist');
    const hot = () => client.chat.completions.create({ model: MODEL, messages: ASK, temperature: 9 });
    equal((await fails(hot, OpenAI.BadRequestError, 400, 'temperature')).param, 'temperature', 'param');
    const stranger = new OpenAI({ baseURL: `${URL}/v1`, apiKey: 'wrong', maxRetries: 0 });
    await fails(() => stranger.models.list(), OpenAI.AuthenticationError, 401);
  },

  async cancel() {
    const stream = await slow.chat.completions.create({ model: MODEL, messages: ASK, stream: true, max_tokens: 1000 });
    let count = 0;
    for await (const chunk of stream) {
      check(chunk.model === MODEL, 'a chunk without its model');
      if (++count === 3) {
        await checkRunning();
        stream.controller.abort();
      }
    }
    equal(count, 3, 'chunks before the cancel');
    return checkCancelled();
  },
});
