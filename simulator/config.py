"""Settings of a simulation."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from kvmesh.protocol.profile import Profile
from kvmesh.protocol.timing import PolynomialTiming, ProfileTiming, Timing, pull_s_per_token
from kvmesh.router.policies import Policy

Mode = Literal["aggregated", "disaggregated"]


class SimConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times in seconds of simulated time."""

    mode: Mode = "aggregated"
    workers: Annotated[int, Meta(ge=1)] = 8  # at first; prefill workers included
    prefill_workers: Annotated[int, Meta(ge=0)] = 0  # workers that prefill, when disaggregated; 0: half
    blocks: Annotated[int, Meta(ge=1)] = 2048  # of each worker
    block_size: Annotated[int, Meta(ge=1)] = 512
    max_num_seqs: Annotated[int, Meta(ge=1)] = 256
    max_step_tokens: Annotated[int, Meta(ge=1)] = 8192
    context_tokens: Annotated[int, Meta(ge=2)] = 1 << 20
    prefill_profile: Profile | None = None  # None: PolynomialTiming
    decode_profile: Profile | None = None  # of decode and aggregated workers
    fit_kv_tokens: Annotated[int, Meta(ge=0)] = 0  # held tokens at which PolynomialTiming is slowest; 0: a full cache
    speedup: Annotated[float, Meta(gt=0)] = 1.0
    prefill_rate: Annotated[float, Meta(ge=0)] = 0.0  # tokens/s; then a step that only decodes takes `itl_s`
    itl_s: Annotated[float, Meta(ge=0)] = 0.0
    kv_bandwidth_gbps: Annotated[float, Meta(ge=0)] = 64.0  # gigabytes/s between two workers; 0: no limit
    peers: bool = False  # workers pull prefixes from each other, as fast as from prefill workers
    host_blocks: Annotated[int, Meta(ge=0)] = 0  # of each worker, in host memory below the device
    host_bandwidth_gbps: Annotated[float, Meta(ge=0)] = 25.0  # gigabytes/s down and up; 0: no limit
    disk_blocks: Annotated[int, Meta(ge=0)] = 0  # of each worker, on a disk: those that are used twice
    disk_bandwidth_gbps: Annotated[float, Meta(ge=0)] = 2.0  # gigabytes/s down and up; 0: no limit
    shared_blocks: Annotated[int, Meta(ge=0)] = 0  # in storage of all workers: those that one of them uses twice
    shared_bandwidth_gbps: Annotated[float, Meta(ge=0)] = 1.0  # gigabytes/s of each worker, down and up; 0: no limit
    policy: Policy = "kv"
    recompute_price: Annotated[float, Meta(ge=0)] = 0.0
    saturation_tokens: Annotated[int, Meta(ge=0)] = 2048  # 0: no request waits in the router
    admission: bool = True  # routers refuse requests with a stated deadline that they cannot answer in time
    states_deadline: bool = False  # every client states a deadline that it never reaches
    routers: Annotated[int, Meta(ge=1)] = 1
    gossip_lag_s: Annotated[float, Meta(ge=0)] = 0.005
    event_lag_s: Annotated[float, Meta(ge=0)] = 0.005
    load_report_interval_s: Annotated[float, Meta(ge=0)] = 0.0  # between two reports of a worker's load; 0: none
    hop_s: Annotated[float, Meta(ge=0)] = 0.0  # from a client's request until the router sees it, and back
    concurrency: Annotated[int, Meta(ge=0)] = 0  # > 0: requests at a time, whatever the trace's arrivals
    start_s: Annotated[float, Meta(ge=0)] = 30.0  # from the order of a worker until it takes requests
    flip_s: Annotated[float, Meta(ge=0)] = 3.0  # from the end of the drain until it has its other role
    gpus_per_prefill: Annotated[float, Meta(ge=0)] = 1.0
    gpus_per_decode: Annotated[float, Meta(ge=0)] = 1.0
    ttft_slo_s: Annotated[float, Meta(gt=0)] = 0.5
    itl_slo_s: Annotated[float, Meta(gt=0)] = 0.05
    keeps_itl: bool = False  # routers know `itl_slo_s`, as where somebody has stated an SLO
    sample_s: Annotated[float, Meta(gt=0)] = 10.0  # of the time line; doubled when there are too many samples
    seed: Annotated[int, Meta(ge=0)] = 1

    @property
    def num_prefill(self) -> int:
        """Workers that only prefill, at first."""
        if self.mode == "aggregated":
            return 0
        return self.prefill_workers or max(1, self.workers // 2)

    @property
    def total_kv_tokens(self) -> int:
        return self.blocks * self.block_size


class RateTiming:
    """Prompts at a fixed rate, steps of decode in a fixed time."""

    def __init__(self, tokens_per_s: float, itl_s: float) -> None:
        self._tokens_per_s = tokens_per_s
        self._itl_s = itl_s

    def prefill_s(self, new_tokens: int) -> float:
        return new_tokens / self._tokens_per_s

    def decode_s(self, sequences: int, kv_tokens: int) -> float:
        return self._itl_s if sequences else 0.0


def timing_of(config: SimConfig, *, is_prefill: bool) -> Timing:
    if config.prefill_rate:
        return RateTiming(config.prefill_rate, config.itl_s)
    profile = config.prefill_profile if is_prefill else config.decode_profile
    if profile is not None:
        return ProfileTiming(profile, config.speedup)
    return PolynomialTiming(config.fit_kv_tokens or config.total_kv_tokens, config.speedup)


def tier_block_s(config: SimConfig, bandwidth_gbps: float) -> float:
    """Return how long one block takes to a tier below the device, or back."""
    return config.block_size * pull_s_per_token(config.decode_profile, bandwidth_gbps, config.speedup)


def pull_s_per_token_of(config: SimConfig) -> float:
    return pull_s_per_token(config.prefill_profile, config.kv_bandwidth_gbps, config.speedup)
