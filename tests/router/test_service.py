"""A router by itself and those who ask it, over real sockets."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
import pytest_asyncio

from kvmesh.kvevents.formats import encode_payload
from kvmesh.kvevents.publisher import KvEventPublisher
from kvmesh.mesh.discovery import Deleted, Put, open_discovery
from kvmesh.mesh.discovery.memory import MemoryDiscovery
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.mesh.plane.server import Call, PlaneServer
from kvmesh.protocol.errors import (
    DeadlineExceededError,
    FeedLostError,
    InvalidRequestError,
    NoWorkerError,
    OverloadedError,
)
from kvmesh.protocol.events import KvEvent, Stored
from kvmesh.protocol.hashing import pack_hashes, sequence_hashes
from kvmesh.protocol.ids import EngineHash, RequestId, WorkerId
from kvmesh.protocol.messages import (
    KvSnapshot,
    Progress,
    Resume,
    Role,
    RouterCard,
    RouteRequest,
    WorkerCard,
    WorkerIdentity,
    decode,
    encode,
)
from kvmesh.router import client as client_module
from kvmesh.router import local as local_module
from kvmesh.router import service as service_module
from kvmesh.router.client import RemoteRouter
from kvmesh.router.config import RouterConfig
from kvmesh.router.core import Outcome
from kvmesh.router.feeds import WorkerFeed
from kvmesh.router.index import Holder
from kvmesh.router.local import LocalBooking, LocalRouter
from kvmesh.router.metrics import REUSED_TOKENS
from kvmesh.router.service import handlers, serve
from tests.support.patience import PATIENCE_S

BLOCK = 16
TOKENS = list(range(1000, 1160))
DECODE_1 = WorkerId("d1")


def card(name: str, role: Role = Role.DECODE, **fields: object) -> WorkerCard:
    values: dict[str, object] = {"model": "m", "model_path": "/m", "address": f"{name}:1", "block_size": BLOCK}
    values |= {"total_blocks": 100, "context_tokens": 4096, "transfer": "shm"}
    return WorkerCard(worker_id=WorkerId(name), name=name, role=role, **(values | fields))  # type: ignore[arg-type]


def request(name: str = "r", **fields: object) -> RouteRequest:
    hashes = pack_hashes(sequence_hashes(TOKENS, BLOCK))
    values = {"request_id": RequestId(name), "model": "m", "isl_tokens": len(TOKENS), "sequence_hashes": hashes}
    return RouteRequest(**(values | fields))  # type: ignore[arg-type]


def stored(blocks: int) -> list[KvEvent]:
    names = tuple(EngineHash(i) for i in range(blocks))
    return [Stored(names, None, tuple(TOKENS[: blocks * BLOCK]), BLOCK)]


def blocks(router: LocalRouter) -> int:
    return sum(index.num_blocks for index in router.state.fleet.indexes.values())


def queued(router: LocalRouter, worker: str = "d1") -> float:
    return router.state.load.of(Holder(WorkerId(worker), 0)).own.queued_tokens


def answered(router: LocalRouter, worker: str = "d1") -> int:
    """Blocks of answers that the router counts there."""
    return router.state.load.of(Holder(WorkerId(worker), 0)).private_blocks


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.002)


class World:
    """Discovery, routers that serve and one that asks."""

    def __init__(self) -> None:
        self.discovery = MemoryDiscovery()
        self.plane = PlaneClient()  # of who asks
        self.remote = RemoteRouter(self.plane)
        self.routers: dict[str, LocalRouter] = {}
        self.servers: dict[str, PlaneServer] = {}
        self._planes: list[PlaneClient] = []
        self._tasks = [asyncio.create_task(self.remote.run(self.discovery))]

    async def start_router(self, name: str, **settings: object) -> LocalRouter:
        plane, workers = PlaneClient(), WorkerFeed()
        router = LocalRouter(RouterConfig(name=name, **settings), plane, workers)  # type: ignore[arg-type]
        self._planes.append(plane)
        self._tasks.append(asyncio.create_task(workers.run(self.discovery)))
        server = PlaneServer(handlers(router), always={"progress"})
        address = await server.start("127.0.0.1")
        if router.gossip is not None:
            self._tasks.append(asyncio.create_task(router.gossip.run(self.discovery)))
        await self.put_router(name, address, router.card().gossip)
        self.routers[name], self.servers[name] = router, server
        return router

    async def kill_router(self, name: str) -> None:
        """Kill a router, as others see it: its connections break, and its card goes with its lease."""
        server, router = self.servers.pop(name), self.routers.pop(name)
        for link in list(server._links):
            link.abort("as if the process had been killed")
        await server.close()
        await router.close()
        self.discovery.remove(f"routers/{name}")

    async def serve_as_worker(self) -> str:
        async def identify(call: Call) -> None:
            await call.send(WorkerIdentity(worker_id=WorkerId("w")))

        self.servers["worker"] = PlaneServer({"identify": identify})
        return await self.servers["worker"].start("127.0.0.1")

    async def put_router(self, name: str, address: str, gossip: str = "") -> None:
        await self.discovery.put(f"routers/{name}", encode(RouterCard(name=name, address=address, gossip=gossip)))
        await until(lambda: f"routers/{name}" in self.remote._routers)

    async def add(self, *cards: WorkerCard) -> None:
        for one in cards:
            await self.discovery.put(f"workers/{one.worker_id}", encode(one))
        await until(lambda: all(len(r.state.fleet.cards) >= len(cards) for r in self.routers.values()))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        for server in self.servers.values():
            await server.close()
        for router in self.routers.values():
            await router.close()
        for plane in [self.plane, *self._planes]:
            await plane.close()
        await self.discovery.close()


@pytest_asyncio.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    yield world
    await world.close()


async def hold(world: World, route: RouteRequest) -> None:
    """A booking, until cancelled."""
    async with world.remote.book(route, 5):
        await asyncio.Event().wait()


# --- bookings -----------------------------------------------------------------------------------------


async def test_a_booking_counts_until_its_block_is_left(world: World) -> None:
    router = await world.start_router("r")
    await world.add(card("d1"), card("p1", Role.PREFILL))
    async with world.remote.book(request(), 5) as booking:
        assert (booking.placed.prefill.worker_id, booking.placed.decode.worker_id) == ("p1", "d1")
        assert len(router.state.load) == 1
    await until(lambda: len(router.state.load) == 0)


async def test_a_first_token_is_reported_to_the_router(world: World) -> None:
    router = await world.start_router("r")
    await world.add(card("d1"))
    async with world.remote.book(request(), 5) as booking:
        assert queued(router) == len(TOKENS)
        booking.prefill_done()
        booking.prefill_done()
        await until(lambda: queued(router) == 0)
        assert len(router.state.load) == 1


async def test_the_length_of_the_answer_is_reported(world: World) -> None:
    router = await world.start_router("r")
    await world.add(card("d1"))
    async with world.remote.book(request(), 5) as booking:
        booking.prefill_done(32)
        booking.progress(5 * BLOCK)
        await until(lambda: answered(router) == 6)
    await until(lambda: answered(router) == 0)


async def test_a_sign_of_life_is_no_first_token(world: World) -> None:
    router = await world.start_router("r", lease_s=5)
    await world.add(card("d1"))
    async with world.remote.book(request(), 5) as booking:
        ends_s = router.state.load._bookings[RequestId("r")].ends_s
        booking.progress(0)
        await until(lambda: router.state.load._bookings[RequestId("r")].ends_s > ends_s)
        assert queued(router) == len(TOKENS)


async def test_what_workers_reused_counts_once_for_each_request(world: World) -> None:
    def reused() -> float:
        return REUSED_TOKENS.value

    await world.start_router("r")
    await world.add(card("d1"))
    before = reused()
    async with world.remote.book(request(), 5) as booking:
        booking.prefill_done(48)
        await until(lambda: reused() == before + 48)
        booking.progress(20)
        booking.prefill_done(7)
    assert reused() == before + 48


async def test_a_failure_in_the_block_ends_the_booking(world: World) -> None:
    router = await world.start_router("r")
    await world.add(card("d1"))
    with pytest.raises(ZeroDivisionError):
        async with world.remote.book(request(), 5) as booking:
            booking.prefill_done()
            raise ZeroDivisionError
    await until(lambda: len(router.state.load) == 0)


async def test_bookings_end_with_their_frontends_connection(world: World) -> None:
    router = await world.start_router("r")
    await world.add(card("d1"))
    address, plane = world.servers["r"].address, world.plane
    async with plane.open(address, "place", request("r1"), 5), plane.open(address, "place", request("r2"), 5):
        await until(lambda: len(router.state.load) == 2)
        for link in list(world.servers["r"]._links):
            link.abort("as if the process had been killed")
        await until(lambda: len(router.state.load) == 0)


async def test_a_caller_that_is_cancelled_leaves_no_booking(world: World) -> None:
    router = await world.start_router("r")
    await world.add(card("d1"))

    holding = asyncio.create_task(hold(world, request()))
    await until(lambda: len(router.state.load) == 1)
    holding.cancel()
    await until(lambda: len(router.state.load) == 0)


async def test_without_a_worker_the_router_says_why(world: World) -> None:
    await world.start_router("r")
    await world.add(card("p1", Role.PREFILL))
    with pytest.raises(NoWorkerError, match="only prefill workers"):
        async with world.remote.book(request(), 5):
            pass


async def test_without_time_nothing_is_booked(world: World) -> None:
    router = await world.start_router("r")
    await world.add(card("d1"))
    with pytest.raises(DeadlineExceededError):
        async with world.remote.book(request(), 0):
            pass
    assert len(router.state.load) == 0


# --- bookings of the router in this process ----------------------------------------------------------


class FakeTime:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.perf_counter = time.perf_counter

    def monotonic(self) -> float:
        return self.now


async def test_a_booking_of_which_nothing_is_heard_ends(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeTime()
    monkeypatch.setattr(local_module, "time", clock)
    router = await world.start_router("r", lease_s=60)
    await world.add(card("d1"))
    booking, silent = await router.place(request("told"), 1000), await router.place(request("silent"), 1000)
    for _ in range(10):
        clock.now += 30
        booking.progress(40)
        router._sweep()
    assert (router.booking(RequestId("told")), router.booking(RequestId("silent"))) == (booking, None)
    assert set(router._bookings) == {"told"}
    for ended in (silent, booking, booking):
        ended.prefill_done()
        ended.progress(100)
        ended.end(ok=True)
    assert (len(router.state.load), router._bookings, answered(router)) == (0, {}, 0)


async def test_the_bookings_of_a_worker_that_leaves_end(world: World) -> None:
    router = await world.start_router("r")
    await world.add(card("d1"), card("d2"))
    bookings = [await router.place(request(f"r{i}", pin=WorkerId(f"d{i}")), 5) for i in (1, 2)]
    world.discovery.remove("workers/d1")
    await until(lambda: len(router.state.load) == 1)
    assert [router.booking(booking.request_id) is booking for booking in bookings] == [False, True]
    for booking in bookings:
        booking.progress(10)
        booking.end(ok=False)
    assert (len(router.state.load), router._bookings) == (0, {})


async def test_a_replaced_booking_does_not_end_the_new_one(world: World) -> None:
    router = await world.start_router("r")
    await world.add(card("d1"), card("d2"))
    first = await router.place(request(pin=WorkerId("d1")), 5)
    second = await router.place(request(pin=WorkerId("d2")), 5)
    first.progress(1000)
    first.end(ok=False)
    assert (router.booking(RequestId("r")), answered(router, "d1"), answered(router, "d2")) == (second, 0, 1)
    second.end(ok=True)
    assert (len(router.state.load), router._bookings) == (0, {})


async def test_replacing_a_booking_keeps_the_waiting_request(world: World) -> None:
    router = await world.start_router("r")
    await world.add(card("d1"), card("d2", max_num_seqs=1))
    first = await router.place(request(pin=WorkerId("d1")), 5)
    other = await router.place(request("other", pin=WorkerId("d2")), 5)
    second = asyncio.create_task(router.place(request(pin=WorkerId("d2")), 5))
    await until(lambda: router.state.waiting == 1)
    first.end(ok=False)  # late: its connection was thought to be alive
    other.end(ok=True)
    (await second).end(ok=True)
    assert (len(router.state.load), router._placing, router._bookings) == (0, {}, {})


async def test_a_lone_request_is_placed_in_its_own_turn(world: World) -> None:
    router = await world.start_router("r")
    await world.add(card("d1"))
    placing = router.place(request(), 5)
    with pytest.raises(StopIteration) as placed:
        placing.send(None)
    placed.value.value.end(ok=True)
    assert (len(router.state.load), router._placing, router._bookings) == (0, {}, {})


async def test_a_caller_that_leaves_before_its_answer_leaves_nothing(world: World) -> None:
    router = await world.start_router("r")
    await world.add(card("d1"))
    place = router.place

    async def place_and_leave(request: RouteRequest, timeout_s: float) -> LocalBooking:
        booking = await place(request, timeout_s)
        asyncio.get_running_loop().call_soon(answering.cancel)
        return booking

    router.place = place_and_leave  # type: ignore[method-assign]
    call = SimpleNamespace(body=encode(request()), timeout_s=5.0)
    answering = asyncio.ensure_future(handlers(router)["place"](call))  # type: ignore[arg-type]
    await asyncio.wait([answering])
    await until(lambda: (len(router.state.load), router._bookings) == (0, {}))


async def test_a_begun_request_leaves_its_prefix(world: World) -> None:
    router = await world.start_router("r")
    await world.add(card("d1", kv_events="tcp://127.0.0.1:1"))
    for has_begun, overlap in ((False, 0), (True, 10)):
        async with world.remote.book(request(), 5) as booking:
            if has_begun:
                booking.prefill_done()
                await until(lambda: queued(router) == 0)
        await until(lambda: len(router.state.load) == 0)
        assert (await world.remote.preview(request("next"), 5)).decode.overlap_blocks == overlap


# --- the queue ----------------------------------------------------------------------------------------


async def test_a_request_waits_until_there_is_room(world: World) -> None:
    router = await world.start_router("r")
    await world.add(card("d1", max_num_seqs=1))
    async with world.remote.book(request("first"), 5):
        waiting = asyncio.create_task(hold(world, request("second")))
        await until(lambda: router.state.waiting == 1)
        assert set(router.state.load._bookings) == {"first"}
    await until(lambda: set(router.state.load._bookings) == {"second"})
    waiting.cancel()
    await until(lambda: len(router.state.load) == 0)


async def test_a_router_with_waiting_requests_is_not_taken_for_dead(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "STILL_WAITING_S", 0.01)
    monkeypatch.setattr(client_module, "ANSWER_TIMEOUT_S", 1.0)
    router = await world.start_router("a")
    await world.start_router("b")
    await world.add(card("d1", max_num_seqs=1))
    async with world.remote.book(request("first"), 5):
        waiting = asyncio.create_task(hold(world, request("second")))
        async with world.plane.open(world.servers["a"].address, "place", request("third"), 5) as stream:
            for _ in range(150):  # more than a caller's credit, and longer than its patience
                assert bytes(await stream.next()) == encode(None)
        await until(lambda: router.state.waiting == 1)
    await until(lambda: "second" in router.state.load)
    waiting.cancel()
    await until(lambda: len(router.state.load) == 0 and router.state.waiting == 0)


async def test_a_request_that_times_out_leaves_nothing(world: World) -> None:
    router = await world.start_router("r")
    await world.add(card("d1", max_num_seqs=1))
    async with world.remote.book(request("first"), 5):
        with pytest.raises(DeadlineExceededError):
            async with world.remote.book(request("second"), 0.05):
                pass
        await until(lambda: router.state.waiting == 0)
        with pytest.raises(DeadlineExceededError, match="no worker was free in time"):
            await router.place(request("third"), 0.05)
        assert (router._placing, len(router.state.load)) == ({}, 1)


async def test_a_full_queue_says_when_to_come_back(world: World) -> None:
    router = await world.start_router("r", queue_max_requests=1)
    await world.add(card("d1", max_num_seqs=1))
    async with world.remote.book(request("first"), 5):
        waiting = asyncio.create_task(hold(world, request("second")))
        await until(lambda: router.state.waiting == 1)
        with pytest.raises(OverloadedError) as refused:
            async with world.remote.book(request("third"), 5):
                pass
        assert refused.value.retry_after_s is not None
        waiting.cancel()
        await until(lambda: router.state.waiting == 0)


async def test_a_caller_that_leaves_the_queue_is_forgotten(world: World) -> None:
    router = await world.start_router("r")
    await world.add(card("d1", max_num_seqs=1))
    async with world.remote.book(request("first"), 5):
        waiting = asyncio.create_task(hold(world, request("second")))
        await until(lambda: router.state.waiting == 1)
        waiting.cancel()
        await until(lambda: router.state.waiting == 0)
    await until(lambda: len(router.state.load) == 0 and not router._placing)


async def test_a_caller_that_leaves_while_placed_leaves_nothing(world: World) -> None:
    router = await world.start_router("r")
    await world.add(card("d1", max_num_seqs=1))
    running = await router.place(request("running"), 5)
    settle = router._settle

    def leave_then(outcomes: Sequence[Outcome]) -> None:
        settle(outcomes)
        if outcomes:
            placing.cancel()

    router._settle = leave_then  # type: ignore[method-assign]
    placing = asyncio.create_task(router.place(request(), 5))
    await until(lambda: router.state.waiting == 1)
    running.end(ok=True)
    await asyncio.wait([placing])
    assert placing.cancelled()
    assert (len(router.state.load), router._placing, router._bookings) == (0, {}, {})


async def test_a_second_request_of_one_name_is_refused(world: World) -> None:
    router = await world.start_router("r")
    await world.add(card("d1", max_num_seqs=1))
    running = await router.place(request("running"), 5)
    waiting = asyncio.create_task(router.place(request("twice"), 5))
    await until(lambda: router.state.waiting == 1)
    with pytest.raises(InvalidRequestError, match="waits in the queue already"):
        await router.place(request("twice"), 5)
    running.end(ok=True)
    (await waiting).end(ok=True)
    assert (len(router.state.load), router._placing) == (0, {})


# --- several routers, none, and bad ones --------------------------------------------------------------


async def test_without_a_router_the_error_says_what_to_start(world: World) -> None:
    assert not world.remote.is_ready()
    with pytest.raises(NoWorkerError, match="kvmesh router"):
        async with world.remote.book(request(), 5):
            pass


async def test_a_router_that_is_gone_is_passed_over(world: World) -> None:
    await world.put_router("a", "127.0.0.1:1")
    await world.start_router("b")
    await world.add(card("d1"))
    async with world.remote.book(request(), 5) as booking:
        assert booking.placed.decode.worker_id == "d1"


async def test_routers_that_are_all_gone_are_a_failure_that_passes(world: World) -> None:
    await world.put_router("a", "127.0.0.1:1")
    with pytest.raises(NoWorkerError, match="cannot connect to 127"):
        async with world.remote.book(request(), 5):
            pass


async def test_a_router_that_drains_is_passed_over(world: World) -> None:
    await world.start_router("a")
    second = await world.start_router("b")
    await world.add(card("d1"))
    world.servers["a"].draining = True
    async with world.remote.book(request(), 5):
        assert len(second.state.load) == 1


async def test_a_router_that_hangs_is_passed_over(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "ANSWER_TIMEOUT_S", 0.05)

    async def hang(call: Call) -> None:
        await asyncio.Event().wait()

    hung = PlaneServer({"place": hang})
    await world.put_router("a", await hung.start("127.0.0.1"))
    await world.start_router("b")
    await world.add(card("d1"))
    async with world.remote.book(request(), 5) as booking:
        assert booking.placed.decode.worker_id == "d1"
        await until(lambda: not hung.tasks)
    await hung.close()


async def test_a_router_that_dies_takes_no_request_with_it(world: World) -> None:
    await world.start_router("r")
    await world.add(card("d1"))
    async with world.remote.book(request(), 5) as booking:
        await world.servers["r"].close()
        booking.prefill_done()


async def test_an_embedded_router_is_not_asked(world: World) -> None:
    await world.discovery.put("routers/a", encode(RouterCard(name="a", gossip="tcp://127.0.0.1:1")))
    await asyncio.sleep(0.01)
    assert not world.remote.is_ready()
    await world.start_router("b")
    await world.add(card("d1"))
    async with world.remote.book(request(), 5) as booking:
        assert booking.placed.decode.worker_id == "d1"
    await world.discovery.put("routers/b", encode(RouterCard(name="b")))  # as while it drains
    await until(lambda: not world.remote.is_ready())


async def test_a_router_that_answers_outlives_its_lease(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router without a lease may have lost discovery only."""
    monkeypatch.setattr("kvmesh.mesh.lapsed.ASK_AGAIN_S", 0.02)
    await world.start_router("a")
    await world.add(card("d1"))
    world.discovery.remove("routers/a", has_lapsed=True)
    await asyncio.sleep(0.1)
    async with world.remote.book(request(), 5) as booking:
        assert booking.placed.decode.worker_id == "d1"
    await world.servers["a"].close()
    await until(lambda: not world.remote.is_ready())


@pytest.mark.parametrize("there", ["nobody", "another router", "a worker"])
async def test_a_router_that_is_gone_leaves_with_its_lease(world: World, there: str) -> None:
    await world.start_router("a")
    address = "127.0.0.1:1"
    if there == "another router":
        address = world.servers["a"].address
    elif there == "a worker":
        address = await world.serve_as_worker()
    await world.put_router("b", address)
    world.discovery.remove("routers/b", has_lapsed=True)
    await until(lambda: list(world.remote._routers) == ["routers/a"])


async def test_a_router_that_renews_its_lease_is_asked_no_more(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmesh.mesh.lapsed.ASK_AGAIN_S", 0.02)
    await world.start_router("a")
    world.discovery.remove("routers/a", has_lapsed=True)
    await asyncio.sleep(0.05)
    await world.put_router("a", world.servers["a"].address)
    await until(lambda: not world.remote._lapsed._asking)
    world.discovery.remove("routers/a")
    await until(lambda: not world.remote.is_ready())


async def test_a_preview_says_where_and_why_and_books_nothing(world: World) -> None:
    await world.put_router("a", "127.0.0.1:1")
    router = await world.start_router("b")
    await world.add(card("d1"))
    placed = await world.remote.preview(request(), 5)
    assert placed.decode.worker_id == "d1"
    assert placed.explanation is not None
    assert [candidate.note for candidate in placed.explanation.candidates] == ["chosen"]
    assert (len(router.state.load), router.state.waiting) == (0, 0)
    with pytest.raises(NoWorkerError, match="'x'"):
        await world.remote.preview(request(pin=WorkerId("x")), 5)
    await world.kill_router("b")
    with pytest.raises(NoWorkerError, match="no router is ready"):
        await world.remote.preview(request(), 5)


# --- a router that is lost ----------------------------------------------------------------------------


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers look for another router at once."""
    monkeypatch.setattr(client_module, "RESUME_S", 0.005)


@pytest.mark.usefixtures("eager")
async def test_running_requests_are_resumed_at_the_next_router(world: World) -> None:
    await world.start_router("a")
    second = await world.start_router("b")
    await world.add(card("d1"), card("p1", Role.PREFILL))
    async with world.remote.book(request("new"), 5), world.remote.book(request("old"), 5) as old:
        old.prefill_done(32)
        old.progress(5 * BLOCK)
        await world.kill_router("a")
        await until(lambda: set(second.state.load._bookings) == {"new", "old"} and answered(second) == 1 + 6)
        assert second.state.load.of(Holder(WorkerId("d1"), 0)).requests == 2
        assert queued(second, "p1") == len(TOKENS)
        assert [second.booking(RequestId(name)).has_begun for name in ("new", "old")] == [False, True]
    await until(lambda: len(second.state.load) == 0 and not second._bookings)


@pytest.mark.usefixtures("eager")
async def test_a_restarted_router_knows_everything_again(world: World) -> None:
    """The new router gets its index from the workers, and its load from the frontends."""
    publisher = KvEventPublisher()
    publisher.publish(stored(5))
    await world.start_router("r")
    await world.add(card("d1", kv_events=publisher.endpoint, kv_replay=publisher.replay_endpoint), card("d2"))
    other = request("running", pin=WorkerId("d2"), sequence_hashes=b"")
    async with world.remote.book(other, 5) as running:
        await world.kill_router("r")
        running.prefill_done()  # while there is none
        router = await world.start_router("r")
        await until(lambda: blocks(router) == 5 and len(router.state.load) == 1)
        await until(lambda: queued(router, "d2") == 0)
        running.progress(3 * BLOCK)
        await until(lambda: answered(router, "d2") == 4)
        async with world.remote.book(request("known"), 5) as known:
            assert (known.placed.decode.worker_id, known.placed.decode.overlap_blocks) == ("d1", 5)
    await until(lambda: len(router.state.load) == 0)
    await publisher.close()


@pytest.mark.usefixtures("eager")
async def test_a_booking_is_offered_again_until_its_worker_is_known(world: World) -> None:
    await world.start_router("r")
    await world.add(card("d1"))
    async with world.remote.book(request(), 5):
        await world.kill_router("r")
        world.discovery.remove("workers/d1")
        router = await world.start_router("r")
        await asyncio.sleep(0.05)
        assert len(router.state.load) == 0
        await world.add(card("d1"))
        await until(lambda: len(router.state.load) == 1)
    await until(lambda: len(router.state.load) == 0)


@pytest.mark.usefixtures("eager")
async def test_progress_during_a_takeover_reaches_the_new_router(world: World) -> None:
    asked, may_answer, told = asyncio.Event(), asyncio.Event(), list[Progress]()

    async def resume(call: Call) -> None:
        asked.set()
        await may_answer.wait()
        await call.send(decode(call.body, Resume).placed)
        await asyncio.Event().wait()

    async def progress(call: Call) -> None:
        told.append(decode(call.body, Progress))

    await world.start_router("a")
    await world.add(card("d1"))
    slow = PlaneServer({"resume": resume, "progress": progress})
    await world.put_router("b", await slow.start("127.0.0.1"))
    async with world.remote.book(request(), 5) as booking:
        await world.kill_router("a")
        await asked.wait()
        booking.prefill_done(16)
        booking.progress(40)
        may_answer.set()
        await until(lambda: bool(told))
        assert told[-1] == Progress(request_id=RequestId("r"), osl_tokens=40, has_begun=True, reused_tokens=16)
    await until(lambda: not slow.tasks)
    await slow.close()


@pytest.mark.usefixtures("eager")
async def test_an_old_connection_does_not_end_a_resumed_booking(world: World) -> None:
    router = await world.start_router("r")
    await world.add(card("d1"))
    async with world.remote.book(request(), 5) as booking:
        before = router.booking(RequestId("r"))
        for link in list(world.servers["r"]._links):
            link.abort("the network")
        await until(lambda: router.booking(RequestId("r")) not in (None, before))
        booking.prefill_done()
        await until(lambda: queued(router) == 0)
    await until(lambda: len(router.state.load) == 0)


@pytest.mark.usefixtures("eager")
async def test_no_router_is_told_after_the_deadline(world: World) -> None:
    await world.start_router("r")
    await world.add(card("d1"))
    async with world.remote.book(request(), 0.05) as booking:
        await world.kill_router("r")
        await until(lambda: booking._holding.done())  # type: ignore[attr-defined]
        router = await world.start_router("r")
        assert len(router.state.load) == 0


async def test_a_card_that_cannot_be_read_is_ignored(world: World) -> None:
    await world.discovery.put("routers/a", b"rubbish")
    router = await world.start_router("b")
    await world.discovery.put("workers/x", b"rubbish")
    await world.add(card("d1"))
    async with world.remote.book(request(), 5):
        assert len(router.state.fleet.cards) == 1
    world.discovery.remove("routers/a")
    world.discovery.remove("workers/x")
    await world.put_router("c", "127.0.0.1:1")
    assert set(world.remote._routers) == {"routers/b", "routers/c"}


async def test_the_end_of_the_feed_is_a_failure() -> None:
    discovery = MemoryDiscovery()
    following = asyncio.create_task(RemoteRouter(PlaneClient()).run(discovery))
    await asyncio.sleep(0)
    await discovery.close()
    with pytest.raises(FeedLostError):
        await following
    with pytest.raises(FeedLostError):
        await WorkerFeed().run(discovery)


# --- what it learns of workers ------------------------------------------------------------------------


async def test_kv_events_are_followed_as_workers_come_and_go(world: World) -> None:
    router = await world.start_router("r")
    publisher = KvEventPublisher()
    publisher.publish(stored(3))
    await world.add(card("d1", kv_events=publisher.endpoint, kv_replay=publisher.replay_endpoint), card("d2"))
    await until(lambda: blocks(router) == 3)
    publisher.publish(stored(5))
    await until(lambda: blocks(router) == 5)
    async with world.remote.book(request(), 5) as booking:
        assert (booking.placed.decode.worker_id, booking.placed.decode.overlap_blocks) == ("d1", 5)
    world.discovery.remove("workers/d1")
    await until(lambda: blocks(router) == 0)
    async with world.remote.book(request(), 5) as booking:
        assert booking.placed.decode.worker_id == "d2"
    await publisher.close()


async def test_a_worker_that_comes_back_is_followed_again(world: World) -> None:
    router = await world.start_router("r")
    publisher = KvEventPublisher()
    one = card("d1", kv_events=publisher.endpoint, kv_replay=publisher.replay_endpoint)
    await world.add(one)
    publisher.publish(stored(4))
    await until(lambda: blocks(router) == 4)
    world.discovery.remove("workers/d1")
    await until(lambda: blocks(router) == 0)
    await world.add(one)
    await until(lambda: blocks(router) == 4)
    await publisher.close()


async def test_events_lost_from_the_ring_come_as_a_snapshot(world: World) -> None:
    publisher = KvEventPublisher(ring_batches=1)
    for _ in range(5):
        publisher.publish([])

    async def kv_snapshot(call: Call) -> None:
        for blocks in (2, 6):
            await call.send(KvSnapshot(seq=publisher.last_seq, payload=encode_payload(stored(blocks), 0.0, 0)))

    server = PlaneServer({"kv_snapshot": kv_snapshot})
    router = await world.start_router("r")
    address = await server.start("127.0.0.1")
    await world.add(card("d1", address=address, kv_events=publisher.endpoint, kv_replay=publisher.replay_endpoint))
    await until(lambda: blocks(router) == 6)
    await server.close()
    await publisher.close()


async def test_each_rank_of_a_worker_is_followed_by_itself(world: World) -> None:
    publishers = [KvEventPublisher(dp_rank=rank) for rank in range(2)]
    router = await world.start_router("r")
    first, second = ((one.endpoint, one.replay_endpoint) for one in publishers)
    await world.add(card("d1", dp_size=2, kv_events=first[0], kv_replay=first[1], rank_kv_events=(second,)))
    publishers[1].publish(stored(4))
    await until(lambda: blocks(router) == 4)
    hashes = pack_hashes(sequence_hashes(TOKENS, BLOCK))
    assert set(router.state.fleet.overlaps("m", hashes, time.monotonic())) == {Holder(DECODE_1, 1)}
    for publisher in publishers:
        await publisher.close()


async def test_a_worker_with_unusable_events_still_joins(world: World) -> None:
    await world.start_router("r")
    await world.add(card("d1", kv_events="nonsense", kv_replay="nonsense"))
    async with world.remote.book(request(), 5) as booking:
        assert booking.placed.decode.worker_id == "d1"


@pytest.mark.parametrize("capacity", [0.0, -1.0, float("nan"), float("inf")])
async def test_a_worker_whose_capacity_is_not_positive_is_left_out(world: World, capacity: float) -> None:
    router = await world.start_router("r")
    await world.discovery.put("workers/d1", encode(card("d1", capacity=capacity)))
    await world.add(card("d2"))
    assert {c.worker_id for c in router.state.fleet.cards} == {"d2"}


async def test_a_worker_with_another_block_size_is_left_out(world: World) -> None:
    router = await world.start_router("r")
    await world.add(card("d1"))
    await world.discovery.put("workers/d2", encode(card("d2", block_size=2 * BLOCK)))
    await world.discovery.put("workers/d3", encode(card("d3")))
    await until(lambda: len(router.state.fleet.cards) == 2)
    assert {c.worker_id for c in router.state.fleet.cards} == {"d1", "d3"}


# --- the whole service --------------------------------------------------------------------------------


async def test_the_service_lets_requests_finish_when_stopped(tmp_path: Path) -> None:
    url = f"file:{tmp_path}"
    stop, discovery, plane = asyncio.Event(), open_discovery(url), PlaneClient()
    await discovery.put("workers/d1", encode(card("d1")))
    serving = asyncio.create_task(serve(RouterConfig(discovery=url, drain_timeout_s=5), stop))
    remote = RemoteRouter(plane)
    async with aclosing(discovery.watch("routers/")) as changes:  # type: ignore[type-var]
        async with asyncio.timeout(PATIENCE_S):
            appeared = await anext(changes)
        assert isinstance(appeared, Put)
        found = decode(appeared.value, RouterCard)
        assert found.name == "router"
        remote._join(appeared.key, appeared.value)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    async with remote.book(request(), 5):
                        break
                except NoWorkerError:
                    await asyncio.sleep(0.01)  # it has not seen the worker yet
        async with remote.book(request("late"), 5) as booking:
            stop.set()
            async with asyncio.timeout(PATIENCE_S):
                changed = await anext(changes)
            assert isinstance(changed, Put)
            assert decode(changed.value, RouterCard).address == ""
            with pytest.raises(NoWorkerError, match="shutting down"):
                async with remote.book(request("refused"), 5):
                    pass
            async with aiohttp.ClientSession() as http, http.get(found.http_url + "/health") as reply:
                assert (reply.status, (await reply.json())["status"]) == (503, "draining")
            booking.prefill_done()
            assert not serving.done()
        async with asyncio.timeout(PATIENCE_S):
            await serving
            assert await anext(changes) == Deleted("routers/router")
    await plane.close()
    await discovery.close()
