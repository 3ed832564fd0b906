"""A report's curves as a PNG."""

from pathlib import Path

from kvmesh.protocol.errors import ConfigError
from kvmesh.simulator.page import CURVES
from kvmesh.simulator.report import SimReport


def draw(report: SimReport, title: str, path: Path) -> None:
    """Write the picture. Raises ConfigError if matplotlib is not there, or there is nothing to draw."""
    if not report.timeline:
        raise ConfigError("the simulation is too short for curves", hint="leave --png out")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a picture needs matplotlib", hint="pip install 'kvmesh[plots]', or use --html") from error
    figure = Figure(figsize=(10, 14), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    axes = figure.subplots(len(CURVES), 1, sharex=True)
    at_s = [sample.at_s for sample in report.timeline]
    for axis, (name, curves) in zip(axes, CURVES, strict=True):
        for label, value in curves:
            axis.plot(at_s, [value(sample) for sample in report.timeline], label=label)
        axis.set_ylabel(name)
        axis.legend(loc="upper left")
    axes[-1].set_xlabel("simulated time [s]")
    figure.savefig(path, format="png", metadata={"Software": None})
