// Claude Code, headless. The tiny model cannot hold its prompt; the answers come from a model that follows orders.

import { mkdirSync } from 'node:fs';
import { check, checkUsage, equal, KEY, MODEL, PERSON_SCHEMA, run, URL } from './flows.mjs';
import { AGENT_URL, FILL, FORM, RECALL, RUN, SAY, SAY_SLOWLY, checkIdle, runAgent } from './agents.mjs';

mkdirSync(`${process.env.HOME}/.claude`, { recursive: true });

// Run it with an order; return what the last line reports.
async function claude(order, { flags = [], url = AGENT_URL, model = MODEL, onLine } = {}) {
  const variables = {
    ANTHROPIC_BASE_URL: url, ANTHROPIC_API_KEY: KEY, ANTHROPIC_MODEL: model, DISABLE_AUTOUPDATER: '1',
    CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: '1', CLAUDE_CODE_MAX_RETRIES: '0',
  };
  const format = ['--output-format', 'stream-json', '--include-partial-messages', '--verbose'];
  const ended = await runAgent(
    '@anthropic-ai/claude-code/cli-wrapper.cjs', ['-p', order, ...format, ...flags], variables, onLine,
  );
  return { ...ended, last: ended.lines.at(-1) };
}

function checkWorked({ last, rest }, result) {
  check(last?.type === 'result', `no result: ${rest}`);
  equal([last.is_error, last.result], [false, result], 'the result');
}

const piecesOf = (lines) =>
  lines.map((line) => line.event?.delta).filter((delta) => delta?.type === 'text_delta').map((delta) => delta.text);

run('@anthropic-ai/claude-code', {
  async chat() {
    checkWorked(await claude(SAY), 'blue heron');
  },

  async stream() {
    const { lines, last } = await claude(SAY);
    const pieces = piecesOf(lines);
    check(pieces.length > 1, `a stream of one piece: ${pieces}`);
    equal(pieces.join(''), last.result, 'the stream');
  },

  async second_turn() {
    const first = await claude(SAY);
    const second = await claude(RECALL, { flags: ['--resume', first.last.session_id] });
    checkWorked(second, 'I have said: blue heron');
    checkWorked(await claude(RECALL), 'I have not said: blue heron');
  },

  async tools() {
    const ended = await claude(RUN, { flags: ['--allowedTools', 'Bash'] });
    checkWorked(ended, 'it printed: 42 herons');
    equal(ended.last.num_turns, 2, 'the turns');
  },

  async structured() {
    const { last } = await claude(FILL, { flags: ['--json-schema', JSON.stringify(PERSON_SCHEMA)] });
    equal([last.is_error, last.structured_output], [false, FORM], 'the output');
  },

  async usage() {
    const { last } = await claude(SAY);
    const { inputTokens, outputTokens } = last.modelUsage[MODEL];
    checkUsage(inputTokens, outputTokens, inputTokens + outputTokens);
    equal([last.usage.input_tokens, last.usage.output_tokens], [inputTokens, outputTokens], 'the usage of the turn');
  },

  async error() {
    const missing = await claude(SAY, { model: 'nonsense' });
    equal([missing.last.is_error, missing.last.api_error_status], [true, 404], 'a model that is not there');
    check(missing.last.result.includes('nonsense'), missing.last.result);
    const long = await claude(SAY, { url: URL });
    check(long.last.is_error && /prompt is too long/i.test(long.last.result), `a prompt that is too long: ${long.last.result}`);
  },

  async cancel() {
    let pieces = 0;
    await claude(SAY_SLOWLY, {
      onLine(line, interrupt) {
        if (line.event?.delta?.type === 'text_delta' && ++pieces === 3) interrupt();
      },
    });
    check(pieces >= 3 && pieces < 100, `${pieces} pieces came`);
    return checkIdle();
  },
});
