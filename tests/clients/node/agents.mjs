// Run a coding agent as its users do: as a program, with a home of its own and no way to the internet.
// KVMESH_AGENT_URL is a frontend of the mesh whose model follows orders (scripted.py).

import { spawn } from 'node:child_process';
import { appendFileSync } from 'node:fs';
import { createServer } from 'node:http';
import { createInterface } from 'node:readline';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { check } from './flows.mjs';

export const AGENT_URL = process.env.KVMESH_AGENT_URL;
export const SAY = 'Please say "blue heron" now.';
export const RECALL = 'Please recall "blue heron" now.';
export const RUN = 'Please run "echo $((41+1)) herons" now.';
export const FILL = 'Please fill in the form now.';
export const SAY_SLOWLY = 'Please say "heron" slowly now.';
export const FORM = { name: 'x', age: 1 }; // what the model writes into a form

// These programs do not load offline.cjs. What leaves the host goes to this proxy, which notes it and refuses.
async function deadEnd() {
  const note = (host) => process.env.KVMESH_ATTEMPTS && appendFileSync(process.env.KVMESH_ATTEMPTS, `${host}\n`);
  const server = createServer((request, response) => (note(request.url), response.writeHead(403).end()));
  server.on('connect', (request, socket) => (note(request.url), socket.end('HTTP/1.1 403 Forbidden\r\n\r\n')));
  await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve));
  server.unref();
  return `http://127.0.0.1:${server.address().port}`;
}
const proxy = await deadEnd();

// Run a script of the agents' packages to its end, and return its exit code, the JSON objects it printed, and the rest.
// `onLine` gets each object as it comes, and a function that interrupts the program; `onStart` gets that function.
export async function runAgent(script, given, variables, onLine = () => {}, onStart = () => {}) {
  const { NODE_OPTIONS, ...inherited } = process.env;
  const env = { ...inherited, HTTPS_PROXY: proxy, HTTP_PROXY: proxy, NO_PROXY: '127.0.0.1,localhost', ...variables };
  const file = fileURLToPath(new URL(`./agents/node_modules/${script}`, import.meta.url));
  const child = spawn(process.execPath, [file, ...given], { env, stdio: ['ignore', 'pipe', 'pipe'], detached: true });
  const lines = [];
  let rest = '';
  child.stderr.on('data', (data) => (rest += data));
  const interrupt = () => process.kill(-child.pid, 'SIGINT');
  createInterface({ input: child.stdout }).on('line', (line) => {
    if (!line.startsWith('{')) return void (rest += `${line}\n`);
    lines.push(JSON.parse(line));
    onLine(lines.at(-1), interrupt);
  });
  const closed = new Promise((resolve) => child.on('close', resolve));
  onStart(interrupt);
  const code = await closed;
  return { code, lines, rest };
}

async function inFlight() {
  const text = await (await fetch(`${AGENT_URL}/metrics`)).text();
  return Number(/^kvmesh_frontend_inflight (\S+)/m.exec(text)[1]);
}

// Wait until the count of requests in progress is as wanted. Return how long that took, undefined if it took too long.
async function waitFor(isWanted, withinS = 5) {
  for (const began = performance.now(); performance.now() - began < withinS * 1000; await sleep(20)) {
    if (isWanted(await inFlight())) return (performance.now() - began) / 1000;
  }
}

// Return whether an answer to an agent is in progress, now or soon.
export const checkRunning = async () => (await waitFor((count) => count > 0, 30)) !== undefined;

// Check that none is, now or soon.
export async function checkIdle() {
  const s = await waitFor((count) => count === 0);
  check(s !== undefined, 'the answer is still in progress 5 s after the cancel');
  return `idle after ${s.toFixed(2)} s`;
}
