"""Stores of responses all keep this contract."""

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from kvmesh.frontend.responses.directory_store import DirectoryStore
from kvmesh.frontend.responses.memory_store import MemoryStore
from kvmesh.frontend.responses.retention import StoreLimits
from kvmesh.frontend.responses.store import PreviousResponseError, ResponseStore, StorageError, StoredResponse

Opener = Callable[[StoreLimits], ResponseStore]


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "dir"])
async def opener(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> AsyncIterator[Opener]:
    opened: list[ResponseStore] = []

    def open_store(limits: StoreLimits) -> ResponseStore:
        if request.param == "memory":
            opened.append(MemoryStore(limits, clock))
        else:
            opened.append(DirectoryStore(tmp_path / "responses", limits, clock))
        return opened[-1]

    yield open_store
    for store in opened:
        await store.close()


def record(
    name: str, previous: str | None = None, *, owner: str = "", status: str = "completed", size: int = 0
) -> StoredResponse:
    shown = {"id": name, "status": status, "output": [], "pad": "x" * size}
    response = json.dumps(shown).encode()
    return StoredResponse(
        id=name, owner=owner, status=status, response=response, input=b"[]", previous=previous, events=b"event\n\n"
    )


async def kept(store: ResponseStore, *names: str) -> list[str]:
    return [name for name in names if await store.get("", name) is not None]


async def test_what_was_put_is_found_whole(opener: Opener) -> None:
    store = opener(StoreLimits())
    await store.put(record("a"))
    assert await store.get("", "a") == record("a")
    await store.put(record("a", status="incomplete"))
    assert await store.get("", "a") == record("a", status="incomplete")
    assert await store.get("", "b") is None


async def test_another_owner_finds_nothing(opener: Opener) -> None:
    store = opener(StoreLimits())
    await store.put(record("a", owner="one"))
    assert await store.get("two", "a") is None
    assert await store.get("", "a") is None
    assert not await store.delete("two", "a")
    with pytest.raises(PreviousResponseError):
        await store.chain("two", "a")
    assert await store.get("one", "a") is not None


async def test_ids_may_hold_anything(opener: Opener, tmp_path: Path) -> None:
    store = opener(StoreLimits())
    for name in ("../../escaped", "/etc/passwd", "a\0b", "x" * 5000, "\ud800", ""):
        await store.put(record("known"))
        assert await store.get("", name) is None
        assert not await store.delete("", name)
    outside = [path for path in tmp_path.rglob("*") if path.is_file() and path.parent.name != "responses"]
    assert outside == []


async def test_a_deleted_response_is_gone(opener: Opener) -> None:
    store = opener(StoreLimits())
    await store.put(record("a"))
    assert await store.delete("", "a")
    assert not await store.delete("", "a")
    assert await store.get("", "a") is None


async def test_an_update_does_not_bring_a_deleted_response_back(opener: Opener) -> None:
    """Another frontend may end a background response just after it was deleted."""
    store = opener(StoreLimits())
    await store.put(record("a", status="in_progress"))
    await store.put(record("a"), is_update=True)
    assert await store.get("", "a") == record("a")
    await store.delete("", "a")
    await store.put(record("a"), is_update=True)
    assert await store.get("", "a") is None


async def test_a_response_that_is_used_again_lives_on(opener: Opener, clock: Clock) -> None:
    store = opener(StoreLimits(ttl_s=10))
    await store.put(record("a"))
    await store.put(record("b"))
    clock.now_s += 8
    assert await store.reuse("", "a") == record("a")
    assert await store.reuse("other", "a") is None
    assert await store.reuse("", "c") is None
    clock.now_s += 8
    await store.sweep()
    assert await kept(store, "a", "b") == ["a"]


async def test_a_chain_is_oldest_first(opener: Opener) -> None:
    store = opener(StoreLimits())
    await store.put(record("a"))
    await store.put(record("b", "a", status="incomplete"))
    await store.put(record("c", "b"))
    assert [found.id for found in await store.chain("", "c")] == ["a", "b", "c"]


@pytest.mark.parametrize("status", ["queued", "in_progress", "failed", "cancelled"])
async def test_only_answers_can_be_continued(opener: Opener, status: str) -> None:
    store = opener(StoreLimits())
    await store.put(record("a", status=status))
    with pytest.raises(PreviousResponseError, match=status):
        await store.chain("", "a")


async def test_a_chain_with_a_gap_names_what_is_missing(opener: Opener) -> None:
    store = opener(StoreLimits())
    await store.put(record("b", "a"))
    with pytest.raises(PreviousResponseError, match="'a'"):
        await store.chain("", "b")


async def test_a_chain_that_leads_in_a_circle_ends(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmesh.frontend.responses.store.MAX_CHAIN", 5)
    store = opener(StoreLimits())
    await store.put(record("a", "a"))
    with pytest.raises(PreviousResponseError, match="longer than"):
        await store.chain("", "a")


async def test_the_least_recently_used_goes_first(opener: Opener, clock: Clock) -> None:
    store = opener(StoreLimits(max_count=3))
    for name in ("a", "b", "c"):
        clock.now_s += 1
        await store.put(record(name))
    clock.now_s += 1
    await store.chain("", "a")
    clock.now_s += 1
    await store.put(record("d"))
    assert await kept(store, "a", "b", "c", "d") == ["a", "c", "d"]


async def test_the_bytes_are_bounded(opener: Opener, clock: Clock) -> None:
    store = opener(StoreLimits(max_bytes=9000))
    for name in ("a", "b", "c"):
        clock.now_s += 1
        await store.put(record(name, size=3000))
    assert await kept(store, "a", "b", "c") == ["b", "c"]
    with pytest.raises(StorageError, match="more than the store holds"):
        await store.put(record("huge", size=20_000))
    assert await store.get("", "huge") is None
    assert await kept(store, "b", "c") == ["b", "c"], "the others stay"


async def test_responses_expire_unless_they_are_continued(opener: Opener, clock: Clock) -> None:
    store = opener(StoreLimits(ttl_s=60))
    await store.put(record("a"))
    await store.put(record("b"))
    clock.now_s += 50
    await store.chain("", "b")
    clock.now_s += 20
    assert await kept(store, "a", "b") == ["b"]
    await store.sweep()
    clock.now_s += 60
    assert await kept(store, "a", "b") == []


async def test_what_runs_is_not_the_oldest(opener: Opener, clock: Clock) -> None:
    store = opener(StoreLimits(max_count=2))
    await store.put(record("runs", status="in_progress"))
    clock.now_s += 1
    await store.put(record("a"))
    clock.now_s += 1
    assert list(await store.beat([("", "runs")])) == []
    await store.put(record("b"))
    assert await kept(store, "runs", "a", "b") == ["runs", "b"]
