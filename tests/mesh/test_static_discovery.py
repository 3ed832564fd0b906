"""Discovery through a list of addresses: every service is asked for its keys, over a real request plane."""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from kvmesh.mesh.discovery import Change, Deleted, Put, open_discovery, standing_calls
from kvmesh.mesh.discovery.answers import NOT_ASKED
from kvmesh.mesh.discovery.memory import MemoryDiscovery
from kvmesh.mesh.discovery.own_keys import METHOD, KeysNews
from kvmesh.mesh.discovery.static import StaticDiscovery
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.mesh.plane.server import Call, PlaneServer
from kvmesh.protocol.errors import ConfigError, OverloadedError
from tests.support.patience import PATIENCE_S
from tests.support.recovery import RECOVERED_S, WITHOUT_S
from tests.support.services import quiet_port

REPEAT_S, LEASE_S = 0.2, 1.0


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmesh.mesh.discovery.own_keys.REPEAT_S", REPEAT_S)
    monkeypatch.setattr("kvmesh.mesh.discovery.static.LOOK_S", 0.1)


class Site:
    """Services on ports of their own, and the list that names them."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "mesh.txt"
        self._closing = contextlib.AsyncExitStack()

    def list(self, *addresses: str) -> None:
        beside = self.path.with_suffix(".new")
        beside.write_text("".join(f"{address}\n" for address in addresses))
        beside.replace(self.path)

    async def service(self, port: int = 0, **keys: bytes) -> tuple[str, StaticDiscovery, PlaneServer]:
        """Start a service that shows keys; return its address, its discovery and its request plane."""
        store = StaticDiscovery(str(self.path))
        server = PlaneServer({}, standing=standing_calls(store))
        address = await server.start("127.0.0.1", port)
        self._closing.push_async_callback(server.close)
        self._closing.push_async_callback(store.close)
        for key, value in keys.items():
            await store.put(f"workers/{key}", value)
        return address, store, server

    def watcher(self, lease_s: float = LEASE_S) -> StaticDiscovery:
        store = StaticDiscovery(str(self.path), lease_s)
        self._closing.push_async_callback(store.close)
        return store

    async def close(self) -> None:
        await self._closing.aclose()


@pytest_asyncio.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    site = Site(tmp_path)
    yield site
    await site.close()


async def take(changes: AsyncIterator[Change], count: int = 1) -> list[Change]:
    return [await asyncio.wait_for(anext(changes), PATIENCE_S) for _ in range(count)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


async def test_the_keys_of_all_listed_services_are_seen(site: Site) -> None:
    (a, _, _), (b, store, _) = await site.service(a=b"1"), await site.service(b=b"2")
    site.list(a, b)
    changes = site.watcher().watch("workers/")
    assert sorted(map(repr, await take(changes, 2))) == [repr(Put("workers/a", b"1")), repr(Put("workers/b", b"2"))]
    registration = await store.put("workers/c", b"3")
    assert await take(changes) == [Put("workers/c", b"3")]
    await registration.withdraw()
    assert await take(changes) == [Deleted("workers/c")]


async def test_a_service_that_only_shows_keys_reads_no_list(site: Site) -> None:
    await site.service(a=b"1")
    assert not site.path.exists()


async def test_keys_stay_while_their_owner_has_nothing_new(site: Site) -> None:
    address, _, _ = await site.service(a=b"1")
    site.list(address)
    changes = site.watcher().watch("")
    await take(changes)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(changes), 2 * LEASE_S)


async def test_a_service_that_ends_without_a_word_lapses_at_once(site: Site) -> None:
    """Its port refuses connections, so no lease has to pass."""
    address, _, server = await site.service(a=b"1")
    site.list(address)
    store = site.watcher(WITHOUT_S)
    changes = store.watch("")
    await take(changes)
    await server.close()
    began_s = time.monotonic()
    assert await take(changes) == [Deleted("workers/a", has_lapsed=True)]
    assert time.monotonic() - began_s < RECOVERED_S
    [(asked, said)] = store.where().asked
    assert (asked, "cannot connect" in said, store.where().status()[:10]) == (address, True, "away since")


async def test_a_service_that_hangs_lapses_after_its_lease(site: Site) -> None:
    hangs = asyncio.Event()

    async def answer(call: Call) -> None:
        while not hangs.is_set():
            await call.send(KeysNews(process=1, keys={"workers/a": b"1"}))
            await asyncio.sleep(REPEAT_S)
        await asyncio.Event().wait()

    server = PlaneServer({}, standing={METHOD: answer})
    site.list(await server.start("127.0.0.1"))
    store = site.watcher()
    changes = store.watch("")
    await take(changes)
    hangs.set()
    began_s = time.monotonic()
    assert await take(changes) == [Deleted("workers/a", has_lapsed=True)]
    assert time.monotonic() - began_s >= LEASE_S - REPEAT_S
    assert "it has been silent for 1 s" in store.where().asked[0][1]
    await store.close()
    await server.close()


async def test_a_service_that_is_started_again_is_seen_at_once(site: Site) -> None:
    port = quiet_port()
    address, _, server = await site.service(port, a=b"1")
    site.list(address)
    changes = site.watcher(WITHOUT_S).watch("")
    await take(changes)
    await server.close()
    await site.service(port, b=b"2")
    began_s = time.monotonic()
    first = await take(changes)
    assert first[0] in (Deleted("workers/a"), Deleted("workers/a", has_lapsed=True))
    assert await take(changes) == [Put("workers/b", b"2")]
    assert time.monotonic() - began_s < RECOVERED_S


async def test_a_service_that_starts_later_is_found(site: Site) -> None:
    port = quiet_port()
    site.list(f"127.0.0.1:{port}")
    store = site.watcher()
    changes = store.watch("")
    first = asyncio.ensure_future(anext(changes))
    await until(lambda: store.where().status().startswith("away since"))
    await site.service(port, a=b"1")
    assert await asyncio.wait_for(first, PATIENCE_S) == Put("workers/a", b"1")
    assert store.where().status() == "reached"


async def test_the_list_is_read_again_when_it_changes(site: Site) -> None:
    (a, _, _), (b, _, _) = await site.service(a=b"1"), await site.service(b=b"2")
    site.list(a)
    changes = site.watcher().watch("")
    assert await take(changes) == [Put("workers/a", b"1")]
    site.list(a, b)
    assert await take(changes) == [Put("workers/b", b"2")]
    site.list(b)
    assert await take(changes) == [Deleted("workers/a")]


@pytest.mark.parametrize("damage", ["removed", "empty", "unreadable line"])
async def test_a_list_that_is_damaged_later_changes_nothing(
    site: Site, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    address, _, _ = await site.service(a=b"1")
    site.list(address)
    changes = site.watcher().watch("")
    await take(changes)
    match damage:
        case "removed":
            site.path.unlink()
        case "empty":
            site.path.write_text("")
        case _:
            site.path.write_text(f"{address}\nhttp://x\n")
    await until(lambda: any("the addresses that were read before are asked on" in line for line in caplog.messages))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(changes), 0.5)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1, "it is said once"


@pytest.mark.parametrize(
    ("contents", "problem"),
    [(None, "cannot be read: No such file"), ("", "lists no address"), ("a:1\nb\n", "line 2: 'b' is no address")],
)
async def test_a_bad_list_is_a_config_error_for_a_watcher(site: Site, contents: str | None, problem: str) -> None:
    if contents is not None:
        site.path.write_text(contents)
    with pytest.raises(ConfigError, match=problem):
        await anext(site.watcher().watch(""))


@pytest.mark.parametrize("rest", ["?listen=h:1", "f?lease-s=3", "f?listen=", "f?listen=7000"])
def test_bad_settings_are_refused_with_the_usage(rest: str) -> None:
    with pytest.raises(ConfigError, match=r"static:<file>\?listen=host:port"):
        open_discovery(f"static:{rest}")


async def test_a_port_that_is_taken_is_a_config_error(site: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        store = StaticDiscovery(f"{site.path}?listen=127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ConfigError, match="cannot listen on"):
            await store.put("frontends/f", b"1")
        await store.close()


async def test_each_address_says_why_it_does_not_count(site: Site) -> None:
    web = await asyncio.start_server(lambda reader, writer: writer.write(b"HTTP/1.1 400 Bad\r\n\r\n"), "127.0.0.1", 0)
    other = PlaneServer(dict(standing_calls(MemoryDiscovery())))
    good, _, _ = await site.service(a=b"1")
    away = f"127.0.0.1:{quiet_port()}"
    web_address = f"127.0.0.1:{web.sockets[0].getsockname()[1]}"
    other_address = await other.start("127.0.0.1")
    site.list(good, away, web_address, other_address)
    store = site.watcher()
    await take(store.watch(""))
    await until(lambda: all(said != NOT_ASKED for _, said in store.where().asked))
    said = dict(store.where().asked)
    assert said.pop(good) == "answers and shows 1 key"
    assert "cannot connect" in said.pop(away)
    assert "it seems to be no kvmesh service" in said.pop(web_address)
    assert said == {other_address: "a kvmesh service that is not started with --discovery static:"}
    await store.close()
    web.close()
    await other.close()


@pytest.mark.parametrize(
    "news",
    [
        {"process": 0, "keys": {}},
        {"process": 1, "keys": {"": b"1"}},
        {"process": 1, "keys": {"k": b""}},
        {"process": 1, "keys": {"k" * 513: b"1"}},
        {"process": 1, "keys": {"k": b"1" * 65537}},
        {"process": 1, "keys": {f"k{n}": b"1" for n in range(1025)}},
        {"process": 1},  # keys as they were, which nobody knows
        [1, 2],
    ],
    ids=lambda news: msgspec.json.encode(news)[:40].decode(),
)
async def test_an_answer_is_checked_before_it_is_believed(site: Site, news: object) -> None:
    async def answer(call: Call) -> None:
        await call.send(news)
        await asyncio.Event().wait()

    server = PlaneServer({}, standing={METHOD: answer})
    site.list(await server.start("127.0.0.1"))
    store = site.watcher()
    first = asyncio.ensure_future(anext(store.watch("")))
    await until(lambda: "away" in store.where().status())
    assert not first.done()
    assert "KeysNews" in store.where().asked[0][1] or "does not say" in store.where().asked[0][1]
    first.cancel()
    await store.close()
    await server.close()


async def test_what_nobody_would_take_is_not_shown(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmesh.mesh.discovery.own_keys.MAX_KEYS", 2)
    _, store, _ = await site.service(a=b"1", b=b"2")
    for key, value in (("k" * 513, b"1"), ("a", b"1" * 65537), ("workers/c", b"3")):
        with pytest.raises(ConfigError, match=r"cannot be shown|shown already"):
            await store.put(key, value)
    await store.put("workers/a", b"4")


async def test_no_drain_waits_for_those_who_ask(site: Site) -> None:
    address, store, server = await site.service(a=b"1")
    site.list(address)
    changes = site.watcher().watch("")
    await take(changes)
    began_s = time.monotonic()
    assert await server.drain(PATIENCE_S) == 0
    assert time.monotonic() - began_s < RECOVERED_S
    await store.put("workers/b", b"2")
    assert await take(changes) == [Put("workers/b", b"2")], "a service that drains still shows its keys"


async def test_too_many_who_ask_are_refused(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmesh.mesh.discovery.own_keys.MAX_ASKERS", 1)
    address, _, _ = await site.service(a=b"1")
    plane = PlaneClient()
    async with plane.open(address, METHOD, None, 5) as first:
        assert await first.next() is not None
        with pytest.raises(OverloadedError, match="1 processes follow"):
            await plane.ask(address, METHOD, None, KeysNews, 5)
    await plane.close()


async def test_a_process_without_a_request_plane_says_that_nobody_sees_it(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        await site.watcher().put("frontends/f", b"1")
        assert any("nobody can ask this process for frontends/f" in line for line in caplog.messages)
        caplog.clear()
        await site.service(a=b"1")
        listening = StaticDiscovery(f"{site.path}?listen=127.0.0.1:{quiet_port()}")
        await listening.put("frontends/f", b"1")
        await listening.close()
        assert not caplog.messages


async def test_a_bug_ends_the_watch(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that follows a watch which never says anything again would misroute in silence."""

    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    address, _, _ = await site.service(a=b"1")
    site.list(address)
    monkeypatch.setattr("kvmesh.mesh.discovery.answers.Answers.on_news", fail)
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(anext(site.watcher().watch("")), PATIENCE_S)


async def test_idle_discovery_does_not_read_the_list_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    address, _, _ = await site.service(a=b"1")
    site.list(address)
    await take(site.watcher().watch(""))
    reads: list[object] = []
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: reads.append(path) or read(path))
    await asyncio.sleep(0.5)
    assert reads == []
    os.utime(site.path)
    await until(lambda: reads != [])
