"""The results of a simulation."""

from msgspec import Struct


class Spread(Struct, frozen=True, kw_only=True):
    """Hold the spread of many values, in seconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class Sample(Struct, frozen=True, kw_only=True):
    """Hold one interval of the time line, with the workers at its end."""

    at_s: float  # its end
    requests: int  # that arrived
    ended: int
    good: int  # requests that ended within the SLO
    ttft_s: float  # mean of the first tokens of the interval
    itl_s: float  # mean of the requests that ended
    prefill_ready: int
    prefill_starting: int
    decode_ready: int  # aggregated ones are counted here
    decode_starting: int
    draining: int
    waiting: int  # in the routers
    prompt_tokens: int = 0  # of requests that got their first token in the interval
    cached_tokens: int = 0  # of these, found in a cache
    predicted_tokens: int = 0  # the same as the router had believed when it placed

    @property
    def hit_share(self) -> float:
        return self.cached_tokens / max(1, self.prompt_tokens)

    @property
    def predicted_share(self) -> float:
        return self.predicted_tokens / max(1, self.prompt_tokens)


class PlannerChange(Struct, frozen=True, kw_only=True):
    """Hold a decision of the planner that changed something."""

    at_s: float
    prefill: int
    decode: int
    flip: str  # "", or e.g. "2 to decode"
    why: str


class SimReport(Struct, frozen=True, kw_only=True):
    requests: int
    failed: int
    duration_s: float  # until the last request ended
    hit_share: float  # of all prompt tokens, those found in the cache of the worker that computed the prompt
    predicted_hit_share: float  # the same as the router had believed when it placed
    ttft_s: Spread
    itl_s: Spread  # of requests: (last - first token) / (OSL - 1)
    e2e_s: Spread
    queue_mean_s: float  # of the TTFT, spent waiting in the router
    attainment: float  # share of the requests that had their first token and their mean ITL within the SLO
    ttft_attainment: float
    itl_attainment: float
    ttft_windows_kept: float  # share of windows of 5 minutes in which the p95 of the TTFT kept the SLO
    itl_windows_kept: float
    goodput_rps: float  # requests within the SLO, per second
    output_tokens_per_s: float
    preemptions: int
    balance: float  # most / mean prompt tokens computed by a worker that computes them, and was there from the first
    busy_share: float  # of the workers' time
    gpu_hours: float  # from a worker's order until it is gone, or the end
    worker_hours: float
    started: int  # workers ordered by the planner
    stopped: int
    flipped: int
    timeline: tuple[Sample, ...]
    changes: tuple[PlannerChange, ...]
    changes_left_out: int
