"""Follow the KV events of many workers: in order, without gaps, from the first batch on."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

import zmq

from kvevents.cursor import Action, Apply, Cursor, Drop, Mode, RequestReplay, RequestSnapshot, Reset
from kvevents.formats import MAX_PAYLOAD_BYTES, decode_payload
from kvevents.publisher import END_OF_REPLAY
from kvevents.sockets import Frames, LoopSocket, open_socket
from protocol.errors import ConfigError, MeshError, WireError
from protocol.events import Cleared, KvEvent
from protocol.ids import WorkerId

log = logging.getLogger(__name__)

Sink = Callable[[WorkerId, int, Sequence[KvEvent]], None]  # worker, dp rank, what happened there

_QUEUED_BATCHES = 4096  # of one worker, while the loop is busy
_QUEUED_REPLAYS = 256
_SEQ_BYTES = 8
_FIRST_RECHECKS_S = (0.1, 1.0)  # for what was published before the subscription had arrived


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a worker holds after batch `seq`, parents before children."""

    seq: int
    events: Sequence[KvEvent]


@dataclass(frozen=True, slots=True)
class KvSource:
    """Where one data-parallel rank of a worker publishes. "" and None: it does not offer that."""

    worker_id: WorkerId
    endpoint: str
    replay_endpoint: str = ""
    dp_rank: int = 0
    topic: str = ""  # a prefix; "" takes all
    snapshot: Callable[[], Awaitable[Snapshot]] | None = None


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for what, and how often."""

    answer_s: float = 5.0  # of silence during a replay
    snapshot_s: float = 30.0
    tries: int = 4  # of a replay or a snapshot
    backoff_s: float = 0.2  # before the second try, then twice as long each time
    recheck_s: float = 30.0  # between looks for losses that no later batch has told of
    at_once: int = 16  # workers that are caught up with at the same time

    def before_try(self, number: int) -> float:
        """Seconds to wait before try `number`, counted from 0."""
        return self.backoff_s * 2 ** (min(number, 8) - 1) if number else 0.0


class KvEventSubscriber:
    """Calls `sink` with each worker's events, in order, on the event loop it was made on.

    A batch of events that begins with Cleared replaces all that was said of that rank before. `stats` counts:
    batches, dropped, unreadable, replays, snapshots, resets.
    """

    def __init__(self, sink: Sink, *, patience: Patience | None = None) -> None:
        self._sink = sink
        self._patience = patience or Patience()
        self._slots = asyncio.Semaphore(self._patience.at_once)
        self._feeds: dict[tuple[WorkerId, int], _Feed] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.stats: Counter[str] = Counter()

    def add(self, source: KvSource) -> None:
        """Begin to follow a source; one with the same worker and rank is replaced.

        Raises ConfigError for an endpoint that is none.
        """
        key = (source.worker_id, source.dp_rank)
        if key in self._feeds:
            self._feeds.pop(key).close()
        feed = _Feed(source, self._sink, self._patience, self._slots, self.stats)
        task = asyncio.create_task(feed.run(), name=f"follow kv events of {source.worker_id}/{source.dp_rank}")
        feed.task = task
        self._feeds[key] = feed
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def remove(self, worker_id: WorkerId) -> None:
        """Follow no rank of this worker any more: `sink` is not called for it again. Unknown ones are no error."""
        for key in [key for key in self._feeds if key[0] == worker_id]:
            self._feeds.pop(key).close()

    def is_live(self, worker_id: WorkerId, dp_rank: int = 0) -> bool:
        """All that is known to be published there was delivered."""
        feed = self._feeds.get((worker_id, dp_rank))
        return feed is not None and feed.is_live

    async def close(self) -> None:
        """Follow nothing any more. A second call does nothing."""
        for worker_id in {key[0] for key in self._feeds}:
            self.remove(worker_id)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("%s ended", task.get_name(), exc_info=error)


class _Feed:
    """One source: a SUB socket for what comes, a task for what has to be asked for."""

    task: asyncio.Task[None]

    def __init__(
        self,
        source: KvSource,
        sink: Sink,
        patience: Patience,
        slots: asyncio.Semaphore,
        stats: Counter[str],
    ) -> None:
        self._source = source
        self._sink = sink
        self._patience = patience
        self._slots = slots
        self._stats = stats
        self._cursor = Cursor(can_replay=bool(source.replay_endpoint), can_snapshot=source.snapshot is not None)
        self._request: RequestReplay | RequestSnapshot | None = None
        self._requested = asyncio.Event()
        self._heard = asyncio.Event()  # a replay goes on
        self._complained = False
        if source.replay_endpoint:
            _connect_dealer(source).close()  # a bad address is found now
        self._sub = LoopSocket(_connect_sub(source), self._on_live)
        self._carry_out(self._cursor.start())

    @property
    def is_live(self) -> bool:
        return self._cursor.mode is Mode.LIVE

    def close(self) -> None:
        self._sub.close()
        self.task.cancel()

    async def run(self) -> None:
        """Carry out what the cursor asks for, and recheck while that is nothing. Ends by cancellation."""
        rechecks = chain(_FIRST_RECHECKS_S, repeat(self._patience.recheck_s))
        in_a_row = 0
        while True:
            if self._request is None:
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
            self._carry_out(self._cursor.on_recheck())

    async def _answer_request(self) -> None:
        request, self._request = self._request, None
        if isinstance(request, RequestReplay):
            await self._replay()
        elif self._source.snapshot is not None:
            await self._restore(self._source.snapshot)

    # --- replay and snapshot --------------------------------------------------------------------------

    async def _replay(self) -> None:
        self._stats["replays"] += 1
        for number in range(self._patience.tries):
            await asyncio.sleep(self._patience.before_try(number))
            async with self._slots:
                if await self._replay_once():
                    return
        log.warning("%s does not answer at %s", self._name, self._source.replay_endpoint)
        self._carry_out(self._cursor.on_replay_failed())

    async def _replay_once(self) -> bool:
        """Ask from where we are; False if there is silence before the end."""
        dealer = LoopSocket(_connect_dealer(self._source), self._on_replayed)
        try:
            dealer.send((b"", (self._cursor.next_seq or 0).to_bytes(8, "big")))
            while self._request is None and self._cursor.mode is Mode.REPLAYING:
                self._heard.clear()
                async with asyncio.timeout(self._patience.answer_s):
                    await self._heard.wait()
        except TimeoutError:
            return False
        finally:
            dealer.close()
        return True

    async def _restore(self, take: Callable[[], Awaitable[Snapshot]]) -> None:
        self._stats["snapshots"] += 1
        for number in range(self._patience.tries):
            await asyncio.sleep(self._patience.before_try(number))
            try:
                async with self._slots, asyncio.timeout(self._patience.snapshot_s):
                    snapshot = await take()
            except Exception as error:  # whatever it is, the feed must not stop at a gap
                is_bug = not isinstance(error, MeshError | OSError)
                log.warning("%s: no snapshot (%r)", self._name, error, exc_info=is_bug)
            else:
                self._carry_out(self._cursor.on_snapshot(snapshot.seq, snapshot.events))
                return
        self._carry_out(self._cursor.on_snapshot_failed())

    # --- what comes -----------------------------------------------------------------------------------

    def _on_live(self, frames: Frames) -> None:
        """`[topic, seq, payload]`."""
        if len(frames) != 3 or len(frames[1]) != _SEQ_BYTES:
            self._complain(f"a message of {len(frames)} frames is no batch")
            return
        self._carry_out(self._cursor.on_live(int.from_bytes(frames[1], "big"), frames[2]))

    def _on_replayed(self, frames: Frames) -> None:
        """`[b"", topic, seq, payload]`, without the topic from older engines; the end has seq -1."""
        self._heard.set()
        if len(frames) < 2 or len(frames[-2]) != _SEQ_BYTES:
            self._complain(f"a replay of {len(frames)} frames is no batch")
            return
        seq, payload = frames[-2:]
        if seq == END_OF_REPLAY:
            self._carry_out(self._cursor.on_replay_end())
        else:
            self._carry_out(self._cursor.on_replayed(int.from_bytes(seq, "big"), payload))

    # --- what has to be done --------------------------------------------------------------------------

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Apply():
                    self._apply(action)
                case Reset():
                    self._reset(action)
                case Drop():
                    self._stats["dropped"] += 1
                case RequestReplay() | RequestSnapshot():
                    self._request = action
                    self._requested.set()

    def _apply(self, action: Apply) -> None:
        self._stats["batches"] += 1
        try:
            events = decode_payload(action.payload).events
        except WireError as error:  # asking again would bring the same
            self._complain(f"batch {action.seq}: {error}")
            return
        self._deliver(events)

    def _reset(self, action: Reset) -> None:
        self._stats["resets"] += 1
        log.info("%s: begin anew (%s)", self._name, action.reason)
        self._deliver([Cleared(), *action.events])

    def _deliver(self, events: Sequence[KvEvent]) -> None:
        try:
            self._sink(self._source.worker_id, self._source.dp_rank, events)
        except Exception:  # a bug met by one batch must not end the feed
            log.exception("%s: %d events were lost", self._name, len(events))

    def _complain(self, what: str) -> None:
        """Once in the log per source, always in the statistics."""
        self._stats["unreadable"] += 1
        log.log(logging.DEBUG if self._complained else logging.WARNING, "%s: %s", self._name, what)
        self._complained = True

    @property
    def _name(self) -> str:
        return f"kv events of {self._source.worker_id}/{self._source.dp_rank}"


def _connect_sub(source: KvSource) -> zmq.Socket[bytes]:
    socket = open_socket(zmq.SUB, receive=_QUEUED_BATCHES, max_bytes=MAX_PAYLOAD_BYTES)
    socket.setsockopt(zmq.SUBSCRIBE, source.topic.encode())
    return _connect(socket, source.endpoint)


def _connect_dealer(source: KvSource) -> zmq.Socket[bytes]:
    socket = open_socket(zmq.DEALER, receive=_QUEUED_REPLAYS, max_bytes=MAX_PAYLOAD_BYTES)
    return _connect(socket, source.replay_endpoint)


def _connect(socket: zmq.Socket[bytes], endpoint: str) -> zmq.Socket[bytes]:
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close()
        hint = "give it as tcp://host:port"
        raise ConfigError(f"cannot follow KV events at {endpoint!r}: {error}", hint=hint) from error
    return socket
