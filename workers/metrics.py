"""All metrics of a worker. Label values come from small sets: never a request id."""

from prometheus_client import Counter, Gauge, Histogram

REQUESTS = Counter("kvmesh_worker_requests_total", "Requests ended.", ["outcome"])  # "ok" or a MeshError.code
STEP_SECONDS = Histogram(
    "kvmesh_worker_step_seconds", "Time of one forward step.", buckets=(1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1)
)
STEP_TOKENS = Counter("kvmesh_worker_step_tokens_total", "Tokens computed, prompts and answers together.")
PULLS = Counter("kvmesh_worker_kv_pulls_total", "KV pulls ended.", ["backend", "outcome"])
PULL_BYTES = Counter("kvmesh_worker_kv_pulled_bytes_total", "KV bytes fetched from prefill workers.", ["backend"])
PULL_SECONDS = Histogram(
    "kvmesh_worker_kv_pull_seconds",
    "Time of one KV pull.",
    ["backend"],
    buckets=(1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1, 3),
)
TURNS = Counter("kvmesh_worker_role_changes_total", "Times a worker of this process has changed its role.", ["role"])
# By name of the worker: one process may host many, and these say how each of them is. All else is their sum.
RUNNING = Gauge("kvmesh_worker_running_requests", "Requests in the batch.", ["worker"])
WAITING = Gauge("kvmesh_worker_waiting_requests", "Requests that wait for a place.", ["worker"])
QUEUED_TOKENS = Gauge("kvmesh_worker_queued_tokens", "Prompt tokens that are still to compute.", ["worker"])
USED_BLOCKS = Gauge("kvmesh_worker_used_blocks", "KV blocks held by requests and offers.", ["worker"])
TOTAL_BLOCKS = Gauge("kvmesh_worker_total_blocks", "All KV blocks: used, cached and free.", ["worker"])
CACHED_BLOCKS = Gauge(
    "kvmesh_worker_cached_blocks", "KV blocks that hold a reusable prefix and no request.", ["worker"]
)
OFFERS = Gauge("kvmesh_worker_kv_offers", "KV offers that wait for a decode worker.", ["worker"])
