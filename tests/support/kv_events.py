"""A follower's index that shows what it was told, and events for it."""

import asyncio
from collections.abc import Callable, Sequence

from kvmesh.kvevents.formats import decode_payload, encode_payload
from kvmesh.protocol.events import Cleared, Digest, KvEvent, Removed, Stored
from kvmesh.protocol.ids import EngineHash, WorkerId
from tests.support.patience import PATIENCE_S

W1 = WorkerId("w1")


def block(number: int) -> Stored:
    return Stored((EngineHash(number),), None, (number, number), 2)


def blocks(*numbers: int) -> list[KvEvent]:
    return [block(number) for number in numbers]


def payload(*numbers: int, ts: float = 1.0) -> bytes:
    return encode_payload(blocks(*numbers), ts)


def digest_of(numbers: Sequence[int]) -> Digest:
    return Digest(len(numbers), sum(numbers))


class Index:
    """Implements kvevents.subscriber.Sink: the blocks of each worker; a test waits for what it expects to see."""

    def __init__(self) -> None:
        self.held: dict[tuple[WorkerId, int], set[int]] = {}
        self.resets = 0
        self.batches: list[int] = []  # how many events each had
        self._changed = asyncio.Event()

    def on_batch(self, worker_id: WorkerId, dp_rank: int, payload: bytes) -> None:
        events = decode_payload(payload).events
        self.batches.append(len(events))
        self._apply(self.held.setdefault((worker_id, dp_rank), set()), events)

    def on_reset(self, worker_id: WorkerId, dp_rank: int, payloads: Sequence[bytes]) -> None:
        self.resets += 1
        held = self.held[worker_id, dp_rank] = set()
        for payload in payloads:
            self._apply(held, decode_payload(payload).events)
        self._changed.set()

    def digest(self, worker_id: WorkerId, dp_rank: int) -> Digest | None:
        return digest_of(sorted(self.held.get((worker_id, dp_rank), ())))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def holds(self, *numbers: int, worker_id: WorkerId = W1, dp_rank: int = 0) -> None:
        await self.until(lambda: self.held.get((worker_id, dp_rank)) == set(numbers))

    def _apply(self, held: set[int], events: Sequence[KvEvent]) -> None:
        for event in events:
            match event:
                case Stored():
                    held.update(event.hashes)
                case Removed():
                    held.difference_update(event.hashes)
                case Cleared():
                    held.clear()
        self._changed.set()
