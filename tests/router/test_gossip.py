"""Routers report their load to each other, and forget the load of routers that fall silent."""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.kvevents.door import KeyPair, new_keys, show_key
from kvmesh.kvevents.sockets import LoopSocket, open_socket
from kvmesh.mesh.discovery.memory import MemoryDiscovery
from kvmesh.mesh.identity.credentials import Credentials
from kvmesh.mesh.identity.names import MeshRole
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.protocol.errors import ConfigError, FeedLostError, WireError
from kvmesh.protocol.hashing import pack_hashes
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.messages import Role, RouterCard, RouteRequest, WorkerCard, encode
from kvmesh.router.config import RouterConfig
from kvmesh.router.feeds import WorkerFeed
from kvmesh.router.gossip import (
    COALESCE_S,
    LAST_WORDS,
    REPEAT_S,
    SILENCE_S,
    GossipReceiver,
    GossipSender,
    HolderShare,
    LoadNews,
    decode_news,
)
from kvmesh.router.gossip_link import Gossip
from kvmesh.router.index import Holder
from kvmesh.router.load import NOTHING, ActiveLoad, Share
from kvmesh.router.local import LocalRouter
from tests.support.budget import examples
from tests.support.certificates import TestCa
from tests.support.patience import PATIENCE_S

A, B = Holder(WorkerId("a"), 0), Holder(WorkerId("b"), 1)


def new_load() -> ActiveLoad:
    load = ActiveLoad()
    for holder in (A, B):
        load.join(holder)
    return load


def book(load: ActiveLoad, name: str, holder: Holder = A, tokens: int = 100) -> RequestId:
    request_id = RequestId(name)
    load.book(request_id, decode=holder, prefill=holder, prefill_tokens=tokens, hashes=pack_hashes([1, 2]), now=0.0)
    return request_id


def news(seq: int, *shares: HolderShare, router: str = "r", generation: int = 1, is_whole: bool = True) -> LoadNews:
    return LoadNews(router=router, generation=generation, seq=seq, is_whole=is_whole, shares=shares)


def share(holder: Holder, requests: int = 1, tokens: int = 10, blocks: int = 2) -> HolderShare:
    return HolderShare(holder.worker_id, holder.dp_rank, tokens, blocks, requests)


def elsewhere(load: ActiveLoad, holder: Holder = A) -> tuple[float, int, int]:
    """Return what other routers have placed there."""
    total, own = load.of(holder).total, load.of(holder).own
    return (total[0] - own[0], total[1] - own[1], total[2] - own[2])


class Router:
    """A teller and a listener on one load; time is the caller's."""

    def __init__(self, name: str = "r", generation: int = 1) -> None:
        self.load = new_load()
        self.teller = GossipSender(self.load, name, generation)
        self.listener = GossipReceiver(self.load)
        self.teller.on_listener(0.0)
        self.teller.tell(0.0)

    def told(self, now: float) -> LoadNews | None:
        self.teller.on_change(now)
        return self.teller.tell(now + COALESCE_S)


# --- when it is told, and what ------------------------------------------------------------------------


def test_a_new_listener_gets_a_full_report() -> None:
    load = new_load()
    book(load, "r1")
    teller = GossipSender(load, "r", 7)
    assert teller.next_s() is None
    teller.on_listener(5.0)
    assert teller.next_s() == 5.0
    told = teller.tell(5.0)
    assert told == news(1, share(A, 1, 100, 3), generation=7)


def test_changes_wait_for_others_to_go_with_them() -> None:
    router = Router()
    router.teller.tell(1.0)
    book(router.load, "r1")
    router.teller.on_change(10.0)
    book(router.load, "r2", B)
    router.teller.on_change(10.001)
    assert router.teller.next_s() == 10.0 + COALESCE_S
    assert router.teller.tell(10.001) is None
    told = router.teller.tell(10.0 + COALESCE_S)
    assert told is not None
    assert not told.is_whole
    assert {row.worker_id for row in told.shares} == {"a", "b"}


def test_only_changed_sums_are_sent() -> None:
    router = Router()
    book(router.load, "r1")
    router.told(1.0)
    book(router.load, "r2", B)
    told = router.told(1.1)
    assert told is not None
    assert [row.worker_id for row in told.shares] == ["b"]
    assert router.told(1.2) is None


def test_all_sums_are_repeated_while_requests_are_in_flight() -> None:
    router = Router()
    book(router.load, "r1")
    router.told(1.0)
    now = 1.0 + COALESCE_S
    for _ in range(5):
        now += REPEAT_S
        assert router.teller.next_s() == pytest.approx(now)
        told = router.teller.tell(now)
        assert told is not None
        assert (told.is_whole, len(told.shares)) == (True, 1)
    book(router.load, "r2", B)
    router.teller.tell(now + REPEAT_S)
    assert router.told(now + REPEAT_S) is None  # that was among it


def test_an_idle_router_says_so_and_is_silent() -> None:
    router = Router()
    request = book(router.load, "r1")
    router.told(1.0)
    router.load.free(request, 1.5)
    told = router.told(1.5)
    assert told is not None
    assert told.shares == (HolderShare(A.worker_id, 0, 0, 0, 0),)
    said = 0
    while (at := router.teller.next_s()) is not None:
        told = router.teller.tell(at)
        assert told is not None
        assert (told.is_whole, told.shares) == (True, ())
        said += 1
    assert said == LAST_WORDS


def test_without_listeners_nothing_is_sent() -> None:
    router = Router()
    book(router.load, "r1")
    router.teller.on_change(1.0)
    router.teller.on_alone()
    assert router.teller.next_s() is None
    assert router.teller.tell(100.0) is None


def test_the_message_survives_the_wire_and_rubbish_does_not() -> None:
    told = news(3, share(A), share(B, 2), is_whole=False)
    assert decode_news(encode(told)) == told
    wrong = [b"", b"\x00", b"rubbish", b"\x93" * 100_000, encode({"router": "r"}), encode([1])]
    wrong.append(encode(told).replace(encode("a"), encode(7)))
    wrong += [encode(news(1, share(A, requests))) for requests in (-1, 1 << 50)]
    for data in wrong:
        with pytest.raises(WireError):
            decode_news(data)


# --- what becomes of it -------------------------------------------------------------------------------


def test_what_others_have_placed_counts() -> None:
    load = new_load()
    book(load, "own")
    listener = GossipReceiver(load)
    assert listener.on_news(news(1, share(A, 2, 30, 4)), 0.0)
    assert listener.on_news(news(1, share(A, 1, 10, 1), router="s"), 0.0)
    assert elsewhere(load) == (40, 5, 3)
    assert load.shares() == {A: Share(100, 3, 1)}  # only its own is told on


def test_a_whole_message_replaces_and_a_part_changes() -> None:
    load = new_load()
    listener = GossipReceiver(load)
    listener.on_news(news(1, share(A), share(B)), 0.0)
    listener.on_news(news(2, share(B, 5), is_whole=False), 0.0)
    assert (elsewhere(load, A)[2], elsewhere(load, B)[2]) == (1, 5)
    listener.on_news(news(3, HolderShare(B.worker_id, 1, 0, 0, 0), is_whole=False), 0.0)
    assert (elsewhere(load, A)[2], elsewhere(load, B)[2]) == (1, 0)
    listener.on_news(news(4), 0.0)
    assert (elsewhere(load, A), listener.next_s()) == ((0, 0, 0), None)


def test_what_was_overtaken_or_came_before_does_not_count() -> None:
    load = new_load()
    listener = GossipReceiver(load)
    listener.on_news(news(5, share(A, 5)), 0.0)
    assert not listener.on_news(news(5, share(A, 1)), 0.0)
    assert not listener.on_news(news(4, share(A, 1)), 0.0)
    assert elsewhere(load)[2] == 5


def test_a_restarted_peer_begins_with_nothing() -> None:
    load = new_load()
    listener = GossipReceiver(load)
    listener.on_news(news(900, share(A, 5), generation=1), 0.0)
    assert listener.on_news(news(1, share(B, 1), generation=2, is_whole=False), 0.0)
    assert (elsewhere(load, A)[2], elsewhere(load, B)[2]) == (0, 1)
    assert not listener.on_news(news(901, share(A, 5), generation=1), 0.0)


def test_a_silent_router_with_load_is_forgotten() -> None:
    load = new_load()
    listener = GossipReceiver(load)
    listener.on_news(news(1, share(A)), 10.0)
    listener.on_news(news(1, router="idle"), 10.0)
    assert listener.next_s() == 10.0 + SILENCE_S
    assert listener.expire(10.0 + SILENCE_S - 0.01) == []
    assert listener.expire(10.0 + SILENCE_S) == ["r"]
    assert (elsewhere(load), listener.next_s()) == ((0, 0, 0), None)
    assert listener.on_news(news(2, share(A)), 20.0)  # it was only slow
    assert elsewhere(load)[2] == 1


def test_only_a_router_with_load_has_to_report() -> None:
    load = new_load()
    listener = GossipReceiver(load)
    for seq in range(1, 30):
        listener.on_news(news(seq, share(A), is_whole=seq % 2 == 0), seq * REPEAT_S)
        assert listener.expire(seq * REPEAT_S + 0.5) == []
    assert listener.next_s() == 29 * REPEAT_S + SILENCE_S
    listener.on_news(news(30, share(A, 0, 0, 0), is_whole=False), 30 * REPEAT_S)
    assert listener.next_s() is None


def test_a_router_that_has_left_is_forgotten() -> None:
    load = new_load()
    listener = GossipReceiver(load)
    listener.on_news(news(1, share(A)), 0.0)
    assert listener.forget("r", 1.0)
    assert not listener.forget("r", 1.0)
    assert (elsewhere(load), listener.next_s()) == ((0, 0, 0), None)


def test_load_of_a_new_worker_counts_with_the_next_message() -> None:
    load = new_load()
    listener, late = GossipReceiver(load), Holder(WorkerId("late"), 0)
    listener.on_news(news(1, share(late)), 0.0)
    load.join(late)
    listener.on_news(news(2, share(late)), 1.0)
    assert elsewhere(load, late)[2] == 1
    load.leave(late, 1.0)
    load.join(late)
    assert elsewhere(load, late)[2] == 0
    listener.forget("r", 1.0)


def test_a_worker_that_leaves_is_neither_reported_nor_remembered() -> None:
    router = Router()
    book(router.load, "r1")
    router.load.leave(A, 0.0)
    assert router.told(1.0) is None
    assert router.load.take_own_changes() == {}


steps = st.lists(st.tuples(st.sampled_from(["book", "free", "first"]), st.integers(0, 5), st.sampled_from([A, B])))


@settings(max_examples=examples(200))
@given(steps, st.integers(0, 2**32), st.floats(0, 0.9))
def test_whatever_is_lost_repeated_or_overtaken_the_views_agree_soon(steps: list, seed: int, loss: float) -> None:
    """Messages come late, twice, in any order, or not at all; a second later all are told what is."""
    rng, sender, receiver = random.Random(seed), Router(), Router("other")
    on_the_way: list[LoadNews] = []
    now = 1.0
    for what, number, holder in steps:
        now += 0.01
        match what:
            case "book":
                book(sender.load, f"r{number}", holder)
            case "first":
                sender.load.prefill_done(RequestId(f"r{number}"), now)
            case _:
                sender.load.free(RequestId(f"r{number}"), now)
        if (told := sender.told(now)) is not None and rng.random() >= loss:
            on_the_way += [told] * rng.choice((1, 1, 2))
        rng.shuffle(on_the_way)
        while on_the_way and rng.random() < 0.5:
            receiver.listener.on_news(on_the_way.pop(), now)
    if (at := sender.teller.next_s()) is not None:
        told = sender.teller.tell(at)
        assert told is not None
        on_the_way.append(told)
    rng.shuffle(on_the_way)
    for late in on_the_way:
        receiver.listener.on_news(late, now)
    if steps:
        assert {h: elsewhere(receiver.load, h) for h in (A, B)} == {
            h: tuple(sender.load.shares().get(h, NOTHING)) for h in (A, B)
        }


# --- over sockets -------------------------------------------------------------------------------------


def card(name: str) -> WorkerCard:
    return WorkerCard(
        worker_id=WorkerId(name), name=name, role=Role.DECODE, model="m", model_path="/m", address=f"{name}:1",
        block_size=16, total_blocks=10_000, context_tokens=4096, max_num_seqs=1000,
    )  # fmt: skip


def request(name: str, **fields: object) -> RouteRequest:
    return RouteRequest(request_id=RequestId(name), model="m", isl_tokens=160, **fields)  # type: ignore[arg-type]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.002)


class Mesh:
    """Routers as inside frontends: they meet through discovery and answer nobody but the test."""

    def __init__(self, credentials: Credentials | None) -> None:
        self.discovery = MemoryDiscovery()
        self.plane = PlaneClient(credentials)
        self.routers: dict[str, LocalRouter] = {}
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}

    async def start(self, name: str, **settings: object) -> LocalRouter:
        workers = WorkerFeed()
        config = RouterConfig(name=name, **({"saturation_tokens": 0} | settings))  # type: ignore[arg-type]
        router = LocalRouter(config, self.plane, workers)
        assert router.gossip is not None
        self._tasks[name] = [
            asyncio.create_task(feed) for feed in (workers.run(self.discovery), router.gossip.run(self.discovery))
        ]
        await self.discovery.put(f"routers/{name}", encode(router.card()))
        self.routers[name] = router
        await until(lambda: self.is_connected() and len(router.state.fleet.cards) == 2)
        return router

    def is_connected(self) -> bool:
        others = len(self.routers) - 1
        return all(r.gossip is not None and r.gossip._listeners == others for r in self.routers.values())

    async def stop(self, name: str, *, leaves_card: bool = False) -> None:
        router = self.routers.pop(name)
        for task in self._tasks.pop(name):
            task.cancel()
        await router.close()
        if not leaves_card:
            self.discovery.remove(f"routers/{name}")

    async def close(self) -> None:
        for name in list(self.routers):
            await self.stop(name)
        await self.plane.close()
        await self.discovery.close()


@pytest_asyncio.fixture(params=["open", "closed"])
async def mesh(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Mesh]:
    mesh = Mesh(TestCa(tmp_path / "ca").member(MeshRole.FRONTEND) if request.param == "closed" else None)
    for name in ("d1", "d2"):
        await mesh.discovery.put(f"workers/{name}", encode(card(name)))
    yield mesh
    await mesh.close()


def seen(router: LocalRouter, worker: str = "d1") -> tuple[float, int, int]:
    """Return what the other routers have placed there, as this router knows it."""
    return elsewhere(router.state.load, Holder(WorkerId(worker), 0))


async def test_routers_see_what_the_others_have_placed(mesh: Mesh) -> None:
    first, second, third = [await mesh.start(name) for name in "abc"]
    on_d1 = [await first.place(request(f"r{i}", pin=WorkerId("d1")), 5) for i in range(3)]
    await until(lambda: seen(second) == seen(third) == (480, 3, 3))
    other = await second.place(request("s"), 5)
    assert other.placed.decode.worker_id == "d2"  # d1 is idle as far as this router itself has seen
    await until(lambda: seen(third, "d2") == seen(first, "d2") == (160, 1, 1))
    on_d1[0].prefill_done()
    on_d1[0].progress(32)
    await until(lambda: seen(third) == (320, 5, 3))
    for booking in (*on_d1, other):
        booking.end(ok=True)
    await until(lambda: all(seen(r, w) == (0, 0, 0) for r in (first, second, third) for w in ("d1", "d2")))


async def test_a_router_that_dies_is_forgotten_with_what_it_placed(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmesh.router.gossip.SILENCE_S", 0.3)
    first, second = [await mesh.start(name) for name in "ab"]
    await second.place(request("r", pin=WorkerId("d1")), 5)
    await until(lambda: seen(first) == (160, 1, 1))
    await mesh.stop("b", leaves_card=True)  # killed: its lease goes on for a while
    await until(lambda: seen(first) == (0, 0, 0))
    again = await mesh.start("b")
    await again.place(request("s", pin=WorkerId("d1")), 5)
    await until(lambda: seen(first) == (160, 1, 1))
    await mesh.stop("b")
    await until(lambda: seen(first) == (0, 0, 0))


async def test_a_late_router_learns_what_is_in_flight(mesh: Mesh) -> None:
    first = await mesh.start("a")
    booking = await first.place(request("r", pin=WorkerId("d1")), 5)
    second = await mesh.start("b")
    await until(lambda: seen(second) == (160, 1, 1))
    booking.end(ok=True)
    await until(lambda: seen(second) == (0, 0, 0))


async def test_a_request_that_waits_goes_when_another_router_makes_room(mesh: Mesh) -> None:
    one_each = 1 / card("d1").max_num_seqs
    first, second = [await mesh.start(name, saturation_requests_share=one_each) for name in "ab"]
    both = [await first.place(request(f"r{i}", pin=WorkerId(f"d{i}")), 5) for i in (1, 2)]
    await until(lambda: seen(second, "d1")[2] == seen(second, "d2")[2] == 1)
    waiting = asyncio.create_task(second.place(request("s"), 5))
    await until(lambda: second.state.waiting == 1)
    both[1].end(ok=True)
    booking = await waiting
    assert booking.placed.decode.worker_id == "d2"
    booking.end(ok=True)
    both[0].end(ok=True)


@pytest.mark.parametrize("mesh", ["closed"], indirect=True)
@pytest.mark.parametrize("keys", [None, new_keys()], ids=["plain", "with a key of its own"])
async def test_a_stranger_hears_no_gossip_of_a_closed_mesh(mesh: Mesh, keys: KeyPair | None) -> None:
    first, second = [await mesh.start(name) for name in "ab"]
    heard: list[list[bytes]] = []
    sub = open_socket(zmq.SUB)
    sub.setsockopt(zmq.SUBSCRIBE, b"")
    if keys is not None:
        show_key(sub, keys, first.card().gossip_key)
    sub.connect(first.card().gossip)
    stranger = LoopSocket(sub, heard.append)
    for number in range(4):
        await first.place(request(f"r{number}", pin=WorkerId("d1")), 5)
        await asyncio.sleep(0.1)
    await until(lambda: seen(second) == (640, 4, 4))
    stranger.close()
    assert not heard


@pytest.mark.parametrize("mesh", ["closed"], indirect=True)
async def test_an_open_router_is_not_followed_in_a_closed_mesh(mesh: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    first = await mesh.start("a")
    await mesh.discovery.put("routers/b", encode(RouterCard(name="b", gossip="tcp://127.0.0.1:9")))
    await mesh.discovery.put("routers/c", encode(RouterCard(name="c", gossip="tcp://127.0.0.1:9", gossip_key="x")))
    await until(lambda: "its gossip_key is no key" in caplog.text)
    assert "the gossip of router b is not followed: it is open" in caplog.text
    assert first.gossip is not None
    assert first.gossip.peers == 0


async def test_a_router_alone_says_nothing(mesh: Mesh) -> None:
    router = await mesh.start("a")
    gossip = router.gossip
    assert gossip is not None
    (await router.place(request("r"), 5)).end(ok=True)
    assert (gossip._tell_timer, gossip._expiry_timer, gossip._sender._seq) == (None, None, 0)


async def test_idle_routers_run_no_timers(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmesh.router.gossip.REPEAT_S", 0.01)
    first, second = [await mesh.start(name) for name in "ab"]
    assert first.gossip is not None
    assert second.gossip is not None
    booking = await first.place(request("r", pin=WorkerId("d1")), 5)
    await until(lambda: seen(second)[2] == 1)
    booking.end(ok=True)
    await until(lambda: seen(second)[2] == 0)
    await until(lambda: first.gossip._tell_timer is None)
    booking = await first.place(request("s", pin=WorkerId("d1")), 5)
    await until(lambda: seen(second)[2] == 1)
    assert first.gossip._tell_timer is not None
    mesh.discovery.remove("routers/a")  # and so nobody listens to it any more
    await until(lambda: first.gossip._listeners == 0 and seen(second)[2] == 0)
    assert first.gossip._tell_timer is None
    booking.end(ok=True)


async def test_rubbish_and_strangers_do_not_count(mesh: Mesh) -> None:
    router = await mesh.start("a")
    gossip = router.gossip
    assert gossip is not None
    told = news(1, HolderShare(WorkerId("d1"), 0, 1, 1, 1), router="stranger")
    for frames in ([b"rubbish"], [], [encode(told)], [encode(news(1, router="a"))]):
        gossip._on_message(frames)
    for frames in ([b"\0"], [b"\1other topic"], [b"\1", b""]):
        gossip._on_subscription(frames)
    assert (seen(router), gossip._listeners) == ((0, 0, 0), 0)


async def test_cards_that_cannot_be_followed_are_passed_over(mesh: Mesh) -> None:
    first = await mesh.start("a")
    for name, value in {
        "x": b"rubbish",
        "y": encode(RouterCard(name="y", gossip="nonsense")),
        "z": encode(RouterCard(name="z", address="127.0.0.1:1")),
    }.items():
        await mesh.discovery.put(f"routers/{name}", value)
    second = await mesh.start("b")
    assert first.gossip is not None
    await until(lambda: first.gossip.peers == 1)
    await second.place(request("r", pin=WorkerId("d1")), 5)
    await until(lambda: seen(first) == (160, 1, 1))
    await mesh.discovery.put("routers/b", encode(RouterCard(name="b")))  # it has turned gossip off
    await until(lambda: seen(first) == (0, 0, 0) and first.gossip.peers == 0)


async def test_a_router_that_listens_outlives_its_lease(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle router says nothing, and it may have lost discovery only."""
    monkeypatch.setattr("kvmesh.mesh.lapsed.ASK_AGAIN_S", 0.02)
    first, second = [await mesh.start(name) for name in "ab"]
    assert first.gossip is not None
    mesh.discovery.remove("routers/b", has_lapsed=True)
    await asyncio.sleep(0.2)
    await second.place(request("r", pin=WorkerId("d1")), 5)
    await until(lambda: seen(first) == (160, 1, 1))
    await second.close()
    await until(lambda: first.gossip.peers == 0 and seen(first) == (0, 0, 0))


async def test_a_port_that_is_taken_is_a_bad_setting(mesh: Mesh) -> None:
    first = await mesh.start("a")
    assert first.gossip is not None
    port = int(first.gossip.endpoint.rpartition(":")[2])
    threads = os.listdir("/proc/self/task")
    with pytest.raises(ConfigError, match="cannot gossip"):
        LocalRouter(RouterConfig(gossip_port=port), mesh.plane, WorkerFeed())
    assert set(os.listdir("/proc/self/task")) <= set(threads), "nothing of it is left running"


async def test_without_gossip_nothing_is_opened(mesh: Mesh) -> None:
    router = LocalRouter(RouterConfig(gossip=False), mesh.plane, WorkerFeed())
    assert (router.gossip, router.card().gossip) == (None, "")
    await router.close()


async def test_the_end_of_discovery_is_a_failure() -> None:
    discovery = MemoryDiscovery()
    gossip = Gossip(ActiveLoad(), "r", lambda: None, bind="tcp://127.0.0.1:*")
    following = asyncio.create_task(gossip.run(discovery))
    await asyncio.sleep(0)
    await discovery.close()
    with pytest.raises(FeedLostError):
        await following
    await gossip.close()
    await gossip.close()
