"""All metrics of the router. Label values come from closed sets: never a request id."""

from prometheus_client import Counter

from mesh.gauges import gauge
from mesh.histogram import LoopHistogram
from mesh.tally import LoopCounter
from protocol.messages import Placed

PLACEMENTS = LoopCounter("kvmesh_router_placements_total", "Requests placed.", ["kind"])  # aggregated, disaggregated
FAILURES = Counter("kvmesh_router_failures_total", "Requests that could not be placed.", ["code"])
PLACE_SECONDS = LoopHistogram(
    "kvmesh_router_place_seconds", "Time to choose workers.", buckets=(1e-5, 1e-4, 1e-3, 1e-2)
).labels()
WAIT_SECONDS = LoopHistogram(
    "kvmesh_router_wait_seconds", "Time until a request was placed.", buckets=(1e-4, 1e-3, 1e-2, 0.1, 1, 10, 60)
).labels()
PROMPT_TOKENS = LoopCounter("kvmesh_router_prompt_tokens_total", "Prompt tokens of requests that have begun.").labels()
PREDICTED_TOKENS = LoopCounter(
    "kvmesh_router_predicted_reuse_tokens_total", "Of those, believed to be cached."
).labels()
REUSED_TOKENS = LoopCounter("kvmesh_router_reused_tokens_total", "Of those, found in the cache by the worker.").labels()
WAITING = gauge("kvmesh_router_waiting", "Requests that wait because every worker is saturated.", together="sum")
EXPIRED = gauge(
    "kvmesh_router_expired_bookings", "Bookings that ended because nothing was heard of them.", together="sum"
)
IN_FLIGHT = gauge("kvmesh_router_in_flight", "Bookings that stand.", together="sum")
INDEX_BLOCKS = gauge("kvmesh_router_index_blocks", "Distinct prefixes in the index.", together="alike")
ORPHAN_BLOCKS = gauge(
    "kvmesh_router_index_orphan_blocks", "Blocks dropped because their parent is not known.", together="alike"
)
WORKERS = gauge("kvmesh_router_workers", "Workers known.", together="alike")
LAPSED_WORKERS = gauge(
    "kvmesh_router_lapsed_workers", "Workers that answer although their lease has lapsed.", together="alike"
)
EVENTS = LoopCounter("kvmesh_router_kv_events_total", "KV events applied.").labels()
HTTP_REQUESTS = Counter("kvmesh_router_http_requests_total", "HTTP requests answered.", ["route", "status"])
HTTP_BOOKINGS = gauge("kvmesh_router_http_bookings", "Bookings made over HTTP that stand.", together="sum")
RESUMED = Counter("kvmesh_router_resumed_total", "Bookings taken over from a router that is gone.")
GOSSIP_SENT = Counter("kvmesh_router_gossip_sent_total", "Messages to other routers.")
GOSSIP_RECEIVED = Counter("kvmesh_router_gossip_received_total", "Messages from other routers.")
LOAD_REPORTS = LoopCounter("kvmesh_router_load_reports_total", "Reports of load from workers.").labels()
UNBOOKED_REQUESTS = gauge(
    "kvmesh_router_unbooked_requests", "Requests that workers report for outside callers.", together="alike"
)
UNBOOKED_BLOCKS = gauge("kvmesh_router_unbooked_blocks", "KV blocks that these requests hold.", together="alike")
UNBOOKED_TOKENS = gauge(
    "kvmesh_router_unbooked_tokens", "Prompt tokens that workers report beyond the bookings.", together="alike"
)
PEERS = gauge("kvmesh_router_peers", "Other routers that gossip.", together="alike")

_AGGREGATED, _DISAGGREGATED = PLACEMENTS.labels("aggregated"), PLACEMENTS.labels("disaggregated")


def count_placement(placed: Placed) -> None:
    (_AGGREGATED if placed.prefill is None else _DISAGGREGATED).inc()
