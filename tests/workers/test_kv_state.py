"""A worker's snapshot and digest stand for exactly the batches that it has published."""

from collections.abc import Callable, Sequence
from typing import Any

from kvmesh.kvcache.pool import BlockPool
from kvmesh.kvevents.formats import decode_payload
from kvmesh.protocol.events import Digest, KvEvent, Stored
from kvmesh.protocol.hashing import sequence_hashes
from kvmesh.protocol.messages import KvDigest, KvSnapshot, Role, encode
from kvmesh.workers.service import Worker
from tests.support.place import FakePlace


class Publisher:
    """Numbers batches as every publisher does."""

    def __init__(self) -> None:
        self.published: list[Sequence[KvEvent]] = []

    @property
    def last_seq(self) -> int:
        return len(self.published) - 1


class Engine:
    """A block pool whose last changes are published when somebody asks."""

    def __init__(self, listener: Callable[[Sequence[KvEvent]], object]) -> None:
        self.pool = BlockPool(8, 2)
        self._listener = listener

    def store(self, *tokens: int) -> None:
        (name,) = sequence_hashes(tokens, 2)
        self.pool.commit(self.pool.allocate(1)[0], name, None, tokens)

    def kv_digest(self) -> Digest:
        self._publish()
        return self.pool.digest

    def kv_snapshot(self) -> list[KvEvent]:
        self._publish()
        return self.pool.snapshot()

    def _publish(self) -> None:
        if events := self.pool.take_events():
            self._listener(events)


class Call:
    def __init__(self) -> None:
        self.body = encode(None)
        self.sent: list[Any] = []

    async def send(self, message: object) -> None:
        self.sent.append(message)


async def ask(handler: Callable[..., Any]) -> list[Any]:
    call = Call()
    await handler(call)
    return call.sent


async def test_digest_and_snapshot_are_of_the_batch_they_name() -> None:
    publisher = Publisher()
    engine = Engine(publisher.published.append)
    handlers = Worker(engine, FakePlace(Role.DECODE, publisher)).handlers()  # type: ignore[arg-type]
    assert await ask(handlers["kv_digest"]) == [KvDigest(seq=-1, blocks=0, value=0)]
    for step in range(3):
        engine.store(step, step)
        (digest,) = await ask(handlers["kv_digest"])
        assert (digest.seq, digest.blocks, digest.value) == (step, *engine.pool.digest)
    engine.store(9, 9)
    (snapshot,) = await ask(handlers["kv_snapshot"])
    assert isinstance(snapshot, KvSnapshot)
    assert snapshot.seq == publisher.last_seq == 3
    held = {
        name for event in decode_payload(snapshot.payload).events if isinstance(event, Stored) for name in event.hashes
    }
    assert held == {name for event in engine.pool.snapshot() if isinstance(event, Stored) for name in event.hashes}


async def test_a_snapshot_says_when_it_was_taken() -> None:
    publisher = Publisher()
    engine = Engine(publisher.published.append)
    engine.store(1, 1)
    (snapshot,) = await ask(Worker(engine, FakePlace(Role.DECODE, publisher)).kv_snapshot)  # type: ignore[arg-type]
    assert decode_payload(snapshot.payload).ts > 1e9
