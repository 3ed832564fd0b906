"""The processes that guides are compiled in are killed in mid-answer, as the kernel does when memory is short."""

from pathlib import Path

import psutil
import pytest

from tests.support.mesh import Mesh, running_mesh
from tests.support.streams import Stream, check_answer

STREAMS, TOKENS = 3, 800
TEXT = {"type": "string", "minLength": 6000}
SCHEMA = {"name": "story", "schema": {"type": "object", "properties": {"text": TEXT}, "required": ["text"]}}
GUIDED = {"response_format": {"type": "json_schema", "json_schema": SCHEMA}}
PROMPT = range(100, 140)


def zygote_of(mesh: Mesh, worker: str) -> psutil.Process:
    """Return the process that the guides of a worker are forked from; they end with it."""
    (zygote,) = [p for p in psutil.Process(mesh.pid(worker)).children() if "kvmesh.mesh.jobs.zygote" in p.cmdline()]
    return zygote


@pytest.mark.e2e
@pytest.mark.long
def test_an_answer_that_loses_its_guide_continues_on_another_worker(tmp_path: Path) -> None:
    with running_mesh(tmp_path, "--prefill", "0", "--decode", "0", "--aggregated", "2") as mesh:
        workers = [{"x-kvmesh-worker": name} for name in mesh.workers()]
        right, again = [Stream(mesh.url, PROMPT, TOKENS, headers=worker, **GUIDED).join() for worker in workers]
        check_answer(again, right.tokens)
        zygotes = {name: zygote_of(mesh, name) for name in mesh.workers()}
        streams = [Stream(mesh.url, PROMPT, TOKENS, **GUIDED) for _ in range(STREAMS)]
        for stream in streams:
            stream.until_tokens(5)
        busiest = max(zygotes, key=lambda name: mesh.metric("kvmesh_worker_running_requests", name))
        zygotes[busiest].kill()
        for stream in streams:
            check_answer(stream.join(), right.tokens)
        assert sum(stream.trace["migrations"] for stream in streams) > 0
