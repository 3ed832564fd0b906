// Continue's command line, headless. The answers come from a model that follows orders.

import { writeFileSync } from 'node:fs';
import { check, equal, KEY, MODEL, run } from './flows.mjs';
import { AGENT_URL, RECALL, RUN, SAY, SAY_SLOWLY, checkIdle, checkRunning, runAgent } from './agents.mjs';

// Run it with an order; return its exit code and what it printed.
async function cn(order, { flags = [], url = AGENT_URL, model = MODEL, onStart } = {}) {
  const file = `${process.env.HOME}/continue.yaml`;
  const settings = { name: model, provider: 'openai', model, apiBase: `${url}/v1`, apiKey: KEY, roles: ['chat'] };
  writeFileSync(file, JSON.stringify({ name: 'mesh', version: '1.0.0', schema: 'v1', models: [settings] })); // JSON is YAML, too
  const given = ['-p', order, '--config', file, ...flags];
  const variables = { CONTINUE_TELEMETRY_ENABLED: '0', CONTINUE_CLI_ENABLE_TELEMETRY: '0' };
  return runAgent('@continuedev/cli/dist/cn.js', given, variables, undefined, onStart);
}

const textOf = ({ code, rest }) => [code, rest.trim()];

run('@continuedev/cli', {
  async chat() {
    equal(textOf(await cn(SAY)), [0, 'blue heron'], 'the answer');
  },

  async second_turn() {
    await cn(SAY);
    equal(textOf(await cn(RECALL, { flags: ['--resume'] })), [0, 'I have said: blue heron'], 'the second answer');
    equal(textOf(await cn(RECALL)), [0, 'I have not said: blue heron'], 'the answer to a new conversation');
  },

  async tools() {
    equal(textOf(await cn(RUN, { flags: ['--auto'] })), [0, 'it printed: 42 herons'], 'the answer');
  },

  async error() {
    const { code, rest } = await cn(SAY, { model: 'nonsense' });
    check(code !== 0 && rest.includes("'nonsense' does not exist"), `${code}: ${rest}`);
  },

  async cancel() {
    let wasRunning;
    await cn(SAY_SLOWLY, { onStart: async (interrupt) => { wasRunning = await checkRunning(); interrupt(); } });
    check(wasRunning, 'the answer was never in progress');
    return checkIdle();
  },
}, {
  stream: 'it prints whole answers', structured: 'it has none', usage: 'it shows none',
});
