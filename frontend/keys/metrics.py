"""Metrics of API keys. The label `key` is the name of a key in the file, or the one name of all tokens."""

from kvmesh.mesh.measure import counter, gauge, locked_gauge
from kvmesh.mesh.tally import LoopMetric

_P = "kvmesh_frontend_key_"
REQUESTS = counter(_P + "requests_total")  # outcome: kvmesh.frontend.errors.OUTCOMES
TOKENS = counter(_P + "tokens_total")
REFUSED = counter(_P + "refused_total")
STREAMS = gauge(_P + "streams")
ASKS = counter(_P + "leases_total")
FRONTENDS = locked_gauge(_P + "frontends")
BUDGETS = locked_gauge(_P + "budgets")


def forget(key: str) -> None:
    """Remove the metrics of a key that is not configured any more."""
    metrics: tuple[LoopMetric, ...] = (REQUESTS, TOKENS, REFUSED, STREAMS)  # type: ignore[type-arg]
    for metric in metrics:
        metric.forget(key)
