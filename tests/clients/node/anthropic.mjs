// Anthropic's SDK for JavaScript.

import Anthropic from '@anthropic-ai/sdk';
import { zodOutputFormat } from '@anthropic-ai/sdk/helpers/zod';
import { betaZodTool } from '@anthropic-ai/sdk/helpers/beta/zod';
import { z } from 'zod';
import {
  ABOUT_ANNA, FOLLOW_UP, KEY, MODEL, QUESTION, SLOW_URL, TOKENS, TOOL_TOKENS, URL, WEATHER, WEATHER_SCHEMA, chatText, check,
  checkCancelled, checkPerson, checkPieces, checkRunning, equal, fails, run,
} from './flows.mjs';

const client = new Anthropic({ baseURL: URL, apiKey: KEY, maxRetries: 0 });
const slow = new Anthropic({ baseURL: SLOW_URL, apiKey: KEY, maxRetries: 0 });
const user = (content) => ({ role: 'user', content });
const ASK = [user(QUESTION)];
const GREEDY = { model: MODEL, temperature: 0, max_tokens: TOKENS };
const TOOL = { name: 'get_weather', description: 'Return the weather in a city.', input_schema: WEATHER_SCHEMA };
const Person = z.object({ name: z.string(), age: z.int() });
const whole = () => client.messages.create({ messages: ASK, ...GREEDY });
const textOf = (message) => message.content.map((block) => block.text).join('');

run('@anthropic-ai/sdk', {
  async chat() {
    const message = await whole();
    equal(textOf(message), await chatText(QUESTION), 'the answer');
    equal([message.type, message.role, message.content[0].type], ['message', 'assistant', 'text'], 'the kinds');
  },

  async stream() {
    const pieces = [];
    const stream = client.messages.stream({ messages: ASK, ...GREEDY }).on('text', (piece) => pieces.push(piece));
    const last = await stream.finalMessage();
    checkPieces(pieces, textOf(await whole()));
    equal(textOf(last), pieces.join(''), 'the text of the final message');
  },

  async second_turn() {
    const first = await whole();
    const messages = [...ASK, { role: first.role, content: first.content }, user(FOLLOW_UP)];
    const second = await client.messages.create({ messages, ...GREEDY });
    equal(textOf(second), await chatText(QUESTION, textOf(first), FOLLOW_UP), 'the second answer');
    check(second.usage.cache_read_input_tokens > 0, 'no cached tokens in the second turn');
  },

  async tools() {
    const asked = { model: MODEL, temperature: 0, max_tokens: TOOL_TOKENS, tools: [TOOL] };
    const first = await client.messages.create({ messages: [user(WEATHER)], ...asked });
    equal(first.stop_reason, 'tool_use', 'why the first answer ended');
    const [call] = first.content.filter((block) => block.type === 'tool_use');
    equal([call.name, Object.keys(call.input)], ['get_weather', ['city']], 'the call');
    const result = { type: 'tool_result', tool_use_id: call.id, content: '{"weather": "sunny"}' };
    const messages = [user(WEATHER), { role: 'assistant', content: first.content }, user([result])];
    const second = await client.messages.create({ messages, ...asked });
    equal(second.content.map((block) => block.type), ['text'], 'the blocks after the result');
  },

  async tool_runner() {
    const called = [];
    const tool = betaZodTool({
      name: TOOL.name, description: TOOL.description, inputSchema: z.object({ city: z.string() }),
      run: (given) => (called.push(given), '{"weather": "sunny"}'),
    });
    const asked = { model: MODEL, temperature: 0, max_tokens: TOOL_TOKENS, messages: [user(WEATHER)], tools: [tool] };
    const last = await client.beta.messages.toolRunner(asked);
    equal(called.map((given) => Object.keys(given)), [['city']], 'the arguments of the calls');
    equal([last.stop_reason, last.content[0].type], ['end_turn', 'text'], 'the last message');
  },

  async structured() {
    const format = zodOutputFormat(Person);
    const message = await client.messages.parse({
      model: MODEL, messages: [user(ABOUT_ANNA)], temperature: 0, max_tokens: 400, output_config: { format },
    });
    checkPerson(message.parsed_output);
  },

  async usage() {
    const { usage } = await whole();
    check(usage.input_tokens + usage.cache_read_input_tokens > 0 && usage.output_tokens > 0, JSON.stringify(usage));
    const counted = await client.messages.countTokens({ model: MODEL, messages: ASK });
    equal(usage.input_tokens + usage.cache_read_input_tokens, counted.input_tokens, 'the counted prompt');
  },

  async error() {
    const missing = () => client.messages.create({ ...GREEDY, model: 'nonsense', messages: ASK });
    const error = await fails(missing, Anthropic.NotFoundError, 404, 'nonsense');
    equal([error.type, Boolean(error.requestID)], ['not_found_error', true], 'type and request id');
    const hot = () => client.messages.create({ ...GREEDY, messages: ASK, temperature: 9 });
    await fails(hot, Anthropic.BadRequestError, 400, 'temperature');
    const stranger = new Anthropic({ baseURL: URL, apiKey: 'wrong', maxRetries: 0 });
    await fails(() => stranger.messages.create({ messages: ASK, ...GREEDY }), Anthropic.AuthenticationError, 401);
  },

  async cancel() {
    const stream = slow.messages.stream({ model: MODEL, messages: ASK, max_tokens: 1000 });
    let pieces = 0;
    let aborted = false;
    try {
      for await (const event of stream) {
        if (event.type === 'content_block_delta' && ++pieces === 3) {
          await checkRunning();
          stream.abort();
        }
      }
    } catch (error) {
      check(error instanceof Anthropic.APIUserAbortError, String(error));
      aborted = true;
    }
    equal([pieces, aborted], [3, true], 'pieces before the cancel, and how the stream ended');
    return checkCancelled();
  },

  async models() {
    const models = await Array.fromAsync(await client.models.list());
    equal(models.map((model) => [model.id, model.type]), [[MODEL, 'model']], 'the models');
    equal((await client.models.retrieve(MODEL)).id, MODEL, 'the model');
  },
});
