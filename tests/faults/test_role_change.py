"""A worker changes its role under load: no request fails, no token is wrong, and its cache is not lost."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.protocol.errors import InvalidRequestError
from kvmesh.protocol.messages import Control, ControlAction, ControlReply, Role
from tests.faults.conftest import LEASE_S, PATIENT, watched
from tests.faults.prompts import LENGTHS, prompt_of
from tests.support.mesh import Mesh, running_mesh, until
from tests.support.streams import Stream, check_mock_answer

NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
TURN_S = 10.0  # there is at most this much to finish


@pytest.fixture(scope="module")
def _four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    flags = ["--engine", "mock", "--kv-transfer", "shm", "--offer-lease-s", str(LEASE_S), "--prefill", "2"]
    with running_mesh(tmp_path_factory.mktemp("four"), *flags, module=PATIENT) as mesh:
        yield mesh


@pytest.fixture
def four(_four: Mesh) -> Iterator[Mesh]:
    """Mock engines: two prefill workers, two decode workers; after a test each has its first role again."""
    yield from watched(_four, NAMES)
    assert {name: card.role.value for name, card in _four.workers().items()} == {n: n.split("-")[0] for n in NAMES}


def set_role(mesh: Mesh, name: str, role: Role) -> ControlReply:
    """Ask the worker, and wait until it has changed and the frontend has heard of it."""
    address = mesh.workers()[name].address

    async def ask() -> ControlReply:
        plane = PlaneClient()
        try:
            request = Control(action=ControlAction.SET_ROLE, arguments={"role": role.value})
            return await plane.ask(address, "control", request, ControlReply, TURN_S)
        finally:
            await plane.close()

    reply = asyncio.run(ask())
    card = mesh.workers()[name]
    assert (card.role, card.worker_id, card.address) == (role, reply.worker_id, address)
    log = mesh.run_dir / "logs" / "frontend.log"
    until(lambda: f"worker joined worker={card.worker_id}" in log.read_text(), what="the frontend to hear of it")
    return reply


class Load:
    """Clients that ask one question after the other, until the block ends; each must get its right answer."""

    def __init__(self, mesh: Mesh, clients: int = 4) -> None:
        self.done: list[Stream] = []
        self._mesh = mesh
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(clients)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        for stream in self.done:
            check_mock_answer(stream)

    def until_decoded_by(self, name: str) -> None:
        """A request that was asked from now on."""
        known = len(self.done)
        until(lambda: any(s.trace.get("decode_worker") == name for s in self.done[known:]), what=f"work of {name}")

    def until_prefilled_by(self, name: str) -> None:
        known = len(self.done)
        until(lambda: any(s.trace.get("prefill_worker") == name for s in self.done[known:]), what=f"work of {name}")

    def _ask(self, number: int) -> None:
        for i in range(10**6):
            if self._stop.is_set():
                return
            trace = {"kvmesh": {"trace": True, "disaggregate": True}}
            self.done.append(Stream(self._mesh.url, prompt_of(20 + 10 * number, 100 * number + i), 20, **trace).join())


def test_a_worker_changes_its_role_and_back_under_load(four: Mesh) -> None:
    before = four.workers()["prefill-1"]
    with Load(four) as load:
        load.until_prefilled_by("prefill-1")
        set_role(four, "prefill-1", Role.DECODE)
        load.until_decoded_by("prefill-1")
        set_role(four, "prefill-1", Role.PREFILL)
        load.until_prefilled_by("prefill-1")
    after = four.workers()["prefill-1"]
    assert (after.pid, after.name) == (before.pid, before.name), "it is the same process"
    assert after.worker_id != before.worker_id
    assert four.metric("kvmesh_worker_role_changes_total", "prefill-1") == 2
    assert all(stream.trace["pull_error"] == "" for stream in load.done)


def test_streams_that_run_finish_where_they_run(four: Mesh) -> None:
    pinned = {"kvmesh": {"trace": True, "disaggregate": True, "worker": "decode-1"}}
    streams = [Stream(four.url, prompt_of(n, n), 150, **pinned) for n in LENGTHS]
    for stream in streams:
        stream.until_tokens(5)
    set_role(four, "decode-1", Role.PREFILL)
    for stream in streams:
        check_mock_answer(stream.join())
        assert (stream.trace["decode_worker"], stream.trace["migrations"]) == ("decode-1", 0)
    set_role(four, "decode-1", Role.DECODE)


def test_what_it_offers_is_fetched_before_it_changes(four: Mesh) -> None:
    pinned = {"trace": True, "disaggregate": True, "worker": "decode-0"}
    there = {"x-kvmesh-prefill-worker": "prefill-1"}
    changing = threading.Thread(target=set_role, args=(four, "prefill-1", Role.DECODE))
    with four.stopped("decode-0"):
        streams = [
            Stream(four.url, prompt_of(n, n), 20, headers=there, kvmesh=pinned, cache_salt="offers") for n in LENGTHS
        ]
        until(lambda: four.metric("kvmesh_worker_kv_offers", "prefill-1") == len(streams), what="offers")
        changing.start()
        until(lambda: "prefill-1" not in four.workers(), what="its card to be withdrawn")
    for stream in streams:
        check_mock_answer(stream.join())
        assert (stream.trace["pull_error"], stream.trace["migrations"]) == ("", 0)
        assert stream.trace["kv_bytes_pulled"] > 0
    changing.join()
    set_role(four, "prefill-1", Role.PREFILL)


def test_its_cache_is_kept_and_routers_know_of_it(four: Mesh) -> None:
    prompt = prompt_of(320, 3)
    whole = {"trace": True, "disaggregate": False, "worker": "decode-1"}
    check_mock_answer(Stream(four.url, prompt, 4, kvmesh=whole, cache_salt="kept").join())
    set_role(four, "decode-1", Role.PREFILL)
    halves = {"trace": True, "disaggregate": True}

    def goes_there() -> bool:
        stream = Stream(four.url, [*prompt, 1, 2, 3], 4, kvmesh=halves, cache_salt="kept").join()
        check_mock_answer(stream)
        return stream.trace["prefill_worker"] == "decode-1" and stream.trace["cached_tokens"] == 320

    assert goes_there(), "the router has been told of its cache with its first events"
    set_role(four, "decode-1", Role.DECODE)


def test_its_own_role_and_unknown_roles_change_nothing(four: Mesh) -> None:
    before = four.workers()["decode-0"]
    reply = set_role(four, "decode-0", Role.DECODE)
    assert (reply.worker_id, reply.detail) == (before.worker_id, "it is a decode worker already")

    async def ask() -> None:
        plane = PlaneClient()
        request = Control(action=ControlAction.SET_ROLE, arguments={"role": "cook"})
        try:
            with pytest.raises(InvalidRequestError, match="one of aggregated, prefill, decode"):
                await plane.ask(before.address, "control", request, ControlReply, TURN_S)
        finally:
            await plane.close()

    asyncio.run(ask())
    assert four.workers()["decode-0"] == before


def test_streams_that_take_longer_than_a_drain_go_on_elsewhere(tmp_path: Path) -> None:
    flags = ["--engine", "mock", "--kv-transfer", "shm", "--drain-timeout-s", "0.3"]
    with running_mesh(tmp_path, *flags, module=PATIENT) as mesh:
        until(lambda: mesh.workers_seen() == 3, what="all workers")
        streams = [Stream(mesh.url, prompt_of(n, n), 200) for n in LENGTHS]
        for stream in streams:
            stream.until_tokens(5)
        assert mesh.metric("kvmesh_worker_running_requests", "decode-1") > 0
        set_role(mesh, "decode-1", Role.PREFILL)
        for stream in streams:
            check_mock_answer(stream.join())
        assert any(stream.trace["migrations"] for stream in streams)
        assert {stream.trace["decode_worker"] for stream in streams} == {"decode-0"}


def test_a_torch_worker_changes_its_role_too(tmp_path: Path) -> None:
    flags = ["--kv-transfer", "shm", "--prefill", "2", "--decode", "1"]
    with running_mesh(tmp_path, *flags, module=PATIENT) as mesh:
        until(lambda: mesh.workers_seen() == 3, what="all workers")
        prompts = [prompt_of(n, n) for n in (17, 40)]
        asked = {"kvmesh": {"trace": True, "disaggregate": False}, "cache_salt": "plain"}
        answers = [Stream(mesh.url, prompt, 30, **asked).join().tokens for prompt in prompts]
        set_role(mesh, "prefill-1", Role.DECODE)
        pinned = {"trace": True, "disaggregate": True, "worker": "prefill-1"}
        for prompt, answer in zip(prompts, answers, strict=True):
            stream = Stream(mesh.url, prompt, 30, kvmesh=pinned).join()
            assert stream.tokens == answer
            assert (stream.trace["decode_worker"], stream.trace["pull_error"]) == ("prefill-1", "")
