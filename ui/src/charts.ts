// Curves, as SVG.

import { svg } from "./dom.js";

export interface Curve {
  name: string;
  color: string; // a class of the style sheet
  values: (number | null)[];
  isDashed?: boolean;
  isStep?: boolean;
  isFilled?: boolean;
}

const NOTHING: Curve[] = [];

/** Draw curves over the same times into an SVG element; the upper end of the scale is `most`, or the largest value. */
export function plot(into: SVGElement, times: number[], curves: Curve[] = NOTHING, most = 0, edge = 2): number {
  const box = into.getBoundingClientRect();
  const w = Math.max(10, box.width), h = Math.max(10, box.height);
  into.setAttribute("viewBox", `0 0 ${w} ${h}`);
  let top = most;
  if (!top) for (const curve of curves) for (const value of curve.values) if (value !== null && value > top) top = value;
  top = top || 1;
  const first = times[0] ?? 0, span = Math.max(1e-9, (times[times.length - 1] ?? 1) - first);
  const x = (t: number): number => edge + ((t - first) / span) * (w - 2 * edge);
  const y = (v: number): number => h - edge - (Math.min(v, top) / top) * (h - 2 * edge);
  const parts: SVGElement[] = [];
  for (const share of [0.25, 0.5, 0.75]) {
    if (h > 60) parts.push(svg("line", { class: "grid", x1: 0, x2: w, y1: h * share, y2: h * share }));
  }
  for (const curve of curves) {
    const [line, area] = path(times, curve, x, y, h - edge);
    if (curve.isFilled) parts.push(svg("path", { class: `area ${curve.color}`, d: area }));
    parts.push(svg("path", { class: `curve ${curve.color}${curve.isDashed ? " dashed" : ""}`, d: line }));
  }
  into.replaceChildren(...parts);
  return top;
}

function path(times: number[], curve: Curve, x: (t: number) => number, y: (v: number) => number, floor: number): [string, string] {
  let line = "", area = "", start = 0, before = 0, isOpen = false;
  const close = (): void => {
    if (isOpen) area += `L${before.toFixed(1)} ${floor}L${start.toFixed(1)} ${floor}Z`;
    isOpen = false;
  };
  curve.values.forEach((value, i) => {
    if (value === null) return close();
    const px = x(times[i]!), py = y(value).toFixed(1);
    if (!isOpen) {
      line += `M${px.toFixed(1)} ${py}`;
      area += `M${px.toFixed(1)} ${py}`;
      start = px;
    } else {
      const step = curve.isStep ? `H${px.toFixed(1)}V${py}` : `L${px.toFixed(1)} ${py}`;
      line += step;
      area += step;
    }
    before = px;
    isOpen = true;
  });
  close();
  return [line, area];
}
