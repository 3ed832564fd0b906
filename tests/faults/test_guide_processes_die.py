"""The processes that guides are compiled in are killed in mid-answer, as the kernel does when memory is short."""

from pathlib import Path

import psutil
import pytest

from tests.support.mesh import Mesh, running_mesh
from tests.support.streams import Stream, check_answer

TOKENS = 150
TEXT = {"type": "string", "minLength": 1000}
SCHEMA = {"name": "story", "schema": {"type": "object", "properties": {"text": TEXT}, "required": ["text"]}}
GUIDED = {"response_format": {"type": "json_schema", "json_schema": SCHEMA}}
PROMPT = range(100, 140)


def kill_zygote(mesh: Mesh, worker: str) -> None:
    """Kill the process that the guides of a worker are forked from; they end with it."""
    (zygote,) = [p for p in psutil.Process(mesh.pid(worker)).children() if "mesh.jobs.zygote" in p.cmdline()]
    zygote.kill()


@pytest.mark.e2e
def test_an_answer_that_loses_its_guide_continues_on_another_worker(tmp_path: Path) -> None:
    with running_mesh(tmp_path, "--prefill", "0", "--decode", "0", "--aggregated", "2") as mesh:
        right = Stream(mesh.url, PROMPT, TOKENS, **GUIDED).join()
        check_answer(right, right.tokens)
        stream = Stream(mesh.url, PROMPT, TOKENS, **GUIDED).until_tokens(5)
        (worker,) = [n for n in mesh.workers() if mesh.metric("kvmesh_worker_running_requests", n) > 0]
        kill_zygote(mesh, worker)
        check_answer(stream.join(), right.tokens)
        assert stream.trace["migrations"] == 1
        check_answer(
            Stream(mesh.url, PROMPT, TOKENS, headers={"x-kvmesh-worker": worker}, **GUIDED).join(), right.tokens
        )
