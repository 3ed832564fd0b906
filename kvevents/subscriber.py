"""Follow the KV events of many workers: in order, without gaps, from the first batch on."""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Protocol

from kvmesh.kvevents.allowance import Allowance, EventRates
from kvmesh.kvevents.connect import Links
from kvmesh.kvevents.cursor import (
    Action,
    Apply,
    Cursor,
    Diverged,
    Drop,
    Mode,
    Position,
    RequestDigest,
    RequestReplay,
    RequestSnapshot,
    Reset,
)
from kvmesh.kvevents.pending import PendingBudget
from kvmesh.kvevents.transport import KvSource, Snapshot
from kvmesh.mesh.safeguards import is_off
from kvmesh.protocol.errors import MeshError, WireError
from kvmesh.protocol.events import Digest
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import KvDigest

log = logging.getLogger(__name__)

_FINDS_LOSSES = not is_off("replay")
_FIRST_RECHECKS_S = (0.1, 1.0)  # finds batches that were published before the subscription arrived

Request = RequestReplay | RequestSnapshot | RequestDigest


class Sink(Protocol):
    """A record of what the workers hold. It is called on the event loop, in order, and must not block."""

    def on_batch(self, worker_id: WorkerId, dp_rank: int, payload: bytes) -> None:
        """Take the next batch, as on the wire (kvevents/formats.py). Raises WireError if it is unreadable."""

    def on_reset(self, worker_id: WorkerId, dp_rank: int, payloads: Sequence[bytes]) -> None:
        """Replace all that is known of that rank by the batches `payloads`. Raises WireError if they are unreadable."""

    def digest(self, worker_id: WorkerId, dp_rank: int) -> Digest | None:
        """Return the digest of all that the rank holds by the applied batches; None: no digests are kept."""


@dataclass(frozen=True, slots=True)
class Patience:
    """The times to wait, and the numbers of tries."""

    answer_s: float = 5.0  # of silence during a replay, and for a digest
    snapshot_s: float = 30.0
    tries: int = 4  # of a replay or a snapshot
    backoff_s: float = 0.2  # before the second try, then twice as long each time
    recheck_s: float = 30.0  # between looks for losses that no later batch has shown
    at_once: int = 16  # requests to workers at the same time

    def before_try(self, number: int) -> float:
        """Return the seconds to wait before try `number`, counted from 0."""
        return self.backoff_s * 2 ** (min(number, 8) - 1) if number else 0.0


class KvEventSubscriber:
    """Feeds `sink` with each worker's events, in order, on the event loop it was made on.

    `stats` counts: batches, dropped, unreadable, replays, snapshots, digests, divergences, resets, rests.

    A publisher that sends more than `rates` is disconnected for a while, and asked for what was missed after that.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        patience: Patience | None = None,
        links: Links | None = None,
        rates: EventRates | None = None,
        on_rest: Callable[[], object] = lambda: None,
    ) -> None:
        """Make a subscriber, which closes `links` when it is closed. `on_rest` counts disconnected publishers."""
        self.stats: Counter[str] = Counter()
        self._links = links or Links()
        self._shared = _Shared(sink, patience or Patience(), self._links, self.stats, rates or EventRates(), on_rest)
        self._feeds: dict[tuple[WorkerId, int], _Feed] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, source: KvSource) -> None:
        """Begin to follow a source. It replaces one of the same worker and rank, whose content is forgotten.

        Raises ConfigError for a bad endpoint.
        """
        key = (source.worker_id, source.dp_rank)
        if key in self._feeds:
            self._feeds.pop(key).close()
            if source.resume is None:
                self._shared.sink.on_reset(*key, ())
        feed = _Feed(source, self._shared)
        task = asyncio.create_task(feed.run(), name=f"follow kv events of {source.worker_id}/{source.dp_rank}")
        feed.task = task
        self._feeds[key] = feed
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def remove(self, worker_id: WorkerId) -> None:
        """Stop following all ranks of a worker: `sink` is not called for it again. An unknown worker is no error."""
        for key in [key for key in self._feeds if key[0] == worker_id]:
            self._feeds.pop(key).close()

    def is_live(self, worker_id: WorkerId, dp_rank: int = 0) -> bool:
        """Return whether the transport works, and all batches known to be published there were delivered."""
        feed = self._feeds.get((worker_id, dp_rank))
        return feed is not None and feed.is_live

    def count_live(self) -> tuple[int, int]:
        """Return how many sources are followed without a gap, and how many are not."""
        live = [feed.is_live for feed in list(self._feeds.values())]
        return sum(live), len(live) - sum(live)

    def positions(self) -> Mapping[tuple[WorkerId, int], Position]:
        """Return the positions up to which the sink was fed. A follower with a copy of the sink can resume there."""
        return {key: position for key, feed in self._feeds.items() if (position := feed.position) is not None}

    @property
    def pending_bytes(self) -> int:
        """The payload bytes of batches of all sources that cannot be applied yet."""
        return self._shared.budget.used_bytes

    async def close(self) -> None:
        """Stop following all sources. A second call does nothing."""
        for worker_id in {key[0] for key in self._feeds}:
            self.remove(worker_id)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._links.close()

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("%s ended", task.get_name(), exc_info=error)


class _Shared:
    """The objects that all feeds of a subscriber share."""

    def __init__(
        self,
        sink: Sink,
        patience: Patience,
        links: Links,
        stats: Counter[str],
        rates: EventRates,
        on_rest: Callable[[], object],
    ) -> None:
        self.sink = sink
        self.patience = patience
        self.links = links
        self.stats = stats
        self.rates = rates
        self.on_rest = on_rest
        self.slots = asyncio.Semaphore(patience.at_once)
        self.budget = PendingBudget()


class _Feed:
    """A source: its link brings live batches, and `run` makes the requests of the cursor.

    Implements kvmesh.kvevents.transport.Listener.
    """

    task: asyncio.Task[None]

    def __init__(self, source: KvSource, shared: _Shared) -> None:
        self._source = source
        self._sink = shared.sink
        self._patience = shared.patience
        self._slots = shared.slots
        self._stats = shared.stats
        self._is_closed = False
        self._request: Request | None = None
        self._requested = asyncio.Event()
        self._complained = False
        self._links = shared.links
        self._on_rest = shared.on_rest
        self._allowance = Allowance(shared.rates, asyncio.get_running_loop().time())
        self._is_resting = self._has_rested = False  # the publisher sent too much: the link is closed
        self._link = shared.links.open(source, self)
        self._cursor = Cursor(
            can_replay=self._link.can_replay and _FINDS_LOSSES,
            can_snapshot=source.snapshot is not None and _FINDS_LOSSES,
            can_digest=source.digest is not None and _FINDS_LOSSES,
            numbers_restart=self._link.numbers_restart,
            resume=source.resume,
            budget=shared.budget,
        )
        self._carry_out(self._cursor.start())

    @property
    def is_live(self) -> bool:
        return self._cursor.mode is Mode.LIVE and not self._is_resting and self._link.is_up

    @property
    def position(self) -> Position | None:
        return self._cursor.position

    def close(self) -> None:
        self._is_closed = True
        self._link.close()
        self._cursor.close()
        self.task.cancel()

    async def run(self) -> None:
        """Make the requests of the cursor, and recheck while there are none.

        Cancellation ends this; `_is_closed` does where `asyncio.wait_for` of Python 3.11 swallows the cancellation.
        """
        rechecks = chain(_FIRST_RECHECKS_S, repeat(self._patience.recheck_s))
        in_a_row = 0
        while not self._is_closed:
            if self._is_resting:
                await self._rest()
            elif self._request is None:
                in_a_row = 0
                await self._idle(min(next(rechecks), self._patience.recheck_s))
            else:
                await asyncio.sleep(self._patience.before_try(max(in_a_row - 2, 0)))
                in_a_row += 1
                await self._answer_request()

    async def _idle(self, recheck_s: float) -> None:
        self._requested.clear()
        try:
            async with asyncio.timeout(recheck_s):
                await self._requested.wait()
        except TimeoutError:
            self._carry_out(self._cursor.on_recheck(self._own_digest()))

    async def _answer_request(self) -> None:
        request, self._request = self._request, None
        match request:
            case RequestReplay():
                await self._replay()
            case RequestSnapshot() if self._source.snapshot is not None:
                await self._restore(self._source.snapshot)
            case RequestDigest() if self._source.digest is not None:
                await self._compare(self._source.digest)

    # --- requests ----------------------------------------------------------------------------

    async def _replay(self) -> None:
        self._stats["replays"] += 1
        for number in range(self._patience.tries):
            await asyncio.sleep(self._patience.before_try(number))
            try:
                async with self._slots:
                    await self._link.replay(self._cursor.replay_start, self._on_replayed, self._patience.answer_s)
            except (TimeoutError, MeshError, OSError) as error:
                log.debug("%s: no replay (%r)", self._name, error)
                if self._wants_replay:
                    continue
            else:
                if self._wants_replay:
                    self._carry_out(self._cursor.on_replay_end())
            return
        log.warning("%s: %s does not replay", self._name, self._source.replay_endpoint or self._source.endpoint)
        self._carry_out(self._cursor.on_replay_failed())

    def _on_replayed(self, seq: int, payload: bytes) -> bool:
        if self._may_take(payload):
            self._carry_out(self._cursor.on_replayed(seq, payload))
        return self._wants_replay

    @property
    def _wants_replay(self) -> bool:
        is_open = not (self._is_closed or self._is_resting)
        return is_open and self._request is None and self._cursor.mode is Mode.REPLAYING

    async def _restore(self, take: Callable[[], Awaitable[Snapshot]]) -> None:
        self._stats["snapshots"] += 1
        for number in range(self._patience.tries):
            await asyncio.sleep(self._patience.before_try(number))
            try:
                async with self._slots, asyncio.timeout(self._patience.snapshot_s):
                    snapshot = await take()
            except Exception as error:  # no error may stop the feed at a gap
                is_bug = not isinstance(error, MeshError | OSError)
                log.warning("%s: no snapshot (%r)", self._name, error, exc_info=is_bug)
            else:
                self._carry_out(self._cursor.on_snapshot(snapshot.seq, snapshot.payloads))
                return
        self._carry_out(self._cursor.on_snapshot_failed())

    async def _compare(self, ask: Callable[[], Awaitable[KvDigest]]) -> None:
        self._stats["digests"] += 1
        try:
            async with self._slots, asyncio.timeout(self._patience.answer_s):
                answer = await ask()
        except Exception as error:  # the next recheck asks again
            is_bug = not isinstance(error, MeshError | OSError)
            log.log(logging.WARNING if is_bug else logging.DEBUG, "%s: no digest (%r)", self._name, error)
            self._carry_out(self._cursor.on_digest_failed())
        else:
            self._carry_out(self._cursor.on_digest(answer.seq, Digest(answer.blocks, answer.value)))

    # --- events of the link -----------------------------------------------------------------------------------

    def on_live(self, seq: int, payload: bytes) -> None:
        if self._may_take(payload):
            self._carry_out(self._cursor.on_live(seq, payload))

    def on_disconnected(self) -> None:
        self._carry_out(self._cursor.on_disconnected())

    def on_reconnected(self) -> None:
        self._carry_out(self._cursor.on_reconnected())

    def on_unreadable(self, what: str) -> None:
        """Count unreadable data, and log the first of each source as a warning."""
        self._stats["unreadable"] += 1
        log.log(logging.DEBUG if self._complained else logging.WARNING, "%s: %s", self._name, what)
        self._complained = True
        self._may_take(b"")

    # --- a publisher that sends too much ----------------------------------------------------------------------

    def _may_take(self, payload: bytes) -> bool:
        """Return whether a batch is within the publisher's allowance; else its link is closed for a while."""
        if self._is_resting or self._is_closed:
            return False
        if self._allowance.take(payload, asyncio.get_running_loop().time()):
            return True
        self._stats["rests"] += 1
        self._on_rest()
        level = logging.DEBUG if self._has_rested else logging.WARNING
        log.log(level, "%s: it sends more events than one publisher may; it is disconnected for a while, and asked "
                "for what was missed after that", self._name)  # fmt: skip
        self._is_resting = self._has_rested = True
        self._link.close()
        self._carry_out(self._cursor.on_disconnected())
        self._requested.set()
        return False

    async def _rest(self) -> None:
        """Leave the publisher alone until it may send again, then connect again and ask for what was missed."""
        await asyncio.sleep(self._allowance.rest_s(asyncio.get_running_loop().time()))
        if self._is_closed:
            return
        try:
            self._link = self._links.open(self._source, self)
        except MeshError as error:
            log.warning("%s: cannot connect again: %s", self._name, error)
            return
        self._is_resting = False
        if self._request is None and self._cursor.mode is Mode.REPLAYING:
            self._request = RequestReplay(self._cursor.replay_start)
        self._carry_out(self._cursor.on_reconnected())

    # --- actions of the cursor --------------------------------------------------------------------------

    def _carry_out(self, actions: Sequence[Action]) -> None:
        """Carry out actions in order. Actions that an applied batch causes come after all of them."""
        pending = deque(actions)
        while pending and not self._is_closed:
            match pending.popleft():
                case Apply(seq, payload):
                    self._apply(seq, payload)
                    if self._cursor.wants_digests and (own := self._own_digest()) is not None:
                        pending.extend(self._cursor.on_applied(seq, own))
                case Reset() as reset:
                    self._reset(reset)
                case Drop():
                    self._stats["dropped"] += 1
                case Diverged(in_a_row):
                    self._on_divergence(in_a_row)
                case RequestReplay() | RequestSnapshot() | RequestDigest() as request:
                    self._request = request
                    self._requested.set()

    def _apply(self, seq: int, payload: bytes) -> None:
        self._stats["batches"] += 1
        try:
            self._sink.on_batch(self._source.worker_id, self._source.dp_rank, payload)
        except WireError as error:  # asking again would bring the same
            self.on_unreadable(f"batch {seq}: {error}")
        except Exception:  # a bug met by one batch must not end the feed
            log.exception("%s: batch %d was lost", self._name, seq)

    def _reset(self, reset: Reset) -> None:
        self._stats["resets"] += 1
        log.info("%s: starting again (%s)", self._name, reset.reason)
        try:
            self._sink.on_reset(self._source.worker_id, self._source.dp_rank, reset.payloads)
        except WireError as error:
            self.on_unreadable(f"a snapshot: {error}")
        except Exception:
            log.exception("%s: a snapshot was lost", self._name)

    def _own_digest(self) -> Digest | None:
        try:
            return self._sink.digest(self._source.worker_id, self._source.dp_rank)
        except Exception:
            log.exception("%s: no digest of what is held", self._name)
            return None

    def _on_divergence(self, in_a_row: int) -> None:
        """Count a divergence. Log the first, and the second if the new snapshot did not help."""
        self._stats["divergences"] += 1
        if in_a_row == 1:
            log.warning("%s: the index differs from what the worker holds; a new snapshot is taken", self._name)
        elif in_a_row == 2:
            log.warning(
                "%s: the index differs again after a snapshot: it is full, or there is a bug; comparing less often",
                self._name,
            )

    @property
    def _name(self) -> str:
        return f"kv events of {self._source.worker_id}/{self._source.dp_rank}"
