"""Run `kvmesh replay`: send a trace or synthetic load through the live router, schedulers and block pools."""

import gc
import json
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct
from rich.console import Console
from rich.progress import Progress

from kvmesh.mesh.config import load
from kvmesh.mesh.lifecycle import GC_THRESHOLDS
from kvmesh.planner.core import PlannerCore
from kvmesh.planner.model import PlannerConfig
from kvmesh.planner.profiles import polynomial_profile
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.profile import Profile, read_profile
from kvmesh.router.policies import Policy
from kvmesh.simulator import PlannerHook, SimConfig, SimReport, SimRequest, simulate
from kvmesh.simulator.access_log import LineCounts, read_access_log
from kvmesh.simulator.arrivals import jittered, limited, sped_up
from kvmesh.simulator.config import Mode
from kvmesh.simulator.loads import Rate, Shape, bursty, constant, diurnal, sawtooth, step, synthesize
from kvmesh.simulator.mooncake import from_rows, stream_rows
from kvmesh.simulator.page import as_html
from kvmesh.simulator.picture import draw
from kvmesh.simulator.tables import as_table, assumptions, summary_of, timeline_of
from kvmesh.simulator.traces import kind_of

LoadShape = Literal["constant", "diurnal", "bursty", "step", "sawtooth"]


class ReplayConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_REPLAY_<NAME>`, that over the TOML file of `--config`, that over the default."""

    trace: Annotated[str, Meta(description="a trace in Mooncake's format (JSON lines), or a frontend's access log")] = (
        ""
    )
    access_log: Annotated[str, Meta(description="instead: the log of a frontend with --access-log-file")] = ""
    load: Annotated[LoadShape | None, Meta(description="instead: a Poisson process of this shape")] = None
    rate: Annotated[float, Meta(gt=0, description="synthetic: requests/s, on average")] = 4.0
    peak_rate: Annotated[float, Meta(ge=0, description="synthetic: requests/s at most; 0: 1.6 times --rate")] = 0.0
    duration_s: Annotated[float, Meta(gt=0, description="synthetic: seconds of load")] = 3600.0
    period_s: Annotated[float, Meta(gt=0)] = 3600.0  # synthetic: seconds until the shape repeats
    isl: Annotated[float, Meta(ge=1, description="synthetic: prompt tokens; of a later turn, what it adds")] = 3000.0
    osl: Annotated[float, Meta(ge=1, description="synthetic, access log: answer tokens")] = 300.0
    spread: Annotated[float, Meta(ge=0, description="synthetic: sigma of log-normal lengths")] = 0.0
    prefix_groups: Annotated[int, Meta(ge=0, description="synthetic: prefixes, one of which begins a prompt")] = 0
    prefix_tokens: Annotated[int, Meta(ge=0, description="synthetic: length of these prefixes")] = 0
    turns: Annotated[int, Meta(ge=1, description="synthetic: turns of a conversation")] = 1
    mode: Annotated[Mode, Meta(description="aggregated, or prefill and decode on different workers")] = "aggregated"
    workers: Annotated[int, Meta(ge=1, description="workers, including those that prefill")] = 8
    prefill_workers: Annotated[int, Meta(ge=0, description="disaggregated: workers that prefill; 0: half")] = 0
    blocks_per_worker: Annotated[int, Meta(ge=1, description="KV blocks of each worker")] = 6000
    peers: Annotated[
        bool, Meta(description="workers pull prefixes from each other, where the router finds that cheaper")
    ] = False
    host_blocks: Annotated[int, Meta(ge=0, description="KV blocks of each worker in host memory; 0: none")] = 0
    host_bandwidth_gbps: Annotated[
        float, Meta(ge=0, description="gigabytes of KV per second to and from host memory; 0: no limit")
    ] = 25.0
    disk_blocks: Annotated[
        int, Meta(ge=0, description="KV blocks of each worker on a disk, for what is used twice; 0: none")
    ] = 0
    disk_bandwidth_gbps: Annotated[
        float, Meta(ge=0, description="gigabytes of KV per second to and from the disk; 0: no limit")
    ] = 2.0
    shared_blocks: Annotated[
        int, Meta(ge=0, description="KV blocks in storage of all workers, for what one of them uses twice; 0: none")
    ] = 0
    shared_bandwidth_gbps: Annotated[
        float, Meta(ge=0, description="gigabytes of KV per second of each worker to and from it; 0: no limit")
    ] = 1.0
    block_size: Annotated[int, Meta(ge=1, description="tokens per block, a divisor of the trace's")] = 512
    trace_block_size: Annotated[int, Meta(ge=1, description="tokens that a block id of the trace stands for")] = 512
    max_num_seqs: Annotated[int, Meta(ge=1, description="sequences that a worker runs at once")] = 256
    max_step_tokens: Annotated[int, Meta(ge=1, description="new tokens of a step")] = 8192
    profile: Annotated[str, Meta(description="file of `kvmesh profile` that times the workers; default: a fit")] = ""
    prefill_profile: Annotated[str, Meta(description="the same for prefill workers alone")] = ""
    fit_kv_tokens: Annotated[
        int,
        Meta(ge=0, description="held tokens at which the fit is slowest, however large the cache is; 0: a full cache"),
    ] = 6000 * 512
    speedup: Annotated[float, Meta(gt=0, description="how many times as fast as profile or fit")] = 1.0
    prefill_rate: Annotated[
        float, Meta(ge=0, description="instead: tokens/s that a worker computes; 0: as profile or fit say")
    ] = 0.0
    itl_s: Annotated[float, Meta(ge=0, description="with --prefill-rate: time of a step that decodes")] = 0.0
    kv_bandwidth_gbps: Annotated[
        float, Meta(ge=0, description="gigabytes of KV per second from prefill to decode workers; 0: no limit")
    ] = 64.0
    policy: Annotated[Policy, Meta(description="how a worker is chosen")] = "kv"
    recompute_price: Annotated[
        float, Meta(ge=0, description="cost of a block to compute, in queued blocks; 0: from the traffic")
    ] = 0.0
    saturation_tokens: Annotated[
        int, Meta(ge=0, description="a worker with this many tokens to compute gets no more; 0: no limit")
    ] = 2048
    routers: Annotated[int, Meta(ge=1, description="routers that share the requests")] = 1
    gossip_lag_s: Annotated[float, Meta(ge=0, description="age of what a router knows about the others' load")] = 0.005
    event_lag_s: Annotated[float, Meta(ge=0, description="from a cache's change until the routers know")] = 0.005
    # time between two reports of a worker's load to the routers; 0: no reports
    load_report_interval_s: Annotated[float, Meta(ge=0)] = 0.0
    hop_s: Annotated[float, Meta(ge=0)] = 0.0  # time from client to router and back, in the frontend
    arrival_speedup: Annotated[float, Meta(gt=0)] = 1.0  # requests come this many times as fast
    concurrency: Annotated[
        int, Meta(ge=0, description="requests at a time, whatever the trace's arrivals; 0: by the trace")
    ] = 0
    jitter_s: Annotated[
        float, Meta(ge=0, description="spread each arrival over this time: traces have coarse clocks")
    ] = 0.0
    limit: Annotated[int, Meta(ge=0, description="requests at most; 0: all")] = 0
    ttft_slo_s: Annotated[float, Meta(gt=0, description="TTFT to keep")] = 0.5
    itl_slo_s: Annotated[float, Meta(gt=0, description="gap between tokens to keep, on a request's average")] = 0.05
    planner: Annotated[
        bool, Meta(description="the planner starts, stops and flips workers; --workers is the first count")
    ] = False
    max_gpus: Annotated[int, Meta(ge=1, description="with --planner: GPUs of all workers together, at most")] = 16
    start_s: Annotated[float, Meta(ge=0, description="with --planner: cold start of a worker")] = 30.0
    flip_s: Annotated[float, Meta(ge=0, description="with --planner: flip of a drained worker to its other role")] = 3.0
    seed: Annotated[int, Meta(ge=0, description="seed of policies that draw, of synthetic load and jitter")] = 1
    json: Annotated[bool, Meta(description="print a summary, one JSON object")] = False
    timeline: Annotated[str, Meta(description="write the time line and the planner's decisions as JSON")] = ""
    html: Annotated[str, Meta(description="write a page with figures and curves, all in one file")] = ""
    png: Annotated[str, Meta(description="write the curves as a picture; needs matplotlib")] = ""


def main(argv: list[str]) -> int:
    config = load(
        ReplayConfig,
        argv,
        {},
        prefix="KVMESH_REPLAY_",
        prog="kvmesh replay",
        description="Drive router, schedulers and KV caches through a trace or synthetic load, in simulated time.",
    )
    gc.set_threshold(*GC_THRESHOLDS)
    console, settings = Console(stderr=config.json), simulated(config)
    started = time.process_time()
    with Progress(*Progress.get_default_columns()[:1], console=console, transient=True) as progress:
        task = progress.add_task("", total=None)
        ended = iter(range(1, 1 << 60))

        def on_end() -> None:
            if (number := next(ended)) % 100 == 0:
                progress.update(task, description=f"{number} requests have ended")

        counts = LineCounts()
        report = simulate(requests_of(config, counts), settings, hook_of(config), on_end)
    if counts.requests:
        console.print(f"the log has {counts.text}", soft_wrap=True, markup=False)
    title = f"{report.requests} requests, {config.workers} workers, {config.mode}, {config.policy}"
    if config.png:
        draw(report, title, Path(config.png))
    if config.html:
        Path(config.html).write_text(
            as_html(report, title, assumptions(settings), settings_of(config)), encoding="utf-8"
        )
    if config.timeline:
        Path(config.timeline).write_bytes(timeline_of(report))
    if config.json:
        print(json.dumps(summary_of(report, settings)))
    else:
        console.print(as_table(report, title, assumptions(settings)))
        memory_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        console.print(
            f"CPU of this replay: {time.process_time() - started:.1f} s, memory at most: {memory_mib:.0f} MiB"
        )
    return 0


def replay(requests: Iterator[SimRequest], config: ReplayConfig) -> SimReport:
    return simulate(requests, simulated(config))


KV_SETTINGS = (
    "peers",
    "host_blocks",
    "host_bandwidth_gbps",
    "disk_blocks",
    "disk_bandwidth_gbps",
    "shared_blocks",
    "shared_bandwidth_gbps",
)


def simulated(config: ReplayConfig) -> SimConfig:
    """Return the simulation's settings. Raises ConfigError if a profile cannot be read or lacks a table."""
    profile = read_profile(Path(config.profile)) if config.profile else None
    prefill_profile = read_profile(Path(config.prefill_profile)) if config.prefill_profile else profile
    if config.mode == "disaggregated" and config.workers < 2:
        raise ConfigError("one worker cannot be both", hint="set --workers to 2 or more, or --mode aggregated")
    if config.prefill_workers >= config.workers:
        found = f"{config.prefill_workers} of {config.workers} workers prefill: none is left to decode"
        raise ConfigError(found, hint="--workers counts those of --prefill-workers too")
    _check_tables(config, prefill_profile, profile)
    return SimConfig(
        mode=config.mode,
        workers=config.workers,
        prefill_workers=config.prefill_workers,
        blocks=config.blocks_per_worker,
        **{name: getattr(config, name) for name in KV_SETTINGS},
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_step_tokens=config.max_step_tokens,
        prefill_profile=prefill_profile,
        decode_profile=profile,
        fit_kv_tokens=config.fit_kv_tokens,
        speedup=config.speedup,
        prefill_rate=config.prefill_rate,
        itl_s=config.itl_s,
        kv_bandwidth_gbps=config.kv_bandwidth_gbps,
        policy=config.policy,
        recompute_price=config.recompute_price,
        saturation_tokens=config.saturation_tokens,
        routers=config.routers,
        gossip_lag_s=config.gossip_lag_s,
        event_lag_s=config.event_lag_s,
        load_report_interval_s=config.load_report_interval_s,
        hop_s=config.hop_s,
        concurrency=config.concurrency,
        start_s=config.start_s,
        flip_s=config.flip_s,
        gpus_per_prefill=1.0 if prefill_profile is None else prefill_profile.gpus,
        gpus_per_decode=1.0 if profile is None else profile.gpus,
        ttft_slo_s=config.ttft_slo_s,
        itl_slo_s=config.itl_slo_s,
        keeps_itl=config.planner,
        seed=config.seed,
    )


def hook_of(config: ReplayConfig) -> PlannerHook | None:
    """Return the live planner core, None without --planner. Raises ConfigError if it cannot size the workers."""
    if not config.planner:
        return None
    if config.prefill_rate:
        raise ConfigError("the planner sizes workers by their profiles", hint="set --profile instead of --prefill-rate")
    if config.speedup != 1.0 and (config.profile or config.prefill_profile):
        raise ConfigError("the planner goes by the profile as it is", hint="leave --speedup out")
    kv_tokens = config.blocks_per_worker * config.block_size
    fit = polynomial_profile(
        kv_tokens, config.max_num_seqs, config.max_step_tokens, config.speedup, fit_kv_tokens=config.fit_kv_tokens
    )
    settings = simulated(config)
    rules = PlannerConfig(
        mode=config.mode,
        ttft_slo_s=config.ttft_slo_s,
        itl_slo_s=config.itl_slo_s,
        max_gpus=config.max_gpus,
        start_s=config.start_s,
        flip_s=config.flip_s,
    )
    decode = settings.decode_profile or fit
    core = PlannerCore(rules, (settings.prefill_profile or fit) if config.mode == "disaggregated" else decode, decode)
    return PlannerHook(core.decide, rules.reactive_interval_s, rules.reactive_interval_s)


def _check_tables(config: ReplayConfig, prefill: Profile | None, decode: Profile | None) -> None:
    """Raise ConfigError if a profile lacks a table. Decode workers need both: the router may let them prefill."""
    for flag, profile, needs_decode in (("--prefill-profile", prefill, False), ("--profile", decode, True)):
        if profile is None:
            continue
        if profile.prefill is None or (needs_decode and profile.decode is None):
            missing = "prefill" if profile.prefill is None else "decode"
            raise ConfigError(f"the profile of {flag} has no {missing} table", hint="measure it: `kvmesh profile`")


def access_log_of(config: ReplayConfig) -> Path | None:
    """Return the access log to replay, if there is one. Raise ConfigError if --trace is of no known format."""
    if config.access_log:
        return Path(config.access_log)
    return Path(config.trace) if config.trace and kind_of(Path(config.trace)) == "access-log" else None


def requests_of(config: ReplayConfig, counts: LineCounts | None = None) -> Iterator[SimRequest]:
    """Return the requests to replay. Raises ConfigError, now or while they are read. Count the lines of a log."""
    sources = [name for name in ("trace", "access_log", "load") if getattr(config, name)]
    if len(sources) != 1:
        found = f"{' and '.join(sources)} are given" if sources else "no requests are given"
        raise ConfigError(found, hint="give one of --trace, --access-log and --load")
    if config.load is not None:
        found_requests = synthesize(
            rate_of(config), config.duration_s, shape_of(config), seed=config.seed, block_size=config.block_size
        )
    elif log := access_log_of(config):
        found_requests = read_access_log(log, config.block_size, round(config.osl), round(config.isl), counts)
    else:
        rows = stream_rows(Path(config.trace), config.limit)
        found_requests = from_rows(rows, config.block_size, config.trace_block_size)
    if config.arrival_speedup != 1.0:
        found_requests = sped_up(found_requests, config.arrival_speedup)
    if config.jitter_s:
        found_requests = jittered(found_requests, config.jitter_s, config.seed)
    return limited(found_requests, config.limit)


def rate_of(config: ReplayConfig) -> Rate:
    """Return the rate of --load. Its mean is --rate, except for `step` and `bursty`: --rate is their low level."""
    peak = config.peak_rate or 1.6 * config.rate
    match config.load:
        case "diurnal":
            return diurnal(config.rate, min(1.0, peak / config.rate - 1), config.period_s)
        case "bursty":
            return bursty(config.rate, peak, config.period_s, config.period_s / 4, config.seed, config.duration_s)
        case "step":
            return step(config.rate, peak, config.duration_s / 3, config.duration_s * 2 / 3)
        case "sawtooth":
            return sawtooth(max(0.0, 2 * config.rate - peak), peak, config.period_s)
    return constant(config.rate)


def shape_of(config: ReplayConfig) -> Shape:
    return Shape(
        isl_tokens=config.isl,
        osl_tokens=config.osl,
        spread=config.spread,
        groups=config.prefix_groups,
        prefix_tokens=config.prefix_tokens,
        turns=config.turns,
    )


def settings_of(config: ReplayConfig) -> dict[str, str]:
    """Return the settings that differ from their defaults, without those of the output."""
    ours = msgspec.to_builtins(config)
    theirs = msgspec.to_builtins(ReplayConfig())
    return {name: str(value) for name, value in ours.items() if value != theirs[name] and name not in _OUTPUTS}


_OUTPUTS = ("json", "html", "png", "timeline")
