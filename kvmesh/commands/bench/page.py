"""A report as one HTML file: tables, Pareto and latency curves as SVG, the manifest. No script, no network."""

from collections.abc import Callable, Iterable, Sequence
from html import escape

import msgspec

from kvmesh.commands.bench.results import PointResult, ServeReport
from kvmesh.commands.bench.tables import COLUMNS, lines_of, row_of
from kvmesh.simulator.report import Spread

WIDTH, HEIGHT = 440, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 14, 38
_COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#525252")
_STYLE = """
:root{color-scheme:light dark;font:15px/1.45 system-ui,sans-serif}
body{max-width:75rem;margin:1.5rem auto;padding:0 1rem}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.9em}
th,td{padding:.2rem .7rem;text-align:right;border-bottom:1px solid #8884}
th:nth-child(-n+2),td:nth-child(-n+2){text-align:left}.wide{overflow-x:auto}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(22rem,1fr));gap:1rem}figure{margin:0}
figcaption{font-weight:600}svg{width:100%;height:auto}svg text{fill:currentColor;font-size:11px}
.swatch{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin:0 .3em 0 1em}.warning{color:#c2410c}
pre{background:#8882;padding:.7rem;overflow-x:auto;border-radius:6px}
"""

Value = Callable[[PointResult], float | None]


class CurveChart(msgspec.Struct, frozen=True):
    """Describe a chart over the points of a sweep; `dashed` is drawn beside `y`, None: nothing."""

    title: str
    x_label: str
    y_label: str
    x: Value
    y: Value
    dashed: Value | None = None


def _at(spread: Spread | None, name: str, factor: float = 1e3) -> float | None:
    return None if spread is None else factor * float(getattr(spread, name))


def charts_of(report: ServeReport) -> list[CurveChart]:
    """Return the charts that the points allow: curves for each kind of sweep, and the Pareto front."""
    charts = [
        CurveChart(
            "Throughput per user against the total",
            "tokens/s per user",
            "output tokens/s per GPU" if report.manifest.settings.get("gpus") != 1.0 else "output tokens/s",
            lambda r: r.tokens_per_s_user or None,
            lambda r: r.output_tokens_per_s_gpu or None,
        )
    ]
    kinds = dict.fromkeys(result.point.kind for result in report.points)
    for kind, unit in (("rate", "requests/s offered"), ("concurrency", "clients")):
        if kind not in kinds:
            continue

        def load(r: PointResult, kind: str = kind) -> float | None:
            return r.point.value if r.point.kind == kind else None

        for title, y, dashed in (
            ("TTFT, p50 and p99 (dashed), ms", _spread("ttft_s", "p50"), _spread("ttft_s", "p99")),
            ("ITL, p50 and p99 (dashed), ms", _spread("itl_s", "p50"), _spread("itl_s", "p99")),
            ("End to end, p50 and p99 (dashed), ms", _spread("e2e_s", "p50"), _spread("e2e_s", "p99")),
        ):
            charts.append(CurveChart(title, unit, "ms", load, y, dashed))
        charts.append(
            CurveChart(
                "Requests/s completed and within the SLO (dashed)",
                unit,
                "requests/s",
                load,
                lambda r: r.completion_rate,
                lambda r: r.goodput_rps,
            )
        )
    return charts


def _spread(field: str, name: str) -> Value:
    return lambda result: _at(getattr(result, field), name)


def series_of(report: ServeReport) -> dict[str, list[PointResult]]:
    """Return the points by endpoint and prefix ratio: a line of a chart each."""
    series: dict[str, list[PointResult]] = {}
    several = len({result.point.prefix_ratio for result in report.points}) > 1
    for result in report.points:
        name = f"{result.endpoint}, prefix {result.point.prefix_ratio:.0%}" if several else result.endpoint
        series.setdefault(name, []).append(result)
    return series


def page_of(report: ServeReport) -> str:
    """Return the whole page."""
    series = series_of(report)
    legend = "".join(
        f'<span class="swatch" style="background:{colour}"></span>{escape(name)}'
        for name, colour in zip(series, _cycled(len(series)), strict=True)
    )
    charts = "".join(_svg(chart, list(series.values())) for chart in charts_of(report))
    head = "".join(f"<th>{escape(column)}" for column in COLUMNS)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}" for cell in row_of(result)) for result in report.points)
    lines = "".join(
        f'<li class="{"warning" if line.startswith("warning") else ""}">{escape(line)}' for line in lines_of(report)
    )
    manifest = msgspec.json.format(msgspec.json.encode(report.manifest), indent=2).decode()
    checks = msgspec.json.format(msgspec.json.encode(report.endpoints), indent=2).decode()
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>kvmesh bench serve</title>'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style><h1>{escape(' and '.join(dict.fromkeys(r.endpoint for r in report.points)))}</h1>"
        f"<p>{escape(report.manifest.started)}, {escape(report.manifest.cpu)}, {report.manifest.cores} cores</p>"
        f'<ul>{lines}</ul><p>{legend}</p><div class="charts">{charts}</div>'
        f'<h2>Points</h2><div class="wide"><table><tr>{head}{rows}</table></div>'
        f"<h2>Endpoints</h2><pre>{escape(checks)}</pre><h2>Manifest</h2><pre>{escape(manifest)}</pre></html>\n"
    )


def _cycled(count: int) -> list[str]:
    return [_COLOURS[number % len(_COLOURS)] for number in range(count)]


def _svg(chart: CurveChart, series: Sequence[Sequence[PointResult]]) -> str:
    values = [
        (x, y)
        for points in series
        for result in points
        for y in (chart.y(result), chart.dashed(result) if chart.dashed else None)
        if (x := chart.x(result)) is not None and y is not None
    ]
    if not values:
        return ""
    most_x, most_y = (1.05 * max(1e-9, *(value[axis] for value in values)) for axis in (0, 1))

    def place(x: float, y: float) -> str:
        across = _LEFT + (WIDTH - _LEFT - _RIGHT) * x / most_x
        return f"{across:.1f},{HEIGHT - _BOTTOM - (HEIGHT - _BOTTOM - _TOP) * y / most_y:.1f}"

    drawn = "".join(
        _line(chart.x, value, points, colour, place, dash)
        for points, colour in zip(series, _cycled(len(series)), strict=True)
        for value, dash in ((chart.y, ""), (chart.dashed, "5 4"))
        if value is not None
    )
    return (
        f"<figure><figcaption>{escape(chart.title)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title)}">'
        f"{_axes(chart, most_x, most_y)}{drawn}</svg></figure>"
    )


def _axes(chart: CurveChart, most_x: float, most_y: float) -> str:
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    parts = [f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="#888"/>']
    for step in range(5):
        share = step / 4
        x, y = _LEFT + (right - _LEFT) * share, bottom - (bottom - _TOP) * share
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="#8883"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{most_y * share:.4g}</text>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{most_x * share:.4g}</text>')
    middle = (_LEFT + right) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(chart.x_label)}</text>')
    parts.append(
        f'<text x="12" y="{HEIGHT / 2:.0f}" text-anchor="middle" transform="rotate(-90 12 {HEIGHT / 2:.0f})">'
        f"{escape(chart.y_label)}</text>"
    )
    return "".join(parts)


def _line(
    x: Value, y: Value, points: Iterable[PointResult], colour: str, place: Callable[[float, float], str], dash: str
) -> str:
    known = [(at, value, r) for r in points if (at := x(r)) is not None and (value := y(r)) is not None]
    placed = [(place(at, value), r) for at, value, r in sorted(known, key=lambda one: one[0])]
    line = f'<polyline fill="none" stroke="{colour}" stroke-width="1.6"' + (
        f' stroke-dasharray="{dash}"' if dash else ""
    )
    dots = "".join(
        f'<circle cx="{at.split(",")[0]}" cy="{at.split(",")[1]}" r="3.5" fill="{colour}">'
        f"<title>{escape(result.endpoint)}, {escape(result.point.label)}</title></circle>"
        for at, result in placed
    )
    return f'{line} points="{" ".join(at for at, _ in placed)}"/>{dots}'
