"""Track a follower's position in one worker's event stream, and decide its next step. Pure.

Batches are numbered without gaps. A repeated batch is dropped. Missing batches are requested: first from the worker's
replay ring, then, if the ring no longer reaches back, as a snapshot of all that the worker holds now. A worker that
offers neither is followed from its newest batches, and all earlier knowledge of it is forgotten: an index that is too
small costs cache hits, an index that is wrong misroutes.

A worker process that replaces another at the same address is a new *generation*, and numbers from 0 again. The times of
batches tell generations apart: a batch carries the time of its making, and a new generation's times are later. So

- a live batch with an applied number, but later than all applied batches, is of a new generation;
- a live batch with the next number, but older than the last, is a straggler of an old generation;
- a replay begins with the batch that was applied last: if that batch differs now, or the ring's newest batch is before
  it, the generation is new;
- after the connection was lost, nothing is applied until a replay has found that batch unchanged.

The digest finds all other differences: a recheck asks the worker for a hash of what it holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf

from kvmesh.kvevents.audit import Audit
from kvmesh.kvevents.formats import batch_ts
from kvmesh.kvevents.pending import PendingBatches, PendingBudget
from kvmesh.protocol.events import Digest


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply batch `seq`. If the cursor `wants_digests`, report the digest after it with `on_applied`."""

    seq: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Reset:
    """Forget all that was applied. The worker holds the content of `payloads`, and of the batches that follow."""

    reason: str
    payloads: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestReplay:
    """Ask for all batches from `start` on. `on_replay_end`, `on_replay_failed` or another request end that."""

    start: int


@dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """Ask for all that the worker holds. `on_snapshot` or `on_snapshot_failed` ends that."""


@dataclass(frozen=True, slots=True)
class RequestDigest:
    """Ask for a hash of what the worker holds. `on_digest`, `on_digest_failed` or another request end that."""


@dataclass(frozen=True, slots=True)
class Diverged:
    """The digests of follower and worker after the same batch differ."""

    in_a_row: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Drop batch `seq`, which was applied before or is of no use."""

    seq: int


Action = Apply | Reset | RequestReplay | RequestSnapshot | RequestDigest | Diverged | Drop


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a follower that has kept its state and continues from there."""

    next_seq: int
    ts: float  # of the batch before that


class Mode(Enum):
    LIVE = "live"
    REPLAYING = "replaying"
    SNAPSHOTTING = "snapshotting"


class Cursor:
    """Turns batches as they arrive into batches in order. Every method returns the actions to take, in order.

    The first call is `start()`. Invariant: after each Reset, the applied batches have consecutive numbers, and
    `next_seq` is the number that must follow (None: the number of the batch that comes first).

    With `numbers_restart` another process may take this one's place under the same name, and a replay always has the
    newest batch. It is False for a transport that gives each process a name of its own and may drop all batches.
    """

    def __init__(
        self,
        *,
        can_replay: bool = True,
        can_snapshot: bool = True,
        can_digest: bool = False,
        numbers_restart: bool = True,
        resume: Position | None = None,
        max_pending: int = 4096,
        max_pending_bytes: int = 32 << 20,
        budget: PendingBudget | None = None,
    ) -> None:
        self.mode = Mode.LIVE
        self.next_seq: int | None = None
        self._can_replay = can_replay
        self._can_snapshot = can_snapshot
        self._can_digest = can_digest
        self._numbers_restart = numbers_restart
        self._pending = PendingBatches(max_pending, max_pending_bytes, budget or PendingBudget())
        self._audit = Audit()
        self._highest_seq = -1  # highest number known to be published
        self._claimed_seq = -1  # published, as the worker said; may be on its way
        self._last_ts = 0.0  # of batch next_seq - 1, or a lower bound of the next time; 0: unknown
        self._has_last = False  # _last_ts is that of batch next_seq - 1
        self._max_ts = inf  # latest applied time of this generation; inf: unknown
        self._check: int | None = None  # the batch that a replay has to find unchanged first
        self._doubted = False  # the connection was lost: the generation may be new
        self._asked_in_doubt = False  # the replay under way was asked for because of doubt
        self._asked_before = False  # reconnected while an answer was awaited: it may be incomplete
        self._before_replay = 0
        self._incomplete = False  # the follower knows less than the worker holds, because nobody answered
        self._from_oldest = False  # the replay under way brings all batches, and replaces all that was applied
        self._resume = resume

    # --- what happens ---------------------------------------------------------------------------------

    def start(self) -> list[Action]:
        """Catch up with all batches published before the start, or since the position to resume."""
        if self._can_replay:
            self.next_seq = 0
            if self._resume is not None:
                self.next_seq, self._last_ts = self._resume.next_seq, self._resume.ts
                self._max_ts, self._has_last = self._last_ts or inf, self.next_seq > 0
            return self._replay()
        if self._can_snapshot:
            return self._snapshot()
        return [Reset("what was known before cannot be checked")] if self._resume is not None else []

    def on_live(self, seq: int, payload: bytes) -> list[Action]:
        ts = batch_ts(payload)
        if self.mode is Mode.SNAPSHOTTING or self.next_seq is None:
            return self._keep(seq, payload) if self.mode is not Mode.LIVE else [self._apply(seq, payload)]
        if seq < self.next_seq:
            is_new = self._numbers_restart and ts > self._max_ts
            return self._begin_anew(f"its batches begin again, here is {seq}", seq, payload) if is_new else [Drop(seq)]
        if self._is_straggler(ts):
            return [Drop(seq), *(self._recover() if self.mode is Mode.LIVE else [])]
        if self.mode is Mode.LIVE and seq == self.next_seq and not self._doubted:
            return [self._apply(seq, payload)]
        kept = self._keep(seq, payload)
        return [*kept, *self._recover()] if self.mode is Mode.LIVE else kept

    def on_disconnected(self) -> list[Action]:
        """Note that the next batches may come from another process, and that waiting batches may be of a dead one."""
        if not self._numbers_restart:
            return []
        self._doubted = True
        self._pending.clear()
        self._highest_seq = (self.next_seq or 0) - 1
        return self._recover() if self.mode is Mode.REPLAYING else []

    def on_reconnected(self) -> list[Action]:
        """Note that batches published meanwhile have not come."""
        if self.mode is not Mode.LIVE:
            self._asked_before = True
            return []
        return self._recover() if self.next_seq is not None and (self._doubted or self._can_replay) else []

    def on_replayed(self, seq: int, payload: bytes) -> list[Action]:
        if self.mode is not Mode.REPLAYING or self.next_seq is None:
            return [Drop(seq)]
        if self._from_oldest:
            return self._begin_with_oldest(seq, payload)
        if self._check is not None and seq <= self._check:
            return self._on_checked(seq, payload)
        if seq < self.next_seq:
            return [Drop(seq)]
        self._highest_seq = max(self._highest_seq, seq)
        if seq == self.next_seq and self._check is None:
            return [self._apply(seq, payload), *self._drain()]
        if self._can_snapshot:  # the ring no longer reaches back to next_seq
            return self._snapshot()
        self._forget_position()
        lost = Reset(f"batches before {seq} are lost")
        return [lost, self._apply(seq, payload), *self._drain()]

    def on_replay_end(self) -> list[Action]:
        if self.mode is not Mode.REPLAYING:
            return []
        if self._check is not None or self._from_oldest:
            return self._begin_anew("its newest batch is before our last")
        if self._asked_before:
            return self._recover()
        actions = [] if self._doubted else self._drain()  # batches that came just after the replay
        if not self._is_behind():
            self.mode = Mode.LIVE
            self._pending.clear()  # only earlier batches remain
            return actions
        if self.next_seq != self._before_replay:  # the replay helped: the missing batches are newer
            return [*actions, *self._recover()]
        return [*actions, *(self._snapshot() if self._can_snapshot else self._give_up())]

    def on_replay_failed(self) -> list[Action]:
        """Note that nobody answers the request for a replay."""
        if self.mode is not Mode.REPLAYING:
            return []
        self._doubted = self._doubted or self._asked_in_doubt or self._check is not None
        self._check, self._from_oldest = None, False
        if self._can_snapshot and (self._is_behind() or self.next_seq == 0):
            return self._snapshot()
        return self._give_up()

    def on_snapshot(self, seq: int, payloads: Sequence[bytes]) -> list[Action]:
        """Take over `payloads`, all that the worker holds after batch `seq` (-1: before the first)."""
        if self.mode is not Mode.SNAPSHOTTING:
            return []
        self.mode = Mode.LIVE
        self.next_seq = seq + 1
        self._last_ts = max(map(batch_ts, payloads), default=0.0)
        self._max_ts, self._has_last = self._last_ts or inf, False
        self._incomplete, self._claimed_seq = False, -1
        for old in [s for s in self._pending if s <= seq]:
            self._pending.forget(old)
        self._forget_stragglers()
        self._highest_seq = max(seq, self._pending.highest or seq)
        actions: list[Action] = [Reset("snapshot", tuple(payloads))]
        if not self._doubted:
            actions += self._drain()
        is_late = self._asked_before and self._can_replay
        return [*actions, *self._recover()] if self._doubted or is_late or self._is_behind() else actions

    def on_snapshot_failed(self) -> list[Action]:
        return self._give_up() if self.mode is Mode.SNAPSHOTTING else []

    def on_recheck(self, own: Digest | None = None) -> list[Action]:
        """Find losses that no later batch has shown, and ask again for what could not be had before.

        `own` is the digest of all that was applied; None if unknown.
        """
        if self.mode is not Mode.LIVE:
            return []
        if self._incomplete and (self._can_snapshot or self._can_replay):
            return self._snapshot() if self._can_snapshot else self._replay_from_oldest()
        if self._doubted:
            return self._recover()
        if self.next_seq is None:
            return []
        if self._claimed_seq >= self.next_seq:  # it had time to arrive since the last recheck
            self._highest_seq = max(self._highest_seq, self._claimed_seq)
            return self._recover()
        if self._can_digest and own is not None and self._audit.is_due():
            self._audit.ask(self.next_seq - 1, own)
            return [RequestDigest()]
        return self._replay() if self._can_replay else []

    def on_digest(self, seq: int, theirs: Digest) -> list[Action]:
        """Judge `theirs`, the worker's digest after its last batch `seq` (-1: before the first)."""
        if self._audit.asked_at is None or self.next_seq is None:
            return []
        if seq < self._audit.asked_at:
            return self._begin_anew(f"its last batch is {seq}, and we had {self._audit.asked_at}")
        verdict = self._audit.answer(seq, theirs)
        if verdict is None and seq >= self.next_seq:
            self._claimed_seq = seq
            return self._recover() if self.mode is Mode.LIVE and self._can_replay else []
        return self._judge(verdict)

    def on_digest_failed(self) -> list[Action]:
        """Note that nobody answers the request for a digest, and look for lost batches by a replay."""
        if self._audit.asked_at is None:
            return []
        self._audit.close()
        return self._replay() if self.mode is Mode.LIVE and self._can_replay else []

    @property
    def wants_digests(self) -> bool:
        return self._audit.asked_at is not None

    def on_applied(self, seq: int, own: Digest) -> list[Action]:
        """Judge `own`, the follower's digest after batch `seq`, which was just applied."""
        return self._judge(self._audit.record(seq, own))

    # --- what is known --------------------------------------------------------------------------------

    @property
    def replay_start(self) -> int:
        """The number of the first batch that the replay under way has still to bring."""
        if self._from_oldest:
            return 0
        return self._check if self._check is not None else self.next_seq or 0

    @property
    def position(self) -> Position | None:
        """The position to `resume` from, with all that was applied; None if one cannot continue from there."""
        if self.next_seq is None or self._incomplete or not self._has_last:
            return None
        return Position(self.next_seq, self._last_ts)

    def close(self) -> None:
        """Give back the used part of the budget."""
        self._pending.clear()

    def _is_behind(self) -> bool:
        """Return whether batches are known to exist that were not applied."""
        return self.next_seq is None or self.next_seq <= self._highest_seq

    def _is_straggler(self, ts: float) -> bool:
        """Return whether a batch with the next number is older than the last.

        It is of an old generation, or the worker's clock was set back; the ring, or a snapshot, tells which.
        """
        can_ask = self._can_replay or self._can_snapshot
        return self._numbers_restart and can_ask and 0.0 < ts < self._last_ts

    # --- what to do about it --------------------------------------------------------------------------

    def _recover(self) -> list[Action]:
        """Ask for missing batches, or clear a doubt."""
        is_sure = self._has_last or not self._doubted or self.next_seq == 0
        if self._can_replay and is_sure:
            return self._replay()
        if self._can_snapshot:
            return self._snapshot()
        return self._begin_anew("the connection was lost") if self._can_replay else self._give_up()

    def _replay(self) -> list[Action]:
        assert self.next_seq is not None
        self.mode = Mode.REPLAYING
        self._before_replay = self.next_seq
        self._asked_before = self._from_oldest = False
        self._check = self.next_seq - 1 if self._has_last and self._numbers_restart else None
        self._asked_in_doubt, self._doubted = self._doubted, False
        return [RequestReplay(self.replay_start)]

    def _replay_from_oldest(self) -> list[Action]:
        if self.next_seq is None:  # nothing was applied that would have to be replaced
            self.next_seq = 0
        self.mode = Mode.REPLAYING
        self._before_replay = self.next_seq
        self._from_oldest, self._asked_before = True, False
        self._asked_in_doubt, self._doubted = self._doubted, False
        return [RequestReplay(0)]

    def _begin_with_oldest(self, seq: int, payload: bytes) -> list[Action]:
        self._forget_position()
        return [Reset(f"all batches, from {seq} on"), self._apply(seq, payload), *self._drain()]

    def _on_checked(self, seq: int, payload: bytes) -> list[Action]:
        """Check that the first replayed batch is the one that was applied last."""
        if seq != self._check:
            return [Drop(seq)]
        self._check = None
        if batch_ts(payload) != self._last_ts:
            return self._begin_anew(f"its batch {seq} is another one now")
        return []

    def _snapshot(self) -> list[Action]:
        """Ask for a snapshot. Waiting batches are dropped, because the snapshot will contain them."""
        self.mode = Mode.SNAPSHOTTING
        self._pending.clear()
        self._audit.close()
        self._check, self._from_oldest = None, False
        self._doubted = self._asked_before = False
        return [RequestSnapshot()]

    def _begin_anew(self, reason: str, seq: int = -1, payload: bytes = b"") -> list[Action]:
        """Begin a new generation, whose numbers start at 0. Batch `seq` is the first that has come."""
        self._forget_position()
        self.mode = Mode.LIVE
        self.next_seq = 0
        self._highest_seq = -1
        self._pending.clear()
        self._doubted = False
        kept = self._keep(seq, payload) if seq >= 0 else []
        return [Reset(reason), *kept, *self._recover()]

    def _give_up(self) -> list[Action]:
        """Give up missing batches: continue with the latest batches that follow each other."""
        self.mode = Mode.LIVE
        self._forget_stragglers()
        actions = [] if self._doubted else self._drain()
        if not self._is_behind():
            self._pending.clear()
            return actions
        self.next_seq = self._pending.latest_run()
        self._highest_seq = -1 if self._pending.highest is None else self._pending.highest
        self._forget_position()
        self._doubted, self._incomplete = False, True
        lost = Reset(f"batches before {'the next' if self.next_seq is None else self.next_seq} are lost")
        actions = [*actions, lost, *self._drain()]
        self._pending.clear()
        return actions

    def _forget_position(self) -> None:
        """Forget the position, because all that was applied no longer counts."""
        self._audit.close()
        self._check, self._from_oldest = None, False
        self._last_ts, self._max_ts, self._has_last = 0.0, inf, False
        self._incomplete, self._claimed_seq = False, -1

    def _judge(self, equal: bool | None) -> list[Action]:
        if equal is not False:
            return []
        diverged = Diverged(self._audit.mismatches)
        return [diverged, *(self._snapshot() if self._can_snapshot else self._begin_anew("it diverged"))]

    # --- batches --------------------------------------------------------------------------------------

    def _apply(self, seq: int, payload: bytes) -> Apply:
        self.next_seq = seq + 1
        self._highest_seq = max(self._highest_seq, seq)
        self._last_ts, self._has_last = batch_ts(payload), True
        self._max_ts = self._last_ts if self._max_ts == inf else max(self._max_ts, self._last_ts)
        self._pending.forget(seq)
        return Apply(seq, payload)

    def _drain(self) -> list[Action]:
        """Apply the pending batches that are next."""
        actions: list[Action] = []
        while self.next_seq is not None and (payload := self._pending.get(self.next_seq)) is not None:
            if self._is_straggler(batch_ts(payload)):
                self._pending.forget(self.next_seq)
                break
            actions.append(self._apply(self.next_seq, payload))
        return actions

    def _keep(self, seq: int, payload: bytes) -> list[Action]:
        """Hold a live batch back. The oldest batches make room: this replay, or the next, brings them."""
        self._highest_seq = max(self._highest_seq, seq)
        known = self._pending.get(seq)
        if known is not None and batch_ts(known) >= batch_ts(payload):
            return [Drop(seq)]
        return [Drop(gone) for gone in self._pending.keep(seq, payload)]

    def _forget_stragglers(self) -> None:
        """Forget waiting stragglers: their numbers do not show what is published."""
        gone = [seq for seq in self._pending if self._is_straggler(batch_ts(self._pending.get(seq) or b""))]
        for seq in gone:
            self._pending.forget(seq)
        if gone and self.next_seq is not None:
            self._highest_seq = max(self.next_seq - 1, self._pending.highest or -1)
