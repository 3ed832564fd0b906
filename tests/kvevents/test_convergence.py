"""Test that an index that follows events ends as the union of the workers' pools, whatever is lost on the way.

Real block pools publish through real rings and payloads into a channel that loses, repeats, delays and reorders;
a real cursor drives a real index. Replays, snapshots and digests are answered late, in pieces or not at all, while
workers restart under the same name or a new one. Pure: no sockets, and time is a counter.
"""

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.kvcache.pool import BlockPool, PoolExhaustedError
from kvmesh.kvevents.batches import in_parts
from kvmesh.kvevents.cursor import (
    Action,
    Apply,
    Cursor,
    Diverged,
    Mode,
    RequestDigest,
    RequestReplay,
    RequestSnapshot,
    Reset,
)
from kvmesh.kvevents.formats import encode_payload
from kvmesh.kvevents.pending import PendingBudget
from kvmesh.kvevents.publisher import ReplayRing
from kvmesh.protocol.events import Digest, Stored
from kvmesh.protocol.hashing import sequence_hashes
from kvmesh.protocol.ids import WorkerId
from kvmesh.router.index import Holder, PrefixIndex
from tests.support.budget import examples

BLOCK = 2
Batch = tuple[int, bytes]


@dataclass(frozen=True)
class Kind:
    """The services that a worker offers to its followers."""

    ring_batches: int = 4
    replay: bool = True
    snapshot: bool = True
    digest: bool = True
    numbers_restart: bool = True


OURS = Kind()
WITHOUT_DIGEST = Kind(digest=False)
WITHOUT_REPLAY = Kind(replay=False)
STOCK = Kind(ring_batches=10_000, snapshot=False, digest=False)  # an unmodified vLLM
NATS = Kind(numbers_restart=False)  # its stream may drop all that it had


class Clock:
    """A second passes from batch to batch, unless somebody sets it."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def tick(self) -> float:
        self.now_s += 1.0
        return self.now_s


class Worker:
    """A worker process: a pool, and the ring through which its events go."""

    def __init__(self, kind: Kind, clock: Clock) -> None:
        self.kind = kind
        self.pool = BlockPool(6, BLOCK)
        self.ring = ReplayRing(kind.ring_batches, 1 << 20)
        self.tables: list[list[int]] = []
        self._clock = clock

    def run_prompt(self, tokens: Sequence[int]) -> None:
        names = sequence_hashes(tokens, BLOCK)
        table = self.pool.match(names)
        try:
            table += self.pool.allocate(len(names) - len(table))
        except PoolExhaustedError:
            self.pool.release(table)
            return
        for i, name in enumerate(names):
            previous = table[i - 1] if i else None
            table[i] = self.pool.commit(table[i], name, previous, tokens[i * BLOCK : (i + 1) * BLOCK])
        self.tables.append(table)

    def finish(self, number: int) -> None:
        if self.tables:
            self.pool.release(self.tables.pop(number % len(self.tables)))

    def evict(self) -> None:
        self.pool.release(self.pool.allocate(self.pool.available_blocks))

    def publish(self) -> list[Batch]:
        """A step of the engine."""
        events = self.pool.take_events()
        batches = [self._encode(part) for part in in_parts(events, 1024)] if events else []
        return [(self.ring.append(payload), payload) for payload in batches]

    def snapshot(self) -> tuple[int, list[bytes]]:
        return self.ring.next_seq - 1, [self._encode(part) for part in in_parts(self.pool.snapshot(), 1024)]

    def content(self) -> set[int]:
        return {name for event in self.pool.snapshot() if isinstance(event, Stored) for name in event.hashes}

    def _encode(self, events: Sequence[object]) -> bytes:
        return encode_payload(events, self._clock.tick(), 0)  # type: ignore[arg-type]


@dataclass
class Answer:
    """An answer on its way to the follower. Its `pieces` are delivered one by one, unless overtaken."""

    request: RequestReplay | RequestSnapshot | RequestDigest
    pieces: deque[Callable[[], list[Action]]] = field(default_factory=deque)


class Follower:
    """Does what kvmesh.kvevents.subscriber does, when the test lets it."""

    def __init__(self, worker: Worker, holder: Holder, index: PrefixIndex, budget: PendingBudget) -> None:
        kind = worker.kind
        self.worker = worker
        self.holder = holder
        self.index = index
        self.cursor = Cursor(
            can_replay=kind.replay,
            can_snapshot=kind.snapshot,
            can_digest=kind.digest,
            numbers_restart=kind.numbers_restart,
            max_pending=5,
            budget=budget,
        )
        self.request: RequestReplay | RequestSnapshot | RequestDigest | None = None
        self.answer: Answer | None = None
        self.is_connected = True
        self.is_numb = False  # the next batch is not understood
        self.divergences = 0
        self.carry_out(self.cursor.start())

    def carry_out(self, actions: list[Action]) -> None:
        pending = deque(actions)
        while pending:
            match pending.popleft():
                case Apply(seq, payload):
                    self._apply(payload)
                    if self.cursor.wants_digests:
                        pending.extend(self.cursor.on_applied(seq, self.digest()))
                case Reset(_, payloads):
                    self.index.drop(self.holder)
                    for payload in payloads:
                        self.index.apply_payload(self.holder, payload)
                case Diverged():
                    self.divergences += 1
                case RequestReplay() | RequestSnapshot() | RequestDigest() as request:
                    self.request = request

    def _apply(self, payload: bytes) -> None:
        if not self.is_numb:
            self.index.apply_payload(self.holder, payload)
        self.is_numb = False

    def digest(self) -> Digest:
        return Digest(*self.index.digest(self.holder))

    def recheck(self) -> None:
        if self.request is None and self.answer is None:
            self.carry_out(self.cursor.on_recheck(self.digest()))

    def ask(self) -> None:
        """The worker answers as things are now; the answer arrives later."""
        if self.request is None or self.answer is not None or not self.is_connected:
            return
        request, self.request = self.request, None
        self.answer = Answer(request)
        match request:
            case RequestReplay():
                for seq, payload in list(self.worker.ring.since(self.cursor.replay_start, 1 << 20)):
                    self.answer.pieces.append(lambda s=seq, p=payload: self.cursor.on_replayed(s, p))  # type: ignore[misc]
                self.answer.pieces.append(self.cursor.on_replay_end)
            case RequestSnapshot():
                seq, payloads = self.worker.snapshot()
                self.answer.pieces.append(lambda: self.cursor.on_snapshot(seq, payloads))
            case RequestDigest():
                last, theirs = self.worker.ring.next_seq - 1, self.worker.pool.digest
                self.answer.pieces.append(lambda: self.cursor.on_digest(last, theirs))

    def hear(self, pieces: int) -> None:
        """The next pieces of the answer arrive."""
        while self.answer is not None and pieces > 0:
            if isinstance(self.answer.request, RequestReplay) and self.request is not None:
                self.answer = None  # the replay was given up for something else
                return
            self.carry_out(self.answer.pieces.popleft()())
            if self.answer is not None and not self.answer.pieces:
                self.answer = None
            pieces -= 1

    def fail(self) -> None:
        """Fail the request: nobody answers, or the answer was lost."""
        request = self.request if self.answer is None else self.answer.request
        if request is None or (self.answer is not None and self.request is not None):
            return
        self.request = self.answer = None
        match request:
            case RequestReplay():
                self.carry_out(self.cursor.on_replay_failed())
            case RequestSnapshot():
                self.carry_out(self.cursor.on_snapshot_failed())
            case RequestDigest():
                self.carry_out(self.cursor.on_digest_failed())

    def on_restart(self, worker: Worker) -> None:
        """Another process takes the worker's place. Its connections break; an answer that is complete may arrive."""
        self.worker = worker
        self.is_connected = False
        if self.answer is not None and isinstance(self.answer.request, RequestReplay):
            self.request, self.answer = self.request or self.answer.request, None  # it is tried again
        self.carry_out(self.cursor.on_disconnected())

    def reconnect(self) -> None:
        if not self.is_connected:
            self.is_connected = True
            self.carry_out(self.cursor.on_reconnected())

    def settle(self) -> None:
        """The worker is quiet and reachable: answer until nothing is asked."""
        self.reconnect()
        for _ in range(100):
            self.ask()
            self.hear(1 << 20)
            if self.request is None and self.answer is None:
                return
        raise AssertionError("it asks for ever")


class World:
    """Workers of one kind, what is on its way from them, and one index that follows them all."""

    def __init__(self, kind: Kind, num_workers: int) -> None:
        self.kind = kind
        self.clock = Clock()
        self.names = (WorkerId(f"w{i}") for i in itertools.count())
        self.index = PrefixIndex()
        self.budget = PendingBudget(2000)
        self.followers: list[Follower] = []
        self.in_flight: list[tuple[Follower, Batch]] = []
        for _ in range(num_workers):
            self.join()

    def join(self) -> Follower:
        worker = Worker(self.kind, self.clock)
        self.publish_from(worker)
        follower = Follower(worker, Holder(next(self.names), 0), self.index, self.budget)
        self.followers.append(follower)
        return follower

    def publish_from(self, worker: Worker) -> None:
        """Publish batches before anybody follows, so that they are live for nobody."""
        worker.run_prompt([0, 1, 1, 0])
        worker.publish()

    def act(self, step: str, which: int, detail: int) -> None:
        follower = self.followers[which % len(self.followers)]
        worker = follower.worker
        match step:
            case "prompt":
                worker.run_prompt([detail >> bit & 1 for bit in range(2 * (1 + detail % 4))])
            case "finish":
                worker.finish(detail)
            case "evict":
                worker.evict()
            case "clear":
                worker.pool.clear()
            case "deliver" | "lose" | "twice" if self.in_flight:
                self._on_way(step, detail % len(self.in_flight))
            case "ask":
                follower.ask()
            case "hear":
                follower.hear(1 + detail % 4)
            case "fail":
                follower.fail()
            case "recheck":
                follower.recheck()
            case "reconnect":
                follower.reconnect()
            case "cut":
                follower.is_connected = False
                follower.carry_out(follower.cursor.on_disconnected())
            case "restart" if self.kind.numbers_restart:
                follower.on_restart(Worker(self.kind, self.clock))
            case "new id":
                self._replace(follower)
            case "numb" if self.kind.digest:
                follower.is_numb = True
            case "set clock" if self.kind.digest:  # else nothing tells generations apart
                self.clock.now_s -= detail
        if step in ("prompt", "finish", "evict", "clear"):
            self.in_flight += [(follower, batch) for batch in worker.publish()]

    def _on_way(self, step: str, number: int) -> None:
        follower, batch = self.in_flight[number]
        if step != "twice":
            del self.in_flight[number]
        if step != "lose" and follower in self.followers and follower.is_connected:
            follower.carry_out(follower.cursor.on_live(*batch))

    def _replace(self, follower: Follower) -> None:
        """The worker's lease ends, and it comes back as another."""
        self.followers.remove(follower)
        follower.cursor.close()
        self.index.drop_worker(follower.holder.worker_id)
        self.join()

    def heal(self, deliver_rest: bool) -> None:
        while self.in_flight:
            self.act("deliver" if deliver_rest else "lose", 0, 0)
        for follower in self.followers:
            follower.settle()
            for _ in range(130):  # after mismatches in a row a worker is asked for its digest less and less often
                follower.recheck()
                follower.settle()

    def check(self) -> None:
        for follower in self.followers:
            held = {prefix for prefix, _ in self.index.content(follower.holder)}
            assert held == follower.worker.content()
            assert follower.digest() == follower.worker.pool.digest
            assert (follower.cursor.mode, follower.request, follower.answer) == (Mode.LIVE, None, None)
        assert self.budget.used_bytes == 0
        assert set(self.index.holders) <= {follower.holder for follower in self.followers}


STEPS = (
    "nothing",  # the simplest, so that a failing schedule shrinks to what it needs
    *("prompt", "prompt", "prompt", "finish", "evict", "clear"),
    *("deliver", "deliver", "deliver", "lose", "twice"),
    *("ask", "ask", "hear", "hear", "fail", "recheck"),
    *("restart", "reconnect", "cut", "new id", "numb", "set clock"),
)
a_step = st.tuples(st.sampled_from(STEPS), st.integers(0, 3), st.integers(0, 255))
steps = st.lists(a_step, min_size=40, max_size=80)  # lists without a least size are short, and little happens
kinds = pytest.mark.parametrize(
    "kind",
    [OURS, WITHOUT_DIGEST, WITHOUT_REPLAY, STOCK, NATS],
    ids=["ours", "digestless", "replayless", "stock", "nats"],
)


@kinds
@settings(max_examples=examples(150))
@given(num_workers=st.integers(1, 3), steps=steps, deliver_rest=st.booleans())
def test_any_interleaving_ends_with_the_union_of_the_pools(
    kind: Kind, num_workers: int, steps: list[tuple[str, int, int]], deliver_rest: bool
) -> None:
    world = World(kind, num_workers)
    for step in steps:
        world.act(*step)
    world.heal(deliver_rest)
    world.check()
