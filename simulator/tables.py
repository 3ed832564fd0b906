"""A report for people, as a table."""

from rich.table import Table

from simulator.report import SimReport, Spread


def as_table(report: SimReport, title: str) -> Table:
    table = Table("figure", "value", title=title)
    for name, value in figures(report):
        table.add_row(name, value)
    return table


def figures(report: SimReport) -> list[tuple[str, str]]:
    """(what, how much)"""
    rows = [
        ("prompt tokens from cache", f"{report.hit_share:.1%} (predicted {report.predicted_hit_share:.1%})"),
        ("TTFT mean", f"{report.ttft_s.mean:.3f} s, of it in the router's queue {report.queue_mean_s:.3f} s"),
        ("TTFT p50, p90, p99, max", _seconds(report.ttft_s)),
        ("ITL p50, p90, p99, max", _seconds(report.itl_s, 1e3, "ms")),
        ("end to end p50, p90, p99, max", _seconds(report.e2e_s)),
        (
            "within the SLO",
            f"{report.attainment:.2%} (TTFT {report.ttft_attainment:.2%}, ITL {report.itl_attainment:.2%})",
        ),
        ("goodput", f"{report.goodput_rps:.2f} requests/s, {report.output_tokens_per_s:.0f} tokens/s in all"),
        ("failed", str(report.failed)),
        ("preemptions", str(report.preemptions)),
        ("balance (most / mean prompt tokens computed)", f"{report.balance:.3f}"),
        ("workers busy", f"{report.busy_share:.1%}"),
        ("GPU-hours", f"{report.gpu_hours:.2f}"),
    ]
    if report.started or report.stopped or report.flipped:
        rows.append(("workers started, stopped, flipped", f"{report.started}, {report.stopped}, {report.flipped}"))
    return rows


def _seconds(spread: Spread, scale: float = 1.0, unit: str = "s") -> str:
    values = (spread.p50, spread.p90, spread.p99, spread.max)
    return ", ".join(f"{value * scale:.3f}" for value in values) + f" {unit}"
