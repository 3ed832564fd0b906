"""An operator drains a worker under load, looks at it, and puts it back, with `kvmesh workers` against a real mesh."""

import json
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from kvmesh.frontend.keys.keyfile import KeyLine, hashed, written
from kvmesh.protocol.messages import WorkerCard
from tests.support import mesh_tls
from tests.support.mesh import Mesh, running_mesh, until
from tests.support.streams import Stream, check_mock_answer

pytestmark = [pytest.mark.e2e, pytest.mark.long]

KEY = "sk-operator"
SENT = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(written(KeyLine(name="ops", sha256=hashed(KEY), admin=True)) + "\n")
    keys.chmod(0o600)
    flags = ("--engine=mock", "--mock-itl-ms=20", "--prefill=0", "--decode=0", "--aggregated=2", "--kv-transfer=shm")
    with running_mesh(keys.parent / "run", *flags, f"--api-keys-file={keys}", "--canary-interval-s=1") as mesh:
        yield mesh


def workers(mesh: Mesh, *words: str) -> list[dict[str, object]]:
    """Return the lines that the command prints. It must end with 0."""
    command = [sys.executable, "-m", "kvmesh", "workers", *words, f"--url={mesh.url}", f"--api-key={KEY}", "--json"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert said.returncode == 0, said.stderr
    return [json.loads(line) for line in said.stdout.splitlines()]


def state(mesh: Mesh, name: str) -> str:
    listed = json.loads(json.dumps(workers(mesh)[0]))
    return str({one["name"]: one["status"]["state"] for one in listed}[name])


def health(card: WorkerCard) -> tuple[int, str]:
    reply = httpx.get(card.metrics_url.replace("/metrics", "/health"), timeout=30, verify=mesh_tls.verify())
    return reply.status_code, reply.text


def answer(mesh: Mesh, worker: str = "", tokens: int = 5) -> None:
    pin = {"x-kvmesh-worker": worker} if worker else {}
    check_mock_answer(Stream(mesh.url, list(range(100, 140)), tokens, headers=SENT | pin).join())


def test_a_worker_is_drained_under_load_and_comes_back(mesh: Mesh) -> None:
    card = mesh.workers()["aggregated-0"]
    running = [Stream(mesh.url, list(range(50 + number, 90 + number)), 60, headers=SENT) for number in range(6)]
    until(lambda: all(stream.tokens for stream in running), what="all streams have begun")
    workers(mesh, "drain", "aggregated-0")
    for stream in running:
        check_mock_answer(stream.join())
    assert state(mesh, "aggregated-0") == "drained"
    assert health(card)[0] == 503 and "is drained" in health(card)[1]
    for _ in range(4):
        answer(mesh)
    # it may be trying itself with a canary
    until(lambda: mesh.metric("kvmesh_worker_running_requests", worker="aggregated-0") == 0, what="an idle worker")
    workers(mesh, "resume", "aggregated-0")
    assert health(card)[0] == 200
    until(lambda: mesh.workers_seen() == 2, what="the router knows it again")
    answer(mesh, "aggregated-0")


def test_quiet_workers_are_tried(mesh: Mesh) -> None:
    until(
        lambda: mesh.metric("kvmesh_worker_canaries_total", worker="aggregated-1", outcome="ok") >= 2,
        what="two canaries",
    )
