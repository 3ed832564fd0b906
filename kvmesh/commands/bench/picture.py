"""Draw the charts of a report as one PNG."""

from pathlib import Path

from kvmesh.commands.bench.page import charts_of, series_of
from kvmesh.commands.bench.results import ServeReport
from kvmesh.protocol.errors import ConfigError

COLUMNS = 2


def draw_report(report: ServeReport, path: Path) -> None:
    """Write the picture. Raise ConfigError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "pictures need matplotlib", hint="install it with `pip install 'kvmesh[plots]'`, or add --no-png"
        ) from error
    charts, series = charts_of(report), series_of(report)
    rows = -(-len(charts) // COLUMNS)
    figure = Figure(figsize=(12, 4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
    for axis, chart in zip(axes, charts, strict=False):
        for number, (name, points) in enumerate(series.items()):
            for value, style in ((chart.y, "o-"), (chart.dashed, "--")):
                if value is None:
                    continue
                at = [(chart.x(result), value(result)) for result in points]
                known = sorted((x, y) for x, y in at if x is not None and y is not None)
                label = name if style == "o-" else None
                axis.plot([x for x, _ in known], [y for _, y in known], style, color=f"C{number}", label=label)
        axis.set_title(chart.title, fontsize=10)
        axis.set_xlabel(chart.x_label)
        axis.set_ylabel(chart.y_label)
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    for axis in axes[len(charts) :]:
        axis.set_visible(False)
    figure.savefig(path, dpi=110, metadata={"Software": "kvmesh"})
