"""Calls between processes of the mesh: streams, limits, and what happens when either side goes away."""

import asyncio
import contextlib
import dataclasses
import gc
import socket
import struct
import weakref
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.mesh.plane import client as client_module
from kvmesh.mesh.plane import peer_watch as watch_module
from kvmesh.mesh.plane.client import WINDOW_MESSAGES, PlaneClient, Shortcut, Take
from kvmesh.mesh.plane.frames import Batch, Credit, FrameReader, Hello, Open, Ping, encode_frame
from kvmesh.mesh.plane.pulse import HASTY
from kvmesh.mesh.plane.server import Call, PlaneServer
from kvmesh.protocol.errors import (
    ConfigError,
    DeadlineExceededError,
    DrainingError,
    InvalidRequestError,
    MeshError,
    NoWorkerError,
    OverloadedError,
    PeerLostError,
    UnreachableError,
    WireError,
)
from kvmesh.protocol.messages import Failure
from kvmesh.protocol.version import PROTOCOL_VERSION, RELEASE
from tests.support.patience import PATIENCE_S

FULL = OverloadedError("full", hint="add workers", param="model", retry_after_s=7)


class Service:
    """A server with handlers for the tests."""

    def __init__(self) -> None:
        self.sent = 0
        self.started = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.go_on = asyncio.Event()
        self.server = PlaneServer(
            {
                "count": self.count,
                "forever": self.forever,
                "fail": self.fail,
                "full": self.full,
                "bug": self.bug,
                "hold": self.hold,
                "late": self.late,
            }
        )

    async def count(self, call: Call) -> None:
        for i in range(msgspec.msgpack.decode(call.body)):
            await call.send(i)
            self.sent += 1

    async def forever(self, call: Call) -> None:
        self.started.set()
        try:
            await call.send("first")
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()

    async def hold(self, call: Call) -> None:
        self.started.set()
        await self.go_on.wait()
        await call.send("done")

    async def late(self, call: Call) -> None:
        """Send three messages after the caller has left."""
        try:
            await self.forever(call)
        finally:
            for i in range(3):
                await call.send(i)

    async def fail(self, call: Call) -> None:
        raise NoWorkerError("no worker is ready")

    async def full(self, call: Call) -> None:
        raise FULL

    async def bug(self, call: Call) -> None:
        raise ZeroDivisionError


@pytest_asyncio.fixture
async def service() -> AsyncIterator[Service]:
    service = Service()
    await service.server.start("127.0.0.1")
    yield service
    await service.server.close()


@pytest_asyncio.fixture
async def client() -> AsyncIterator[PlaneClient]:
    client = PlaneClient()
    yield client
    await client.close()


async def test_a_call_is_answered_by_its_messages_in_order(service: Service, client: PlaneClient) -> None:
    async with client.open(service.server.address, "count", 500, 5) as stream:
        assert [n async for n in stream.messages(int)] == list(range(500))


async def test_many_streams_share_one_connection(service: Service, client: PlaneClient) -> None:
    async def count(n: int) -> list[int]:
        async with client.open(service.server.address, "count", n, 5) as stream:
            return [i async for i in stream.messages(int)]

    answers = await asyncio.gather(*(count(n) for n in range(100)))
    assert [len(a) for a in answers] == list(range(100))
    assert len(service.server._links) == 1


async def test_a_slow_consumer_holds_its_producer_back(service: Service, client: PlaneClient) -> None:
    async with client.open(service.server.address, "count", 10_000, 5) as slow:
        assert await client.ask(service.server.address, "count", 1, int, 5) == 0  # others go on
        assert await slow.next() is not None
        assert service.sent <= WINDOW_MESSAGES + 1
        assert len([n async for n in slow.messages(int)]) == 9_999


async def test_leaving_a_stream_cancels_the_call(service: Service, client: PlaneClient) -> None:
    async with client.open(service.server.address, "forever", None, 5) as stream:
        assert await stream.next() is not None
    await asyncio.wait_for(service.cancelled.wait(), PATIENCE_S)


async def test_a_caller_that_leaves_gets_the_messages_that_wait(service: Service, client: PlaneClient) -> None:
    unread: list[bytes] = []
    async with client.open(service.server.address, "count", 3, 5) as stream:
        stream.on_unread = lambda message: unread.append(bytes(message)) or True
        async with asyncio.timeout(PATIENCE_S):
            while len(stream._messages) < 3:
                await asyncio.sleep(0)
    assert [msgspec.msgpack.decode(message) for message in unread] == [0, 1, 2]


@pytest.mark.parametrize("wanted", [2, 100])
async def test_a_caller_that_has_left_gets_later_messages(service: Service, client: PlaneClient, wanted: int) -> None:
    unread: list[int] = []

    def on_unread(message: msgspec.Raw) -> bool:
        unread.append(msgspec.msgpack.decode(message))
        return len(unread) < wanted

    async with client.open(service.server.address, "late", None, 5) as stream:
        stream.on_unread = on_unread
        assert await stream.next() is not None
    link = client.standing(service.server.address)
    assert link is not None
    async with asyncio.timeout(PATIENCE_S):
        while link._left:
            await asyncio.sleep(0)
    assert unread == [0, 1, 2][:wanted]


async def test_a_client_remembers_a_limited_number_of_left_streams(
    client: PlaneClient, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "MAX_LEFT", 2)
    async with client.open(service.server.address, "hold", None, 5):
        link = client.standing(service.server.address)
        assert link is not None
        for _ in range(5):
            async with client.open(service.server.address, "hold", None, 5) as stream:
                stream.on_unread = lambda message: True
        assert len(link._left) == 2


async def test_a_peer_that_dies_ends_its_streams_at_once(service: Service, client: PlaneClient) -> None:
    async with client.open(service.server.address, "forever", None, 60) as stream:
        await stream.next()
        for link in list(service.server._links):
            link._transport.abort()
        with pytest.raises(PeerLostError, match="lost 127"):
            await asyncio.wait_for(stream.next(), PATIENCE_S)


async def test_a_caller_that_dies_cancels_its_calls(service: Service) -> None:
    reader, writer = await asyncio.open_connection(*service.server.address.split(":"))
    writer.write(encode_frame(Hello()))
    writer.write(encode_frame(Open(1, "forever", 60.0, 8, msgspec.Raw(msgspec.msgpack.encode(None)))))
    await service.started.wait()
    writer.transport.abort()
    await asyncio.wait_for(service.cancelled.wait(), PATIENCE_S)


@pytest.mark.parametrize("hasty", [True, False])
async def test_a_silent_peer_is_given_up_by_what_its_calls_bear(
    monkeypatch: pytest.MonkeyPatch, client: PlaneClient, hasty: bool
) -> None:
    """A host that lost power sends no FIN: only silence tells."""
    quick = dataclasses.replace(HASTY, tick_s=0.02, ask_s=0.04, silent_s=0.1, unanswered_s=0.04)
    monkeypatch.setattr(watch_module, "HASTY" if hasty else "CALM", quick)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with client.open(f"127.0.0.1:{silent.getsockname()[1]}", "forever", None, 60, hasty=hasty) as stream:
            with pytest.raises(PeerLostError, match="silent"):
                await asyncio.wait_for(stream.next(), PATIENCE_S)


async def test_a_hasty_call_hastens_the_calls_beside_it(service: Service, client: PlaneClient) -> None:
    async with client.open(service.server.address, "forever", None, 60) as calm:
        await calm.next()
        link = client.standing(service.server.address)
        assert link is not None and not link.is_hasty()
        async with client.open(service.server.address, "forever", None, 60, hasty=True) as hasty:
            await hasty.next()
            assert link.is_hasty() and link.watch._limits is HASTY
        assert not link.is_hasty()


async def test_a_peer_that_fell_silent_gets_calls_after_it_has_answered(
    client: PlaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel, or a proxy, takes connections for a process that hangs: the first call must not be lost there again."""
    monkeypatch.setattr(client_module, "PROOF_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        client._note_away(address)
        with pytest.raises(UnreachableError, match="takes connections, and does not answer"):
            await client.ask(address, "count", 1, int, PATIENCE_S)
    service = Service()
    await service.server.start("127.0.0.1", int(address.rpartition(":")[2]))
    try:
        monkeypatch.setattr(client_module, "PROOF_TIMEOUT_S", PATIENCE_S)
        assert await client.ask(address, "count", 1, int, PATIENCE_S) == 0
        assert address not in client._away
    finally:
        await service.server.close()


async def test_a_silent_suspect_is_given_up_soon(monkeypatch: pytest.MonkeyPatch, client: PlaneClient) -> None:
    monkeypatch.setattr(watch_module, "SUSPECT_S", 0.02)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        async with client.open(address, "forever", None, 60) as stream:
            client.suspect(address, "its lease has ended")
            with pytest.raises(PeerLostError, match="its lease has ended, and it does not answer"):
                await asyncio.wait_for(stream.next(), PATIENCE_S)


async def test_a_suspect_that_answers_keeps_its_streams(
    monkeypatch: pytest.MonkeyPatch, service: Service, client: PlaneClient
) -> None:
    monkeypatch.setattr(watch_module, "SUSPECT_S", 0.05)
    async with client.open(service.server.address, "hold", None, 5) as stream:
        await service.started.wait()
        client.suspect(service.server.address, "it drains")
        client.suspect("127.0.0.1:1", "nobody has a connection to it")
        await asyncio.sleep(0.1)
        service.go_on.set()
        assert await stream.next() is not None


async def test_the_deadline_ends_a_call_on_both_sides(service: Service, client: PlaneClient) -> None:
    with pytest.raises(DeadlineExceededError):
        async with client.open(service.server.address, "forever", None, 0.05) as stream:
            await stream.next()
            await stream.next()
    await asyncio.wait_for(service.cancelled.wait(), PATIENCE_S)


async def test_a_deadline_ends_only_the_stream_not_its_task(service: Service, client: PlaneClient) -> None:
    """The stream is held by a generator that is suspended while its consumer does something slow."""

    async def messages() -> AsyncIterator[object]:
        async with client.open(service.server.address, "forever", None, 0.05) as stream:
            while (message := await stream.next()) is not None:
                yield message

    stream = messages()
    await anext(stream)
    # the slow thing: outlasts the deadline, is not cancelled
    await asyncio.wait_for(service.cancelled.wait(), PATIENCE_S)
    with pytest.raises(DeadlineExceededError):
        await anext(stream)


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), -1.0])
async def test_a_timeout_that_is_none_is_refused(service: Service, timeout_s: float) -> None:
    reader, writer = await asyncio.open_connection(*service.server.address.split(":"))
    writer.write(encode_frame(Hello()))
    writer.write(encode_frame(Open(1, "count", timeout_s, 8, msgspec.Raw(b"\x01"))))
    assert b"is not between 0 and" in await asyncio.wait_for(reader.read(200), PATIENCE_S)
    writer.close()


async def test_an_offer_is_sent_in_order_or_not_at_all(service: Service, client: PlaneClient) -> None:
    taken: list[bool] = []

    async def offer(call: Call) -> None:
        assert not call.offer("no UTF-8: \udc80")
        taken.append(call.offer(bytes(40 << 20)))
        for number in range(3 * WINDOW_MESSAGES):
            taken.append(call.offer(number))
            if not taken[-1]:
                await call.send(number)

    service.server.handlers["offer"] = offer
    async with client.open(service.server.address, "offer", None, 5) as stream:
        assert [n async for n in stream.messages(int)] == list(range(3 * WINDOW_MESSAGES))
    too_large, beyond_credit = False, False
    assert taken[: WINDOW_MESSAGES + 2] == [too_large, *[True] * WINDOW_MESSAGES, beyond_credit]


async def test_an_answer_too_large_for_a_frame_is_an_error(service: Service, client: PlaneClient) -> None:
    async def huge(call: Call) -> None:
        await call.send(bytes(40 << 20))

    service.server.handlers["huge"] = huge
    with pytest.raises(WireError, match="over the limit"):
        await client.ask(service.server.address, "huge", None, bytes, 5)


async def test_errors_arrive_with_class_and_fields(service: Service, client: PlaneClient) -> None:
    with pytest.raises(NoWorkerError, match="no worker is ready"):
        await client.ask(service.server.address, "fail", None, int, 5)
    with pytest.raises(OverloadedError) as full:
        await client.ask(service.server.address, "full", None, int, 5)
    assert vars(full.value) == vars(FULL)
    with pytest.raises(MeshError, match="ZeroDivisionError in bug, see the log"):
        await client.ask(service.server.address, "bug", None, int, 5)
    with pytest.raises(InvalidRequestError, match="no method 'nonsense'"):
        await client.ask(service.server.address, "nonsense", None, int, 5)


async def test_an_absent_peer_is_reported_and_found_later(client: PlaneClient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(PeerLostError, match="cannot connect"):
        await client.ask(f"127.0.0.1:{port}", "count", 1, int, 5)
    service = Service()
    await service.server.start("127.0.0.1", port)
    assert await client.ask(f"127.0.0.1:{port}", "count", 1, int, 5) == 0
    await service.server.close()


async def test_silence_when_connecting_costs_the_long_wait_once(
    client: PlaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listener with a full backlog gives no answer, as a host behind a cut gives none."""
    monkeypatch.setattr(client_module, "CONNECT_TIMEOUT_S", 0.6)
    monkeypatch.setattr(client_module, "KNOWN_AWAY_TIMEOUT_S", 0.1)
    with contextlib.ExitStack() as sockets:
        silent = sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        for _ in range(2):  # one is in the backlog, one waits for it
            filler = sockets.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(silent.getsockname())
        for limit_s in (0.6, 0.1, 0.1):
            with pytest.raises(UnreachableError, match=f"no answer in {limit_s} s"):
                await client.ask(address, "count", 1, int, PATIENCE_S)
        silent.close()
    service = Service()
    await service.server.start("127.0.0.1", int(address.rpartition(":")[2]))
    try:
        assert await client.ask(address, "count", 1, int, PATIENCE_S) == 0, "a peer that is back is used at once"
    finally:
        await service.server.close()


async def test_a_restarted_peer_is_connected_anew(client: PlaneClient) -> None:
    first = Service()
    address = await first.server.start("127.0.0.1")
    assert await client.ask(address, "count", 1, int, 5) == 0
    await first.server.close()
    second = Service()
    await second.server.start("127.0.0.1", int(address.split(":")[1]))
    assert await client.ask(address, "count", 1, int, 5) == 0
    await second.server.close()


async def test_a_draining_server_finishes_what_runs_and_refuses_the_rest(service: Service, client: PlaneClient) -> None:
    held = asyncio.create_task(client.ask(service.server.address, "hold", None, str, 5))
    await service.started.wait()
    drain = asyncio.create_task(service.server.drain(5))
    await asyncio.sleep(0)
    with pytest.raises(DrainingError):
        await client.ask(service.server.address, "count", 1, int, 5)
    service.go_on.set()
    assert await held == "done"
    assert await drain == 0


async def test_more_calls_than_allowed_are_refused_early(service: Service, client: PlaneClient) -> None:
    service.server.max_calls = 1
    async with client.open(service.server.address, "forever", None, 5) as stream:
        await stream.next()
        with pytest.raises(OverloadedError):
            await client.ask(service.server.address, "count", 1, int, 5)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<I", 1 << 31),
        struct.pack("<I", 3) + b"\xc1\xc1\xc1",
        encode_frame(Ping())[:3] + b"\xff" * 64,
        encode_frame(Open(1, "count", 1.0, 1, msgspec.Raw(b"\x01"))),  # no hello
        encode_frame(Hello(99)),
    ],
)
async def test_garbage_is_hung_up_on_and_harms_nobody(service: Service, client: PlaneClient, garbage: bytes) -> None:
    reader, writer = await asyncio.open_connection(*service.server.address.split(":"))
    writer.write(garbage)
    assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
    writer.close()
    assert await client.ask(service.server.address, "count", 1, int, 5) == 0


@pytest.mark.parametrize(
    "hello", [Hello(), Hello(2), Hello(2, 1, 1), Hello(2, 3, 2, "0.3.0")], ids=["0.1.0", "framing", "same", "next"]
)
async def test_callers_of_neighbouring_releases_are_answered(service: Service, hello: Hello) -> None:
    assert (await first_answer(service, hello)).messages


async def test_a_caller_of_another_protocol_learns_both_versions(service: Service) -> None:
    answer = await first_answer(service, Hello(2, 99, 98, "9.9.9"))
    [(stream, failure)] = answer.ends
    assert (stream, failure.code, answer.messages) == (1, "unreachable", [])  # 0.1.0 then tries another worker
    assert "protocol 99" in failure.message and "kvmesh 9.9.9" in failure.message
    assert f"protocol {PROTOCOL_VERSION}" in failure.message and f"kvmesh {RELEASE}" in failure.message


async def first_answer(service: Service, hello: Hello) -> Batch:
    """Return the first frame that a caller with this hello is sent."""
    reader, writer = await asyncio.open_connection(*service.server.address.split(":"))
    writer.write(encode_frame(hello))
    writer.write(encode_frame(Open(1, "count", 60.0, 8, msgspec.Raw(msgspec.msgpack.encode(3)))))
    answers = FrameReader()
    async with asyncio.timeout(PATIENCE_S):
        while not (frames := answers.feed(await reader.read(65536))):
            pass
    writer.close()
    [frame] = frames
    assert isinstance(frame, Batch)
    return frame


async def test_nagle_is_off_on_both_sides(service: Service, client: PlaneClient) -> None:
    await client.ask(service.server.address, "count", 1, int, 5)
    [link] = service.server._links
    [task] = client._links.values()
    for side in (link, task.result()):
        raw = side._transport.get_extra_info("socket")
        assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


# --- feeding a consumer -------------------------------------------------------------------------------


class Taker:
    """A consumer that shows what a test needs to see. It is full after each `every` messages until it is emptied."""

    shortcut: Shortcut | None = None

    def __init__(self, *, every: int = 0, enough: int = 0, breaks_at: int = 0) -> None:
        self.taken: list[int] = []
        self.tasks: set[asyncio.Task[None] | None] = set()  # that gave the messages
        self.is_full = False
        self.waited = asyncio.Event()  # somebody waits until it is ready
        self._ready = asyncio.Event()
        self._every = every
        self._enough = enough
        self._breaks_at = breaks_at

    def take(self, message: int) -> bool:
        assert not (self.is_full or self.is_done), "it wants nothing"
        self.taken.append(message)
        self.tasks.add(asyncio.current_task())
        if len(self.taken) == self._breaks_at:
            raise ZeroDivisionError("a bug of the consumer")
        self.is_full = bool(self._every) and len(self.taken) % self._every == 0
        return not (self.is_full or self.is_done)

    @property
    def is_done(self) -> bool:
        return bool(self._enough) and len(self.taken) >= self._enough

    async def until_ready(self) -> None:
        self.waited.set()
        while self.is_full:
            self._ready.clear()
            await self._ready.wait()

    def empty(self) -> None:
        self.is_full = False
        self.waited.clear()
        self._ready.set()


class EvenNumbers:
    """Implements kvmesh.mesh.plane.client.Shortcut for a Taker: takes even numbers."""

    def __init__(self, taker: Taker) -> None:
        self._taker = taker
        self.took = self._passed = 0

    def bind(self, take: Take, most: int) -> None:
        self._take, self._most = take, most

    def release(self) -> None:
        del self._take

    def __call__(self, raw: msgspec.Raw) -> bool:
        number = msgspec.msgpack.decode(raw)
        if number % 2 or self._passed == self._most:
            passed, self._passed = self._passed, 0
            return self._take(raw, passed)
        self._passed += 1
        self.took += 1
        return self._taker.take(number)


async def keep_emptying(taker: Taker) -> None:
    while True:
        await taker.waited.wait()
        taker.empty()


async def test_a_fed_consumer_gets_all_messages_in_order(service: Service, client: PlaneClient) -> None:
    taker = Taker()
    async with client.open(service.server.address, "count", 500, 5) as stream:
        await stream.feed(int, taker)
    assert taker.taken == list(range(500)), "more than the credit: it was renewed on the way"


@pytest.mark.parametrize("every", [0, 1, 3])
async def test_a_shortcut_takes_what_it_knows_in_its_order(service: Service, client: PlaneClient, every: int) -> None:
    taker, count = Taker(every=every), 5 * WINDOW_MESSAGES
    taker.shortcut = EvenNumbers(taker)
    emptying = asyncio.create_task(keep_emptying(taker))
    async with client.open(service.server.address, "count", count, 5) as stream:
        await stream.feed(int, taker)
    emptying.cancel()
    assert taker.taken == list(range(count)), "more than the credit: it was renewed on the way"
    assert taker.shortcut.took > count / 2 - 10


async def test_an_error_of_a_shortcut_is_raised_by_feed(service: Service, client: PlaneClient) -> None:
    taker = Taker(breaks_at=3)
    taker.shortcut = EvenNumbers(taker)
    async with client.open(service.server.address, "count", 10, 5) as stream:
        with pytest.raises(ZeroDivisionError):
            await stream.feed(int, taker)
    assert taker.taken == [0, 1, 2]
    assert await client.ask(service.server.address, "count", 1, int, 5) == 0, "the connection stands"


@pytest.mark.parametrize("how", ["the consumer fails", "the peer is lost"])
async def test_a_stream_that_fails_is_freed_without_the_garbage_collector(
    service: Service, client: PlaneClient, how: str
) -> None:
    taker = Taker(breaks_at=3 if how == "the consumer fails" else 0)
    method = "count" if how == "the consumer fails" else "hold"
    gone = weakref.ref(taker)
    gc.disable()
    try:
        with pytest.raises((ZeroDivisionError, PeerLostError)):
            async with client.open(service.server.address, method, 10, 5) as stream:
                if method == "hold":
                    asyncio.get_running_loop().call_later(0.01, service.server._links.copy().pop().abort, "a test")
                await stream.feed(int, taker)
        del taker, stream
        assert gone() is None
    finally:
        gc.enable()


async def test_messages_are_pushed_from_the_connection_and_wake_no_task(service: Service, client: PlaneClient) -> None:
    async def paced(call: Call) -> None:
        for number in range(10):
            await call.send(number)
            await asyncio.sleep(0)

    service.server.handlers["paced"] = paced
    taker = Taker()
    async with client.open(service.server.address, "paced", None, 5) as stream:
        await stream.feed(int, taker)
    assert taker.taken == list(range(10))
    assert taker.tasks == {None}, "the loop itself has called"


@pytest.mark.parametrize("every", [1, 3, WINDOW_MESSAGES, WINDOW_MESSAGES + 1])
async def test_a_full_consumer_is_waited_for(service: Service, client: PlaneClient, every: int) -> None:
    taker = Taker(every=every)
    emptying = asyncio.create_task(keep_emptying(taker))
    async with client.open(service.server.address, "count", 300, 5) as stream:
        await stream.feed(int, taker)
    emptying.cancel()
    assert taker.taken == list(range(300))


async def test_a_full_consumer_holds_back_only_its_own_producer(service: Service, client: PlaneClient) -> None:
    taker = Taker(every=5)
    async with client.open(service.server.address, "count", 10_000, 5) as stream:
        feeding = asyncio.create_task(stream.feed(int, taker))
        await taker.waited.wait()
        others = Taker()
        async with client.open(service.server.address, "count", 1000, 5) as other:
            await other.feed(int, others)
        assert len(others.taken) == 1000
        assert len(taker.taken) == 5
        assert service.sent - 1000 <= WINDOW_MESSAGES + 5
        feeding.cancel()


async def test_a_consumer_that_has_enough_ends_the_call(service: Service, client: PlaneClient) -> None:
    async def endless(call: Call) -> None:
        try:
            while True:
                await call.send(1)
        finally:
            service.cancelled.set()

    service.server.handlers["endless"] = endless
    taker = Taker(enough=3)
    async with client.open(service.server.address, "endless", None, 5) as stream:
        await stream.feed(int, taker)
    assert taker.taken == [1, 1, 1]
    await asyncio.wait_for(service.cancelled.wait(), PATIENCE_S)


@pytest.mark.parametrize("breaks_at", [1, 2, 40])
async def test_a_consumer_that_raises_harms_its_own_call_only(
    service: Service, client: PlaneClient, breaks_at: int
) -> None:
    other = asyncio.create_task(client.ask(service.server.address, "hold", None, str, 5))
    await service.started.wait()
    with pytest.raises(ZeroDivisionError, match="a bug of the consumer"):
        async with client.open(service.server.address, "count", 500, 5) as stream:
            await stream.feed(int, Taker(breaks_at=breaks_at))
    service.go_on.set()
    assert await other == "done", "the connection stands"


async def test_messages_of_another_kind_are_the_callers_error(service: Service, client: PlaneClient) -> None:
    with pytest.raises(WireError, match="unreadable str"):
        async with client.open(service.server.address, "count", 5, 5) as stream:
            await stream.feed(str, Taker())  # type: ignore[arg-type]
    assert await client.ask(service.server.address, "count", 1, int, 5) == 0


async def test_what_the_peer_fails_with_comes_after_what_it_said(service: Service, client: PlaneClient) -> None:
    async def say_and_fail(call: Call) -> None:
        for number in range(8):
            await call.send(number)
        raise NoWorkerError("it is gone")

    service.server.handlers["say"] = say_and_fail
    taker = Taker(every=3)
    async with client.open(service.server.address, "say", None, 5) as stream:
        feeding = asyncio.create_task(stream.feed(int, taker))
        await taker.waited.wait()
        while not stream._ended:
            await asyncio.sleep(0)
        assert not feeding.done(), "messages wait for the consumer, and the error behind them"
        emptying = asyncio.create_task(keep_emptying(taker))
        with pytest.raises(NoWorkerError, match="it is gone"):
            await feeding
        emptying.cancel()
    assert taker.taken == list(range(8))


async def test_an_end_while_the_consumer_is_full_loses_nothing(service: Service, client: PlaneClient) -> None:
    taker = Taker(every=3)
    async with client.open(service.server.address, "count", 8, 5) as stream:
        feeding = asyncio.create_task(stream.feed(int, taker))
        await taker.waited.wait()
        while not stream._ended:
            await asyncio.sleep(0)
        emptying = asyncio.create_task(keep_emptying(taker))
        await feeding
        emptying.cancel()
    assert taker.taken == list(range(8))


async def test_a_peer_that_dies_ends_the_feeding(service: Service, client: PlaneClient) -> None:
    async with client.open(service.server.address, "hold", None, 60) as stream:
        feeding = asyncio.create_task(stream.feed(str, Taker()))  # type: ignore[arg-type]
        await service.started.wait()
        for link in list(service.server._links):
            link._transport.abort()
        with pytest.raises(PeerLostError, match="lost 127"):
            await asyncio.wait_for(feeding, PATIENCE_S)


async def test_the_deadline_ends_the_feeding(service: Service, client: PlaneClient) -> None:
    with pytest.raises(DeadlineExceededError):
        async with client.open(service.server.address, "hold", None, 0.05) as stream:
            await stream.feed(str, Taker())  # type: ignore[arg-type]


async def test_who_stops_feeding_leaves_nothing_behind(service: Service, client: PlaneClient) -> None:
    """Cancelled while it waits, a stream gives later messages to nobody."""
    taker = Taker()
    async with client.open(service.server.address, "hold", None, 5) as stream:
        feeding = asyncio.create_task(stream.feed(str, taker))  # type: ignore[arg-type]
        await service.started.wait()
        feeding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await feeding
        service.go_on.set()
        assert [message async for message in stream.messages(str)] == ["done"]
    assert taker.taken == []


async def test_a_peer_that_exceeds_its_credit_is_hung_up_on(client: PlaneClient) -> None:
    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = FrameReader()
        while not any(isinstance(frame, Open) for frame in frames.feed(await reader.read(4096))):
            pass
        one = msgspec.Raw(msgspec.msgpack.encode(1))
        writer.write(encode_frame(Batch([(1, one)] * (WINDOW_MESSAGES + 2), [])))
        await reader.read(-1)
        writer.close()

    server = await asyncio.start_server(flood, "127.0.0.1", 0)
    async with server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with client.open(address, "count", 1, 5) as stream:
            taker = Taker(every=1)
            feeding = asyncio.create_task(stream.feed(int, taker))
            await taker.waited.wait()
            taker.is_full = False
            emptying = asyncio.create_task(keep_emptying(taker))
            taker.empty()
            with pytest.raises(PeerLostError, match="beyond its credit"):
                await asyncio.wait_for(feeding, PATIENCE_S)
            emptying.cancel()


ENDS = [(1, None), (2, Failure(code="c", message="m"))]
FRAMES = [Hello(), Credit(3, 8), Batch([(1, msgspec.Raw(b"\x05"))], ENDS), Ping()]


@given(st.lists(st.sampled_from(FRAMES), max_size=6), st.data())
def test_any_cut_of_the_byte_stream_gives_the_same_frames(frames: list, data: st.DataObject) -> None:
    stream = b"".join(map(encode_frame, frames))
    reader, seen, at = FrameReader(), [], 0
    while at < len(stream):
        step = data.draw(st.integers(1, len(stream) - at))
        seen += reader.feed(stream[at : at + step])
        at += step
    assert [encode_frame(f) for f in seen] == [encode_frame(f) for f in frames]


@given(st.binary(max_size=200))
def test_random_bytes_give_frames_or_a_wire_error(data: bytes) -> None:
    try:
        FrameReader(max_frame_bytes=1000).feed(data)
    except WireError:
        pass


def test_a_frame_is_refused_by_its_length_alone() -> None:
    with pytest.raises(WireError, match="limit is 1000"):
        FrameReader(max_frame_bytes=1000).feed(struct.pack("<I", 1001))


async def test_a_server_with_an_ipv6_address_is_reached_there(service: Service, client: PlaneClient) -> None:
    other = PlaneServer({"count": service.count})
    try:
        await other.start("::1")
    except ConfigError:
        pytest.skip("this host has no IPv6")
    async with client.open(other.address, "count", 3, 5) as stream:
        assert [n async for n in stream.messages(int)] == [0, 1, 2]
    assert other.address.startswith("[::1]:")
    await other.close()
