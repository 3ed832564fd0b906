// Codex CLI, headless. The tiny model cannot hold its prompt; the answers come from a model that follows orders.

import { mkdirSync, writeFileSync } from 'node:fs';
import { check, checkUsage, equal, KEY, MODEL, PERSON_SCHEMA, run, URL } from './flows.mjs';
import { AGENT_URL, FILL, FORM, RECALL, RUN, SAY, SAY_SLOWLY, checkIdle, checkRunning, runAgent } from './agents.mjs';

const home = `${process.env.HOME}/codex`;
mkdirSync(home, { recursive: true });
const provider = (name, url) => `
[model_providers.${name}]
name = "${name}"
base_url = "${url}/v1"
wire_api = "responses"
env_key = "KVMESH_API_KEY"
request_max_retries = 0
stream_max_retries = 0
`;
const QUIET = `
check_for_update_on_startup = false
[analytics]
enabled = false
[features]
plugins = false
`;
writeFileSync(
  `${home}/config.toml`,
  `${QUIET}${provider('agents', AGENT_URL)}${provider('tiny', URL)}`,
);

// Run it with an order; return its last message and its last event.
async function codex(order, { flags = [], command = [], name = 'agents', model = MODEL, onLine } = {}) {
  const chosen = ['-c', `model_provider="${name}"`, '-m', model];
  const given = ['exec', '--skip-git-repo-check', '--json', ...chosen, ...flags, ...command, order];
  const ended = await runAgent('@openai/codex/bin/codex.js', given, { CODEX_HOME: home, KVMESH_API_KEY: KEY }, onLine);
  const items = ended.lines.filter((line) => line.type === 'item.completed').map((line) => line.item);
  const text = items.filter((item) => item.type === 'agent_message').map((item) => item.text).join('');
  return { ...ended, items, text, last: ended.lines.at(-1) };
}

function checkWorked({ last, text, rest }, expected) {
  check(last?.type === 'turn.completed', `the turn did not complete: ${JSON.stringify(last)} ${rest}`);
  equal(text, expected, 'the last message');
}

run('@openai/codex', {
  async chat() {
    checkWorked(await codex(SAY), 'blue heron');
  },

  async second_turn() {
    const first = await codex(SAY);
    const { thread_id: thread } = first.lines.find((line) => line.type === 'thread.started');
    checkWorked(await codex(RECALL, { command: ['resume', thread] }), 'I have said: blue heron');
    checkWorked(await codex(RECALL), 'I have not said: blue heron');
  },

  async tools() {
    const { items, text, last } = await codex(RUN, { flags: ['-c', 'web_search="disabled"', '--dangerously-bypass-approvals-and-sandbox'] });
    const [ran] = items.filter((item) => item.type === 'command_execution');
    equal([ran?.exit_code, ran?.aggregated_output], [0, '42 herons\n'], 'what was run');
    check(text.startsWith('it printed: ') && text.includes('42 herons'), `the last message: ${text}`);
    equal(last.type, 'turn.completed', 'the last event');
  },

  async structured() {
    writeFileSync(`${home}/schema.json`, JSON.stringify(PERSON_SCHEMA));
    const { text } = await codex(FILL, { flags: ['--output-schema', `${home}/schema.json`] });
    equal(JSON.parse(text), FORM, 'the last message');
  },

  async usage() {
    const { usage } = (await codex(SAY)).last;
    checkUsage(usage.input_tokens, usage.output_tokens, usage.input_tokens + usage.output_tokens);
  },

  async error() {
    const missing = await codex(SAY, { model: 'nonsense' });
    equal(missing.last.type, 'turn.failed', 'the last event');
    check(missing.last.error.message.includes('nonsense'), missing.last.error.message);
    const long = await codex(SAY, { name: 'tiny' });
    check(/context/.test(long.last.error?.message), `a prompt that is too long: ${JSON.stringify(long.last)}`);
  },

  async cancel() {
    let wasRunning;
    const { last } = await codex(SAY_SLOWLY, {
      async onLine(line, interrupt) {
        if (line.type !== 'turn.started') return;
        wasRunning = await checkRunning();
        interrupt();
      },
    });
    check(wasRunning && last.type !== 'turn.completed', `running: ${wasRunning}, the last event: ${last.type}`);
    return checkIdle();
  },
}, { stream: 'its JSON output has whole messages' });
