// Run the flows of one client and print a line of JSON for each. Needs nothing beyond node itself.
// The helpers at the end ask the mesh over plain HTTP: what a client gets is compared with what they get.

import { existsSync, readFileSync } from 'node:fs';
import { isDeepStrictEqual, inspect } from 'node:util';

export const { KVMESH_URL: URL, KVMESH_SLOW_URL: SLOW_URL, KVMESH_API_KEY: KEY } = process.env;
export const MODEL = 'tiny';
export const QUESTION = 'Tell me about a garden.';
export const FOLLOW_UP = 'And what grows there?';
export const ABOUT_ANNA = 'Anna is 7 years old. Give me the name and age as JSON.';
export const WEATHER = 'What is the weather in Paris?';
export const TOKENS = 24;
export const TOOL_TOKENS = 200;
export const WEATHER_SCHEMA = { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] };
export const PERSON_SCHEMA = {
  type: 'object',
  properties: { name: { type: 'string' }, age: { type: 'integer' } },
  required: ['name', 'age'],
  additionalProperties: false,
};
const IDLE_WITHIN_S = 5;

const say = (fields) => console.log(JSON.stringify(fields));

// Run each function of `flows` as the flow of its name. `lacks`: reasons why the client does not have other flows.
export async function run(packageName, flows, lacks = {}) {
  say({ version: versionOf(packageName) });
  const asked = process.env.KVMESH_FLOWS?.split(',') ?? [];
  for (const [flow, play] of Object.entries(flows)) {
    if (asked.length && !asked.includes(flow)) continue;
    const began = performance.now();
    const result = { flow, ok: true, detail: '' };
    try {
      result.detail = String((await play()) ?? '').slice(0, 200);
    } catch (error) {
      console.error(error);
      Object.assign(result, { ok: false, detail: `${error?.name}: ${error?.message}`.slice(0, 1500) + lineOf(error) });
    }
    say({ ...result, s: Math.round(performance.now() - began) / 1000 });
  }
  for (const [flow, reason] of Object.entries(lacks)) say({ flow, lacks: reason });
  process.exit(0); // some clients keep sockets open
}

const FOLDERS = ['.', './agents', './promptfoo'];

export function versionOf(packageName) {
  const files = FOLDERS.map((folder) => new globalThis.URL(`${folder}/node_modules/${packageName}/package.json`, import.meta.url));
  return JSON.parse(readFileSync(files.find((file) => existsSync(file)), 'utf8')).version;
}

function lineOf(error) {
  const frame = error?.stack?.split('\n').find((line) => line.includes(process.argv[1]));
  return frame ? ` (${frame.trim().split('/').at(-1).replace(')', '')})` : '';
}

// --- checks ---------------------------------------------------------------------------------------------

const shown = (value) => inspect(value, { depth: 6, breakLength: Infinity });

export function check(condition, what) {
  if (!condition) throw new Error(what);
}

export function equal(found, expected, what) {
  check(isDeepStrictEqual(found, expected), `${what}: found ${shown(found)}, expected ${shown(expected)}`);
}

// Check that `play` fails with an error of class `kind` that shows `status` and the mesh's own words. Return the error.
export async function fails(play, kind, status, ...parts) {
  let answer;
  try {
    answer = await play();
  } catch (error) {
    check(error instanceof kind, `${error?.name} is no ${kind.name}: ${error}`);
    equal(error.status ?? error.statusCode, status, 'the status of the error');
    for (const part of parts) check(error.message.includes(part), `${part} is not in ${error.message}`);
    return error;
  }
  throw new Error(`nothing was raised, and the answer is ${shown(answer)}`);
}

export function checkUsage(input, output, total) {
  check(input > 0 && output > 0, `input ${input}, output ${output}`);
  equal(total, input + output, 'the sum of tokens');
}

export function checkPieces(pieces, whole) {
  check(pieces.filter((piece) => piece).length > 1, `a stream of one piece: ${shown(pieces)}`);
  equal(pieces.join(''), whole, 'the stream');
}

export function checkPerson(person) {
  check(typeof person?.name === 'string' && Number.isInteger(person.age), `no person: ${shown(person)}`);
  equal(Object.keys(person).sort(), ['age', 'name'], 'the fields of the person');
}

// --- what the mesh says over plain HTTP -------------------------------------------------------------------

// The answer at temperature 0 to messages of a user and of the assistant, in turns.
export async function chatText(...contents) {
  const messages = contents.map((content, n) => ({ role: n % 2 ? 'assistant' : 'user', content }));
  const reply = await fetch(`${URL}/v1/chat/completions`, {
    method: 'POST',
    headers: { 'content-type': 'application/json', authorization: `Bearer ${KEY}` },
    body: JSON.stringify({ model: MODEL, messages, temperature: 0, max_tokens: TOKENS }),
  });
  equal(reply.status, 200, 'the status of a plain request');
  return (await reply.json()).choices[0].message.content;
}

async function inFlight() {
  const text = await (await fetch(`${SLOW_URL}/metrics`)).text();
  const line = text.split('\n').find((line) => /^kvmesh_frontend_inflight[{ ]/.test(line));
  check(line, 'the mesh has no metric kvmesh_frontend_inflight');
  return Number(line.split(' ')[1]);
}

// Check that the slow mesh answers a request now, before it is cancelled.
export async function checkRunning() {
  check((await inFlight()) > 0, 'the slow mesh has nothing in progress while a stream is open');
}

// Wait until the slow mesh has nothing in progress. Its answers take much longer than that by themselves.
export async function checkCancelled() {
  const began = performance.now();
  for (let count; (count = await inFlight()) > 0; ) {
    check(performance.now() - began < IDLE_WITHIN_S * 1000, `${count} in progress ${IDLE_WITHIN_S} s after the cancel`);
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
  return `idle after ${((performance.now() - began) / 1000).toFixed(2)} s`;
}
