// What a click shows: the life of a request, and a worker.

import { h } from "./dom.js";
import { bytes, clock, percent, seconds } from "./format.js";
import { UNWELL } from "./picture.js";
import { split } from "./panels.js";
import type { Candidate, Decision, Mesh, Span, Stream, Worker } from "./state.js";

const WORDS: Record<string, string> = {
  parse: "read", template: "template", tokenize: "tokenize", queue: "queue", prefill: "prefill", pull: "pull", decode: "decode",
};

export function requestDetails(mesh: Mesh, id: string): HTMLElement | null {
  const stream = mesh.streams.get(id);
  const decision = [...mesh.decisions].reverse().find((d) => d.id === id);
  if (!stream && !decision) return null;
  const parts: HTMLElement[] = [];
  if (stream) parts.push(facts(stream), timeline(stream, Math.max(0, mesh.t - stream.at)));
  if (decision) parts.push(...reasons(decision));
  return h("div", { class: "details" }, ...parts);
}

function facts(s: Stream): HTMLElement {
  const state = s.outcome ? (s.outcome === "ok" ? "done" : `ended: ${s.outcome}`) : `in ${s.phase}`;
  const rows: [string, string][] = [
    ["state", state], ["model", s.model], ["came", clock(s.at)],
    ["prompt", `${s.isl} tokens${s.cached ? `, ${s.cached} from the cache` : ""}`],
    ["answer", `${s.osl} of at most ${s.most} tokens`],
    ["path", s.prefill ? `${s.prefill} → ${s.decode}` : s.decode ?? "not placed yet"],
  ];
  if (s.ttft_s != null) rows.push(["first token", `after ${seconds(s.ttft_s)}`]);
  if (s.took_s != null) rows.push(["took", seconds(s.took_s)]);
  if (s.pulled) rows.push(["KV pulled", bytes(s.pulled)]);
  if (s.migrations) rows.push(["migrated", `${s.migrations}×, because a worker failed`]);
  return list(rows);
}

function list(rows: [string, string][]): HTMLElement {
  return h("dl", { class: "facts" }, ...rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

/** The stages of a request, one below the other, over the same time. */
function timeline(s: Stream, age_s: number): HTMLElement {
  const spans = s.spans ?? [];
  const end = Math.max(...spans.map((span) => span.to_s ?? age_s), 1e-6);
  const rows = spans.map((span) => bar(span, end));
  return h("section", { class: "timeline" }, h("h3", {}, "Its life"), h("ol", {}, ...rows),
    h("div", { class: "scale", "aria-hidden": "true" }, h("span", {}, "0"), h("span", {}, seconds(end / 2)), h("span", {}, seconds(end))));
}

function bar(span: Span, end: number): HTMLElement {
  const length = Math.max(0, (span.to_s ?? end) - span.from_s);
  const line = h("span", { class: `line ${span.kind}${span.to_s == null ? " lasts" : ""}` });
  line.style.left = `${(100 * span.from_s) / end}%`;
  line.style.width = `max(3px, ${(100 * length) / end}%)`;
  return h("li", {}, h("span", { class: "stage" }, WORDS[span.kind] ?? span.kind), h("span", { class: "track" }, line),
    h("span", { class: "took" }, seconds(length)), h("span", { class: "at" }, span.worker ?? ""));
}

function reasons(d: Decision): HTMLElement[] {
  const [where, why] = split(d.why);
  const parts = [h("section", { class: "why" }, h("h3", {}, "Why there"), h("p", {}, h("strong", {}, where), ` ${why}`))];
  if (d.candidates?.length) parts.push(candidates(d.candidates, d.policy ?? ""));
  else parts.push(h("p", { class: "hint" }, "The costs of the candidates are kept for one request in a while, because listing them takes time."));
  return parts;
}

function candidates(all: Candidate[], policy: string): HTMLElement {
  const head = ["leg", "worker", "cost", "cached blocks", "queued tokens", "held blocks", "requests", ""];
  const rows = all.map((c) => h("tr", { class: c.note === "chosen" ? "chosen" : "" },
    ...[c.leg, c.worker, c.cost.toFixed(1), c.cached, c.queued, c.held, c.requests, c.note].map((value) => h("td", {}, String(value)))));
  return h("section", { class: "candidates" }, h("h3", {}, "Who was weighed"),
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "candidates" },
      h("table", {}, h("thead", {}, h("tr", {}, ...head.map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, ...rows))),
    h("p", { class: "hint" }, `Costs are in KV blocks; the policy is ${policy}.`));
}

export function workerDetails(mesh: Mesh, worker: Worker, open: (id: string) => void): HTMLElement {
  const kv = worker.held / Math.max(1, worker.blocks);
  const rows: [string, string][] = [
    ["health", worker.state === "ok" ? "well" : UNWELL[worker.state] ?? worker.state],
    ["role", worker.role], ["model", worker.model],
    ["requests", `${worker.requests}, room for ${worker.seqs}`],
    ["prompt tokens to compute", String(worker.queued)],
    ["KV in use", `${percent(kv)} (${worker.held} of ${worker.blocks} blocks of ${worker.block_tokens} tokens)`],
    ["KV cached", `${worker.cached} blocks`],
    ["host", worker.host || "–"], ["KV transfer", worker.transfer || "–"], ["ranks", String(worker.ranks)],
    ["release", worker.release || "–"], ["id", worker.id],
  ];
  const here = mesh.listed().filter((s) => !s.outcome && (s.decode === worker.name || s.prefill === worker.name)).slice(0, 12);
  const items = here.map((s) => h("li", {}, h("button", { class: "link", type: "button", click: () => open(s.id) },
    `${s.phase}: ${s.isl} + ${s.osl} tokens, ${s.id}`)));
  return h("div", { class: "details" }, list(rows),
    h("section", {}, h("h3", {}, "Requests here"), items.length ? h("ul", { class: "here" }, ...items) : h("p", { class: "hint" }, "None that this page lists.")));
}
