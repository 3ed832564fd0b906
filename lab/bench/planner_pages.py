"""Write a page and a picture for each run of `kvmesh lab bench planner`, and an index that links them.

Pages have their figures, curves and decisions in one HTML file, without scripts and without anything from elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvmesh.lab.bench.planner_track import Chart, Point
from kvmesh.protocol.errors import ConfigError
from kvmesh.simulator.report import PlannerChange

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 900, 220, 60, 20, 22
COLOURS = ("#1f77b4", "#d62728", "#2ca02c")
MOST_CHANGES = 500
STYLE = (
    "body{font:14px sans-serif;margin:2em;max-width:70em}td,th{padding:2px 12px;border-bottom:1px solid #ddd;"
    "text-align:right}td:first-child,th:first-child,th:last-child,td.t{text-align:left}text{font:11px sans-serif}"
)


@dataclass(frozen=True, slots=True)
class RunPage:
    """Hold what the page of one run shows."""

    name: str  # of its files, without an ending
    title: str
    figures: Sequence[tuple[str, str]]
    charts: Sequence[Chart]
    changes: Sequence[PlannerChange]
    changes_left_out: int = 0


def file_name(load: str, start_s: float, policy: str) -> str:
    """Return a name that is safe for a file: a load can be named after a trace."""
    raw = f"{load}-{start_s:g}s-{policy}"
    return "".join(letter if letter.isalnum() or letter in "-._" else "-" for letter in raw)


class PageFolder:
    """Writes pages and pictures into one folder."""

    def __init__(self, folder: Path) -> None:
        """Make the folder. Raise ConfigError if that fails."""
        self._folder = folder
        self._pages: list[RunPage] = []
        self.problem = ""  # why there are no pictures
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder} cannot be made: {error.strerror}", hint="name another --out") from error

    def add(self, page: RunPage) -> None:
        """Write the page, its picture and the index so far. Raise ConfigError if they cannot be written."""
        self._pages.append(page)
        try:
            (self._folder / f"{page.name}.html").write_text(page_of(page), encoding="utf-8")
            self._draw(page)
            index = index_of(self._pages, has_pictures=not self.problem)
            (self._folder / "index.html").write_text(index, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write to {self._folder}: {error.strerror}", hint="name another --out") from error

    def _draw(self, page: RunPage) -> None:
        try:
            draw(page, self._folder / f"{page.name}.png")
        except ImportError:
            self.problem = "without pictures: they need matplotlib, `pip install 'kvmesh[plots]'`"


def draw(page: RunPage, path: Path) -> None:
    """Draw the charts as a PNG. Raise ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 2.6 * len(page.charts)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(page.title)
    axes = figure.subplots(len(page.charts), 1, sharex=True, squeeze=False)
    for (axis,), chart in zip(axes, page.charts, strict=True):
        _draw_chart(axis, chart)
    axes[-1][0].set_xlabel("simulated time [s]")
    figure.savefig(path, format="png", metadata={"Software": None})


def _draw_chart(axis: Any, chart: Chart) -> None:
    if chart.band:
        at_s, low, high = zip(*chart.band, strict=True)
        axis.fill_between(at_s, low, high, alpha=0.2, color=COLOURS[1], label=chart.band_label)
    for curve, colour in zip(chart.curves, COLOURS, strict=False):
        style = {"drawstyle": "steps-post"} if curve.is_stepped else {}
        times_s, values = [at_s for at_s, _ in curve.points], [value for _, value in curve.points]
        axis.plot(times_s, values, label=curve.label, color=colour, linewidth=1, **style)
    axis.set_ylabel(chart.title)
    axis.set_ylim(bottom=0)
    axis.legend(loc="upper left", fontsize=8)


# --- HTML ---------------------------------------------------------------------------------------------


def page_of(page: RunPage) -> str:
    """Return a whole page."""
    rows = "".join(f"<tr><td>{escape(name)}<td>{escape(value)}" for name, value in page.figures)
    end_s = max((at_s for chart in page.charts for curve in chart.curves for at_s, _ in curve.points), default=1.0)
    charts = "".join(_chart(chart, end_s or 1.0) for chart in page.charts)
    note = (
        "<p>A forecast is of the highest rate until a time, and drawn at that time: the line should be above the load, "
        "and the band around its peaks.</p>"
    )
    has_band = any(chart.band for chart in page.charts)
    return _html(
        page.title,
        f'<p><a href="index.html">all runs</a></p><table>{rows}</table>{charts}{note if has_band else ""}'
        f"{_changes(page)}",
    )


def index_of(pages: Sequence[RunPage], *, has_pictures: bool) -> str:
    """Return the page that links all others."""
    names = [name for name, _ in pages[0].figures] if pages else []
    head = "".join(f"<th>{escape(name)}" for name in ["run", *names, *(["picture"] if has_pictures else [])])
    rows = "".join(
        f'<tr><td><a href="{page.name}.html">{escape(page.title)}</a>'
        + "".join(f"<td>{escape(value)}" for _, value in page.figures)
        + (f'<td><a href="{page.name}.png">PNG</a>' if has_pictures else "")
        for page in pages
    )
    return _html("kvmesh lab bench planner", f"<table><tr>{head}{rows}</table>")


def _html(title: str, body: str) -> str:
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
        f"<h1>{escape(title)}</h1>{body}</html>\n"
    )


def _changes(page: RunPage) -> str:
    shown = page.changes[:MOST_CHANGES]
    if not shown:
        return ""
    rows = "".join(
        f"<tr><td>{change.at_s:.0f} s<td>{change.prefill}<td>{change.decode}<td class=t>{escape(change.flip)}"
        f"<td class=t>{escape(change.why)}"
        for change in shown
    )
    rest = len(page.changes) - len(shown) + page.changes_left_out
    more = f"<p>{rest} more are left out.</p>" if rest else ""
    return f"<h2>Orders</h2><table><tr><th>when<th>prefill<th>decode<th>flip<th>why{rows}</table>{more}"


def _chart(chart: Chart, end_s: float) -> str:
    most = chart.most
    bottom = HEIGHT - BOTTOM

    def place(point: Point) -> str:
        at_s, value = point
        across = LEFT + min(at_s, end_s) / end_s * (WIDTH - LEFT)
        return f"{across:.1f},{bottom - value / most * (bottom - TOP):.1f}"

    parts = [
        f'<path d="M{LEFT} {TOP}V{bottom}H{WIDTH}" fill="none" stroke="#999"/>'
        f'<text x="{LEFT - 6}" y="{TOP + 8}" text-anchor="end">{most:.4g}</text>'
        f'<text x="{LEFT - 6}" y="{bottom}" text-anchor="end">0</text>'
        f'<text x="{WIDTH}" y="{HEIGHT - 6}" text-anchor="end">{end_s:.0f} s</text>'
    ]
    if chart.band:
        outline = [(at_s, high) for at_s, _, high in chart.band] + [(at_s, low) for at_s, low, _ in chart.band][::-1]
        parts.append(f'<polygon fill="{COLOURS[1]}" opacity="0.2" points="{" ".join(map(place, outline))}"/>')
    for number, (curve, colour) in enumerate(zip(chart.curves, COLOURS, strict=False)):
        points = _steps(curve.points) if curve.is_stepped else curve.points
        parts.append(f'<polyline fill="none" stroke="{colour}" points="{" ".join(map(place, points))}"/>')
        parts.append(f'<text x="{LEFT + 10 + 130 * number}" y="12" fill="{colour}">{escape(curve.label)}</text>')
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}">{"".join(parts)}</svg>'
    return f"<h2>{escape(chart.title)}</h2>{svg}"


def _steps(points: Sequence[Point]) -> list[Point]:
    """Return points that keep each value until the next one."""
    stepped = list(points[:1])
    for before, after in pairwise(points):
        stepped += [(after[0], before[1]), after]
    return stepped
