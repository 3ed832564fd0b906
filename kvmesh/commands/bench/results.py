"""Declare the result schema of `kvmesh bench serve`, whoever drives the load. Times are in seconds."""

from typing import Literal

from msgspec import Struct

from kvmesh.simulator.report import Spread

SCHEMA = 1
PointKind = Literal["rate", "concurrency", "trace"]


class LoadPoint(Struct, frozen=True, kw_only=True):
    """Describe one point of a sweep. `value`: requests/s, clients, or 0 for a trace at its own times."""

    kind: PointKind
    value: float
    prefix_ratio: float = 0.0

    @property
    def label(self) -> str:
        unit = {"rate": f"{self.value:g} req/s", "concurrency": f"{self.value:g} clients", "trace": "trace"}[self.kind]
        return f"{unit}, prefix {self.prefix_ratio:.0%}" if self.prefix_ratio else unit


class RequestOutcome(Struct, frozen=True, kw_only=True):
    """Report how one request ended. Times count from the start of its point; 0 for a token that never came."""

    due_s: float  # when it was to be sent
    sent_s: float
    end_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    gaps_s: tuple[float, ...] = ()  # between events that hold tokens
    events: int = 0  # that hold tokens
    tokens: int = 0
    asked_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    has_usage: bool = False
    failure: str = ""  # the kind, of a closed set (kvmesh/commands/bench/reading.py), "" for none
    detail: str = ""


class GeneratorLoad(Struct, frozen=True, kw_only=True):
    """Say what the load took of the process that sent it."""

    cpu_share: float  # of one core
    cpu_s: float
    lag_p50_s: float  # sent later than scheduled
    lag_p99_s: float
    lag_max_s: float
    loop_lag_p99_s: float  # a timer of the sender fired so late
    machine_cpu_share: float  # of all cores of this machine, everything that runs on it


class PointResult(Struct, frozen=True, kw_only=True):
    """Hold the figures of one endpoint at one point. A spread is None where nothing was measured."""

    endpoint: str
    point: LoadPoint
    rounds: int
    requests: int
    offered_rps: float  # requests that were due, per second
    completed: int
    errors: dict[str, int]
    error_examples: dict[str, str]
    short_answers: int  # whole, with fewer tokens than asked for
    duration_s: float  # of all rounds
    isl_tokens: float  # mean, as the endpoint counted
    osl_tokens: float
    cached_share: float | None  # of prompt tokens; None: the endpoint does not say
    ttft_s: Spread | None
    itl_s: Spread | None  # gaps between events with tokens
    tpot_s: Spread | None  # of a request: (last - first token) / (tokens - 1)
    e2e_s: Spread | None
    requests_per_s: float  # completed, over the whole duration
    completion_rate: float  # completed per second in the middle of the run, without its tail
    output_tokens_per_s: float
    total_tokens_per_s: float
    output_tokens_per_s_gpu: float
    tokens_per_s_user: float  # 1 / mean time per output token
    attainment: float  # share of all requests within the SLO
    goodput_rps: float  # requests within the SLO, per second
    tokens_per_event: float
    usage_share: float  # of whole answers, those with usage; tokens of the others are counted by events
    generator: GeneratorLoad | None  # None: the driver does not say
    limit_rps: float | None  # requests/s at which the generator's own core would be full
    notes: tuple[str, ...] = ()


class SaturationPoint(Struct, frozen=True, kw_only=True):
    """Say where more load brings no more answers; a field is None where the sweep does not reach it."""

    endpoint: str
    kind: PointKind
    prefix_ratio: float
    at: float | None  # the first point that is saturated
    last_below: float | None  # the largest that is not
    most_requests_per_s: float
    most_goodput_rps: float
    most_goodput_at: float | None


class EndpointFacts(Struct, frozen=True, kw_only=True):
    """Hold what the checks learned about an endpoint."""

    name: str
    url: str
    model: str
    server: str = ""  # Server header, version
    words_per_token: float = 1.0
    template_tokens: float = 0.0
    checks: dict[str, str] = {}  # name -> "ok", or what is missing


class Manifest(Struct, frozen=True, kw_only=True):
    schema: int
    kvmesh: str
    driver: str
    driver_version: str
    started: str  # UTC
    command: str
    settings: dict[str, object]
    seed: int
    python: str
    packages: dict[str, str]
    system: str
    cpu: str
    cores: int
    memory_gib: float
    gpus: list[str]


class ServeReport(Struct, frozen=True, kw_only=True):
    manifest: Manifest
    endpoints: list[EndpointFacts]
    points: list[PointResult]
    saturation: list[SaturationPoint]
    warnings: list[str]
