"""Run `kvmesh bench planner`: compare what policies save and cost, in the simulator.

Five loads, each served by a fleet that one of five policies sizes: ours (forecast, reactive loop, flips), the reactive
loop alone, as many workers as the peak or the mean takes, and the reference's published formulas. All start with the
fleet that suits the first minutes, and have the same profile, SLO and budget. GPU-hours count from a worker's order
until it is gone. The bound is a planner that knows every request to come and uses the same sizing.

The workers are the mock engine's 8B fit, slowed so that a few requests a second make a fleet of some size.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.planner_policies import (
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
from mesh.config import load as load_config
from planner.budget import Counts
from planner.model import PlannerConfig
from planner.profiles import polynomial_profile
from protocol.errors import ConfigError
from simulator import PlannerHook, SimConfig, SimReport, SimRequest, simulate
from simulator.access_log import read_access_log
from simulator.loads import Rate, Shape, bursty, diurnal, sawtooth, step, synthesize
from simulator.mooncake import from_rows, stream_rows

POLICIES = ("kvmesh", "reactive", "static-peak", "static-mean", "reference")
LOADS = ("diurnal", "bursty", "step", "sawtooth", "conversation", "recorded")

KV_TOKENS = 400_000
LONG_KV_TOKENS = 1_000_000  # for the trace's contexts of up to 120,000
NUM_SEQS = 256
STEP_TOKENS = 8192
SPEEDUP = 1 / 24
BLOCK_TOKENS = 256
START_S = 60.0
SHAPE = Shape(isl_tokens=3000, osl_tokens=150, spread=0.5)
TTFT_SLO_S, ITL_SLO_S = 6.0, 0.4
LONG_TTFT_SLO_S, LONG_ITL_SLO_S = 20.0, 0.15  # an idle worker takes 15 s for the longest prompt
MAX_GPUS = 48
HOOK_S = 5.0


class PlannerBenchConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_BENCH_<NAME>`, that over the TOML file of `--config`, that over the default."""

    trace: Annotated[
        str, Meta(description="of the conversation load: JSON lines in Mooncake's format; none: skip it")
    ] = ""
    access_log: Annotated[
        str, Meta(description="of the recorded load: a frontend's --access-log-file; none: skip it")
    ] = ""
    loads: Annotated[str, Meta(description="which, with commas between; none: all")] = ""
    policies: Annotated[str, Meta(description="which, with commas between; none: all")] = ""
    seed: Annotated[int, Meta(ge=0, description="of arrivals and lengths")] = 101
    share: Annotated[float, Meta(gt=0, le=1, description="of each load's duration to run")] = 1.0
    json: Annotated[bool, Meta(description="the last line is one JSON list")] = False


class PlannerRow(Struct, frozen=True, kw_only=True):
    load: str
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


@dataclass(frozen=True, slots=True)
class PlannerLoad:
    """Describe a load. `peak_rps` is the peak of the rate; None for a trace, whose rate is not known."""

    name: str
    requests: Callable[[], Iterator[SimRequest]]
    peak_rps: float | None
    setting: Setting
    sim: SimConfig
    hit_share: float = 0.0  # assumed by policies that do not measure it


def main(argv: list[str]) -> int:
    config = load_config(
        PlannerBenchConfig,
        argv,
        {},
        prefix="KVMESH_BENCH_",
        prog="kvmesh bench planner",
        description="Compare the planner with other policies in the simulator: five loads, each served by fleets that "
        "each policy sizes. Shows the share of requests within the SLO, and GPU-hours.",
    )
    policies = _chosen(config.policies, POLICIES, "policy")
    loads = [load for name in _chosen(config.loads, LOADS, "load") if (load := load_of(name, config)) is not None]
    console = Console(stderr=config.json)
    rows: list[PlannerRow] = []
    began = time.process_time()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("simulating", total=len(loads) * (len(policies) + 1))
        for load in loads:
            progress.update(task, description=f"{load.name}: clairvoyant")
            slots = slots_of(load.requests(), load.hit_share)
            bound = run(load, clairvoyant(load.setting, slots), slots)
            progress.advance(task)
            for policy in policies:
                progress.update(task, description=f"{load.name}: {policy}")
                report = run(load, decide_by(policy, load, slots), slots, policy)
                rows.append(row := row_of(load.name, policy, report, bound))
                console.print(f"{row.load}, {row.policy}: {row.attainment:.1%} for {row.gpu_hours:.1f} GPU-hours")
                progress.advance(task)
    console.print(as_table(rows))
    console.print(f"seed {config.seed}, {time.process_time() - began:.0f} s of CPU")
    if config.json:
        print(json.dumps(msgspec.to_builtins(rows)))
    return 0


def load_of(name: str, config: PlannerBenchConfig) -> PlannerLoad | None:
    """Return a load by its name, None if it needs a trace and none is given."""
    seed = config.seed
    rates: dict[str, tuple[Rate, float]] = {
        "diurnal": (diurnal(mean_rps=2.5, swing=0.7, period_s=5400 * config.share), 5400),
        "bursty": (bursty(1.5, 4.0, quiet_s=400, burst_s=120, seed=seed), 2700),
        "step": (step(1.2, 3.6, 900 * config.share, 2100 * config.share), 3000),
        "sawtooth": (sawtooth(1.0, 4.0, period_s=120), 1800),
    }
    if name == "conversation":
        return _conversation(config) if config.trace else None
    if name == "recorded":
        return _recorded(config) if config.access_log else None
    rate, duration_s = rates[name]
    setting, sim = _setting(SPEEDUP, TTFT_SLO_S, ITL_SLO_S, config.seed)
    return PlannerLoad(
        name,
        lambda: synthesize(rate, duration_s * config.share, SHAPE, seed=seed, block_size=sim.block_size),
        rate.most_rps,
        setting,
        sim,
    )


def decide_by(policy: str, load: PlannerLoad, slots: list[DemandSlot]) -> Decide:
    setting = load.setting
    match policy:
        case "kvmesh":
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
    raise ConfigError(f"no policy {policy!r}", hint=f"there are: {', '.join(POLICIES)}")


def run(load: PlannerLoad, decide: Decide, slots: list[DemandSlot], policy: str = "") -> SimReport:
    """Return the fleet that a policy starts with: for the first five minutes, or the fixed one."""
    first = load.setting.sized(mean_of(slots[:5]))
    if policy == "static-peak":
        first = _peak(load, slots)
    elif policy == "static-mean":
        first = load.setting.sized(mean_of(slots))
    sim = msgspec.structs.replace(load.sim, workers=first.prefill + first.decode, prefill_workers=first.prefill)
    return simulate(load.requests(), sim, PlannerHook(decide, HOOK_S, HOOK_S))


def row_of(load: str, policy: str, report: SimReport, bound: SimReport) -> PlannerRow:
    return PlannerRow(
        load=load,
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
    )


def as_table(rows: list[PlannerRow]) -> Table:
    """Return the table, at most 80 columns wide, as a log has."""
    headings = ("load", "policy", "in SLO", "TTFT", "ITL", "GPU-hours", "of peak", "of bound")
    table = Table(*headings, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for row in rows:
        peak = next((r.gpu_hours for r in rows if (r.load, r.policy) == (row.load, "static-peak")), None)
        table.add_row(
            row.load,
            row.policy,
            f"{row.attainment:.1%}",
            f"{row.ttft_attainment:.1%}",
            f"{row.itl_attainment:.1%}",
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


def _conversation(config: PlannerBenchConfig) -> PlannerLoad:
    rows = list(stream_rows(Path(config.trace)))
    rows = rows[: round(len(rows) * config.share)]
    setting, sim = _setting(SPEEDUP * 4, LONG_TTFT_SLO_S, LONG_ITL_SLO_S, config.seed, LONG_KV_TOKENS)
    load = PlannerLoad("conversation", lambda: from_rows(rows, sim.block_size), None, setting, sim)
    return replace(load, hit_share=_hit_share(load))


def _recorded(config: PlannerBenchConfig) -> PlannerLoad:
    setting, sim = _setting(SPEEDUP, TTFT_SLO_S, ITL_SLO_S, config.seed)
    requests = list(read_access_log(Path(config.access_log), sim.block_size, round(SHAPE.osl_tokens)))
    requests = requests[: max(1, round(len(requests) * config.share))]
    load = PlannerLoad("recorded", lambda: iter(requests), None, setting, sim)
    return replace(load, hit_share=_hit_share(load))


def _hit_share(load: PlannerLoad) -> float:
    """Return the hit share in the caches of a fleet that is sized for the mean load without hits."""
    slots = slots_of(load.requests(), 0.0)
    return run(load, decide_by("static-mean", load, slots), slots, "static-mean").hit_share


def _setting(
    speedup: float, ttft_slo_s: float, itl_slo_s: float, seed: int, kv_tokens: int = KV_TOKENS
) -> tuple[Setting, SimConfig]:
    profile = polynomial_profile(kv_tokens, NUM_SEQS, STEP_TOKENS, speedup)
    planner = PlannerConfig(
        ttft_slo_s=ttft_slo_s, itl_slo_s=itl_slo_s, max_gpus=MAX_GPUS, start_s=START_S, max_step_up=16, max_step_down=4
    )
    sim = SimConfig(
        mode="disaggregated",
        blocks=kv_tokens // BLOCK_TOKENS,
        block_size=BLOCK_TOKENS,
        max_num_seqs=NUM_SEQS,
        max_step_tokens=STEP_TOKENS,
        prefill_profile=profile,
        decode_profile=profile,
        start_s=START_S,
        flip_s=planner.flip_s,
        # a prompt goes to a decode worker only when it would wait for longer than the SLO: it holds up others' tokens
        saturation_tokens=round(STEP_TOKENS * ttft_slo_s / profile.prefill_s(STEP_TOKENS)),
        ttft_slo_s=ttft_slo_s,
        itl_slo_s=itl_slo_s,
        seed=seed,
    )
    return Setting(planner, profile, profile), sim


def _chosen(given: str, all_names: tuple[str, ...], what: str) -> list[str]:
    names = [name.strip() for name in given.split(",") if name.strip()] or list(all_names)
    for name in names:
        if name not in all_names:
            raise ConfigError(f"no {what} {name!r}", hint=f"there are: {', '.join(all_names)}")
    return names
