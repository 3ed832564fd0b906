"""Metrics of the torch engine."""

from kvmesh.mesh.measure import locked_counter

STEPS = locked_counter("kvmesh_worker_torch_steps_total")  # paged, gathered, bucket
WEIGHTS = locked_counter("kvmesh_worker_weights_total")  # mapped, written, own
WEIGHTS_MOVED = locked_counter("kvmesh_worker_weights_moved_total")
