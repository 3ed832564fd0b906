"""Show the demo of the planner: as a picture, and as a page in one file."""

import html
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

WIDTH, HEIGHT, LEFT, BOTTOM = 900, 190, 46, 22
INK, FIRST, SECOND, FAINT = "#333", "#1f6feb", "#d9730d", "#bbb"


class Point(Struct, frozen=True, kw_only=True):
    """Hold the state of the mesh in one second."""

    at_s: float
    offered_rps: float
    prefill_ready: int
    decode_ready: int
    prefill_all: int  # including starting and draining ones
    decode_all: int


class Event(Struct, frozen=True, kw_only=True):
    """Hold one decision that was carried out."""

    at_s: float
    prefill: int
    decode: int
    text: str
    flip: str = ""


class DemoBurst(Struct, frozen=True, kw_only=True):
    """Hold what became of the short burst after the fall."""

    from_s: float
    to_s: float
    found: int  # workers that were there
    ordered: int  # beyond those

    @property
    def text(self) -> str:
        return (
            f"the burst from {self.from_s:.0f} to {self.to_s:.0f} s found the {self.found} workers that were kept for "
            f"it; ordered for it: {self.ordered}"
        )


class Report(Struct, frozen=True, kw_only=True):
    """The last line of `kvmesh lab demo-planner --json`. Times are seconds since the load began."""

    ok: bool
    problems: list[str]
    requests: int
    failed: int
    attainment: float
    ttft_slo_s: float
    itl_slo_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    itl_p50_s: float
    itl_p95_s: float
    workers_at_start: int
    workers_at_peak: int
    workers_at_end: int
    flips: int
    burst: DemoBurst
    worker_hours: float
    worker_hours_static_peak: float
    points: list[Point]
    events: list[Event]
    ttft_s: list[tuple[float, float]]  # (sent at, TTFT)
    itl_s: list[tuple[float, float]]


def arrivals_per_s(report: Report, width_s: float = 5.0) -> list[tuple[float, float]]:
    """Return the rate of the requests that came, averaged over `width_s`."""
    counts: dict[int, int] = {}
    for at_s, _ in report.ttft_s:
        counts[int(at_s // width_s)] = counts.get(int(at_s // width_s), 0) + 1
    return [((n + 0.5) * width_s, count / width_s) for n, count in sorted(counts.items())]


# --- the page -----------------------------------------------------------------------------------------


def write_html(path: Path, report: Report) -> None:
    path.write_text(page(report), encoding="utf-8")


def page(report: Report) -> str:
    end_s = max([1.0, *(point.at_s for point in report.points)])
    load = chart(
        end_s,
        "requests per second: mean rate of arrivals (line), what arrived in 5 s (dots)",
        [("line", FIRST, [(p.at_s, p.offered_rps) for p in report.points])],
        [(FAINT, arrivals_per_s(report))],
    )
    workers = chart(
        end_s,
        f"workers that take requests: <tspan fill='{SECOND}'>prefill</tspan>, <tspan fill='{FIRST}'>decode</tspan>",
        [
            ("step", SECOND, [(p.at_s, p.prefill_ready) for p in report.points]),
            ("step", FIRST, [(p.at_s, p.decode_ready) for p in report.points]),
        ],
    )
    ttft = chart(end_s, "TTFT, ms; the line is the SLO", [], [(FIRST, scaled(report.ttft_s))], 1000 * report.ttft_slo_s)
    itl = chart(end_s, "ITL, ms; the line is the SLO", [], [(SECOND, scaled(report.itl_s))], 1000 * report.itl_slo_s)
    rows = "".join(
        f"<tr><td>{event.at_s:.0f} s</td><td>{event.prefill} + {event.decode}</td>"
        f"<td>{html.escape(event.text)}</td></tr>"
        for event in report.events
    )
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>kvmesh planner</title>
<style>body{{font:15px/1.45 system-ui,sans-serif;color:{INK};max-width:{WIDTH}px;margin:2em auto;padding:0 1em}}
svg{{display:block;margin:.8em 0;width:100%}}td{{padding:.2em .8em .2em 0;vertical-align:top}}
td:first-child,td:nth-child(2){{white-space:nowrap}}</style>
<h1>A load that triples and falls</h1>
<p>{report.requests} requests, {report.failed} failed; {report.attainment:.1%} kept TTFT
{1000 * report.ttft_slo_s:.0f} ms and ITL {1000 * report.itl_slo_s:.0f} ms. Workers: {report.workers_at_start} at the
start, {report.workers_at_peak} at the peak, {report.workers_at_end} at the end; {report.worker_hours:.2f} worker-hours,
{report.worker_hours_static_peak:.2f} if there had been as many as at the peak all the time.
{report.burst.text[0].upper()}{report.burst.text[1:]}.</p>
{load}{workers}{ttft}{itl}
<h2>Decisions that changed something</h2>
<table><tr><td>at</td><td>prefill + decode</td><td>why</td></tr>{rows}</table>
</html>
"""


def scaled(values_s: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(at_s, 1000 * value_s) for at_s, value_s in values_s]


def chart(
    end_s: float,
    title: str,
    lines: Sequence[tuple[str, str, Sequence[tuple[float, float]]]],
    dots: Sequence[tuple[str, Sequence[tuple[float, float]]]] = (),
    limit: float | None = None,
) -> str:
    """Return one SVG. `lines`: (line or step, colour, points); `dots`: (colour, points); `limit`: a line across."""
    values = [value for _, _, points in lines for _, value in points]
    values += [value for _, points in dots for _, value in points]
    top = 1.1 * max([1e-9, *values, limit or 0.0])

    def x(at_s: float) -> float:
        return LEFT + (WIDTH - LEFT) * at_s / end_s

    def y(value: float) -> float:
        return (HEIGHT - BOTTOM) * (1 - value / top)

    parts = [f'<text x="{LEFT}" y="12" font-size="13">{title}</text>']
    for share in (0.0, 0.5, 1.0):
        value = top / 1.1 * share
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#eee"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" font-size="11" text-anchor="end">{value:.3g}</text>')
    parts += [
        f'<text x="{x(at_s):.1f}" y="{HEIGHT - 6}" font-size="11" text-anchor="middle">{at_s} s</text>'
        for at_s in range(0, int(end_s) + 1, 30)
    ]
    for colour, points in dots:
        parts += [f'<circle cx="{x(a):.1f}" cy="{y(v):.1f}" r="1.6" fill="{colour}"/>' for a, v in points]
    for kind, colour, points in lines:
        shape = path_of(points, x, y, is_step=kind == "step")
        parts.append(f'<path d="{shape}" fill="none" stroke="{colour}" stroke-width="2"/>')
    if limit is not None:
        across = f'x1="{LEFT}" x2="{WIDTH}" y1="{y(limit):.1f}" y2="{y(limit):.1f}"'
        parts.append(f'<line {across} stroke="{INK}" stroke-dasharray="5 4"/>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" fill="{INK}">{"".join(parts)}</svg>'


def path_of(
    points: Sequence[tuple[float, float]], x: Callable[[float], float], y: Callable[[float], float], *, is_step: bool
) -> str:
    parts: list[str] = []
    for n, (at_s, value) in enumerate(points):
        if is_step and n:
            parts.append(f"H{x(at_s):.1f}")
        parts.append(f"{'L' if n else 'M'}{x(at_s):.1f} {y(value):.1f}")
    return "".join(parts)


# --- the picture --------------------------------------------------------------------------------------


def write_png(path: Path, report: Report) -> None:
    """Blocks for a second or two."""
    from matplotlib.figure import Figure  # heavy, so imported here; without pyplot there is no global state

    figure = Figure(figsize=(10, 9), layout="constrained")
    load, workers, ttft, itl = axes = figure.subplots(4, 1, sharex=True)
    times = [point.at_s for point in report.points]
    load.plot(times, [point.offered_rps for point in report.points], color=FIRST, label="mean rate of arrivals")
    come = arrivals_per_s(report)
    load.plot([at for at, _ in come], [rate for _, rate in come], ".", color=FAINT, label="arrived, over 5 s")
    load.set_ylabel("requests/s")
    load.legend()
    for name, colour in (("prefill", SECOND), ("decode", FIRST)):
        ready = [getattr(point, f"{name}_ready") for point in report.points]
        workers.step(times, ready, where="post", color=colour, label=f"{name}, ready")
        there = [getattr(point, f"{name}_all") for point in report.points]
        workers.step(
            times, there, where="post", color=colour, alpha=0.35, label=f"{name}, with starting and draining ones"
        )
    workers.set_ylabel("workers")
    workers.legend(fontsize="small")
    latencies: list[tuple[Any, list[tuple[float, float]], float, str, str]] = [
        (ttft, report.ttft_s, report.ttft_slo_s, "TTFT, ms", FIRST),
        (itl, report.itl_s, report.itl_slo_s, "ITL, ms", SECOND),
    ]
    for one, values_s, slo_s, name, colour in latencies:
        one.plot([at for at, _ in values_s], [1000 * value for _, value in values_s], ".", ms=3, color=colour)
        one.axhline(1000 * slo_s, color=INK, ls="--", lw=1, label=f"SLO {1000 * slo_s:.0f}")
        one.set_ylabel(name)
        one.legend(loc="upper right")
    for one in axes:
        one.grid(alpha=0.25)
        one.set_ylim(bottom=0)
    itl.set_xlabel("seconds since the load began")
    figure.suptitle(
        f"{report.requests} requests, {report.failed} failed, {report.attainment:.1%} within the SLO; "
        f"{report.worker_hours:.2f} worker-hours, {report.worker_hours_static_peak:.2f} with as many as at the peak"
    )
    figure.savefig(path, dpi=110)
