"""A report as one HTML file: figures, curves as SVG, the planner's decisions. No script, nothing from elsewhere."""

from collections.abc import Callable, Mapping, Sequence
from html import escape

from kvmesh.simulator.report import PlannerChange, Sample, SimReport
from kvmesh.simulator.tables import figures

WIDTH, HEIGHT = 900, 180
_LEFT, _BOTTOM = 60, 20
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#7f7f7f")
_MOST_CHANGES = 500

Curve = tuple[str, Callable[[Sample], float]]

CURVES: Sequence[tuple[str, Sequence[Curve]]] = (
    ("requests per sample", [("arrived", lambda s: s.requests), ("within the SLO", lambda s: s.good)]),
    (
        "workers",
        [
            ("prefill", lambda s: s.prefill_ready),
            ("decode", lambda s: s.decode_ready),
            ("starting", lambda s: s.prefill_starting + s.decode_starting),
            ("draining", lambda s: s.draining),
        ],
    ),
    ("TTFT, mean [s]", [("TTFT", lambda s: s.ttft_s)]),
    ("ITL, mean [ms]", [("ITL", lambda s: s.itl_s * 1e3)]),
    (
        "prompt tokens from a cache [%]",
        [("found", lambda s: 100 * s.hit_share), ("as the router believed", lambda s: 100 * s.predicted_share)],
    ),
    ("waiting in the routers", [("requests", lambda s: s.waiting)]),
)


def as_html(report: SimReport, title: str, assumed: Sequence[tuple[str, str]], settings: Mapping[str, str]) -> str:
    """A whole page."""
    curves = "".join(_chart(name, report.timeline, lines) for name, lines in CURVES) if report.timeline else ""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        "<style>body{font:14px sans-serif;margin:2em;max-width:60em}td{padding:2px 12px;border-bottom:1px solid #ddd}"
        "text{font:11px sans-serif}h2{font-size:1.1em}</style>"
        f"<h1>{escape(title)}</h1>{_table(figures(report))}"
        f"<h2>Assumed</h2>{_table(assumed)}"
        f"<h2>Settings that differ from the defaults</h2>{_table(sorted(settings.items()))}{curves}"
        f"{_changes(report.changes, report.changes_left_out)}</html>\n"
    )


def _table(rows: Sequence[tuple[str, str]]) -> str:
    cells = "".join(f"<tr><td>{escape(name)}<td>{escape(value)}" for name, value in rows)
    return f"<table>{cells}</table>"


def _changes(changes: Sequence[PlannerChange], left_out: int) -> str:
    if not changes:
        return ""
    shown = changes[:_MOST_CHANGES]
    rows = "".join(
        f"<tr><td>{change.at_s:.0f} s<td>{change.prefill}<td>{change.decode}<td>{escape(change.flip)}"
        f"<td>{escape(change.why)}"
        for change in shown
    )
    rest = len(changes) - len(shown) + left_out
    more = f"<p>{rest} more are left out.</p>" if rest else ""
    head = "<tr><td>when<td>prefill<td>decode<td>flip<td>why"
    return f"<h2>Decisions of the planner</h2><table>{head}{rows}</table>{more}"


def _chart(name: str, samples: Sequence[Sample], curves: Sequence[Curve]) -> str:
    most = max((value(sample) for _, value in curves for sample in samples), default=0.0) or 1.0
    end_s = samples[-1].at_s
    drawn = "".join(
        f'<polyline fill="none" stroke="{colour}" points="{_points(samples, value, most, end_s)}"/>'
        f'<text x="{_LEFT + 10 + 150 * number}" y="12" fill="{colour}">{escape(label)}</text>'
        for number, ((label, value), colour) in enumerate(zip(curves, _COLOURS, strict=False))
    )
    bottom = HEIGHT - _BOTTOM
    axes = (
        f'<path d="M{_LEFT} 18V{bottom}H{WIDTH}" fill="none" stroke="#999"/>'
        f'<text x="{_LEFT - 6}" y="26" text-anchor="end">{most:.4g}</text>'
        f'<text x="{_LEFT - 6}" y="{bottom}" text-anchor="end">0</text>'
        f'<text x="{WIDTH}" y="{HEIGHT - 4}" text-anchor="end">{end_s:.0f} s</text>'
    )
    return f'<h2>{escape(name)}</h2><svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}">{axes}{drawn}</svg>'


def _points(samples: Sequence[Sample], value: Callable[[Sample], float], most: float, end_s: float) -> str:
    bottom, high = HEIGHT - _BOTTOM, HEIGHT - _BOTTOM - 20
    return " ".join(
        f"{_LEFT + sample.at_s / end_s * (WIDTH - _LEFT):.1f},{bottom - value(sample) / most * high:.1f}"
        for sample in samples
    )
