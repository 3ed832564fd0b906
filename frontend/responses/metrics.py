"""All metrics of stored responses."""

from kvmesh.frontend.responses.retention import Dropped
from kvmesh.mesh.measure import locked_counter, locked_gauge

_P = "kvmesh_frontend_responses_"

STORED = locked_gauge(_P + "stored")
STORED_BYTES = locked_gauge(_P + "stored_bytes")
EVICTED = locked_counter(_P + "evicted_total")
MISSES = locked_counter(_P + "misses_total")
STORE_FAILURES = locked_counter(_P + "store_failures_total")
BACKGROUND = locked_gauge(_P + "background")
_EXPIRED, _FULL = EVICTED.labels("expired"), EVICTED.labels("full")


def count_dropped(dropped: Dropped) -> None:
    if dropped.expired:
        _EXPIRED.inc(len(dropped.expired))
    if dropped.crowded_out:
        _FULL.inc(len(dropped.crowded_out))


def count_kept(count: int, total_bytes: int) -> None:
    STORED.set(count)
    STORED_BYTES.set(total_bytes)
