// The panels around the picture: figures, curves, requests, decisions, planner, events.

import { plot } from "./charts.js";
import { byId, h, keyed, setText } from "./dom.js";
import { bytes, clock, count, percent, plural, seconds, shortId } from "./format.js";
import type { Decision, Mesh, MeshEvent, Planner, Point, Step, Stream, Totals } from "./state.js";

const PHASES: Record<string, string> = {
  parse: "reads", template: "reads", tokenize: "reads", queue: "waits", prefill: "prefill", pull: "pulls KV", decode: "decode", ended: "ended",
};
const SHOWN_STREAMS = 40;

// --- figures -------------------------------------------------------------------------------------------------------

interface Tile { id: string; text(t: Totals): string; note(t: Totals): string; value(t: Totals): number | null; color: string }

const TILES: Tile[] = [
  { id: "requests", text: (t) => count(t.requests_per_s), value: (t) => t.requests_per_s, color: "accent",
    note: (t) => (t.failures_per_s > 0 ? `${count(t.failures_per_s)} fail per second` : "end per second") },
  { id: "tokens", text: (t) => count(Math.round(t.tokens_per_s)), note: () => "per second", value: (t) => t.tokens_per_s, color: "decode" },
  { id: "inflight", text: (t) => count(t.inflight), note: (t) => (t.waiting ? `${plural(t.waiting, "request")} wait${t.waiting === 1 ? "s" : ""}` : "none waits"),
    value: (t) => t.inflight, color: "accent" },
  { id: "ttft", text: (t) => seconds(t.ttft_s), note: () => "to the first token", value: (t) => t.ttft_s, color: "prefill" },
  { id: "itl", text: (t) => seconds(t.itl_s), note: () => "between tokens", value: (t) => t.itl_s, color: "decode" },
  { id: "kv", text: (t) => percent(t.kv_share), note: (t) => (t.cached_share == null ? "by requests" : `${percent(t.cached_share)} cached`),
    value: (t) => t.kv_share, color: "aggregated" },
  { id: "hits", text: (t) => percent(t.hit_share), note: () => "of prompt tokens", value: (t) => t.hit_share, color: "good" },
];
const held = new Map<string, string>(); // a time is shown until there is a newer one

export function showFigures(mesh: Mesh): void {
  const times = mesh.recent.map((_, i) => i);
  for (const tile of TILES) {
    const box = byId(`tile-${tile.id}`);
    let text = tile.text(mesh.totals);
    if (text === "–") text = held.get(tile.id) ?? text;
    else held.set(tile.id, text);
    setText(box.querySelector(".value")!, text);
    setText(box.querySelector(".note")!, tile.note(mesh.totals));
    let before: number | null = null; // a curve of times goes on where nobody ended a request
    const values = mesh.recent.map((totals) => (before = tile.value(totals) ?? before));
    plot(box.querySelector("svg")!, times, [{ name: tile.id, color: tile.color, values, isFilled: true }], 0, 1.5);
  }
}

export function showCurves(mesh: Mesh): void {
  const points: (Point | null)[] = []; // null: nobody looked
  for (const point of mesh.history) {
    const before = points[points.length - 1];
    if (before && point[0] - before[0] > 10) points.push(null);
    points.push(point);
  }
  const times = points.map((point, i) => (point ?? points[i - 1])![0]);
  const of = (place: 1 | 2 | 7) => points.map((point) => (point ? point[place] : null));
  const curves = [
    { name: "KV cached", color: "muted", values: of(7) },
    { name: "KV in use", color: "aggregated", values: of(1), isFilled: true },
    { name: "hit rate", color: "good", values: of(2) },
  ];
  plot(byId("curves") as unknown as SVGElement, times, curves, 1);
  const span = times.length > 1 ? times[times.length - 1]! - times[0]! : 0;
  setText(byId("curves-span"), span > 90 ? `last ${Math.round(span / 60)} min` : span ? `last ${Math.round(span)} s` : "");
}

// --- requests ------------------------------------------------------------------------------------------------------

export function showStreams(mesh: Mesh, matches: (text: string) => boolean, open: (id: string) => void): void {
  const all = mesh.listed().filter((s) => matches(`${s.id} ${s.model} ${s.prefill ?? ""} ${s.decode ?? ""} ${s.phase} ${s.outcome ?? ""}`));
  const running = all.filter((s) => !s.outcome).length;
  setText(byId("streams-note"), `${running} in flight${mesh.totals.unseen ? `, ${mesh.totals.unseen} more not listed` : ""}`);
  byId("streams-empty").hidden = all.length > 0;
  keyed(byId("streams"), all.slice(0, SHOWN_STREAMS), (s) => s.id, (s) => makeStream(s, open), updateStream);
}

function makeStream(stream: Stream, open: (id: string) => void): HTMLElement {
  return h("li", {},
    h("button", { class: "row stream", type: "button", click: () => open(stream.id) },
      h("span", { class: "phase" }),
      h("span", { class: "path" }, h("span", { class: "leg prefill" }), h("span", { class: "arrow", "aria-hidden": "true" }), h("span", { class: "leg decode" })),
      h("span", { class: "bar", "aria-hidden": "true" }, h("span", {})),
      h("span", { class: "hit" }),
      h("span", { class: "sizes" }),
      h("span", { class: "id" }, shortId(stream.id))));
}

function updateStream(element: HTMLElement, s: Stream): void {
  const phase = element.querySelector<HTMLElement>(".phase")!;
  const failed = s.outcome && s.outcome !== "ok";
  setText(phase, failed ? s.outcome! : s.outcome ? "done" : PHASES[s.phase] ?? s.phase);
  phase.className = `phase ${failed ? "failed" : s.phase}`;
  setText(element.querySelector(".leg.prefill")!, s.prefill ?? "");
  setText(element.querySelector(".arrow")!, s.prefill ? "→" : "");
  setText(element.querySelector(".leg.decode")!, s.decode ?? "the router’s queue");
  const bar = element.querySelector<HTMLElement>(".bar > span")!;
  bar.style.width = `${Math.min(100, (100 * s.osl) / Math.max(1, s.most))}%`;
  setText(element.querySelector(".hit")!, s.cached ? `${Math.round((100 * s.cached) / Math.max(1, s.isl))} % hit` : "");
  setText(element.querySelector(".sizes")!, `${s.isl} + ${s.osl}`);
  element.firstElementChild!.classList.toggle("over", Boolean(s.outcome));
}

// --- decisions -----------------------------------------------------------------------------------------------------

export function showDecisions(mesh: Mesh, matches: (text: string) => boolean, open: (id: string) => void): void {
  const all = [...mesh.decisions].reverse().filter((d) => matches(`${d.id} ${d.why} ${d.model}`)).slice(0, 14);
  byId("decisions-empty").hidden = all.length > 0;
  keyed(byId("decisions"), all, (d) => `${d.id}@${d.at}`, (d) => makeDecision(d, open), () => undefined);
}

function makeDecision(d: Decision, open: (id: string) => void): HTMLElement {
  const [where, why] = split(d.why);
  return h("li", {},
    h("button", { class: "row decision", type: "button", click: () => open(d.id) },
      h("span", { class: "when" }, clock(d.at)),
      h("span", { class: "text" }, h("strong", {}, where), why ? ` ${why}` : null),
      d.candidates?.length ? h("span", { class: "more" }, `${d.candidates.length} weighed`) : null));
}

/** Where a request runs, and why: the two halves of a decision's sentence. */
export function split(text: string): [string, string] {
  const at = text.indexOf(": ");
  return at < 0 ? [text, ""] : [text.slice(0, at + 1), text.slice(at + 2)];
}

// --- planner -------------------------------------------------------------------------------------------------------

export function showPlanner(planner: Planner): void {
  const has = Boolean(planner.name);
  byId("planner-empty").hidden = has;
  byId("planner-body").hidden = !has;
  if (!has) return;
  const steps = planner.steps, newest = steps[steps.length - 1];
  setText(byId("planner-note"), `${planner.name}${planner.connector ? ` · ${planner.connector}` : ""}${newest ? ` · ${newest.mode}` : ""}`);
  byId("planner-problem").hidden = !planner.problem;
  setText(byId("planner-problem"), planner.problem ?? "");
  if (!newest) return;
  const times = steps.map((step) => step.at);
  let forecast: number | null = null;
  const forecasts = steps.map((step) => (forecast = step.forecast ?? forecast));
  let came: number | null = null;
  const rates = steps.map((step) => (came = step.rps ?? came));
  plot(byId("planner-traffic") as unknown as SVGElement, times, [
    { name: "came", color: "accent", values: rates, isFilled: true },
    { name: "forecast", color: "warn", values: forecasts, isDashed: true },
  ]);
  const step = (name: string, color: string, role: "prefill" | "decode", place: number, isDashed: boolean) =>
    ({ name, color, values: steps.map((s) => s[role][place]!), isStep: true, isDashed });
  plot(byId("planner-replicas") as unknown as SVGElement, times, [
    step("prefill ordered", "prefill", "prefill", 3, true), step("decode ordered", "decode", "decode", 3, true),
    step("prefill ready", "prefill", "prefill", 0, false), step("decode ready", "decode", "decode", 0, false),
  ], 1 + Math.max(...steps.flatMap((s) => [s.prefill[3], s.decode[3], s.prefill[0], s.decode[0]])));
  setText(byId("planner-counts"), `${counts(newest, "prefill")}, ${counts(newest, "decode")}`);
  setText(byId("planner-rate"), `${newest.rps == null ? "–" : newest.rps.toFixed(1)} came, ${newest.forecast == null ? "–" : newest.forecast.toFixed(1)} forecast (requests/s)`);
  const words = [...steps].reverse().filter((s) => s.applied || s.error || s === newest).slice(0, 4);
  keyed(byId("planner-words"), words, (s) => String(s.at), makeWords, () => undefined);
}

function counts(step: Step, role: "prefill" | "decode"): string {
  const [ready, starting, draining, ordered] = step[role];
  const there = [`${ready} ready`, starting ? `${starting} starting` : "", draining ? `${draining} draining` : ""];
  return `${role}: ${there.filter(Boolean).join(", ")}${ordered === ready + starting ? "" : `, ${ordered} wanted`}`;
}

function makeWords(step: Step): HTMLElement {
  const text = step.error ? `not done: ${step.error}` : step.why.join("; ") || "as decided before";
  return h("li", { class: step.error ? "failed" : step.applied ? "applied" : "" },
    h("span", { class: "when" }, clock(step.at)), h("span", { class: "text" }, text));
}

// --- events --------------------------------------------------------------------------------------------------------

const GOOD = new Set(["joined", "returned", "well"]);
const BAD = new Set(["died", "lapsed", "failed", "suspect", "unfollowed"]);

export function showEvents(mesh: Mesh, matches: (text: string) => boolean): void {
  const all = [...mesh.events].reverse().filter((e) => matches(`${e.kind} ${e.who} ${e.text}`)).slice(0, 80);
  byId("events-empty").hidden = all.length > 0;
  keyed(byId("events"), all, (e) => String(e.seq), makeEvent, () => undefined);
}

function makeEvent(event: MeshEvent): HTMLElement {
  const kind = GOOD.has(event.kind) ? "good" : BAD.has(event.kind) ? "bad" : event.kind === "planner" ? "plan" : "plain";
  return h("li", { class: `event ${kind}` },
    h("span", { class: "when" }, clock(event.at)),
    h("span", { class: "text" }, h("span", { class: "kind" }, event.kind), h("strong", {}, event.who), ` ${event.text}`));
}

export function flowsText(mesh: Mesh): string {
  const total = mesh.flows.reduce((sum, flow) => sum + flow[3], 0);
  const pulls = mesh.flows.reduce((sum, flow) => sum + flow[2], 0);
  return pulls ? `${plural(pulls, "pull")}, ${bytes(total)}` : "";
}
