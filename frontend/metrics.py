"""All metrics of the frontend. Label values come from closed sets: never a request id or a client's words."""

from dataclasses import dataclass, field
from functools import cache

from mesh.gauges import gauge
from mesh.histogram import Distribution, LoopHistogram
from mesh.tally import LoopCounter, LoopGauge, Tally

_GAPS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_WAITS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_WHOLE_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)
_P = "kvmesh_frontend_"

REQUESTS = LoopCounter(  # outcome: errors.OUTCOMES
    _P + "requests_total", "Requests that ended.", ["endpoint", "outcome"]
)
INFLIGHT = LoopGauge(_P + "inflight", "Requests in progress.").labels()
MODELS_READY = gauge(_P + "models_ready", "Models that can be asked.", together="alike")
WORKERS_DOWN = gauge(_P + "workers_down", "Workers that end again and again, as their owners report.", together="alike")
TTFT = LoopHistogram(_P + "ttft_seconds", "Request received to first token sent.", ["endpoint"], buckets=_WAITS_S)
ITL = LoopHistogram(_P + "itl_seconds", "Mean gap between the tokens of one answer.", ["endpoint"], buckets=_GAPS_S)
DURATION = LoopHistogram(
    _P + "request_duration_seconds", "Request received to its end.", ["endpoint"], buckets=_WHOLE_S
)
INPUT_TOKENS = LoopHistogram(_P + "input_sequence_tokens", "Tokens of the prompt.", ["endpoint"], buckets=_TOKENS)
OUTPUT_TOKENS = LoopHistogram(_P + "output_sequence_tokens", "Tokens of the answer.", ["endpoint"], buckets=_TOKENS)
CACHED_TOKENS = LoopCounter(_P + "cached_tokens_total", "Prompt tokens found in a prefix cache.", ["endpoint"])
MIGRATIONS = LoopCounter(_P + "migrations_total", "Streams that went on at another worker.", ["endpoint"])


@dataclass(frozen=True, slots=True)
class EndpointMetrics:
    """The children of one endpoint: looking them up for every request costs as much as counting does."""

    endpoint: str
    ttft: Distribution
    itl: Distribution
    duration: Distribution
    input_tokens: Distribution
    output_tokens: Distribution
    cached_tokens: Tally
    migrations: Tally
    outcomes: dict[str, Tally] = field(default_factory=dict)

    def requests(self, outcome: str) -> Tally:
        if (tally := self.outcomes.get(outcome)) is None:
            tally = self.outcomes[outcome] = REQUESTS.labels(self.endpoint, outcome)
        return tally


@cache
def of_endpoint(endpoint: str) -> EndpointMetrics:
    return EndpointMetrics(
        endpoint,
        TTFT.labels(endpoint),
        ITL.labels(endpoint),
        DURATION.labels(endpoint),
        INPUT_TOKENS.labels(endpoint),
        OUTPUT_TOKENS.labels(endpoint),
        CACHED_TOKENS.labels(endpoint),
        MIGRATIONS.labels(endpoint),
    )
