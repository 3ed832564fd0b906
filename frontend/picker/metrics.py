"""All metrics of the endpoint picker. Label values come from closed sets."""

from mesh.gauges import gauge
from mesh.histogram import LoopHistogram
from mesh.tally import LoopCounter, LoopGauge

REQUESTS = LoopCounter(  # outcome: frontend.errors.OUTCOMES; client_gone: it left while it waited
    "kvmesh_picker_requests_total", "Requests that an endpoint was asked for.", ["outcome"]
)
PICK_SECONDS = LoopHistogram(
    "kvmesh_picker_pick_seconds",
    "Time to pick an endpoint: reading the prompt, placing it, waiting for room.",
    buckets=(1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.1, 1, 10, 60),
).labels()
UNREAD = LoopCounter("kvmesh_picker_unread_total", "Requests placed by their length: the prompt was not read.").labels()
STREAMS = LoopGauge("kvmesh_picker_streams", "Requests that gateways have open here.").labels()
UNSEEN = LoopCounter(
    "kvmesh_picker_unseen_total", "Requests whose streams ended before their answers: their load was let go early."
).labels()
ENDPOINTS = gauge("kvmesh_picker_endpoints", "Endpoints that can be picked.", together="alike")
