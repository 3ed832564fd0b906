// The mesh as a picture: the frontend, the workers by role, and what moves between them.
//
// Two canvases: one with what stands still, drawn when a message has come, one with what moves, drawn in each frame
// while something does. A thousand workers are a thousand small shapes, so that is all it takes to stay fluid.

import { percent, plural } from "./format.js";
import { faded, type Palette } from "./palette.js";
import type { Flow, Mesh, Role, Stream, Worker } from "./state.js";

interface Place { x: number; y: number; r: number; worker: Worker }
interface Group { role: Role; x: number; y: number; w: number; h: number; workers: Worker[] }
interface Mote {
  ax: number; ay: number; bx: number; by: number; cx: number; cy: number;
  from: number; takes: number; size: number; color: string; tail: boolean;
}

const ROLES: Role[] = ["prefill", "aggregated", "decode"];
const MAX_MOTES = 260;
const MAX_EDGES = 90;
const HEAD = 30; // above the workers of a group: its name and figures
export const UNWELL: Record<string, string> = {
  lapsed: "its lease has ended", suspect: "has just failed a request", unfollowed: "KV events not followed",
  recovering: "its cache is being learned", new: "has just joined",
};

export class Picture {
  private places: Place[] = [];
  private groups: Group[] = [];
  private byName = new Map<string, Place>();
  private hub = { x: 0, y: 0, r: 26 };
  private motes: Mote[] = [];
  private frame = 0;
  private width = 0;
  private height = 0;
  private still: CanvasRenderingContext2D;
  private moving: CanvasRenderingContext2D;
  private flipped = false; // stacked, on a narrow screen
  chosen: Worker | null = null;
  matches: (worker: Worker) => boolean = () => true;
  calm = matchMedia("(prefers-reduced-motion: reduce)").matches;

  constructor(private box: HTMLElement, private under: HTMLCanvasElement, private over: HTMLCanvasElement,
              private mesh: Mesh, public palette: Palette) {
    this.still = under.getContext("2d")!;
    this.moving = over.getContext("2d")!;
    new ResizeObserver(() => this.resize()).observe(box);
  }

  resize(): void {
    const { clientWidth: w, clientHeight: h } = this.box;
    if (!w || !h) return;
    const ratio = Math.min(2, devicePixelRatio || 1);
    for (const [canvas, context] of [[this.under, this.still], [this.over, this.moving]] as const) {
      canvas.width = w * ratio;
      canvas.height = h * ratio;
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
    }
    this.width = w;
    this.height = h;
    this.layout();
    this.draw();
  }

  // --- where everything is -----------------------------------------------------------------------------------------

  layout(): void {
    this.flipped = this.width < 560;
    const of = new Map<Role, Worker[]>();
    for (const worker of this.mesh.workers.values()) {
      const list = of.get(worker.role) ?? [];
      list.push(worker);
      of.set(worker.role, list);
    }
    const present = ROLES.filter((role) => of.has(role));
    const total = this.mesh.workers.size || 1;
    const shares = present.map((role) => Math.max(0.3, Math.sqrt((of.get(role)!.length) / total)));
    const sum = shares.reduce((a, b) => a + b, 0) || 1;
    const lead = this.flipped ? 84 : Math.min(150, this.width * 0.15);
    this.hub = this.flipped
      ? { x: this.width / 2, y: 38, r: 22 }
      : { x: lead * 0.46, y: this.height / 2, r: 27 };
    const gap = this.flipped ? 10 : 26;
    const length = (this.flipped ? this.height : this.width) - lead - gap * Math.max(0, present.length - 1) - 14;
    let at = lead;
    this.groups = present.map((role, number) => {
      const size = (length * shares[number]!) / sum;
      const group: Group = this.flipped
        ? { role, x: 8, y: at, w: this.width - 16, h: size, workers: of.get(role)! }
        : { role, x: at, y: 12, w: size, h: this.height - 24, workers: of.get(role)! };
      at += size + gap;
      return group;
    });
    this.places = [];
    this.byName.clear();
    for (const group of this.groups) this.place(group);
    this.motes = [];
  }

  private place(group: Group): void {
    group.workers.sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
    const n = group.workers.length, w = group.w - 16, hgt = group.h - HEAD - 10;
    let columns = 1, cell = 0;
    for (let c = 1; c <= n; c++) {
      const size = Math.min(w / c, hgt / Math.ceil(n / c));
      if (size > cell) [cell, columns] = [size, c];
    }
    cell = Math.min(cell, 158);
    const rows = Math.ceil(n / columns);
    const left = group.x + (group.w - cell * Math.min(columns, n)) / 2;
    const top = group.y + HEAD + Math.max(0, (hgt - cell * rows) / 2);
    group.workers.forEach((worker, i) => {
      const r = cell >= 44 ? cell * 0.33 : cell * 0.4;
      const shift = cell >= 44 ? -cell * 0.08 : 0; // room for the name
      const place = { worker, r, x: left + (i % columns + 0.5) * cell, y: top + (Math.floor(i / columns) + 0.5) * cell + shift };
      this.places.push(place);
      this.byName.set(worker.name, place);
    });
  }

  at(x: number, y: number): Worker | null {
    let best: Place | null = null, distance = Infinity;
    for (const place of this.places) {
      const d = Math.hypot(place.x - x, place.y - y);
      if (d < Math.max(place.r + 4, 9) && d < distance) [best, distance] = [place, d];
    }
    return best?.worker ?? null;
  }

  spot(worker: Worker): { x: number; y: number; r: number } | null {
    return this.byName.get(worker.name) ?? null;
  }

  /** The nearest worker in a direction, for the arrow keys. */
  next(dx: number, dy: number): Worker | null {
    const from = this.chosen && this.byName.get(this.chosen.name);
    if (!from) return this.places[0]?.worker ?? null;
    let best: Place | null = null, cost = Infinity;
    for (const place of this.places) {
      const along = (place.x - from.x) * dx + (place.y - from.y) * dy;
      const across = Math.abs((place.x - from.x) * dy) + Math.abs((place.y - from.y) * dx);
      if (along > 1 && along + 3 * across < cost) [best, cost] = [place, along + 3 * across];
    }
    return best?.worker ?? this.chosen;
  }

  // --- what stands still -------------------------------------------------------------------------------------------

  draw(): void {
    const c = this.still;
    c.clearRect(0, 0, this.width, this.height);
    for (const group of this.groups) this.drawGroup(group);
    this.drawEdges();
    for (const place of this.places) this.drawWorker(place);
    this.drawHub();
  }

  private drawGroup(group: Group): void {
    const c = this.still, p = this.palette, color = p[group.role];
    c.fillStyle = faded(color, 0.045);
    c.strokeStyle = faded(color, 0.22);
    c.lineWidth = 1;
    c.beginPath();
    c.roundRect(group.x + 0.5, group.y + 0.5, group.w - 1, group.h - 1, 14);
    c.fill();
    c.stroke();
    let requests = 0, held = 0, blocks = 0, unwell = 0;
    for (const worker of group.workers) {
      requests += worker.requests;
      held += worker.held;
      blocks += worker.blocks;
      if (worker.state === "lapsed" || worker.state === "suspect" || worker.state === "unfollowed") unwell += 1;
    }
    c.textAlign = "left";
    c.textBaseline = "middle";
    c.font = "600 12px system-ui, sans-serif";
    c.fillStyle = color;
    const title = `${group.workers.length} ${group.role}`;
    c.fillText(title, group.x + 13, group.y + 18);
    const after = group.x + 13 + c.measureText(title).width + 10;
    c.font = "12px system-ui, sans-serif";
    c.fillStyle = p.muted;
    const facts = [plural(requests, "request"), `KV ${percent(held / Math.max(1, blocks))}`];
    if (unwell) facts.push(`${unwell} unwell`);
    const text = facts.join("  ·  ");
    if (after + c.measureText(text).width < group.x + group.w - 8) c.fillText(text, after, group.y + 18);
  }

  private drawWorker({ x, y, r, worker }: Place): void {
    const c = this.still, p = this.palette, color = p[worker.role];
    c.globalAlpha = this.matches(worker) ? 1 : 0.14;
    const used = Math.min(1, worker.held / Math.max(1, worker.blocks));
    const cached = Math.min(1, worker.cached / Math.max(1, worker.blocks));
    const load = Math.min(1, worker.requests / Math.max(1, worker.seqs));
    const sick = worker.state === "lapsed" ? p.bad : worker.state === "suspect" || worker.state === "unfollowed" ? p.warn : "";
    if (r < 5) {
      c.fillStyle = sick || faded(color, 0.22 + 0.78 * Math.max(load, used));
      c.beginPath();
      c.roundRect(x - r, y - r, 2 * r, 2 * r, Math.min(2, r));
      c.fill();
    } else {
      if (worker.requests > 0 && r > 10) {
        const glow = c.createRadialGradient(x, y, r * 0.6, x, y, r * 1.45);
        glow.addColorStop(0, faded(color, 0.12 + 0.28 * load));
        glow.addColorStop(1, faded(color, 0));
        c.fillStyle = glow;
        c.beginPath();
        c.arc(x, y, r * 1.45, 0, 7);
        c.fill();
      }
      const ring = Math.max(2, r * 0.17);
      c.fillStyle = p.raised;
      c.beginPath();
      c.arc(x, y, r, 0, 7);
      c.fill();
      c.fillStyle = faded(color, 0.1 + 0.5 * load);
      c.beginPath();
      c.arc(x, y, r - ring * 1.6, 0, 7);
      c.fill();
      this.arc(x, y, r - ring / 2, ring, 1, faded(color, 0.16));
      this.arc(x, y, r - ring / 2, ring, cached, faded(color, 0.38));
      this.arc(x, y, r - ring / 2, ring, used, color);
      if (sick || worker.state === "new") {
        c.strokeStyle = sick || p.good;
        c.lineWidth = r > 12 ? 2.5 : 1.5;
        c.setLineDash(worker.state === "new" ? [4, 4] : []);
        c.beginPath();
        c.arc(x, y, r + 3.5, 0, 7);
        c.stroke();
        c.setLineDash([]);
      }
    }
    if (r >= 13) {
      c.textAlign = "center";
      c.textBaseline = "middle";
      c.fillStyle = p.ink;
      c.font = `600 ${Math.round(Math.min(20, r * 0.62))}px system-ui, sans-serif`;
      c.fillText(String(worker.requests), x, y + 1);
      const size = Math.min(12.5, Math.max(9, r * 0.42));
      c.font = `${size}px system-ui, sans-serif`;
      c.fillStyle = sick || p.muted;
      c.fillText(shortened(worker.name, Math.floor((r * 3.4) / (size * 0.55))), x, y + r + size * 0.95 + 3);
    }
    if (this.chosen?.n === worker.n) {
      c.strokeStyle = p.accent;
      c.lineWidth = 2;
      c.beginPath();
      c.arc(x, y, r + 6, 0, 7);
      c.stroke();
    }
    c.globalAlpha = 1;
  }

  private arc(x: number, y: number, r: number, width: number, share: number, color: string): void {
    if (share <= 0) return;
    const c = this.still;
    c.strokeStyle = color;
    c.lineWidth = width;
    c.beginPath();
    c.arc(x, y, r, -Math.PI / 2, -Math.PI / 2 + share * 2 * Math.PI);
    c.stroke();
  }

  private drawHub(): void {
    const c = this.still, p = this.palette, { x, y, r } = this.hub;
    c.fillStyle = p.raised;
    c.strokeStyle = p.accent;
    c.lineWidth = 2;
    c.beginPath();
    for (let i = 0; i < 6; i++) {
      const angle = Math.PI / 6 + (i * Math.PI) / 3;
      c.lineTo(x + r * Math.cos(angle), y + r * Math.sin(angle));
    }
    c.closePath();
    c.fill();
    c.stroke();
    c.textAlign = "center";
    c.textBaseline = "middle";
    c.fillStyle = p.ink;
    c.font = "600 14px system-ui, sans-serif";
    c.fillText(String(this.mesh.totals.inflight), x, y + 1);
    c.font = "12px system-ui, sans-serif";
    c.fillStyle = p.muted;
    if (this.flipped) {
      c.textAlign = "left";
      c.fillText("in flight at the frontend", x + r + 8, y + 1);
    } else {
      c.fillText("frontend", x, y + r + 14);
      if (this.mesh.totals.waiting) {
        c.fillStyle = p.warn;
        c.fillText(`${this.mesh.totals.waiting} wait`, x, y + r + 30);
      }
    }
  }

  private drawEdges(): void {
    const c = this.still, p = this.palette;
    const counts = new Map<string, number>();
    for (const stream of this.mesh.streams.values()) {
      if (stream.outcome || !stream.decode) continue;
      const path = stream.prefill ? [`>${stream.prefill}`, `${stream.prefill}>${stream.decode}`] : [`>${stream.decode}`];
      for (const edge of path) counts.set(edge, (counts.get(edge) ?? 0) + 1);
    }
    let drawn = 0;
    for (const [edge, count] of counts) {
      if (++drawn > MAX_EDGES) break;
      const [from, to] = edge.split(">") as [string, string];
      const a = from ? this.byName.get(from) : this.hub, b = this.byName.get(to);
      if (!a || !b) continue;
      const [cx, cy] = bend(a.x, a.y, b.x, b.y);
      c.strokeStyle = faded(from ? p.prefill : p.accent, Math.min(0.5, 0.14 + 0.05 * count));
      c.lineWidth = Math.min(2.6, 1 + 0.2 * count);
      c.beginPath();
      c.moveTo(a.x, a.y);
      c.quadraticCurveTo(cx, cy, b.x, b.y);
      c.stroke();
    }
  }

  // --- what moves --------------------------------------------------------------------------------------------------

  /** Set in motion what the last message has told: pulls, new requests, tokens. */
  animate(flows: Flow[], begun: Stream[], running: Stream[], spanMs: number): void {
    if (this.calm || document.hidden) return;
    const now = performance.now(), p = this.palette;
    for (const [from, to, count, bytes] of flows) {
      const a = this.byName.get(from), b = this.byName.get(to);
      if (!a || !b) continue;
      const size = 2.2 + Math.min(3.4, Math.log10(1 + bytes / Math.max(1, count) / 1e4));
      for (let i = 0; i < Math.min(10, count); i++) this.send(a, b, now + (spanMs * i) / Math.min(10, count), 900, size, p.prefill, true);
    }
    for (const stream of begun) {
      const to = this.byName.get(stream.prefill ?? stream.decode ?? "");
      if (to) this.send(this.hub, to, now + Math.random() * spanMs, 520, 2.4, p.accent, false);
    }
    for (const stream of running.slice(0, 60)) {
      const from = stream.phase === "decode" && stream.decode ? this.byName.get(stream.decode) : undefined;
      if (from) this.send(from, this.hub, now + Math.random() * spanMs, 800, 1.5, p.decode, false);
    }
    if (this.motes.length && !this.frame) this.frame = requestAnimationFrame((time) => this.step(time));
  }

  private send(a: { x: number; y: number }, b: { x: number; y: number }, from: number, takes: number, size: number,
               color: string, tail: boolean): void {
    if (this.motes.length >= MAX_MOTES) return;
    const [cx, cy] = bend(a.x, a.y, b.x, b.y);
    this.motes.push({ ax: a.x, ay: a.y, bx: b.x, by: b.y, cx, cy, from, takes, size, color, tail });
  }

  private step(now: number): void {
    const c = this.moving;
    c.clearRect(0, 0, this.width, this.height);
    this.motes = this.motes.filter((mote) => now < mote.from + mote.takes);
    for (const mote of this.motes) {
      const part = (now - mote.from) / mote.takes;
      if (part < 0) continue;
      for (let i = mote.tail ? 5 : 0; i >= 0; i--) {
        const t = ease(Math.max(0, part - i * 0.025));
        const u = 1 - t;
        c.fillStyle = faded(mote.color, (1 - i / 6) * Math.min(1, 4 * (1 - part)));
        c.beginPath();
        c.arc(u * u * mote.ax + 2 * u * t * mote.cx + t * t * mote.bx, u * u * mote.ay + 2 * u * t * mote.cy + t * t * mote.by,
              mote.size * (1 - i * 0.12), 0, 7);
        c.fill();
      }
    }
    this.frame = this.motes.length && !document.hidden ? requestAnimationFrame((time) => this.step(time)) : 0;
  }
}

/** The point towards which a line from a to b is bent, so that there and back are two lines. */
function bend(ax: number, ay: number, bx: number, by: number): [number, number] {
  return [(ax + bx) / 2 + (by - ay) * 0.13, (ay + by) / 2 - (bx - ax) * 0.13];
}

function ease(t: number): number {
  return t < 0.5 ? 2 * t * t : 1 - (2 - 2 * t) ** 2 / 2;
}

function shortened(text: string, most: number): string {
  return text.length <= most ? text : `${text.slice(0, Math.max(1, most - 1))}…`;
}
