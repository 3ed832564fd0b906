// The live page: read the feed, keep the mesh, show it.

import { requestDetails, workerDetails } from "./details.js";
import { byId, setText } from "./dom.js";
import { Feed, saveKey, type Status } from "./feed.js";
import { percent, plural } from "./format.js";
import { readPalette } from "./palette.js";
import { flowsText, showCurves, showDecisions, showEvents, showFigures, showPlanner, showStreams } from "./panels.js";
import { Picture, UNWELL } from "./picture.js";
import { Mesh, type Worker } from "./state.js";
import "./whatif.js";

const VERSION = 1;
const THEME = "kvmesh-theme";

const mesh = new Mesh();
const canvas = byId<HTMLCanvasElement>("picture");
const picture = new Picture(byId("stage"), canvas, byId<HTMLCanvasElement>("motion"), mesh, readPalette());
const filter = byId<HTMLInputElement>("filter");
const dialog = byId<HTMLDialogElement>("details");
const login = byId<HTMLDialogElement>("login");
let isPaused = false;
let opened: { kind: "request" | "worker"; id: string } | null = null;

// --- showing -------------------------------------------------------------------------------------------------------

function matches(text: string): boolean {
  const wanted = filter.value.trim().toLowerCase();
  return wanted === "" || wanted.split(/\s+/).every((word) => text.toLowerCase().includes(word));
}

picture.matches = (worker) => matches(`${worker.name} ${worker.id} ${worker.role} ${worker.model} ${worker.state} ${worker.host}`);

function show(): void {
  if (mesh.membersChanged) {
    mesh.membersChanged = false;
    picture.layout();
  }
  picture.draw();
  showFigures(mesh);
  showCurves(mesh);
  showStreams(mesh, matches, openRequest);
  showDecisions(mesh, matches, openRequest);
  showPlanner(mesh.planner);
  showEvents(mesh, matches);
  setText(byId("flows"), flowsText(mesh));
  summarize();
  if (opened && dialog.open) refreshDetails();
}

function summarize(): void {
  const unwell = [...mesh.workers.values()].filter((w) => w.state === "lapsed" || w.state === "suspect").length;
  const text = `${plural(mesh.workers.size, "worker")}${unwell ? `, ${unwell} unwell` : ""}; ` +
    `${plural(mesh.totals.inflight, "request")} in flight; ${percent(mesh.totals.kv_share)} of the KV blocks in use`;
  canvas.setAttribute("aria-label", `The mesh as a picture: ${text}. Arrow keys go from worker to worker, Enter opens one.`);
  setText(byId("mesh-note"), plural(mesh.workers.size, "worker"));
  byId("mesh-empty").hidden = mesh.workers.size > 0 || mesh.t === 0;
}

// --- the feed ------------------------------------------------------------------------------------------------------

const feed = new Feed("ui/events", {
  message(kind, data) {
    if (kind === "whole") {
      if (data.v !== VERSION) return setStatus("refused", "this page is of another release: load it again");
      mesh.whole(data);
      setText(byId("frontend"), [mesh.about.frontend, mesh.about.release && `kvmesh ${mesh.about.release}`].filter(Boolean).join(" · "));
      setText(byId("sees"), mesh.about.sees ?? "");
      document.documentElement.dataset.ready = "yes";
    } else mesh.change(data);
    if (isPaused || document.hidden) return;
    show();
    picture.animate(mesh.flows, mesh.begun, [...mesh.streams.values()].filter((s) => !s.outcome), mesh.everyS * 1000);
  },
  status: setStatus,
});

function setStatus(status: Status, why: string): void {
  const element = byId("status");
  element.dataset.status = isPaused && status === "live" ? "paused" : status;
  const words: Record<Status, string> = { live: isPaused ? "paused" : "live", connecting: "connecting", key: "needs a key", refused: "refused" };
  setText(byId("status-text"), words[status]);
  element.title = why;
  if (status === "key") {
    setText(byId("login-why"), why);
    if (!login.open) login.showModal();
  } else if (status === "live" && login.open) login.close();
}

byId("login-form").addEventListener("submit", (event) => {
  event.preventDefault();
  saveKey(byId<HTMLInputElement>("key").value.trim());
  feed.restart();
});

// --- details -------------------------------------------------------------------------------------------------------

function openRequest(id: string): void {
  opened = { kind: "request", id };
  refreshDetails();
  if (!dialog.open) dialog.showModal();
}

function openWorker(worker: Worker): void {
  opened = { kind: "worker", id: worker.name };
  refreshDetails();
  if (!dialog.open) dialog.showModal();
}

function refreshDetails(): void {
  if (!opened) return;
  const worker = opened.kind === "worker" ? mesh.byName.get(opened.id) : undefined;
  const body = worker ? workerDetails(mesh, worker, openRequest) : requestDetails(mesh, opened.id);
  setText(byId("details-kind"), opened.kind === "worker" ? "Worker" : "Request");
  setText(byId("details-name"), opened.id);
  const place = byId("details-body");
  if (!body || place.contains(document.activeElement)) return;
  const scrolled = place.querySelector(".scroll")?.scrollTop ?? 0;
  place.replaceChildren(body);
  place.querySelector(".scroll")?.scrollTo({ top: scrolled });
}

dialog.addEventListener("close", () => { opened = null; });
for (const each of document.querySelectorAll<HTMLDialogElement>("dialog")) {
  each.addEventListener("click", (event) => { if (event.target === each && each !== login) each.close(); });
  each.querySelector(".close")?.addEventListener("click", () => each.close());
}

// --- the picture: mouse and keys -----------------------------------------------------------------------------------

const tip = byId("tip");

function hint(worker: Worker | null): void {
  tip.hidden = !worker;
  const spot = worker && picture.spot(worker);
  if (!worker || !spot) return;
  const health = worker.state === "ok" ? "" : ` · ${UNWELL[worker.state] ?? worker.state}`;
  setText(tip, `${worker.name} · ${plural(worker.requests, "request")} · KV ${percent(worker.held / Math.max(1, worker.blocks))}${health}`);
  const width = byId("stage").clientWidth;
  tip.style.left = `${Math.max(4, Math.min(width - tip.offsetWidth - 4, spot.x - tip.offsetWidth / 2))}px`;
  tip.style.top = `${Math.max(4, spot.y - spot.r - 40)}px`;
}

canvas.addEventListener("pointermove", (event) => {
  const worker = picture.at(event.offsetX, event.offsetY);
  canvas.style.cursor = worker ? "pointer" : "";
  hint(worker);
});
canvas.addEventListener("pointerleave", () => hint(null));
canvas.addEventListener("click", (event) => {
  const worker = picture.at(event.offsetX, event.offsetY);
  if (worker) openWorker(worker);
});
canvas.addEventListener("keydown", (event) => {
  const ways: Record<string, [number, number]> = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  const way = ways[event.key];
  if (way) {
    picture.chosen = picture.next(...way);
    picture.draw();
    hint(picture.chosen);
    if (picture.chosen) setText(byId("spoken"), tip.textContent ?? "");
  } else if (event.key === "Enter" && picture.chosen) openWorker(picture.chosen);
  else return;
  event.preventDefault();
});
canvas.addEventListener("blur", () => { picture.chosen = null; hint(null); picture.draw(); });

// --- controls ------------------------------------------------------------------------------------------------------

function pause(): void {
  isPaused = !isPaused;
  byId("pause").setAttribute("aria-pressed", String(isPaused));
  setText(byId("pause"), isPaused ? "Go on" : "Pause");
  setStatus("live", "");
  if (!isPaused) show();
}

function setTheme(theme: string): void {
  document.documentElement.dataset.theme = theme;
  localStorage.setItem(THEME, theme);
  picture.palette = readPalette();
  picture.draw();
}

function otherTheme(): void {
  setTheme(document.documentElement.dataset.theme === "light" ? "dark" : "light");
}

byId("pause").addEventListener("click", pause);
byId("theme").addEventListener("click", otherTheme);
byId("help").addEventListener("click", () => byId<HTMLDialogElement>("keys").showModal());
filter.addEventListener("input", show);
filter.addEventListener("keydown", (event) => { if (event.key === "Escape") { filter.value = ""; filter.blur(); show(); } });

document.addEventListener("keydown", (event) => {
  const target = event.target as HTMLElement;
  if (event.ctrlKey || event.metaKey || event.altKey || target.closest("input, dialog")) return;
  if (event.key === "/") filter.focus();
  else if (event.key === "p") pause();
  else if (event.key === "t") otherTheme();
  else if (event.key === "m") canvas.focus();
  else if (event.key === "?") byId<HTMLDialogElement>("keys").showModal();
  else return;
  event.preventDefault();
});
document.addEventListener("visibilitychange", () => { if (!document.hidden && !isPaused) show(); });
matchMedia("(prefers-reduced-motion: reduce)").addEventListener("change", (event) => { picture.calm = event.matches; });

const wished = localStorage.getItem(THEME) ?? (matchMedia("(prefers-color-scheme: light)").matches ? "light" : "dark");
setTheme(wished);
picture.resize();
feed.restart();
