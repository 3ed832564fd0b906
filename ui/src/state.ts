// The mesh as this page knows it: the whole picture first, then what changes. `kvmesh top` folds the same messages.

export type Role = "prefill" | "decode" | "aggregated";
export type Look = [n: number, state: string, requests: number, queued: number, held: number, cached: number];
export type Point = [
  at: number, kv: number, hit: number | null, rps: number, tps: number, inflight: number, waiting: number,
  cached: number | null,
];
export type Flow = [from: string, to: string, count: number, bytes: number];
export type Count = [ready: number, starting: number, draining: number, ordered: number];

export interface Worker {
  n: number; id: string; name: string; role: Role; model: string; blocks: number; block_tokens: number; seqs: number;
  ranks: number; host: string; transfer: string; release: string;
  state: string; requests: number; queued: number; held: number; cached: number;
}
export interface Totals {
  inflight: number; waiting: number; requests_per_s: number; failures_per_s: number; tokens_per_s: number;
  kv_share: number; cached_share: number | null; hit_share: number | null; ttft_s: number | null; itl_s: number | null;
  unseen: number;
}
export interface Span { kind: string; from_s: number; to_s?: number; worker?: string } // no end: it lasts
export interface Stream {
  id: string; model: string; at: number; isl: number; osl: number; most: number; cached: number; phase: string;
  prefill?: string; decode?: string; pulled?: number; migrations?: number; outcome?: string; took_s?: number;
  waited_s?: number; ttft_s?: number; spans?: Span[];
}
export interface Candidate {
  leg: string; worker: string; cost: number; cached: number; queued: number; held: number; requests: number; note: string;
}
export interface Decision {
  id: string; at: number; model: string; isl: number; why: string; policy?: string; candidates?: Candidate[];
}
export interface MeshEvent { seq: number; at: number; kind: string; who: string; text: string }
export interface Step {
  at: number; mode: string; loop: string; prefill: Count; decode: Count; rps: number | null; forecast: number | null;
  ttft_s: number | null; itl_s: number | null; why: string[]; applied: boolean; error: string;
}
export interface Planner { name?: string; connector?: string; problem?: string; steps: Step[] }

const MAX_STREAMS = 80, MAX_DECISIONS = 40, MAX_EVENTS = 200, MAX_STEPS = 120, MAX_POINTS = 300;

export const NO_TOTALS: Totals = {
  inflight: 0, waiting: 0, requests_per_s: 0, failures_per_s: 0, tokens_per_s: 0, kv_share: 0, cached_share: null,
  hit_share: null, ttft_s: null, itl_s: null, unseen: 0,
};

export class Mesh {
  t = 0;
  everyS = 0.5;
  about: { frontend?: string; release?: string; router?: string; sees?: string } = {};
  workers = new Map<number, Worker>();
  byName = new Map<string, Worker>();
  totals: Totals = NO_TOTALS;
  recent: Totals[] = []; // of each message, for the small curves
  history: Point[] = [];
  streams = new Map<string, Stream>();
  decisions: Decision[] = [];
  events: MeshEvent[] = [];
  planner: Planner = { steps: [] };
  flows: Flow[] = []; // of the last message
  begun: Stream[] = []; // in the last message
  membersChanged = true;

  whole(message: any): void {
    this.about = message.about ?? {};
    this.everyS = message.every_s ?? 0.5;
    this.workers.clear();
    this.byName.clear();
    this.streams.clear();
    this.history = [];
    this.decisions = [];
    this.events = [];
    this.planner = { steps: [] };
    this.change(message);
    this.begun = [];
    this.membersChanged = true;
  }

  change(message: any): void {
    this.t = message.t;
    for (const row of message.workers ?? []) this.join(row);
    for (const n of message.gone ?? []) this.leave(n);
    for (const look of (message.loads ?? []) as Look[]) this.load(look);
    if (message.totals) this.totals = message.totals;
    this.recent.push(this.totals);
    if (this.recent.length > 120) this.recent.shift();
    this.flows = message.flows ?? [];
    this.begun = [];
    for (const row of (message.streams ?? []) as Stream[]) this.stream(row);
    this.decisions = last([...this.decisions, ...(message.decisions ?? [])], MAX_DECISIONS);
    const newest = this.events.length ? this.events[this.events.length - 1]!.seq : 0;
    const events = ((message.events ?? []) as MeshEvent[]).filter((event) => event.seq > newest);
    this.events = last([...this.events, ...events], MAX_EVENTS);
    this.history = last([...this.history, ...(message.history ?? [])], MAX_POINTS);
    if (message.planner) this.plan(message.planner);
  }

  private join(row: any): void {
    const before = this.workers.get(row.n);
    const worker = { state: "ok", requests: 0, queued: 0, held: 0, cached: 0, ...before, ...row } as Worker;
    this.workers.set(row.n, worker);
    this.byName.set(worker.name, worker);
    this.membersChanged = true;
  }

  private leave(n: number): void {
    const gone = this.workers.get(n);
    if (!gone) return;
    this.workers.delete(n);
    if (this.byName.get(gone.name) === gone) this.byName.delete(gone.name);
    this.membersChanged = true;
  }

  private load([n, state, requests, queued, held, cached]: Look): void {
    const worker = this.workers.get(n);
    if (worker) Object.assign(worker, { state, requests, queued, held, cached });
  }

  private stream(row: Stream): void {
    if (!this.streams.has(row.id)) this.begun.push(row);
    this.streams.delete(row.id);
    this.streams.set(row.id, row);
    for (const wanted of [true, false]) {
      for (const [id, known] of this.streams) {
        if (this.streams.size <= MAX_STREAMS) return;
        if (!wanted || known.outcome) this.streams.delete(id);
      }
    }
  }

  private plan(row: any): void {
    const earlier = row.name === this.planner.name ? this.planner.steps : [];
    const known = earlier.length ? earlier[earlier.length - 1]!.at : 0;
    const steps = ((row.steps ?? []) as Step[]).filter((step) => step.at > known);
    this.planner = { ...row, steps: last([...earlier, ...steps], MAX_STEPS) };
  }

  /** The requests, those in flight first and the newest of each first. */
  listed(): Stream[] {
    const all = [...this.streams.values()].sort((a, b) => b.at - a.at);
    return [...all.filter((s) => !s.outcome), ...all.filter((s) => s.outcome)];
  }
}

function last<T>(items: T[], most: number): T[] {
  return items.length > most ? items.slice(items.length - most) : items;
}
