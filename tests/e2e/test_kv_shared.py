"""A worker uses what another one has put into shared storage, also after that one was killed."""

from pathlib import Path

import pytest

from tests.e2e.test_kv_disk import PROMPT, cached
from tests.support.mesh import Mesh, running_mesh, until


def shared_bytes(mesh: Mesh, what: str, worker: str) -> float:
    return mesh.metric(f"kvmesh_worker_kv_tier_{what}_bytes_total", worker, tier="shared")


def known(mesh: Mesh) -> dict[str, list[int]]:
    """Return the leading blocks that the router knows of each worker, by tier."""
    candidates = mesh.route(PROMPT)["explanation"]["candidates"]
    return {each["worker"]: list(each["overlap_blocks"]) for each in candidates}


@pytest.mark.long
def test_another_worker_uses_the_prefix_of_a_killed_one(tmp_path: Path) -> None:
    flags = ("--prefill", "0", "--decode", "0", "--aggregated", "2", "--kv-shared", f"dir:{tmp_path / 'kv'}")
    with running_mesh(tmp_path / "run", *flags) as mesh:
        for _ in range(3):  # the worker that is asked first may not be asked again
            answer = mesh.complete(PROMPT, max_tokens=4)
        [first] = who_saved(mesh)
        until(lambda: [blocks[3] for blocks in known(mesh).values()] == [12, 12], what="the router to hear of both")
        [other] = set(mesh.workers()) - {first}
        gone = str(mesh.workers()[first].worker_id)
        mesh.kill(first)
        until(lambda: gone not in known(mesh), what="the router to miss the killed one")
        again = mesh.complete(PROMPT, max_tokens=4)
        assert cached(again) == 16 * 12
        assert again["choices"][0]["text"] == answer["choices"][0]["text"]
        assert shared_bytes(mesh, "loaded", other) > 0


def who_saved(mesh: Mesh) -> list[str]:
    """Wait until blocks are in shared storage; return the workers that put them there."""
    found: list[str] = []

    def look() -> bool:
        found[:] = [name for name in mesh.workers() if shared_bytes(mesh, "saved", name) > 0]
        return bool(found)

    until(look, what="blocks in shared storage")
    return found
