"""The loads of `kvmesh lab bench planner`, and the workers that serve them.

The workers are the mock engine's 8B fit, slowed so that a few requests a second make a fleet of some size.

Where the figures of the loads come from:

- diurnal, bursty, step, sawtooth: plain shapes of ours, measured nowhere.
- coding: Azure's code trace of 2023 (AzurePublicDataset; Splitwise, ISCA 2024) has 8,819 requests in 57 minutes, 0 to
  630 a minute, with medians of 1,500 tokens in and 13 out. Ours has levels that are drawn again about once a
  minute; the largest of 57 such levels is about 4 times the mean. That a level lasts a minute is our assumption.
- week: seven scaled days. Minutes vary by 10 % around them; those of Azure's conversation trace of 2023 vary by 9 %
  (neighbours in its file), of which 6 % are Poisson's. The days, the weekend, the missed day and the launch are ours.
- conversation: the traces that are given; recorded: the access log that is given.

Seeds 7, 11 and 13 were used to tune the planner, 301 to 303 to judge it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

from msgspec import Meta
from msgspec.structs import replace as with_fields

from kvmesh.lab.bench.planner_policies import Setting, mean_of, slots_of
from kvmesh.lab.settings import LabConfig
from kvmesh.planner.model import PlannerConfig
from kvmesh.planner.profiles import polynomial_profile
from kvmesh.protocol.errors import ConfigError
from kvmesh.simulator import SimConfig, SimRequest
from kvmesh.simulator.access_log import LineCounts, read_access_log
from kvmesh.simulator.coarse import simulate_coarsely
from kvmesh.simulator.loads import Rate, Shape, bursty, diurnal, sawtooth, step, switching, synthesize, week
from kvmesh.simulator.mooncake import from_rows, stream_rows
from kvmesh.simulator.traces import TraceKind, kind_of

LOADS = ("diurnal", "bursty", "step", "sawtooth", "coding", "week", "conversation", "recorded")
TUNING_SEEDS = (7, 11, 13)
JUDGING_SEEDS = (301, 302, 303)

KV_TOKENS = 400_000
LONG_KV_TOKENS = 1_000_000  # for a trace's contexts of up to 120,000
NUM_SEQS = 256
STEP_TOKENS = 8192
SPEEDUP = 1 / 24
BLOCK_TOKENS = 256
SHAPE = Shape(isl_tokens=3000, osl_tokens=150, spread=0.5)
CODING = Shape(isl_tokens=2050, osl_tokens=28, spread=0.79, osl_spread=1.24)  # medians of 1,500 and 13
CODING_RPS, CODING_VARIATION = 8819 / 57 / 60, 1.2  # the largest of 57 such minutes is about 4 times the mean
DAY_S = 3600.0
TTFT_SLO_S, ITL_SLO_S = 6.0, 0.4
LONG_TTFT_SLO_S, LONG_ITL_SLO_S = 20.0, 0.15  # an idle worker takes 15 s for the longest prompt
MAX_GPUS = 48
HOOK_S = 5.0


class PlannerBenchConfig(LabConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_BENCH_<NAME>`, that over the TOML file of `--config`, that over the default."""

    trace: Annotated[
        str, Meta(description="Mooncake's JSON lines (load conversation) or access logs (recorded), commas between")
    ] = ""
    access_log: Annotated[
        str, Meta(description="of the recorded load: a frontend's --access-log-file, as with --trace")
    ] = ""
    loads: Annotated[str, Meta(description="which, with commas between; none: all")] = ""
    policies: Annotated[str, Meta(description="which, with commas between; none: all")] = ""
    starts: Annotated[str, Meta(description="cold starts in seconds, with commas between")] = "20,60,300,900"
    seed: Annotated[int, Meta(ge=0, description="of arrivals and lengths; 7, 11, 13 were used to tune")] = 301
    share: Annotated[float, Meta(gt=0, le=1, description="of each load's duration to run")] = 1.0
    miss_cost: Annotated[float, Meta(gt=1, description="price of a missed request, of the policy kvmesh")] = 3.0
    out: Annotated[
        str, Meta(description="folder for a page and a picture of each run, with an index; none: no pages")
    ] = ""
    exact: Annotated[bool, Meta(description="simulate every block and step; ten times slower")] = False


@dataclass(frozen=True, slots=True)
class PlannerLoad:
    """Describe a load. `peak_rps` is the peak of the rate; None if only the requests are known."""

    name: str
    requests: Callable[[], Iterator[SimRequest]]
    peak_rps: float | None
    setting: Setting
    sim: SimConfig
    hit_share: float = 0.0  # assumed by policies that do not measure it
    note: str = ""  # about the file that it was read from

    def started_in(self, start_s: float, miss_cost: float = 3.0) -> "PlannerLoad":
        """Return the load for workers with this cold start, and a planner with this price."""
        config = with_fields(self.setting.config, start_s=start_s, miss_cost=miss_cost)
        setting = Setting(config, self.setting.prefill, self.setting.decode)
        return replace(self, setting=setting, sim=with_fields(self.sim, start_s=start_s))


def loads_of(name: str, config: PlannerBenchConfig) -> list[PlannerLoad]:
    """Return the loads of a name: one for each trace, none if what it is read from is not given."""
    if name in ("conversation", "recorded"):
        wanted = "access-log" if name == "recorded" else "mooncake"
        files = [file for file, kind in _given(config) if kind == wanted]
        names = [name] if len(files) == 1 else [f"{name}:{file.stem}" for file in files]
        of_file = _recorded if name == "recorded" else _conversation
        return [of_file(name, file, config) for name, file in zip(names, files, strict=True)]
    return [_synthetic(name, config)]


def _given(config: PlannerBenchConfig) -> list[tuple[Path, TraceKind]]:
    """Return the given files with their formats. Raise ConfigError if one has none, or two have one name."""
    files = [Path(file.strip()) for file in config.trace.split(",") if file.strip()]
    logs = [Path(config.access_log)] if config.access_log else []
    if len({file.stem for file in files + logs}) < len(files + logs):
        found = ", ".join(map(str, files + logs))
        raise ConfigError(f"two traces of one name: {found}", hint="rows are told apart by the files' names")
    return [*((file, kind_of(file)) for file in files), *((log, "access-log") for log in logs)]


def starts_of(config: PlannerBenchConfig) -> list[float]:
    """Return the cold starts. Raise ConfigError if one is no number of seconds."""
    try:
        starts = [float(text) for text in config.starts.split(",") if text.strip()]
    except ValueError:
        starts = []
    if not starts or not all(0 <= start_s <= 86_400 for start_s in starts):
        raise ConfigError(f"--starts {config.starts!r} is no list of seconds", hint="for example 20,60,300,900")
    return starts


def _synthetic(name: str, config: PlannerBenchConfig) -> PlannerLoad:
    seed, share = config.seed, config.share
    coding = switching(CODING_RPS, CODING_VARIATION, 60.0, seed, 3420.0)
    found: dict[str, tuple[Rate, float, float | None, Shape]] = {
        "diurnal": (diurnal(mean_rps=2.5, swing=0.7, period_s=5400 * share), 5400, 4.25, SHAPE),
        "bursty": (bursty(1.5, 4.0, quiet_s=400, burst_s=120, seed=seed), 2700, 4.0, SHAPE),
        "step": (step(1.2, 3.6, 900 * share, 2100 * share), 3000, 3.6, SHAPE),
        "sawtooth": (sawtooth(1.0, 4.0, period_s=120), 1800, 4.0, SHAPE),
        "coding": (coding, 3420, None, CODING),
        "week": (week(2.0, DAY_S * share, seed), 7 * DAY_S, None, SHAPE),
    }
    rate, duration_s, peak_rps, shape = found[name]
    setting, sim = setting_of(SPEEDUP, TTFT_SLO_S, ITL_SLO_S, seed)
    if name == "week":  # how long a day is, everybody knows
        setting = replace(setting, config=with_fields(setting.config, season_s=DAY_S * share))
    requests = partial(synthesize, rate, duration_s * share, shape, seed=seed, block_size=sim.block_size)
    return PlannerLoad(name, requests, peak_rps, setting, sim)


def _conversation(name: str, trace: Path, config: PlannerBenchConfig) -> PlannerLoad:
    rows = list(stream_rows(trace))
    rows = rows[: max(1, round(len(rows) * config.share))]
    setting, sim = setting_of(SPEEDUP * 4, LONG_TTFT_SLO_S, LONG_ITL_SLO_S, config.seed, LONG_KV_TOKENS)
    load = PlannerLoad(name, lambda: from_rows(rows, sim.block_size), None, setting, sim)
    return replace(load, hit_share=_hit_share(load))


def _recorded(name: str, log: Path, config: PlannerBenchConfig) -> PlannerLoad:
    setting, sim = setting_of(SPEEDUP, TTFT_SLO_S, ITL_SLO_S, config.seed)
    counts = LineCounts()
    requests = list(read_access_log(log, sim.block_size, round(SHAPE.osl_tokens), counts=counts))
    requests = requests[: max(1, round(len(requests) * config.share))]
    load = PlannerLoad(name, lambda: iter(requests), None, setting, sim)
    return replace(load, hit_share=_hit_share(load), note=f"{log} has {counts.text}")


def _hit_share(load: PlannerLoad) -> float:
    """Return the hit share in the caches of a fleet that is sized for the mean load without hits."""
    counts = load.setting.sized(mean_of(slots_of(load.requests(), 0.0)))
    sim = with_fields(load.sim, workers=counts.prefill + counts.decode, prefill_workers=counts.prefill)
    return simulate_coarsely(load.requests(), sim).hit_share


def setting_of(
    speedup: float, ttft_slo_s: float, itl_slo_s: float, seed: int, kv_tokens: int = KV_TOKENS
) -> tuple[Setting, SimConfig]:
    """Return what every policy knows of the workers, and the workers in the simulator."""
    profile = polynomial_profile(kv_tokens, NUM_SEQS, STEP_TOKENS, speedup)
    planner = PlannerConfig(
        ttft_slo_s=ttft_slo_s, itl_slo_s=itl_slo_s, max_gpus=MAX_GPUS, max_step_up=16, max_step_down=4
    )
    sim = SimConfig(
        mode="disaggregated",
        blocks=kv_tokens // BLOCK_TOKENS,
        block_size=BLOCK_TOKENS,
        max_num_seqs=NUM_SEQS,
        max_step_tokens=STEP_TOKENS,
        prefill_profile=profile,
        decode_profile=profile,
        flip_s=planner.flip_s,
        ttft_slo_s=ttft_slo_s,
        itl_slo_s=itl_slo_s,
        keeps_itl=True,
        states_deadline=True,
        seed=seed,
    )
    return Setting(planner, profile, profile), sim
