"""A mesh that grows and shrinks while it serves: over its control socket, and by a planner."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from kvmesh.planner.record import Record, read_records
from tests.support.mesh import Mesh, running_mesh, until
from tests.support.patience import PATIENCE_S
from tests.support.streams import Stream, check_mock_answer

pytestmark = pytest.mark.e2e

# no admission: every answer must come, also where a busy machine makes requests wait
MOCK = ["--engine", "mock", "--kv-transfer", "shm", "--no-admission"]


def prompt_of(seed: int) -> list[int]:
    return [100 + (seed * 7919 + i * 31) % 1800 for i in range(40)]


class Control:
    """The control socket of a mesh."""

    def __init__(self, run_dir: Path) -> None:
        transport = httpx.HTTPTransport(uds=str(run_dir / "control" / "control.sock"))
        self._http = httpx.Client(transport=transport, base_url="http://mesh", timeout=PATIENCE_S)

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        response = self._http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def workers(self, state: str = "ready") -> dict[str, str]:
        """Roles by name."""
        told = self._http.get("/workers").json()["workers"]
        return {worker["name"]: worker["role"] for worker in told if worker["state"] == state}

    def count(self, role: str) -> int:
        return list(self.workers().values()).count(role)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    # a short path: the socket lies in the run directory
    with running_mesh(tmp_path_factory.mktemp("up"), *MOCK, "--mock-speedup", "2") as mesh:
        yield mesh


@pytest.fixture
def control(mesh: Mesh) -> Control:
    return Control(mesh.run_dir)


@contextmanager
def steady_load(mesh: Mesh, clients: int, tokens: int = 20) -> Iterator[list[Stream]]:
    """Send load: each client sends its next request after the last answer. All answers must come and be right."""
    stop = threading.Event()
    streams: list[Stream] = []

    def client(number: int) -> None:
        for i in range(10**6):
            if stop.is_set():
                return
            stream = Stream(mesh.url, prompt_of(1000 * number + i), tokens)
            streams.append(stream)
            stream.join()

    threads = [threading.Thread(target=client, args=(n,)) for n in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield streams
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert len(streams) >= clients
    for stream in streams:
        check_mock_answer(stream)


def test_workers_come_and_go_under_load_and_no_request_notices(mesh: Mesh, control: Control) -> None:
    with steady_load(mesh, 6) as streams:
        assert control.post("/scale", prefill=2, decode=4)["started"] == ["prefill-1", "decode-2", "decode-3"]
        until(lambda: control.count("decode") == 4 and control.count("prefill") == 2, what="the new workers")
        until(lambda: mesh.workers_seen() == 6, what="the frontend to hear of them")
        pids = {card.name: card.pid for card in mesh.workers().values()}
        seen = len(streams)
        until(lambda: len(streams) > seen + 30, what="requests on the new workers")
        draining = control.post("/scale", prefill=1, decode=1)["draining"]
        assert len(draining) == 4
        until(lambda: not any(psutil.pid_exists(pids[name]) for name in draining), what="the drained workers to end")
        seen = len(streams)
        until(lambda: len(streams) > seen + 10, what="requests on those that are left")
    assert len(control.workers()) == 2
    control.post("/scale", decode=2)
    until(lambda: control.count("decode") == 2, what="the mesh as it was")


def test_a_drained_worker_finishes_what_it_has(mesh: Mesh, control: Control) -> None:
    until(lambda: mesh.workers_seen() == 3, what="the frontend to hear of all")
    streams = [Stream(mesh.url, prompt_of(n), 150) for n in range(4)]
    for stream in streams:
        stream.until_tokens(5)
    [name] = control.post("/scale", decode=1)["draining"]
    assert name in control.workers("draining")
    for stream in streams:
        check_mock_answer(stream.join())
        assert stream.trace.get("migrations", 0) == 0
    until(lambda: name not in control.workers("draining"), what="it to end")
    control.post("/scale", decode=2)
    until(lambda: control.count("decode") == 2, what="the mesh as it was")


def test_a_flipped_worker_keeps_its_role_after_a_restart(mesh: Mesh, control: Control) -> None:
    with steady_load(mesh, 4):
        [name] = control.post("/flip", to="prefill", count=1)["flipped"]
        until(lambda: control.workers().get(name) == "prefill", what="the flip")
        until(lambda: mesh.workers_seen() == 3, what="the frontend to hear of it")
    pid = mesh.kill(name)
    mesh.until_replaced(name, pid)
    until(lambda: control.workers().get(name) == "prefill", what="its role to be kept")
    [other] = control.post("/flip", to="decode", count=1)["flipped"]  # of two that have nothing to do, one or the other
    until(lambda: control.workers().get(other) == "decode", what="the flip back")


def test_a_worker_that_cannot_start_leaves_the_mesh_running(tmp_path: Path) -> None:
    """Make the log file a folder, so that it cannot be opened."""
    with running_mesh(tmp_path, *MOCK, "--decode", "1") as mesh:
        control = Control(tmp_path)
        (tmp_path / "logs" / "decode-1.log").mkdir()
        control.post("/scale", decode=2)
        until(lambda: not control.workers("starting"), what="it to be given up")
        assert control.workers() == {"prefill-0": "prefill", "decode-0": "decode"}
        assert len(mesh.complete(prompt_of(1), max_tokens=3)["choices"]) == 1
        (tmp_path / "logs" / "decode-1.log").rmdir()


# --- with a planner -----------------------------------------------------------------------------------

PLANNER = [
    "--planner", "--planner-predictive-interval-s", "3", "--planner-reactive-interval-s", "1",
    "--planner-start-s", "3", "--planner-max-gpus", "5",
]  # fmt: skip


def decided(run_dir: Path, condition: Callable[[Record], bool]) -> bool:
    path = run_dir / "planner.jsonl"
    return path.exists() and any(condition(record) for record in read_records(path, 1000))


@pytest.mark.long
def test_a_restarted_planner_continues_from_the_fleet(tmp_path: Path) -> None:
    flags = [*MOCK, "--decode", "1", "--mock-speedup", "0.5", "--max-num-seqs", "4", *PLANNER]
    with running_mesh(tmp_path, *flags) as mesh:
        control = Control(tmp_path)
        until(lambda: decided(tmp_path, lambda record: True), what="the first decision")
        with steady_load(mesh, 8, tokens=40):
            until(lambda: control.count("decode") > 1, what="a second decode worker")
            before = control.count("decode")
            [planner] = [p for p in mesh.processes() if p.cmdline()[1:4] == ["-P", "-m", "kvmesh.planner"]]
            records = len(read_records(tmp_path / "planner.jsonl", 1000))
            os.kill(planner.pid, signal.SIGKILL)
            until(lambda: len(read_records(tmp_path / "planner.jsonl", 1000)) > records + 3, what="the next planner")
            assert control.count("decode") >= before
        new = read_records(tmp_path / "planner.jsonl", 1000)[records:]
        assert all(record.decision.decode >= before for record in new)
        assert all(record.error == "" for record in new)
        assert sum(record.decision.prefill + record.decision.decode > 5 for record in new) == 0


@pytest.mark.long
def test_a_planner_flips_a_worker_when_the_mix_changes(tmp_path: Path) -> None:
    """Short prompts and long answers, and no GPU to spare: one of the two prefill workers has to decode."""
    flags = [*MOCK, "--prefill", "2", "--decode", "1", "--mock-speedup", "0.5", "--max-num-seqs", "4", *PLANNER]
    with running_mesh(tmp_path, *flags, "--planner-max-gpus", "3", "--planner-flip-s", "1") as mesh:
        control = Control(tmp_path)
        names = control.workers().keys()
        with steady_load(mesh, 8, tokens=60):
            until(lambda: control.count("decode") == 2, what="a prefill worker to turn")
        assert control.workers().keys() == names, "nobody was started, nobody was stopped"
        flips = [
            record for record in read_records(tmp_path / "planner.jsonl", 1000) if record.decision.flip is not None
        ]
        assert [(record.decision.prefill, record.decision.decode) for record in flips][:1] == [(1, 2)]
        assert flips[0].applied is not None
        assert (flips[0].applied.flipped, flips[0].applied.is_complete) == (1, True)
