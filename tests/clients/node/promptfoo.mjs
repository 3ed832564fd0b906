// promptfoo: `promptfoo eval` with a file of prompts, providers and assertions.

import { spawnSync } from 'node:child_process';
import { appendFileSync, existsSync, readFileSync, writeFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import {
  ABOUT_ANNA, FOLLOW_UP, KEY, MODEL, PERSON_SCHEMA, QUESTION, TOKENS, TOOL_TOKENS, URL as MESH, WEATHER, WEATHER_SCHEMA, chatText,
  check, checkUsage, equal, run,
} from './flows.mjs';

const program = fileURLToPath(new URL('./promptfoo/node_modules/promptfoo/dist/src/entrypoint.js', import.meta.url));
const GREEDY = { temperature: 0, max_tokens: TOKENS };
const KINDS = {
  'openai:chat': [`${MESH}/v1`, GREEDY],
  'openai:responses': [`${MESH}/v1`, { temperature: 0, max_output_tokens: TOKENS }],
  'anthropic:messages': [MESH, GREEDY],
};
const CONVERSATION = `[{% for turn in _conversation %}
  {"role": "user", "content": {{ turn.input | dump }}}, {"role": "assistant", "content": {{ turn.output | dump }}},
{% endfor %}{"role": "user", "content": {{ question | dump }}}]`;

function provider(kind = 'openai:chat', fields = {}, model = MODEL) {
  const [apiBaseUrl, limits] = KINDS[kind];
  return { id: `${kind}:${model}`, config: { apiBaseUrl, apiKey: KEY, ...limits, ...fields } };
}

const asked = (question, ...asserted) => ({ vars: { question }, assert: asserted });
const equals = (value) => ({ type: 'equals', value });

// Evaluate a file; return promptfoo's exit code and its results.
function evaluate(providers, tests, prompt = '{{question}}') {
  writeFileSync('eval.yaml', JSON.stringify({ prompts: [prompt], providers, tests })); // JSON is YAML, too
  const flags = ['--no-cache', '--no-progress-bar', '--no-write', '--no-table', '--max-concurrency', '1'];
  const given = [program, 'eval', '-c', 'eval.yaml', ...flags, '-o', 'results.json'];
  const env = { ...process.env, KVMESH_ATTEMPTS: 'attempts-of-promptfoo' };
  const ended = spawnSync(process.execPath, given, { encoding: 'utf8', timeout: 100_000, env });
  reportAttempts();
  return { code: ended.status, ...JSON.parse(readFileSync('results.json', 'utf8')).results };
}

function checkPassed({ code, results }, count) {
  const failures = results.filter((result) => !result.success).map((result) => result.error);
  equal([code, results.length, failures], [0, count, []], 'the exit code, the results and their failures');
}

// It reports home that its telemetry is off; nothing switches that off. All other attempts count.
function reportAttempts() {
  if (!existsSync('attempts-of-promptfoo')) return;
  const hosts = readFileSync('attempts-of-promptfoo', 'utf8').split('\n').filter((host) => host && host !== 'r.promptfoo.app');
  if (hosts.length) appendFileSync(process.env.KVMESH_ATTEMPTS, `${hosts.join('\n')}\n`);
}

const chatted = async () => {
  const right = asked(QUESTION, equals(await chatText(QUESTION)));
  return evaluate(Object.keys(KINDS).map((kind) => provider(kind)), [right, asked(QUESTION, equals('something else'))]);
};
let chats; // an evaluation takes seconds, so two flows share one

run('promptfoo', {
  async chat() {
    chats = await chatted();
    const passed = chats.results.map((result) => [result.testIdx, result.success]);
    equal(passed.sort(), [...Object.keys(KINDS).map(() => [0, true]), ...Object.keys(KINDS).map(() => [1, false])], 'what passed');
    equal([chats.code === 0, chats.stats.errors], [false, 0], 'an exit code that reports failures, and no errors');
  },

  async second_turn() {
    const first = await chatText(QUESTION);
    const second = await chatText(QUESTION, first, FOLLOW_UP);
    checkPassed(evaluate([provider()], [asked(QUESTION, equals(first)), asked(FOLLOW_UP, equals(second))], CONVERSATION), 2);
  },

  tools() {
    const tools = [{ type: 'function', function: { name: 'get_weather', parameters: WEATHER_SCHEMA } }];
    const given = provider('openai:chat', { tools, max_tokens: TOOL_TOKENS });
    const evaluated = evaluate([given], [asked(WEATHER, { type: 'is-valid-openai-tools-call' })]);
    checkPassed(evaluated, 1);
    equal(evaluated.results[0].response.output.map((call) => call.function.name), ['get_weather'], 'the calls');
  },

  structured() {
    const schema = { name: 'person', strict: true, schema: PERSON_SCHEMA };
    const given = provider('openai:chat', { response_format: { type: 'json_schema', json_schema: schema }, max_tokens: 400 });
    checkPassed(evaluate([given], [asked(ABOUT_ANNA, { type: 'is-json', value: PERSON_SCHEMA })]), 1);
  },

  async usage() {
    for (const { response } of (chats ?? (await chatted())).results) {
      const { prompt, completion, total } = response.tokenUsage;
      checkUsage(prompt, completion, total);
    }
  },

  error() {
    const given = [provider('openai:chat', { temperature: 9 }), provider('openai:chat', {}, 'nonsense')];
    const [hot, missing] = evaluate(given, [asked(QUESTION)]).results.map((result) => [result.success, result.error]);
    check(!hot[0] && hot[1].includes('400') && hot[1].includes('temperature'), hot[1]);
    check(!missing[0] && missing[1].includes('404') && missing[1].includes("'nonsense' does not exist"), missing[1]);
  },
}, { stream: 'it waits for whole answers', cancel: 'it waits for whole answers' });
