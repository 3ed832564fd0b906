"""A report for people, as a table, and for programs, as JSON."""

from collections.abc import Sequence

import msgspec
from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvmesh.protocol.profile import Profile
from kvmesh.simulator.config import SimConfig
from kvmesh.simulator.report import SimReport, Spread

FIT = "a fit to an 8B model on one data-centre GPU"


def as_table(report: SimReport, title: str, assumed: Sequence[tuple[str, str]]) -> Table:
    table = Table("figure", "value", title=title, title_justify="left", box=SIMPLE_HEAD)
    for name, value in figures(report):
        table.add_row(name, value)
    table.add_section()
    for name, value in assumed:
        table.add_row(f"assumed: {name}", value)
    return table


def figures(report: SimReport) -> list[tuple[str, str]]:
    """Return the rows of the table: a figure's name and its value."""
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
        (
            "5-minute windows with p95 kept",
            f"TTFT {report.ttft_windows_kept:.1%}, ITL {report.itl_windows_kept:.1%}",
        ),
        ("goodput", f"{report.goodput_rps:.2f} requests/s, {report.output_tokens_per_s:.0f} tokens/s in all"),
        ("failed", str(report.failed)),
        ("preemptions", str(report.preemptions)),
        ("balance, most / mean prefilled", f"{report.balance:.3f}"),
        ("workers busy", f"{report.busy_share:.1%}"),
        ("GPU-hours", f"{report.gpu_hours:.2f}"),
    ]
    if report.started or report.stopped or report.flipped:
        rows.append(("workers started, stopped, flipped", f"{report.started}, {report.stopped}, {report.flipped}"))
    return rows


def _seconds(spread: Spread, scale: float = 1.0, unit: str = "s") -> str:
    values = (spread.p50, spread.p90, spread.p99, spread.max)
    return ", ".join(f"{value * scale:.3f}" for value in values) + f" {unit}"


def assumptions(config: SimConfig) -> list[tuple[str, str]]:
    """Return what the figures rest on: the SLO, the model and the GPU of the workers, their caches."""
    rows = [
        ("SLO", f"TTFT {config.ttft_slo_s:g} s, mean ITL {1e3 * config.itl_slo_s:g} ms"),
        ("worker", _worker_of(config, config.decode_profile)),
    ]
    if config.mode == "disaggregated" and config.prefill_profile != config.decode_profile:
        rows.append(("prefill worker", _worker_of(config, config.prefill_profile)))
    if config.speedup != 1.0:
        rows.append(("speed", f"{config.speedup:g} times that"))
    rows.append(("KV cache", f"{config.blocks} blocks of {config.block_size} tokens on each worker"))
    return rows


def _worker_of(config: SimConfig, profile: Profile | None) -> str:
    if config.prefill_rate:
        return f"prefill {config.prefill_rate:g} tokens/s, a decode step {1e3 * config.itl_s:g} ms"
    return FIT if profile is None else f"{profile.model} on {profile.device}, {profile.mapping}, {profile.engine}"


def summary_of(report: SimReport, config: SimConfig) -> dict[str, object]:
    """Return the figures of a report without its time line; the main ones also have flat names."""
    flat = {
        f"{name}_{figure}_s": getattr(spread, figure)
        for name, spread in (("ttft", report.ttft_s), ("itl", report.itl_s), ("e2e", report.e2e_s))
        for figure in ("mean", "p50", "p99", "max")
    }
    whole: dict[str, object] = msgspec.to_builtins(report)
    for name in _TIMELINE:
        del whole[name]
    return whole | flat | {"assumed": dict(assumptions(config))}


def timeline_of(report: SimReport) -> bytes:
    """Return the time line and the planner's decisions as JSON."""
    return msgspec.json.encode({name: getattr(report, name) for name in _TIMELINE})


_TIMELINE = ("timeline", "changes", "changes_left_out")
