"""Test kill -9 of prefill workers before, during and after the hand-over of the KV."""

import itertools
from pathlib import Path

import psutil
import pytest

from tests.faults.prompts import LENGTHS, prompt_of
from tests.support.mesh import Mesh, running_mesh, until
from tests.support.streams import Stream, check_answer, check_mock_answer

DISAGGREGATE = {"trace": True, "disaggregate": True}


def test_killed_while_it_prefills(mesh: Mesh) -> None:
    with mesh.stopped("prefill-0"):
        streams = [Stream(mesh.url, prompt_of(n, n), 20, kvmesh=DISAGGREGATE) for n in LENGTHS]
        until(lambda: mesh.metric("kvmesh_router_in_flight") == len(streams))
        assert not any(stream.is_over or stream.tokens for stream in streams)
        killed = mesh.kill("prefill-0")
    for stream in streams:
        check_mock_answer(stream.join())
        assert stream.trace["migrations"] >= 1
    mesh.until_replaced("prefill-0", killed)


@pytest.mark.parametrize(("transfer", "connected"), [("nixl", True), ("shm", False), ("shm", True)])
def test_killed_between_the_ticket_and_the_pull(transfer: str, connected: bool, request: pytest.FixtureRequest) -> None:
    """The decode worker finds nobody to fetch from, and computes the prompt itself. `connected`: it fetched before."""
    mesh: Mesh = request.getfixturevalue("nixl_mesh" if transfer == "nixl" else "mesh")
    prompts = [prompt_of(n, n) for n in LENGTHS]
    alone = {"kvmesh": {"disaggregate": False}, "cache_salt": f"alone {transfer}"}
    answers = [stream.join().tokens for stream in [Stream(mesh.url, p, 20, **alone) for p in prompts]]
    pinned = {"kvmesh": DISAGGREGATE | {"worker": "decode-0"}, "cache_salt": f"between {transfer} {connected}"}
    if connected:
        assert Stream(mesh.url, prompt_of(40, 7), 5, **pinned).join().trace["kv_bytes_pulled"] > 0
    with mesh.stopped("decode-0"):
        streams = [Stream(mesh.url, prompt, 20, **pinned) for prompt in prompts]
        until(lambda: mesh.metric("kvmesh_worker_kv_offers", "prefill-0") == len(streams), what="offers")
        killed = mesh.kill("prefill-0")
        until(lambda: not psutil.pid_exists(killed))
    for stream, answer in zip(streams, answers, strict=True):
        check_answer(stream.join(), answer)
        if not (connected and transfer == "shm"):  # the dead worker's memory is mapped, and holds what it held
            assert stream.trace["pull_error"]
            assert stream.trace["kv_bytes_pulled"] == 0


def test_killed_after_the_pull(mesh: Mesh) -> None:
    streams = [Stream(mesh.url, prompt_of(n, n), 60, kvmesh=DISAGGREGATE) for n in LENGTHS]
    for stream in streams:
        stream.until_tokens(3)
    mesh.kill("prefill-0")
    for stream in streams:
        check_mock_answer(stream.join())
        assert stream.trace["prefill_worker"] == "prefill-0"


def test_decode_workers_compute_prompts_while_no_prefill_worker_lives(mesh: Mesh) -> None:
    killed = mesh.kill("prefill-0")
    streams = [Stream(mesh.url, prompt_of(n, n), 10, kvmesh=DISAGGREGATE) for n in LENGTHS]
    for stream in streams:
        check_mock_answer(stream.join())
    mesh.until_replaced("prefill-0", killed)

    def used() -> bool:
        stream = Stream(mesh.url, prompt_of(40), 4, kvmesh=DISAGGREGATE).join()
        check_mock_answer(stream)
        return stream.trace["prefill_worker"] == "prefill-0" and mesh.pid("prefill-0") != killed

    until(used, what="a request for the new worker")


@pytest.mark.parametrize("transfer", ["nixl", "shm"])
def test_a_new_prefill_worker_hands_over_kv(transfer: str, request: pytest.FixtureRequest) -> None:
    mesh: Mesh = request.getfixturevalue("nixl_mesh" if transfer == "nixl" else "mesh")
    firsts = itertools.count()

    def pulled() -> bool:
        where = DISAGGREGATE | {"worker": "decode-1"}
        stream = Stream(mesh.url, prompt_of(80, next(firsts)), 4, kvmesh=where, cache_salt="new").join()
        assert stream.is_done, stream
        return stream.trace["kv_bytes_pulled"] > 0 and not stream.trace["pull_error"]

    mesh.until_replaced("prefill-0", mesh.kill("prefill-0"))
    until(pulled, what="a pull from the new prefill worker")


@pytest.mark.long  # it starts a mesh of its own, so that no earlier kill counts
def test_a_prefill_worker_killed_three_times_prefills_soon_each_time(tmp_path: Path) -> None:
    numbers = itertools.count()

    def prefills(pid: int) -> bool:
        salt = f"kill {next(numbers)}"
        streams = [Stream(mesh.url, prompt_of(3000, n), 4, kvmesh=DISAGGREGATE, cache_salt=salt) for n in range(3)]
        for stream in streams:
            check_mock_answer(stream.join())
        used = any(s.trace["prefill_worker"] == "prefill-0" and not s.trace["migrations"] for s in streams)
        return used and mesh.pid("prefill-0") != pid

    def is_back(pid: int) -> bool:
        worker = mesh.workers().get("prefill-0")
        return worker is not None and worker.pid != pid

    with running_mesh(tmp_path / "mesh", "--engine", "mock", "--kv-transfer", "shm") as mesh:
        until(lambda: mesh.workers_seen() == 3, what="all workers")
        for _ in range(3):
            killed = mesh.kill("prefill-0")
            until(lambda killed=killed: is_back(killed), what="its successor")
            until(lambda killed=killed: prefills(killed), what="a prompt at the new worker")
