"""All metrics of stored responses."""

from prometheus_client import Counter

from frontend.responses.retention import Dropped
from mesh.gauges import gauge

_P = "kvmesh_frontend_responses_"

STORED = gauge(_P + "stored", "Responses in the store.", together="alike")
STORED_BYTES = gauge(_P + "stored_bytes", "Size of the store.", together="alike")
EVICTED = Counter(_P + "evicted_total", "Responses that left the store by themselves.", ["reason"])
MISSES = Counter(_P + "misses_total", "Requests for a response that is not stored.")
STORE_FAILURES = Counter(_P + "store_failures_total", "Responses that could not be stored.")
BACKGROUND = gauge(_P + "background", "Background responses that are queued or in progress.", together="sum")
_EXPIRED, _FULL = EVICTED.labels("expired"), EVICTED.labels("full")


def count_dropped(dropped: Dropped) -> None:
    if dropped.expired:
        _EXPIRED.inc(len(dropped.expired))
    if dropped.crowded_out:
        _FULL.inc(len(dropped.crowded_out))


def count_kept(count: int, total_bytes: int) -> None:
    STORED.set(count)
    STORED_BYTES.set(total_bytes)
