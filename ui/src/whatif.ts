// The panel with what other fleets would have done: a process beside the frontend simulates the recent requests.

import { byId, h, setText } from "./dom.js";
import { messageOf, savedKey } from "./feed.js";
import { percent, plural, seconds } from "./format.js";

interface Figures {
  ttft_p50_s: number | null; ttft_p90_s: number | null; itl_p50_s: number | null; itl_p90_s: number | null;
  hit_share: number; attainment: number; failed: number;
}
interface FigureError { name: keyof Figures; error: number }
interface Fleet { prefill: number; decode: number; aggregated: number }
interface Report {
  model: string; fleet: Fleet; requests: number; judged: number; span_s: number; measured: Figures; simulated: Figures;
  errors: FigureError[]; error: number; most_error: number; is_known: boolean; why: string; ttft_slo_s: number; itl_slo_s: number;
  answers: { case: { name: string; fleet: Fleet }; figures: Figures }[];
}

const COLUMNS: [keyof Figures, string][] = [
  ["ttft_p50_s", "TTFT p50"], ["ttft_p90_s", "TTFT p90"], ["itl_p50_s", "ITL p50"], ["itl_p90_s", "ITL p90"],
  ["hit_share", "from cache"], ["attainment", "within the SLO"],
];
const button = byId<HTMLButtonElement>("whatif-ask");

function shown(name: keyof Figures, value: number | null): string {
  return name === "hit_share" || name === "attainment" ? percent(value) : seconds(value);
}

function fleetText(fleet: Fleet): string {
  return (["prefill", "decode", "aggregated"] as const).filter((role) => fleet[role]).map((role) => `${fleet[role]} ${role}`).join(" + ");
}

function row(name: string, fleet: string, figures: Figures): HTMLElement {
  return h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, fleet), ...COLUMNS.map(([key]) => h("td", {}, shown(key, figures[key]))));
}

function errorRow(report: Report): HTMLElement {
  const of = new Map(report.errors.map((one) => [one.name, one.error]));
  const cells = COLUMNS.map(([key]) => {
    const error = of.get(key);
    const text = error == null ? "–" : `${error < 0 ? "−" : "+"}${(100 * Math.abs(error)).toFixed(1)} %`;
    return h("td", { class: error != null && Math.abs(error) > report.most_error ? "bad" : "" }, text);
  });
  return h("tr", { class: "error" }, h("th", { scope: "row" }, "error"), h("td", {}), ...cells);
}

function table(report: Report): HTMLElement {
  const fleet = fleetText(report.fleet);
  const head = h("tr", {}, ...["", "fleet", ...COLUMNS.map(([, title]) => title)].map((title) => h("th", { scope: "col" }, title)));
  const past = [row("measured", fleet, report.measured), row("simulated", fleet, report.simulated), errorRow(report)];
  const cases = report.answers.map((one) => row(`${one.case.name}`, fleetText(one.case.fleet), one.figures));
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "what other fleets would have done" },
    h("table", {}, h("thead", {}, head), h("tbody", {}, ...past), h("tbody", { class: "cases" }, ...cases)));
}

function words(report: Report): string {
  const rests = `${plural(report.judged, "request")} of the last ${seconds(report.span_s)}; SLO: TTFT ${seconds(report.ttft_slo_s)}, ITL ${seconds(report.itl_slo_s)}.`;
  if (!report.is_known) return `Not known: ${report.why}. ${rests}`;
  return `Simulated and measured figures differ by up to ${(100 * report.error).toFixed(1)} %, and so may the answers. ${rests}`;
}

async function ask(): Promise<void> {
  const body = byId("whatif-body"), say = (text: string) => setText(byId("whatif-words"), text);
  const key = savedKey();
  button.disabled = true;
  say("The simulation runs …");
  try {
    const headers: Record<string, string> = key ? { authorization: `Bearer ${key}` } : {};
    const reply = await fetch("ui/whatif", { headers, cache: "no-store", credentials: "omit" });
    const answer = reply.ok ? ((await reply.json()) as Report & { refused?: string; hint?: string }) : null;
    if (answer && answer.refused === undefined) {
      body.replaceChildren(table(answer));
      say(words(answer));
    } else {
      body.replaceChildren();
      say(answer ? `Not known: ${[answer.refused, answer.hint].filter(Boolean).join("; ")}.` : await messageOf(reply));
    }
  } catch {
    say("The frontend does not answer.");
  } finally {
    button.disabled = false;
  }
}

button.addEventListener("click", () => void ask());
