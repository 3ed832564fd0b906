"""Mock workers beyond one a process: several in one, several ranks in one, and one that takes long to load."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psutil
import pytest

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.protocol.messages import Control, ControlAction, ControlReply, Role
from tests.support import mesh_tls
from tests.support.mesh import Mesh, running_mesh, until
from tests.support.patience import PATIENCE_S
from tests.support.streams import Stream, check_mock_answer

PROMPT = list(range(10, 90))  # 5 full blocks
COUNT = 20


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    flags = ["--engine", "mock", "--kv-transfer", "shm", "--decode", "1"]
    with running_mesh(tmp_path_factory.mktemp("mesh"), *flags) as mesh:
        yield mesh


@contextmanager
def worker(mesh: Mesh, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """Another process of workers until the block ends; then it must end well and by itself."""
    common = ["--engine", "mock", "--kv-transfer", "shm", "--model", "tiny", "--model-path", str(CHECKPOINT_DIR)]
    command = [
        sys.executable,
        "-m",
        "kvmesh.workers",
        *common,
        "--discovery",
        f"file:{mesh.run_dir / 'discovery'}",
        *flags,
    ]
    process = subprocess.Popen(command)
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    until(lambda: mesh.workers_seen() == len(mesh.workers()), what="the frontend to see them leave")


def until_known(mesh: Mesh, names: Sequence[str]) -> None:
    until(lambda: set(names) <= set(mesh.workers()), what="workers to join")
    log = mesh.run_dir / "logs" / "frontend.log"
    cards = mesh.workers().values()
    until(lambda: all(f"joined worker={c.worker_id}" in log.read_text() for c in cards), what="the frontend to hear")


def ask(mesh: Mesh, worker: str, rank: int | None = None, salt: str = "") -> Stream:
    headers = {"x-kvmesh-worker": worker} | ({} if rank is None else {"x-kvmesh-dp-rank": str(rank)})
    trace = {"trace": True, "disaggregate": False}
    stream = Stream(mesh.url, PROMPT, 6, headers=headers, kvmesh=trace, cache_salt=salt or worker).join()
    check_mock_answer(stream)
    assert stream.trace["decode_worker"] == worker
    return stream


def test_each_worker_of_a_process_is_one_of_its_own(mesh: Mesh) -> None:
    names = [f"many-{i}" for i in range(COUNT)]
    with worker(mesh, "--role", "decode", "--name", "many", "--count", str(COUNT)) as process:
        until_known(mesh, names)
        cards = [mesh.workers()[name] for name in names]
        assert {card.pid for card in cards} == {process.pid}
        assert len({card.address for card in cards}) == len({card.kv_events for card in cards}) == COUNT
        assert len({card.metrics_url for card in cards}) == 1
        for name in (names[0], names[7]):
            assert [ask(mesh, name, salt="shared").trace["cached_tokens"] for _ in range(2)] == [0, 64]
        told = [s for s in mesh.samples(names[0]) if s.name == "kvmesh_worker_cached_blocks"]
        assert {s.labels["worker"] for s in told} == set(names)
        assert {s.labels["worker"] for s in told if s.value} == {names[0], names[7]}


def test_one_of_many_workers_changes_its_role_alone(mesh: Mesh) -> None:
    names = [f"some-{i}" for i in range(3)]
    with worker(mesh, "--role", "decode", "--name", "some", "--count", "3"):
        until_known(mesh, names)
        asyncio.run(set_role(mesh.workers()["some-1"].address, Role.PREFILL))
        until_known(mesh, names)
        assert [mesh.workers()[name].role for name in names] == [Role.DECODE, Role.PREFILL, Role.DECODE]
        halves = {"kvmesh": {"trace": True, "disaggregate": True}, "headers": {"x-kvmesh-prefill-worker": "some-1"}}
        stream = Stream(mesh.url, PROMPT, 6, **halves, cache_salt="flipped").join()  # type: ignore[arg-type]
        check_mock_answer(stream)
        assert stream.trace["prefill_worker"] == "some-1"


async def set_role(address: str, role: Role) -> None:
    plane = PlaneClient(mesh_tls.operator())
    request = Control(action=ControlAction.SET_ROLE, arguments={"role": role.value})
    await plane.ask(address, "control", request, ControlReply, 10)
    await plane.close()


def test_the_router_knows_the_cache_of_each_rank(mesh: Mesh) -> None:
    with worker(mesh, "--role", "decode", "--name", "dp", "--dp-size", "2"):
        until_known(mesh, ["dp"])
        assert [ask(mesh, "dp", rank).trace["cached_tokens"] for rank in (1, 1, 0, 0)] == [0, 64, 0, 64]
        assert mesh.metric("kvmesh_worker_cached_blocks", "dp") == 2 * 5
        assert [ask(mesh, "dp", rank, "chosen").trace["cached_tokens"] for rank in (1,)] == [0]
        until(lambda: ask(mesh, "dp", None, "chosen").trace["cached_tokens"] == 64, what="the rank that has it")


def test_a_loading_worker_joins_late_and_can_be_stopped(mesh: Mesh) -> None:
    with worker(mesh, "--role", "decode", "--name", "slow", "--mock-start-s", "1.5"):
        time.sleep(1)
        assert "slow" not in mesh.workers()
        until_known(mesh, ["slow"])
    with worker(mesh, "--role", "decode", "--name", "slower", "--mock-start-s", "600") as process:
        until(lambda: bool(psutil.Process(process.pid).net_connections("tcp")), what="it to listen")
    assert "slower" not in mesh.workers()
