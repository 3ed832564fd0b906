"""Run `kvmesh lab bench planner`: compare what policies save and cost, in the simulator.

Each load is served by fleets that policies size, for each cold start: ours (forecast, reactive loop, flips), the
reactive loop alone, as many workers as the peak or the mean takes, the reference's published formulas, and the
published rules of HPA, KEDA and llm-d. All start with the fleet that suits the first minutes, and have the same
profile, SLO and budget. GPU-hours count from a worker's order until it is gone. The bound is a planner that knows every
request to come and uses the same sizing.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvmesh.lab.bench.planner_loads import HOOK_S, LOADS, PlannerBenchConfig, PlannerLoad, loads_of, starts_of
from kvmesh.lab.bench.planner_pages import PageFolder, RunPage, file_name
from kvmesh.lab.bench.planner_policies import (
    Decide,
    DemandSlot,
    ReferencePlanner,
    Setting,
    clairvoyant,
    fixed,
    mean_of,
    peak_of,
    planned,
    slots_of,
)
from kvmesh.lab.bench.planner_rules import hpa, keda, variant_autoscaler
from kvmesh.lab.bench.planner_track import PlannerTrack
from kvmesh.mesh.config import load as load_config
from kvmesh.planner.budget import Counts
from kvmesh.protocol.errors import ConfigError
from kvmesh.simulator import PlannerHook, SimReport, simulate
from kvmesh.simulator.coarse import simulate_coarsely

SLOW_START_S = 600.0  # beyond it kvmesh starts with the fleet for the peak: nothing could be had in time

POLICIES = ("kvmesh", "kvmesh-untold", "reactive", "static-peak", "static-mean", "reference", "hpa", "keda", "llm-d")


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """Hold a simulation of a load under a policy, and what the policy saw and ordered."""

    report: SimReport
    track: PlannerTrack


class PlannerRow(Struct, frozen=True, kw_only=True):
    load: str
    start_s: float
    policy: str
    attainment: float  # share of the requests with TTFT and ITL within the SLO
    gpu_hours: float
    clairvoyant_gpu_hours: float
    clairvoyant_attainment: float
    ttft_attainment: float
    itl_attainment: float
    ttft_p99_s: float
    requests: int
    failed: int
    started: int
    flipped: int
    ttft_windows_kept: float  # share of windows of 5 minutes in which the p95 of the TTFT kept the SLO
    itl_windows_kept: float


def main(argv: list[str]) -> int:
    config = load_config(
        PlannerBenchConfig,
        argv,
        {},
        prefix="KVMESH_BENCH_",
        prog="kvmesh lab bench planner",
        description="Compare the planner with other policies in the simulator: loads, each served by fleets that "
        "each policy sizes. Shows the share of requests within the SLO, and GPU-hours.",
    )
    policies = _chosen(config.policies, POLICIES, "policy")
    names, starts = _chosen(config.loads, LOADS, "load"), starts_of(config)
    loads = [load for name in names for load in loads_of(name, config)]
    console = Console(stderr=config.json)
    for note in (load.note for load in loads if load.note):
        console.print(note, soft_wrap=True, markup=False)
    pages = PageFolder(Path(config.out)) if config.out else None
    rows: list[PlannerRow] = []
    began = time.process_time()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("simulating", total=len(loads) * len(starts) * len(policies))
        for load in loads:
            for row, done in rows_of(load, starts, policies, config):
                rows.append(row)
                if pages is not None:
                    pages.add(run_page(row, done))
                progress.update(task, advance=1, description=f"{row.load}, {row.start_s:.0f} s: {row.policy}")
                what = f"{row.load}, {row.start_s:.0f} s, {row.policy}"
                console.print(f"{what}: {row.attainment:.1%} for {row.gpu_hours:.1f} GPU-hours")
    console.print(as_table(rows))
    console.print(f"seed {config.seed}, {time.process_time() - began:.0f} s of CPU")
    if pages is not None:
        console.print(f"pages: {config.out}/index.html {pages.problem}".rstrip(), soft_wrap=True, markup=False)
    if config.json:
        print(json.dumps(msgspec.to_builtins(rows)))
    return 0


def rows_of(
    load: PlannerLoad, starts: list[float], policies: list[str], config: PlannerBenchConfig
) -> Iterator[tuple[PlannerRow, PolicyRun]]:
    """Simulate a load with each cold start and policy. A fixed fleet starts nobody: it is simulated once."""
    slots = slots_of(load.requests(), load.hit_share)
    fixed_runs: dict[str, PolicyRun] = {}
    for start_s in starts:
        here = load.started_in(start_s, config.miss_cost)
        bound = run(here, clairvoyant(here.setting, slots), slots, exact=config.exact)
        for policy in policies:
            done = fixed_runs.get(policy)
            if done is None:
                track = PlannerTrack()
                decide = track.watch(decide_by(policy, here, slots))
                done = PolicyRun(run(here, decide, slots, policy, exact=config.exact), track)
            if policy.startswith("static"):
                fixed_runs[policy] = done
            yield row_of(here, policy, done.report, bound), done


def decide_by(policy: str, load: PlannerLoad, slots: list[DemandSlot]) -> Decide:
    setting = load.setting
    match policy:
        case "kvmesh":
            peak = _peak(load, slots)
            config = msgspec.structs.replace(setting.config, peak_prefill=peak.prefill, peak_decode=peak.decode)
            return planned(Setting(config, setting.prefill, setting.decode))
        case "kvmesh-untold":
            return planned(setting)
        case "reactive":
            config = msgspec.structs.replace(setting.config, predictive=False, flips=False)
            return planned(Setting(config, setting.prefill, setting.decode))
        case "static-peak":
            return fixed(_peak(load, slots))
        case "static-mean":
            return fixed(setting.sized(mean_of(slots)))
        case "reference":
            return ReferencePlanner(setting).decide
        case "hpa":
            return hpa(setting, mean_of(slots))
        case "keda":
            return keda(setting, mean_of(slots))
        case "llm-d":
            return variant_autoscaler(setting)
    raise ConfigError(f"no policy {policy!r}", hint=f"there are: {', '.join(POLICIES)}")


def run(
    load: PlannerLoad, decide: Decide, slots: list[DemandSlot], policy: str = "", *, exact: bool = False
) -> SimReport:
    """Simulate a load with the fleet that a policy starts with: for the first five minutes, or the fixed one."""
    first = load.setting.sized(mean_of(slots[:5]))
    is_slow = load.setting.config.start_s > SLOW_START_S
    if policy == "static-peak" or (policy == "kvmesh" and is_slow):
        first = _peak(load, slots)
    elif policy == "static-mean":
        first = load.setting.sized(mean_of(slots))
    sim = msgspec.structs.replace(
        load.sim,
        workers=first.prefill + first.decode,
        prefill_workers=first.prefill,
        max_num_seqs=load.setting.most_sequences(mean_of(slots)),
    )
    return (simulate if exact else simulate_coarsely)(load.requests(), sim, PlannerHook(decide, HOOK_S, HOOK_S))


def row_of(load: PlannerLoad, policy: str, report: SimReport, bound: SimReport) -> PlannerRow:
    return PlannerRow(
        load=load.name,
        start_s=load.setting.config.start_s,
        policy=policy,
        attainment=round(report.attainment, 4),
        gpu_hours=round(report.gpu_hours, 3),
        clairvoyant_gpu_hours=round(bound.gpu_hours, 3),
        clairvoyant_attainment=round(bound.attainment, 4),
        ttft_attainment=round(report.ttft_attainment, 4),
        itl_attainment=round(report.itl_attainment, 4),
        ttft_p99_s=round(report.ttft_s.p99, 3),
        requests=report.requests,
        failed=report.failed,
        started=report.started,
        flipped=report.flipped,
        ttft_windows_kept=round(report.ttft_windows_kept, 4),
        itl_windows_kept=round(report.itl_windows_kept, 4),
    )


def run_page(row: PlannerRow, done: PolicyRun) -> RunPage:
    """Return the page of a run."""
    figures = [
        ("in SLO", f"{row.attainment:.1%}"),
        ("bound", f"{row.clairvoyant_attainment:.1%}"),
        ("GPU-hours", f"{row.gpu_hours:.2f}"),
        ("bound's", f"{row.clairvoyant_gpu_hours:.2f}"),
        ("p95 windows, TTFT", f"{row.ttft_windows_kept:.0%}"),
        ("p95 windows, ITL", f"{row.itl_windows_kept:.0%}"),
        ("TTFT p99", f"{row.ttft_p99_s:.2f} s"),
        ("requests", str(row.requests)),
        ("started", str(row.started)),
        ("flips", str(row.flipped)),
    ]
    return RunPage(
        name=file_name(row.load, row.start_s, row.policy),
        title=f"{row.load}, {row.policy}, cold start {row.start_s:g} s",
        figures=figures,
        charts=done.track.charts(),
        changes=done.report.changes,
        changes_left_out=done.report.changes_left_out,
    )


def as_table(rows: list[PlannerRow]) -> Table:
    """Return the table, at most 80 columns wide, as a log has."""
    headings = ("load", "start", "policy", "in SLO", "bound", "GPU-hours", "of peak", "of bound")
    table = Table(*headings, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    peaks = {(row.load, row.start_s): row.gpu_hours for row in rows if row.policy == "static-peak"}
    for row in rows:
        peak = peaks.get((row.load, row.start_s))
        table.add_row(
            row.load,
            f"{row.start_s:.0f} s",
            row.policy,
            f"{row.attainment:.1%}",
            f"{row.clairvoyant_attainment:.1%}",
            f"{row.gpu_hours:.1f}",
            f"{row.gpu_hours / peak:.0%}" if peak else "",
            f"{row.gpu_hours / row.clairvoyant_gpu_hours:.0%}",
        )
    return table


def _peak(load: PlannerLoad, slots: list[DemandSlot]) -> Counts:
    if load.peak_rps is None:
        return load.setting.sized(peak_of(slots))
    mean = mean_of(slots)
    return load.setting.sized(replace(mean, rps=load.peak_rps))


def _chosen(given: str, all_names: tuple[str, ...], what: str) -> list[str]:
    names = [name.strip() for name in given.split(",") if name.strip()] or list(all_names)
    for name in names:
        if name not in all_names:
            raise ConfigError(f"no {what} {name!r}", hint=f"there are: {', '.join(all_names)}")
    return names
