"""What the planner sees, wants and decides. Values only."""

from enum import Enum
from typing import Annotated, Literal

from msgspec import Meta, Struct


class PlannerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of the pure core; the service has its own settings beside it (planner/config.py)."""

    ttft_slo_s: Annotated[float, Meta(gt=0, description="TTFT to keep")] = 0.5
    itl_slo_s: Annotated[float, Meta(gt=0, description="gap between tokens to keep")] = 0.05
    mode: Annotated[
        Literal["disaggregated", "aggregated"],
        Meta(description="aggregated: each worker does both halves; what is set and told of decode is of them"),
    ] = "disaggregated"
    min_prefill: Annotated[int, Meta(ge=0, description="fewest prefill workers, where there are such")] = 1
    min_decode: Annotated[int, Meta(ge=1, description="fewest decode workers")] = 1
    max_gpus: Annotated[int, Meta(ge=1, description="GPUs of all workers together, at most")] = 8
    max_step_up: Annotated[int, Meta(ge=1, description="workers of a role added in one decision")] = 8
    max_step_down: Annotated[int, Meta(ge=1, description="workers of a role taken away in one decision")] = 2
    predictive_interval_s: Annotated[float, Meta(gt=0, description="of the slow loop, that forecasts")] = 60.0
    reactive_interval_s: Annotated[float, Meta(gt=0, description="of the fast loop, that looks at queues")] = 5.0
    forecast: Annotated[
        Literal["auto", "constant", "average", "holt-winters", "arima", "kalman", "seasonal"],
        Meta(description="how traffic is forecast; auto: what was best of late"),
    ] = "auto"
    headroom: Annotated[float, Meta(gt=0, lt=1, description="quantile of the forecast to be ready for")] = 0.6
    season_s: Annotated[float, Meta(ge=0, description="how long a season of the traffic lasts; 0: found out")] = 0.0
    target_utilization: Annotated[float, Meta(gt=0, le=1, description="share of a worker's capacity to use")] = 0.8
    start_s: Annotated[float, Meta(ge=0, description="from the order of a worker until it takes requests")] = 30.0
    flips: Annotated[bool, Meta(description="turn idle prefill workers into decode workers and back")] = True
    flip_s: Annotated[float, Meta(ge=0, description="how long such a turn takes, without the drain")] = 3.0
    predictive: Annotated[bool, Meta(description="run the slow loop")] = True
    reactive: Annotated[bool, Meta(description="run the fast loop")] = True


class RoleFleet(Struct, frozen=True, kw_only=True):
    """Workers of one role. Those of an aggregated fleet are told as decode workers."""

    ready: int
    starting: int = 0  # ordered, not ready: they are never taken away
    draining: int = 0

    @property
    def ordered(self) -> int:
        return self.ready + self.starting


class Traffic(Struct, frozen=True, kw_only=True):
    """Of one interval that has ended. None, or not a number: not known. Means over the requests of the interval."""

    start_s: float
    end_s: float
    requests: float | None  # that arrived
    isl_tokens: float | None = None
    osl_tokens: float | None = None
    hit_share: float | None = None  # of all prompt tokens, those found in a cache
    ttft_s: float | None = None  # observed mean
    itl_s: float | None = None


class WorkerLoad(Struct, frozen=True, kw_only=True):
    """What one ready worker reports at an instant."""

    name: str
    queued_tokens: int = 0  # of prompts, to compute before a new one
    running: int = 0
    waiting: int = 0
    kv_tokens: int = 0
    total_kv_tokens: int = 0


class Observation(Struct, frozen=True, kw_only=True):
    """All that the planner is told at `at_s` (any monotonic clock)."""

    at_s: float
    prefill: RoleFleet
    decode: RoleFleet
    traffic: Traffic | None = None  # one that was not told before; None: nothing new, or the source is away
    prefill_loads: tuple[WorkerLoad, ...] = ()  # empty: not known
    decode_loads: tuple[WorkerLoad, ...] = ()


class Action(Enum):
    HOLD = "hold"
    SCALE = "scale"


class Flip(Struct, frozen=True, kw_only=True):
    """Turn `count` workers of one role into the other; they are part of the target counts already."""

    to_role: Literal["prefill", "decode"]
    count: int


class Reason(Struct, frozen=True, kw_only=True):
    """Why, for people and for `kvmesh planner explain`: `code` is stable, `text` has the figures."""

    code: str
    text: str


def reason(code: str, text: str) -> Reason:
    return Reason(code=code, text=text)


class ScalingDecision(Struct, frozen=True, kw_only=True):
    """The counts that should be ordered from now on (ready + starting). A HOLD repeats what is ordered."""

    at_s: float
    loop: Literal["predictive", "reactive", "none"]
    action: Action
    prefill: int
    decode: int
    flip: Flip | None = None
    reasons: tuple[Reason, ...] = ()
    forecast_rps: float | None = None
    needed_prefill: int | None = None  # before clamps
    needed_decode: int | None = None
    ttft_correction: float = 1.0
    itl_correction: float = 1.0
