"""All metrics of the endpoint picker. Label values come from closed sets."""

from kvmesh.mesh.measure import counter, gauge, histogram, locked_gauge

REQUESTS = counter("kvmesh_picker_requests_total")  # outcome: frontend.errors.OUTCOMES; client_gone: while it waited
PICK_SECONDS = histogram("kvmesh_picker_pick_seconds").labels()
UNREAD = counter("kvmesh_picker_unread_total").labels()
STREAMS = gauge("kvmesh_picker_streams").labels()
UNSEEN = counter("kvmesh_picker_unseen_total").labels()
ENDPOINTS = locked_gauge("kvmesh_picker_endpoints")
