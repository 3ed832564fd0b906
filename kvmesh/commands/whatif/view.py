"""Show the answer of `kvmesh whatif` as tables."""

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from kvmesh.simulator.whatif.answer import WhatIfReport
from kvmesh.simulator.whatif.figures import SHARES, FigureError, ServiceFigures

NAMES = {
    "ttft_p50_s": "TTFT p50",
    "ttft_p90_s": "TTFT p90",
    "itl_p50_s": "ITL p50",
    "itl_p90_s": "ITL p90",
    "hit_share": "prompt tokens from cache",
    "attainment": "within the SLO",
}


def told(report: WhatIfReport) -> Iterator[Table | Text]:
    """Yield what was, how well it is reproduced, and the answers or why there are none."""
    yield Text(about(report))
    yield reproduced(report)
    if report.is_known:
        yield answers(report)
        yield Text(f"Measured and simulated figures differ by up to {report.error:.1%}, and so may the answers.")
    else:
        yield Text(f"Not known: {report.why}.", "bold")


def about(report: WhatIfReport) -> str:
    """Return what the figures rest on."""
    speeds = report.speeds
    lines = [
        f"{report.requests} requests of {report.span_s:.0f} s to {report.model}, {report.fleet}, "
        f"{report.blocks} blocks of {report.block_size} tokens each, policy {report.policy}",
        f"speeds fitted to the first {report.requests - report.judged}: a step with prompts "
        f"{speeds.step_s * 1e3:.2f} ms + {speeds.token_s * 1e6:.1f} us/token, one that decodes "
        f"{speeds.decode_s * 1e3:.2f} ms + {speeds.kv_token_s * 1e6:.3f} us/token of KV; "
        f"SLO: TTFT {report.ttft_slo_s:g} s, ITL {report.itl_slo_s * 1e3:g} ms",
    ]
    if report.is_cut:
        lines.append(f"there were more requests: the latest {report.requests} count (--limit)")
    if report.failed or report.left_out:
        lines.append(f"not simulated: {report.failed} that failed, {report.left_out} that are not fully described")
    return "\n".join(lines)


def reproduced(report: WhatIfReport) -> Table:
    """Return what really happened to the later requests, and what the simulation makes of it."""
    title = f"What really happened: the last {report.judged} requests"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("figure")
    for name in ("measured", "simulated", "error"):
        table.add_column(name, justify="right")
    for error in report.errors:
        style = "bold red" if abs(error.error) > report.most_error else ""
        table.add_row(NAMES[error.name], *values(error), f"{error.error:+.1%}", style=style)
    return table


def values(error: FigureError) -> tuple[str, str]:
    return shown(error.name, error.measured), shown(error.name, error.simulated)


def shown(name: str, value: float | None) -> str:
    """Return a share in per cent, a time in milliseconds."""
    if value is None:
        return "-"
    return f"{value:.1%}" if name in SHARES else f"{value * 1e3:.1f} ms"


def answers(report: WhatIfReport) -> Table:
    """Return a row for the mesh as it was, and one for each case."""
    table = Table(title="What if (simulated, the same requests)", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("case")
    table.add_column("fleet")
    for name in NAMES.values():
        table.add_column(name, justify="right")
    has_failures = any(one.figures.failed for one in report.answers)
    if has_failures:
        table.add_column("not answered", justify="right")

    def add(name: str, fleet: str, figures: ServiceFigures) -> None:
        cells = [shown(figure, getattr(figures, figure)) for figure in NAMES]
        table.add_row(name, fleet, *cells, *([str(figures.failed)] if has_failures else []))

    add("as it was", str(report.fleet), report.simulated)
    for one in report.answers:
        add(one.case.name, str(one.case.fleet), one.figures)
    return table
