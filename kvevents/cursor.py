"""Where a follower stands in one worker's event stream, and what it has to do next. Pure.

Batches are numbered without gaps. What comes twice is dropped; what is missing is asked for: first from the
worker's replay ring, then, if that no longer reaches back, as a snapshot of all it holds now. A worker that
offers neither is followed from where it is, with all that was known of it forgotten: an index that is too
small costs cache hits, one that is wrong misroutes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from protocol.events import KvEvent


@dataclass(frozen=True, slots=True)
class Apply:
    """Batch `seq` is next."""

    seq: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Reset:
    """Forget all that was applied; the worker holds what `events` say, and what follows."""

    reason: str
    events: tuple[KvEvent, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestReplay:
    """Ask for all batches from `start` on. `on_replay_end`, `on_replay_failed` or a RequestSnapshot end that."""

    start: int


@dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """Ask for all that the worker holds. `on_snapshot` or `on_snapshot_failed` ends that."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Batch `seq` has been applied before, or is of no use."""

    seq: int


Action = Apply | Reset | RequestReplay | RequestSnapshot | Drop


class Mode(Enum):
    LIVE = "live"
    REPLAYING = "replaying"
    SNAPSHOTTING = "snapshotting"


class Cursor:
    """Turns batches as they arrive into batches in order. Every method returns what to do, in order.

    Begins with `start()`. Invariant: after each Reset, the batches applied have consecutive numbers, and
    `next_seq` is the one that must follow (None: whichever comes first).
    """

    def __init__(
        self,
        *,
        can_replay: bool = True,
        can_snapshot: bool = True,
        max_pending: int = 4096,
        max_pending_bytes: int = 32 << 20,
    ) -> None:
        self.mode = Mode.LIVE
        self.next_seq: int | None = None
        self._can_replay = can_replay
        self._can_snapshot = can_snapshot
        self._max_pending = max_pending
        self._max_pending_bytes = max_pending_bytes
        self._pending: dict[int, bytes] = {}  # live batches that cannot be applied yet
        self._pending_bytes = 0
        self._highest_seq = -1  # seen so far, applied or not
        self._replay_start = 0
        self._incomplete = False  # a Reset without a snapshot: we know less than the worker holds

    def start(self) -> list[Action]:
        """Catch up with all that was published before we came."""
        if self._can_replay:
            self.next_seq = 0
            return self._replay()
        return self._snapshot() if self._can_snapshot else []

    def on_live(self, seq: int, payload: bytes) -> list[Action]:
        self._highest_seq = max(self._highest_seq, seq)
        if self.mode is not Mode.LIVE:
            return self._keep(seq, payload)
        if self.next_seq is None or seq == self.next_seq:
            return [self._apply(seq, payload)]
        if seq < self.next_seq:
            return [Drop(seq)]
        return [*self._keep(seq, payload), *self._recover()]

    def on_replayed(self, seq: int, payload: bytes) -> list[Action]:
        if self.mode is not Mode.REPLAYING or self.next_seq is None or seq < self.next_seq:
            return [Drop(seq)]
        self._highest_seq = max(self._highest_seq, seq)
        if seq == self.next_seq:
            return [self._apply(seq, payload), *self._drain()]
        if self._can_snapshot:  # the ring no longer reaches back to next_seq
            return self._snapshot()
        lost = Reset(f"batches {self.next_seq} to {seq - 1} are lost")
        return [lost, self._apply(seq, payload), *self._drain()]

    def on_replay_end(self) -> list[Action]:
        if self.mode is not Mode.REPLAYING:
            return []
        if not self._is_behind():
            self.mode = Mode.LIVE
            return []
        if self.next_seq != self._replay_start:  # it helped: what is missing came too late for it
            return self._replay()
        return self._snapshot() if self._can_snapshot else self._give_up()

    def on_replay_failed(self) -> list[Action]:
        """Nobody answers."""
        if self.mode is not Mode.REPLAYING:
            return []
        if self._can_snapshot and (self._is_behind() or self.next_seq == 0):
            return self._snapshot()
        return self._give_up()

    def on_snapshot(self, seq: int, events: Sequence[KvEvent]) -> list[Action]:
        """`events` are all that the worker holds after batch `seq` (-1: before the first)."""
        if self.mode is not Mode.SNAPSHOTTING:
            return []
        for old in [s for s in self._pending if s <= seq]:
            self._forget(old)
        self.mode = Mode.LIVE
        self.next_seq = seq + 1
        self._highest_seq = max(self._pending, default=seq)
        self._incomplete = False
        actions: list[Action] = [Reset("snapshot", tuple(events)), *self._drain()]
        return [*actions, *self._recover()] if self._is_behind() else actions

    def on_snapshot_failed(self) -> list[Action]:
        return self._give_up() if self.mode is Mode.SNAPSHOTTING else []

    def on_recheck(self) -> list[Action]:
        """Find losses that no later batch has told of, and make good what could not be had before."""
        if self.mode is not Mode.LIVE:
            return []
        if self._incomplete and self._can_snapshot:
            return self._snapshot()
        return self._replay() if self._can_replay and self.next_seq is not None else []

    def _is_behind(self) -> bool:
        """Batches are known to exist that were not applied."""
        return self.next_seq is None or self.next_seq <= self._highest_seq

    def _recover(self) -> list[Action]:
        """A gap lies between `next_seq` and what is pending."""
        if self._can_replay:
            return self._replay()
        return self._snapshot() if self._can_snapshot else self._give_up()

    def _replay(self) -> list[Action]:
        assert self.next_seq is not None
        self.mode = Mode.REPLAYING
        self._replay_start = self.next_seq
        return [RequestReplay(self.next_seq)]

    def _snapshot(self) -> list[Action]:
        """Whatever has arrived until now will be part of the snapshot, so there is no need to keep it."""
        self.mode = Mode.SNAPSHOTTING
        for seq in list(self._pending):
            self._forget(seq)
        return [RequestSnapshot()]

    def _give_up(self) -> list[Action]:
        """What is missing cannot be had: go on with the latest batches that follow each other."""
        self.mode = Mode.LIVE
        actions = self._drain()
        if not self._is_behind():
            return actions
        self.next_seq = self._latest_run()
        self._highest_seq = max(self._pending, default=-1)
        self._incomplete = True
        lost = Reset(f"batches before {'the next' if self.next_seq is None else self.next_seq} are lost")
        actions = [*actions, lost, *self._drain()]
        for seq in list(self._pending):
            self._forget(seq)
        return actions

    def _latest_run(self) -> int | None:
        """First of the newest pending batches that follow each other."""
        first = max(self._pending, default=None)
        while first is not None and first - 1 in self._pending:
            first -= 1
        return first

    def _apply(self, seq: int, payload: bytes) -> Apply:
        self.next_seq = seq + 1
        self._forget(seq)
        return Apply(seq, payload)

    def _drain(self) -> list[Action]:
        """Apply what is pending and next."""
        actions: list[Action] = []
        while self.next_seq is not None and (payload := self._pending.get(self.next_seq)) is not None:
            actions.append(self._apply(self.next_seq, payload))
        return actions

    def _keep(self, seq: int, payload: bytes) -> list[Action]:
        """Hold a live batch back. The oldest make room: the replay under way, or the next, brings them."""
        if seq in self._pending or (self.next_seq is not None and seq < self.next_seq):
            return [Drop(seq)]
        self._pending[seq] = payload
        self._pending_bytes += len(payload)
        dropped: list[Action] = []
        while len(self._pending) > self._max_pending or self._pending_bytes > self._max_pending_bytes:
            oldest = next(iter(self._pending))
            self._forget(oldest)
            dropped.append(Drop(oldest))
        return dropped

    def _forget(self, seq: int) -> None:
        self._pending_bytes -= len(self._pending.pop(seq, b""))
