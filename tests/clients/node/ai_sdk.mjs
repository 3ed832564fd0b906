// The flows of Vercel's AI SDK, for whatever provider a script gives.

import { APICallError, Output, generateObject, generateText, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';
import {
  ABOUT_ANNA, FOLLOW_UP, MODEL, QUESTION, TOKENS, TOOL_TOKENS, WEATHER, chatText, check, checkCancelled, checkPerson, checkPieces,
  checkRunning, checkUsage, equal, fails, run,
} from './flows.mjs';

const GREEDY = { temperature: 0, maxOutputTokens: TOKENS, maxRetries: 0 };
const Person = z.object({ name: z.string(), age: z.int() });

function weather(called) {
  return tool({
    description: 'Return the weather in a city.',
    inputSchema: z.object({ city: z.string() }),
    execute: (given) => (called.push(given), { weather: 'sunny' }),
  });
}

// `modelOf` and `slowModelOf` take a name and return a model of the fast and of the slow mesh.
export function runAiSdk(packageName, modelOf, slowModelOf) {
  const model = modelOf(MODEL);
  const whole = () => generateText({ model, prompt: QUESTION, ...GREEDY });

  return run(packageName, {
    async chat() {
      equal((await whole()).text, await chatText(QUESTION), 'the answer');
    },

    async stream() {
      const result = streamText({ model, prompt: QUESTION, ...GREEDY });
      checkPieces(await Array.fromAsync(result.textStream), (await whole()).text);
      const usage = await result.usage;
      checkUsage(usage.inputTokens, usage.outputTokens, usage.totalTokens);
    },

    async second_turn() {
      const ask = { role: 'user', content: QUESTION };
      const first = await generateText({ model, messages: [ask], ...GREEDY });
      const messages = [ask, ...first.response.messages, { role: 'user', content: FOLLOW_UP }];
      const second = await generateText({ model, messages, ...GREEDY });
      equal(second.text, await chatText(QUESTION, first.text, FOLLOW_UP), 'the second answer');
      check(second.usage.inputTokenDetails.cacheReadTokens > 0, 'no cached tokens in the second turn');
    },

    async tools() {
      for (const generate of [generateText, streamText]) {
        const called = [];
        const asked = { model, prompt: WEATHER, temperature: 0, maxOutputTokens: TOOL_TOKENS, maxRetries: 0 };
        const result = generate({ ...asked, tools: { get_weather: weather(called) }, stopWhen: stepCountIs(4) });
        const [text, steps] = generate === streamText ? [await result.text, await result.steps] : await textAndSteps(result);
        equal(called.map((given) => Object.keys(given)), [['city']], `the arguments of the calls of ${generate.name}`);
        equal(steps.map((step) => step.finishReason), ['tool-calls', 'stop'], `the steps of ${generate.name}`);
        check(text, `no text after the result of ${generate.name}`);
      }
    },

    async structured() {
      const asked = { model, prompt: ABOUT_ANNA, temperature: 0, maxOutputTokens: 400, maxRetries: 0 };
      checkPerson((await generateObject({ ...asked, schema: Person })).object);
      checkPerson((await generateText({ ...asked, output: Output.object({ schema: Person }) })).output);
      const streamed = streamText({ ...asked, output: Output.object({ schema: Person }) });
      const parts = await Array.fromAsync(streamed.partialOutputStream);
      check(parts.length > 1, `a streamed object of ${parts.length} parts`);
      checkPerson(parts.at(-1));
    },

    async usage() {
      const { usage } = await whole();
      checkUsage(usage.inputTokens, usage.outputTokens, usage.totalTokens);
    },

    async error() {
      const missing = () => generateText({ model: modelOf('nonsense'), prompt: QUESTION, ...GREEDY });
      const error = await fails(missing, APICallError, 404, 'nonsense');
      check(error.data?.error?.message.includes('nonsense'), `the body was not understood: ${error.responseBody}`);
      await fails(() => generateText({ model, prompt: QUESTION, ...GREEDY, topP: 7 }), APICallError, 400, 'top_p');
    },

    async cancel() {
      const aborter = new AbortController();
      const result = streamText({
        model: slowModelOf(MODEL), prompt: QUESTION, maxOutputTokens: 1000, abortSignal: aborter.signal,
      });
      const kinds = [];
      for await (const part of result.stream ?? result.fullStream) {
        kinds.push(part.type);
        if (kinds.filter((kind) => kind === 'text-delta').length === 3 && !aborter.signal.aborted) {
          await checkRunning();
          aborter.abort();
        }
      }
      equal(kinds.at(-1), 'abort', 'the last part of the stream');
      return checkCancelled();
    },
  });
}

async function textAndSteps(promise) {
  const { text, steps } = await promise;
  return [text, steps];
}
