"""All metrics of the frontend. Labels have closed or bounded sets of values: no request id, no client's words."""

import time
from dataclasses import dataclass, field

from kvmesh.mesh.histogram import Distribution
from kvmesh.mesh.measure import bounded, counter, gauge, histogram, locked_gauge
from kvmesh.mesh.tally import Tally

_P = "kvmesh_frontend_"
MOST_REMEMBERED = 1024  # children by endpoint and model

REQUESTS = counter(_P + "requests_total")  # outcome: errors.OUTCOMES
SLO_REQUESTS = counter(_P + "slo_requests_total")
SLO_SECONDS = locked_gauge(_P + "slo_seconds")
INFLIGHT = gauge(_P + "inflight").labels()
MODELS_READY = locked_gauge(_P + "models_ready")
WORKERS_DOWN = locked_gauge(_P + "workers_down")
TTFT = histogram(_P + "ttft_seconds")
ITL = histogram(_P + "itl_seconds")
DURATION = histogram(_P + "request_duration_seconds")
INPUT_TOKENS = histogram(_P + "input_sequence_tokens")
OUTPUT_TOKENS = histogram(_P + "output_sequence_tokens")
CACHED_TOKENS = counter(_P + "cached_tokens_total")
MIGRATIONS = counter(_P + "migrations_total")
SUSPECTS = counter(_P + "suspects_total")  # verdict: tried (again, alone), stopped, refused


@dataclass(frozen=True, slots=True)
class EndpointMetrics:
    """The children of one endpoint and model: looking them up for every request costs as much as counting does."""

    endpoint: str
    model: str
    ttft: Distribution
    itl: Distribution
    duration: Distribution
    input_tokens: Distribution
    output_tokens: Distribution
    cached_tokens: Tally
    migrations: Tally
    outcomes: dict[str, Tally] = field(default_factory=dict)
    slo: dict[str, Tally] = field(default_factory=dict)

    def requests(self, outcome: str) -> Tally:
        if (tally := self.outcomes.get(outcome)) is None:
            tally = self.outcomes[outcome] = REQUESTS.labels(self.endpoint, self.model, outcome)
        return tally

    def exemplify(self, trace_id: str, duration_s: float, ttft_s: float | None = None, itl_s: float = 0.0) -> None:
        """Let the histograms name the trace of a request that they have counted."""
        unix_s = time.time()
        self.duration.exemplify(duration_s, trace_id, unix_s)
        if ttft_s is not None:
            self.ttft.exemplify(ttft_s, trace_id, unix_s)
        if itl_s:
            self.itl.exemplify(itl_s, trace_id, unix_s)

    def slo_missed(self, missed: str) -> Tally:
        """Count by what a request has missed: none, ttft, itl, both or failed."""
        if (tally := self.slo.get(missed)) is None:
            tally = self.slo[missed] = SLO_REQUESTS.labels(self.endpoint, self.model, missed)
        return tally


_of_endpoint: dict[tuple[str, str], EndpointMetrics] = {}


def of_endpoint(endpoint: str, model: str = "") -> EndpointMetrics:
    """Return the children of an endpoint and the model of its workers; "": the request named none that is known."""
    found = _of_endpoint.get((endpoint, model))
    if found is None:
        found = _made(endpoint, bounded("model", model) if model else "")
        if len(_of_endpoint) < MOST_REMEMBERED:
            _of_endpoint[endpoint, model] = found
    return found


def _made(endpoint: str, model: str) -> EndpointMetrics:
    of = (endpoint, model)
    return EndpointMetrics(
        endpoint,
        model,
        TTFT.labels(*of),
        ITL.labels(*of),
        DURATION.labels(*of),
        INPUT_TOKENS.labels(*of),
        OUTPUT_TOKENS.labels(*of),
        CACHED_TOKENS.labels(*of),
        MIGRATIONS.labels(*of),
    )
