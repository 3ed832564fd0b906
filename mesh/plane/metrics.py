"""All metrics of the request plane, of the servers and clients of one process together."""

from kvmesh.mesh.measure import counter, gauge

CONNECTIONS = gauge("kvmesh_plane_connections")
ASSEMBLING_BYTES = gauge("kvmesh_plane_assembling_bytes")
UNSENT_BYTES = gauge("kvmesh_plane_unsent_bytes")
HANGUPS = counter("kvmesh_plane_hangups_total")
REPEATED = counter("kvmesh_plane_repeated_frames_total")
