// openai-node: responses.

import OpenAI from 'openai';
import { zodTextFormat } from 'openai/helpers/zod';
import { z } from 'zod';
import {
  ABOUT_ANNA, FOLLOW_UP, KEY, MODEL, QUESTION, SLOW_URL, TOKENS, TOOL_TOKENS, URL, WEATHER, WEATHER_SCHEMA, chatText, check,
  checkCancelled, checkPerson, checkPieces, checkRunning, checkUsage, equal, fails, run,
} from './flows.mjs';

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: KEY, maxRetries: 0 });
const slow = new OpenAI({ baseURL: `${SLOW_URL}/v1`, apiKey: KEY, maxRetries: 0 });
const user = (content) => ({ role: 'user', content });
const GREEDY = { model: MODEL, temperature: 0, max_output_tokens: TOKENS };
const TOOL = {
  type: 'function', name: 'get_weather', description: 'Return the weather in a city.', strict: false,
  parameters: WEATHER_SCHEMA,
};
const Person = z.object({ name: z.string(), age: z.int() });
const whole = () => client.responses.create({ input: QUESTION, ...GREEDY });

run('openai', {
  async chat() {
    equal((await whole()).output_text, await chatText(QUESTION), 'the answer');
  },

  async stream() {
    const stream = client.responses.stream({ input: QUESTION, ...GREEDY });
    const pieces = [];
    const kinds = [];
    for await (const event of stream) {
      kinds.push(event.type);
      if (event.type === 'response.output_text.delta') pieces.push(event.delta);
    }
    const last = await stream.finalResponse();
    checkPieces(pieces, (await whole()).output_text);
    equal(last.output_text, pieces.join(''), 'the text of the last event');
    equal([kinds[0], kinds.at(-1)], ['response.created', `response.${last.status}`], 'the first and the last event');
  },

  async second_turn() {
    const first = await whole();
    const input = [user(QUESTION), ...first.output, user(FOLLOW_UP)];
    const second = await client.responses.create({ input, ...GREEDY });
    equal(second.output_text, await chatText(QUESTION, first.output_text, FOLLOW_UP), 'the second answer');
    check(second.usage.input_tokens_details.cached_tokens > 0, 'no cached tokens in the second turn');
  },

  async tools() {
    const input = [user(WEATHER)];
    const asked = { model: MODEL, temperature: 0, max_output_tokens: TOOL_TOKENS, tools: [TOOL] };
    const first = await client.responses.create({ input, ...asked });
    const calls = first.output.filter((item) => item.type === 'function_call');
    equal(calls.map((call) => [call.name, Object.keys(JSON.parse(call.arguments))]), [['get_weather', ['city']]], 'calls');
    const result = { type: 'function_call_output', call_id: calls[0].call_id, output: '{"weather": "sunny"}' };
    const second = await client.responses.create({ input: [...input, ...first.output, result], ...asked });
    equal(second.output.map((item) => item.type), ['message'], 'the items after the result');
    check(second.output_text, 'no text after the result');
  },

  async structured() {
    const response = await client.responses.parse({
      input: ABOUT_ANNA, model: MODEL, temperature: 0, max_output_tokens: 400,
      text: { format: zodTextFormat(Person, 'person') },
    });
    checkPerson(response.output_parsed);
  },

  async usage() {
    const { usage } = await whole();
    checkUsage(usage.input_tokens, usage.output_tokens, usage.total_tokens);
  },

  async error() {
    const missing = () => client.responses.create({ model: 'nonsense', input: QUESTION });
    await fails(missing, OpenAI.NotFoundError, 404, 'nonsense', 'does not exist');
    const hot = () => client.responses.create({ model: MODEL, input: QUESTION, temperature: 9 });
    equal((await fails(hot, OpenAI.BadRequestError, 400, 'temperature')).param, 'temperature', 'param');
  },

  async cancel() {
    const stream = await slow.responses.create({ model: MODEL, input: QUESTION, stream: true, max_output_tokens: 1000 });
    let pieces = 0;
    for await (const event of stream) {
      if (event.type === 'response.output_text.delta' && ++pieces === 3) {
        await checkRunning();
        stream.controller.abort();
      }
    }
    equal(pieces, 3, 'pieces before the cancel');
    return checkCancelled();
  },
});
