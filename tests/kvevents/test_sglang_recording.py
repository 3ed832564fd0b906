"""Test the recorded events of a real SGLang 0.5.23 on a CPU, read as the live path reads them.

data/sglang-0.5.23.msgpack was written by deploy/record_sglang_events.py: 64 blocks of 16 tokens, 21 prompts one at a
time and three at once, evictions, an emptied cache. SGLang said of each prompt how much of it was cached: whoever
follows its events has to know the same.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from kvmesh.kvevents.formats import decode_payload
from kvmesh.kvevents.subscriber import KvEventSubscriber
from kvmesh.kvevents.transport import KvSource
from kvmesh.protocol.events import Cleared, Digest, KvEvent, Removed, Stored
from kvmesh.protocol.hashing import digest_term, hash_seed, pack_hashes, sequence_hashes
from kvmesh.protocol.ids import EngineHash, SequenceHash, WorkerId
from kvmesh.protocol.tiers import Tier
from kvmesh.router.index import Holder, PlainIndex
from kvmesh.workers.engines.external.cache import EngineCache
from tests.support.fake_sglang import EventSockets, event_map, event_sockets
from tests.support.implementations import INDEXES
from tests.support.patience import PATIENCE_S
from tests.support.sglang_recording import recorder, recording
from tests.support.toy_model import PagedCache

PAGE = 16
CAPACITY_BLOCKS = 64
HOLDER = Holder(WorkerId("w"), 0)

RECORDING = recording()
PAYLOADS: list[bytes] = [payload for _, _, payload in RECORDING.frames]


def wire_events(payload: bytes) -> list[dict[str, Any]]:
    """Return the recorded events as they are, without our decoder."""
    events: list[dict[str, Any]] = msgspec.msgpack.decode(payload)[1]
    return events


def all_wire_events() -> list[dict[str, Any]]:
    return list(chain.from_iterable(map(wire_events, PAYLOADS)))


def wire_names() -> Iterator[int]:
    for event in all_wire_events():
        yield from event.get("block_hashes", ())
        if event.get("parent_block_hash") is not None:
            yield event["parent_block_hash"]


def read_names() -> Iterator[int]:
    for event in chain.from_iterable(decode_payload(payload).events for payload in PAYLOADS):
        if not isinstance(event, Cleared):
            yield from event.hashes
        if isinstance(event, Stored) and event.parent is not None:
            yield event.parent


@dataclass
class Held:
    """The content of SGLang by its own events: the prefix that each block ends, with its salt."""

    blocks: dict[EngineHash, tuple[str | None, tuple[int, ...]]] = field(default_factory=dict)
    parents: dict[EngineHash, EngineHash | None] = field(default_factory=dict)
    most: int = 0
    num_removed: int = 0

    def apply(self, event: KvEvent) -> None:
        match event:
            case Stored():
                self._store(event)
                self.most = max(self.most, len(self.blocks))
            case Removed():
                for name in event.hashes:
                    del self.blocks[name], self.parents[name]
                self.num_removed += len(event.hashes)
            case Cleared():
                self.blocks.clear()
                self.parents.clear()

    def _store(self, event: Stored) -> None:
        parent, before = event.parent, () if event.parent is None else self.blocks[event.parent][1]
        for number, name in enumerate(event.hashes):
            assert name not in self.blocks, "stored twice"
            before += event.token_ids[number * PAGE : (number + 1) * PAGE]
            self.blocks[name], self.parents[name] = (event.salt, before), parent
            parent = name

    @property
    def prefixes(self) -> set[SequenceHash]:
        """Return the same blocks under our names."""
        return {sequence_hashes(tokens, PAGE, hash_seed(None, salt))[-1] for salt, tokens in self.blocks.values()}

    @property
    def digest(self) -> Digest:
        return Digest(len(self.prefixes), sum(digest_term(prefix) for prefix in self.prefixes) % 2**64)


def held_after(num_frames: int) -> Held:
    held = Held()
    for payload in PAYLOADS[:num_frames]:
        for event in decode_payload(payload).events:
            held.apply(event)
    return held


# --- what is on the wire ----------------------------------------------------------------------------------


def test_the_recording_has_what_makes_it_worth_keeping() -> None:
    """Evictions out of a full cache, salts, a prefix that several go on from, caches emptied with blocks in them."""
    events, held = all_wire_events(), held_after(len(PAYLOADS))
    parents = [event["parent_block_hash"] for event in events if event["type"] == "BlockStored"]
    emptied = [n for n, event in enumerate(events) if event["type"] == "AllBlocksCleared"]
    assert RECORDING.version == "0.5.23" and RECORDING.page_size == PAGE
    assert held.num_removed >= CAPACITY_BLOCKS and held.most > CAPACITY_BLOCKS - PAGE
    assert {event.get("cache_salt") for event in events} == {None, "tenant"}
    assert any(parents.count(parent) > 1 for parent in parents if parent is not None)
    assert emptied[0] == 0, "SGLang begins with an empty cache, and says so"
    assert len(emptied) == 2 and emptied[1] > 20 and emptied[1] < len(events) - 1
    assert max(len(wire_events(payload)) for payload in PAYLOADS) > 2


def test_batches_of_rank_0_are_numbered_without_gaps() -> None:
    assert [topic for topic, _, _ in RECORDING.frames] == [b""] * len(PAYLOADS)
    assert [int.from_bytes(seq, "big") for _, seq, _ in RECORDING.frames] == list(range(len(PAYLOADS)))
    batches = [decode_payload(payload) for payload in PAYLOADS]
    assert {batch.dp_rank for batch in batches} == {0}
    assert [batch.ts for batch in batches] == sorted(batch.ts for batch in batches)
    assert all(batch.events for batch in batches)


def test_hashes_are_signed_on_the_wire_and_unsigned_after() -> None:
    assert min(wire_names()) < 0 < max(wire_names())
    assert list(read_names()) == [name % 2**64 for name in wire_names()]


def test_every_block_is_full_and_follows_its_parent() -> None:
    held = Held()
    for event in chain.from_iterable(decode_payload(payload).events for payload in PAYLOADS):
        if isinstance(event, Stored):
            assert (event.block_size, len(event.token_ids)) == (PAGE, PAGE * len(event.hashes))
            assert event.parent is None or event.parent in held.blocks
            assert event.parent is None or event.salt == held.blocks[event.parent][0]
            assert (event.medium, event.lora) == ("GPU", None), "on a CPU, too"
        held.apply(event)


def test_removed_blocks_were_present_and_leave_whole_prefixes() -> None:
    held = Held()
    for payload in PAYLOADS:
        for event in decode_payload(payload).events:
            if isinstance(event, Removed):
                assert set(event.hashes) <= held.blocks.keys()
            held.apply(event)
            assert {parent for parent in held.parents.values() if parent is not None} <= held.parents.keys()
    assert held.num_removed and held.blocks


def test_equal_prefixes_have_one_name_and_others_have_others() -> None:
    """Over the whole recording: a prefix that was removed comes back under the name it had, unless its salt differs."""
    names: dict[tuple[str | None, tuple[int, ...]], EngineHash] = {}
    held = Held()
    for event in chain.from_iterable(decode_payload(payload).events for payload in PAYLOADS):
        held.apply(event)
        for name, prefix in held.blocks.items():
            assert names.setdefault(prefix, name) == name
    assert len(set(names.values())) == len(names)


# --- what is known of it ----------------------------------------------------------------------------------


class CacheFollower:
    """A worker that holds SGLang itself, or stands in front of it."""

    def __init__(self) -> None:
        self.cache = EngineCache(PAGE)
        self.told: set[int] = set()
        self.cache.listeners.append(self._hear)

    def follow(self, payload: bytes) -> None:
        self.cache.on_batch(HOLDER.worker_id, 0, payload)

    def _hear(self, events: Sequence[KvEvent]) -> None:
        for event in events:
            match event:
                case Stored():
                    assert event.parent is None or event.parent in self.told
                    self.told.update(event.hashes)
                case Removed():
                    self.told.difference_update(event.hashes)
                case Cleared():
                    self.told.clear()

    def overlap_blocks(self, prefixes: Sequence[SequenceHash]) -> int:
        return len(list(takewhile(self.told.__contains__, prefixes)))

    @property
    def prefixes(self) -> set[SequenceHash]:
        return {SequenceHash(name) for name in self.told}

    @property
    def digest(self) -> Digest:
        return self.cache.digest_now


class IndexFollower:
    """A router that reads SGLang's events itself."""

    def __init__(self, new_index: Callable[[], PlainIndex]) -> None:
        self.index = new_index()

    def follow(self, payload: bytes) -> None:
        self.index.apply_payload(HOLDER, payload)

    def overlap_blocks(self, prefixes: Sequence[SequenceHash]) -> int:
        depths = self.index.match(pack_hashes(prefixes)).get(HOLDER)
        return 0 if depths is None else depths[Tier.DEVICE]

    @property
    def prefixes(self) -> set[SequenceHash]:
        return {prefix for prefix, tier in self.index.content(HOLDER) if tier is Tier.DEVICE}

    @property
    def digest(self) -> Digest:
        return self.index.digest(HOLDER)


Follower = CacheFollower | IndexFollower


@pytest.fixture(params=[pytest.param(None, id="worker"), *INDEXES])
def follower(request: pytest.FixtureRequest) -> Follower:
    return CacheFollower() if request.param is None else IndexFollower(request.param)


def test_after_every_batch_a_follower_holds_what_sglang_holds(follower: Follower) -> None:
    for number, payload in enumerate(PAYLOADS, 1):
        follower.follow(payload)
        held = held_after(number)
        assert follower.prefixes == held.prefixes
        assert follower.digest == held.digest


def test_a_follower_finds_the_cached_tokens_that_sglang_found(follower: Follower) -> None:
    followed = 0
    for answer in RECORDING.answers:
        for payload in PAYLOADS[followed : answer.num_frames_before]:
            follower.follow(payload)
        followed = max(followed, answer.num_frames_before)
        tokens = answer.prompt.token_ids[:-1]  # the last one is always computed
        prefixes = sequence_hashes(tokens, PAGE, hash_seed(None, answer.prompt.cache_salt))
        assert follower.overlap_blocks(prefixes) * PAGE == answer.cached_tokens
    assert {answer.cached_tokens > 0 for answer in RECORDING.answers} == {False, True}


# --- the fake that other tests run against ----------------------------------------------------------------


@pytest_asyncio.fixture
async def sockets(tmp_path: Path) -> AsyncIterator[EventSockets]:
    with event_sockets(tmp_path) as published:
        yield published


async def test_the_fake_sends_the_recorded_events_as_they_were_sent(sockets: EventSockets, tmp_path: Path) -> None:
    for payload in PAYLOADS:
        sockets.publish_maps(wire_events(payload))
    replayed = await recorder().fetch(f"ipc://{tmp_path}/replay")
    assert [frames[:2] for frames in replayed] == [[topic, seq] for topic, seq, _ in RECORDING.frames]
    assert [without_time(payload) for _, _, payload in replayed] == [without_time(payload) for payload in PAYLOADS]


async def test_its_sockets_can_be_followed_from_the_middle_on(sockets: EventSockets, tmp_path: Path) -> None:
    for payload in PAYLOADS[:10]:
        sockets.publish_maps(wire_events(payload))
    cache = EngineCache(PAGE)
    subscriber = KvEventSubscriber(cache)
    subscriber.add(KvSource(HOLDER.worker_id, f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay"))
    try:
        await until(lambda: cache.digest_now == held_after(10).digest)
        for payload in PAYLOADS[10:]:
            sockets.publish_maps(wire_events(payload))
        await until(lambda: cache.digest_now == held_after(len(PAYLOADS)).digest)
    finally:
        await subscriber.close()


@pytest.mark.parametrize("salt", [None, "tenant"])
def test_the_fakes_own_events_have_the_recorded_form(salt: str | None) -> None:
    """Keys, their order, and the types of their values."""
    cache = PagedCache(num_blocks=4, block_size=PAGE)
    cache.store(list(range(3 * PAGE)), None, salt)
    cache.store(list(range(100, 100 + 3 * PAGE)), None, salt)
    made = [event_map(event, PAGE) for event in cache.take_news()]
    recorded = [
        event for event in all_wire_events() if event["type"] != "BlockStored" or event.get("cache_salt") == salt
    ]
    for kind in ("BlockStored", "BlockRemoved"):
        assert forms(made, kind) == forms(recorded, kind) != set()


def forms(events: Sequence[dict[str, Any]], kind: str) -> set[tuple[tuple[str, str], ...]]:
    """Return the types of an event's fields. A parent counts as one type, because it depends on the block."""
    return {
        tuple((key, "parent" if key == "parent_block_hash" else type(value).__name__) for key, value in event.items())
        for event in events
        if event["type"] == kind
    }


def without_time(payload: bytes) -> list[Any]:
    """All of a batch but its first element, with the keys of each event in their order."""
    ts, events, *rest = msgspec.msgpack.decode(payload)
    assert isinstance(ts, float)
    return [[list(event.items()) for event in events], *rest]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)
