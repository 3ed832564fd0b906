"""A worker that was killed finds its KV on the disk, and the frontend's router knows."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.mesh import Mesh, running_mesh, until

PROMPT = [(7 * i) % 400 + 10 for i in range(16 * 12 + 3)]


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def saved_bytes(mesh: Mesh, worker: str) -> float:
    return mesh.metric("kvmesh_worker_kv_tier_saved_bytes_total", worker, tier="disk")


@pytest.mark.long
def test_a_killed_worker_comes_back_with_its_disk(tmp_path: Path) -> None:
    with running_mesh(
        tmp_path / "run", "--prefill", "0", "--decode", "0", "--aggregated", "1", "--kv-disk", str(tmp_path / "kv")
    ) as mesh:
        [card] = mesh.workers().values()
        for _ in range(2):
            answer = mesh.complete(PROMPT, max_tokens=4)
        until(lambda: saved_bytes(mesh, card.name) > 0, what="blocks on the disk")
        mesh.until_replaced(card.name, mesh.kill(card.name))
        [again] = mesh.workers().values()
        assert again.worker_id != card.worker_id

        def known() -> list[int]:
            """Return the leading blocks that the router knows of, by tier."""
            candidates = mesh.route(PROMPT)["explanation"]["candidates"]
            return list(next(each["overlap_blocks"] for each in candidates if each["note"] == "chosen"))

        until(lambda: known() == [0, 0, 12, 12], what="the router to hear of the blocks on the disk")
        assert "index differs" not in mesh.logs(), "events have said so"
        answered = mesh.complete(PROMPT, max_tokens=4)
        assert cached(answered) == 16 * 12
        assert answered["choices"][0]["text"] == answer["choices"][0]["text"]
