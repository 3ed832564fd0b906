"""The values that the planner's core works on: its settings, observations and decisions."""

from enum import Enum
from typing import Annotated, Literal

from msgspec import Meta, Struct


class PlannerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the pure core. The service has more settings (planner/config.py)."""

    ttft_slo_s: Annotated[float, Meta(gt=0, description="TTFT to keep")] = 0.5
    itl_slo_s: Annotated[float, Meta(gt=0, description="gap between tokens to keep")] = 0.05
    mode: Annotated[
        Literal["disaggregated", "aggregated"],
        Meta(description="aggregated: each worker does both halves; settings and counts of decode are theirs"),
    ] = "disaggregated"
    min_prefill: Annotated[int, Meta(ge=0, description="fewest prefill workers, where there are such")] = 1
    min_decode: Annotated[int, Meta(ge=1, description="fewest decode workers")] = 1
    peak_prefill: Annotated[
        int, Meta(ge=0, description="prefill workers that the highest expected load takes; see peak_decode")
    ] = 0
    peak_decode: Annotated[
        int, Meta(ge=0, description="decode workers for it, as `kvmesh profile plan` says; 0: no load is expected")
    ] = 0
    max_gpus: Annotated[int, Meta(ge=1, description="GPUs of all workers together, at most")] = 8
    max_step_up: Annotated[int, Meta(ge=1)] = 8  # workers of a role added in one decision
    max_step_down: Annotated[int, Meta(ge=1)] = 2  # workers of a role taken away in one decision
    predictive_interval_s: Annotated[float, Meta(gt=0, description="interval of the loop that forecasts")] = 60.0
    reactive_interval_s: Annotated[float, Meta(gt=0, description="interval of the loop that looks at queues")] = 5.0
    forecast: Annotated[
        Literal["auto", "constant", "average", "mean", "trend", "seasonal"],
        Meta(description="how traffic is forecast; auto: a trend or a season while it shows"),
    ] = "auto"
    miss_cost: Annotated[
        float, Meta(gt=1, description="GPU time that a request outside the SLO costs, in multiples of its own")
    ] = 3.0
    season_s: Annotated[float, Meta(ge=0)] = 0.0  # length of one season of the traffic; 0: find it
    target_utilization: Annotated[float, Meta(gt=0, le=1, description="share of a worker's capacity to use")] = 0.8
    start_s: Annotated[float, Meta(ge=0, description="from the order of a worker until it takes requests")] = 30.0
    flips: Annotated[bool, Meta(description="turn idle prefill workers into decode workers and back")] = True
    flip_s: Annotated[float, Meta(ge=0, description="time of such a change, without the drain")] = 3.0
    predictive: bool = True  # run the slow loop
    reactive: bool = True  # run the fast loop


class RoleFleet(Struct, frozen=True, kw_only=True):
    """The workers of one role. Workers of an aggregated fleet count as decode workers."""

    ready: int
    starting: int = 0  # ordered and not ready: never taken away
    draining: int = 0

    @property
    def ordered(self) -> int:
        return self.ready + self.starting


class SloCounts(Struct, frozen=True, kw_only=True):
    """The first tokens and the answers of an interval, and how many of them kept the limits of the SLO."""

    ttft: float
    ttft_within: float
    itl: float
    itl_within: float


class Traffic(Struct, frozen=True, kw_only=True):
    """The traffic of one interval that has ended. Lengths and times are means over its requests; None: not known."""

    start_s: float
    end_s: float
    requests: float | None  # the number that arrived
    isl_tokens: float | None = None
    osl_tokens: float | None = None
    hit_share: float | None = None  # share of all prompt tokens that were found in a cache
    ttft_s: float | None = None  # observed mean
    itl_s: float | None = None
    answered: float | None = None  # of how many requests `osl_tokens` is the mean; None: as many as arrived
    slo_counts: SloCounts | None = None


class WorkerLoad(Struct, frozen=True, kw_only=True):
    """The load that one ready worker reports."""

    name: str
    queued_tokens: int = 0  # of prompts that are computed before a new one
    running: int = 0
    waiting: int = 0
    kv_tokens: int = 0
    total_kv_tokens: int = 0
    cached_blocks: int = 0  # that hold a prefix for later prompts


class Observation(Struct, frozen=True, kw_only=True):
    """The planner's view of the fleet and the traffic at `at_s` of any monotonic clock."""

    at_s: float
    prefill: RoleFleet
    decode: RoleFleet
    traffic: Traffic | None = None  # since the last one; None: nothing new, or the source is away
    prefill_loads: tuple[WorkerLoad, ...] = ()  # empty: not known
    decode_loads: tuple[WorkerLoad, ...] = ()


class Action(Enum):
    HOLD = "hold"
    SCALE = "scale"


class Flip(Struct, frozen=True, kw_only=True):
    """Turn `count` workers of one role into the other. The target counts include them already."""

    to_role: Literal["prefill", "decode"]
    count: int


class Reason(Struct, frozen=True, kw_only=True):
    """A reason of a decision, for `kvmesh planner explain`: `code` is stable, `text` has the figures."""

    code: str
    text: str


def reason(code: str, text: str) -> Reason:
    return Reason(code=code, text=text)


class PeakForecast(Struct, frozen=True, kw_only=True):
    """The highest requests/s of the time that is planned for: 8 of 10 forecasts so far were between low and high."""

    method: str
    horizon_s: float
    likely_rps: float
    low_rps: float
    high_rps: float
    ready_rps: float  # the plan is for so many


class ScalingDecision(Struct, frozen=True, kw_only=True):
    """The counts that should be ordered from now on: ready and starting. A HOLD repeats the present counts."""

    at_s: float
    loop: Literal["predictive", "reactive", "none"]
    action: Action
    prefill: int
    decode: int
    flip: Flip | None = None
    reasons: tuple[Reason, ...] = ()
    forecast_rps: float | None = None
    peak: PeakForecast | None = None  # of the last plan
    needed_prefill: int | None = None  # before clamps
    needed_decode: int | None = None
    ttft_correction: float = 1.0
    itl_correction: float = 1.0
