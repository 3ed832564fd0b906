"""The pages of a running mesh have the metrics and labels of the list, and nothing else."""

from kvmesh.lab.observability.check import exported
from tests.support.mesh import Mesh

EVERYWHERE = {"kvmesh_build_info", "kvmesh_plane_connections", "process_cpu_seconds_total"}


def test_what_a_mesh_exports_is_declared(shm_mesh: Mesh) -> None:
    shm_mesh.complete("Once upon a time")
    workers = list(shm_mesh.workers())
    pages = {name: shm_mesh.page(name) for name in [None, *workers]}
    for name, page in pages.items():
        found, wrong = exported({str(name): page})
        assert wrong == [], name
        assert found >= EVERYWHERE, name
    found, _ = exported({"frontend": pages[None]})
    assert {"kvmesh_frontend_ttft_seconds", "kvmesh_frontend_slo_requests_total", "kvmesh_router_workers"} <= found
    for name in workers:
        for sample in shm_mesh.samples(name):
            if sample.name == "kvmesh_worker_requests_total":
                assert (sample.labels["worker"], sample.labels["model"]) == (name, "tiny")
                assert sample.labels["component"] == "worker"
