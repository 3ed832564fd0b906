"""All metrics of the router. Label values come from closed sets: never a request id."""

from prometheus_client import Counter, Gauge, Histogram

PLACEMENTS = Counter("kvmesh_router_placements_total", "Requests placed.", ["kind"])  # aggregated, disaggregated
FAILURES = Counter("kvmesh_router_failures_total", "Requests that could not be placed.", ["code"])
PLACE_SECONDS = Histogram("kvmesh_router_place_seconds", "Time to choose workers.", buckets=(1e-5, 1e-4, 1e-3, 1e-2))
PROMPT_BLOCKS = Counter("kvmesh_router_prompt_blocks_total", "Full prompt blocks of placed requests.")
OVERLAP_BLOCKS = Counter("kvmesh_router_overlap_blocks_total", "Of those, cached where the prompt is computed.")
IN_FLIGHT = Gauge("kvmesh_router_in_flight", "Bookings that stand.")
INDEX_BLOCKS = Gauge("kvmesh_router_index_blocks", "Distinct prefixes in the index.")
ORPHAN_BLOCKS = Gauge("kvmesh_router_index_orphan_blocks", "Blocks dropped because their parent is not known.")
WORKERS = Gauge("kvmesh_router_workers", "Workers known.")
EVENTS = Counter("kvmesh_router_kv_events_total", "KV events applied.")
