"""Gaps, replay and snapshots of one event stream, without a network."""

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvevents.cursor import Action, Apply, Cursor, Drop, Mode, RequestReplay, RequestSnapshot, Reset
from protocol.events import Stored
from protocol.ids import EngineHash


def b(seq: int) -> bytes:
    return b"%d" % seq


def applied(actions: Iterable[Action]) -> list[int]:
    return [action.seq for action in actions if isinstance(action, Apply)]


def live_cursor(next_seq: int = 0, **options: object) -> Cursor:
    """A cursor that has caught up with batches 0 to next_seq - 1."""
    cursor = Cursor(**options)  # type: ignore[arg-type]
    cursor.start()
    for seq in range(next_seq):
        cursor.on_replayed(seq, b(seq))
    cursor.on_replay_end()
    assert cursor.mode is Mode.LIVE
    return cursor


def test_a_new_cursor_asks_for_everything() -> None:
    assert Cursor().start() == [RequestReplay(0)]


def test_without_replay_it_begins_with_a_snapshot() -> None:
    assert Cursor(can_replay=False).start() == [RequestSnapshot()]


def test_without_either_it_begins_with_whatever_comes() -> None:
    cursor = Cursor(can_replay=False, can_snapshot=False)
    assert cursor.start() == []
    assert cursor.on_live(7, b(7)) == [Apply(7, b(7))]


def test_live_batches_wait_for_the_end_of_the_history() -> None:
    cursor = Cursor()
    cursor.start()
    assert cursor.on_live(2, b(2)) == []
    assert applied(cursor.on_replayed(0, b(0))) == [0]
    assert applied(cursor.on_replayed(1, b(1))) == [1, 2]
    assert cursor.on_replayed(2, b(2)) == [Drop(2)]
    assert cursor.on_replay_end() == []
    assert cursor.mode is Mode.LIVE


def test_batches_in_order_are_applied_and_duplicates_dropped() -> None:
    cursor = live_cursor(3)
    assert cursor.on_live(3, b(3)) == [Apply(3, b(3))]
    assert cursor.on_live(3, b(3)) == [Drop(3)]
    assert cursor.on_live(1, b(1)) == [Drop(1)]


def test_a_gap_is_filled_by_replay() -> None:
    cursor = live_cursor(3)
    assert cursor.on_live(5, b(5)) == [RequestReplay(3)]
    assert applied(cursor.on_replayed(3, b(3))) == [3]
    assert applied(cursor.on_replayed(4, b(4))) == [4, 5]
    assert cursor.on_replay_end() == []


def test_a_second_gap_behind_the_first_is_asked_for_when_the_replay_ends() -> None:
    cursor = live_cursor(3)
    cursor.on_live(5, b(5))
    cursor.on_live(8, b(8))
    for seq in (3, 4, 5):
        cursor.on_replayed(seq, b(seq))
    assert cursor.on_replay_end() == [RequestReplay(6)]


def test_a_ring_that_no_longer_reaches_back_leads_to_a_snapshot() -> None:
    cursor = live_cursor(3)
    cursor.on_live(9, b(9))
    assert cursor.on_replayed(7, b(7)) == [RequestSnapshot()]
    assert cursor.on_replayed(8, b(8)) == [Drop(8)]
    assert cursor.on_live(10, b(10)) == []
    assert cursor.on_live(11, b(11)) == []
    assert cursor.on_snapshot(10, []) == [Reset("snapshot"), Apply(11, b(11))]
    assert cursor.on_live(12, b(12)) == [Apply(12, b(12))]


def test_a_gap_behind_the_snapshot_is_filled_by_replay() -> None:
    cursor = live_cursor(3)
    cursor.on_live(9, b(9))
    cursor.on_replayed(7, b(7))
    cursor.on_live(12, b(12))
    assert cursor.on_snapshot(10, []) == [Reset("snapshot"), RequestReplay(11)]


def test_a_replay_that_brings_nothing_leads_to_a_snapshot() -> None:
    cursor = live_cursor(3)
    cursor.on_live(9, b(9))
    assert cursor.on_replay_end() == [RequestSnapshot()]


def test_a_number_that_no_worker_reached_is_forgotten_with_the_snapshot() -> None:
    cursor = live_cursor(3)
    cursor.on_live(2**63, b"mad")
    cursor.on_replay_end()
    assert cursor.on_snapshot(2, []) == [Reset("snapshot")]
    assert applied(cursor.on_live(3, b(3))) == [3]


def test_a_ring_too_short_without_snapshots_forgets_and_goes_on() -> None:
    cursor = Cursor(can_snapshot=False)
    cursor.start()
    assert cursor.on_replayed(4, b(4)) == [Reset("batches 0 to 3 are lost"), Apply(4, b(4))]
    assert cursor.on_replayed(5, b(5)) == [Apply(5, b(5))]
    assert cursor.on_replay_end() == []


def test_a_gap_without_any_way_back_forgets_and_goes_on() -> None:
    cursor = Cursor(can_replay=False, can_snapshot=False)
    cursor.on_live(1, b(1))
    assert cursor.on_live(4, b(4)) == [Reset("batches before 4 are lost"), Apply(4, b(4))]


def test_when_nobody_answers_the_newest_batches_that_follow_each_other_are_kept() -> None:
    cursor = live_cursor(3, can_snapshot=False)
    for seq in (5, 7, 8):
        cursor.on_live(seq, b(seq))
    actions = cursor.on_replay_failed()
    assert actions == [Reset("batches before 7 are lost"), Apply(7, b(7)), Apply(8, b(8))]
    assert applied(cursor.on_live(9, b(9))) == [9]


def test_a_failed_snapshot_forgets_and_is_tried_again_at_the_recheck() -> None:
    cursor = live_cursor(3)
    cursor.on_live(9, b(9))
    cursor.on_replay_failed()
    assert cursor.on_snapshot_failed() == [Reset("batches before the next are lost")]
    assert applied(cursor.on_live(11, b(11))) == [11]
    assert cursor.on_recheck() == [RequestSnapshot()]
    assert cursor.on_snapshot(11, []) == [Reset("snapshot")]
    assert cursor.on_recheck() == [RequestReplay(12)]


def test_a_failed_recheck_forgets_nothing() -> None:
    cursor = live_cursor(3)
    assert cursor.on_recheck() == [RequestReplay(3)]
    cursor.on_live(3, b(3))
    assert cursor.on_replay_failed() == [RequestSnapshot()]
    cursor = live_cursor(3)
    cursor.on_recheck()
    assert cursor.on_replay_failed() == []
    assert cursor.mode is Mode.LIVE


@pytest.mark.parametrize("bounds", [{"max_pending": 2}, {"max_pending_bytes": 2}])
def test_what_waits_is_bounded_and_comes_by_another_replay(bounds: dict[str, int]) -> None:
    cursor = live_cursor(1, **bounds)
    assert cursor.on_live(2, b(2)) == [RequestReplay(1)]
    assert cursor.on_live(3, b(3)) == []
    assert cursor.on_live(4, b(4)) == [Drop(2)]
    assert applied(cursor.on_replayed(1, b(1))) == [1]
    assert cursor.on_replay_end() == [RequestReplay(2)]
    assert applied(cursor.on_replayed(2, b(2))) == [2, 3, 4]


class Worker:
    """Publishes additions and removals, and keeps the latest batches in a ring."""

    def __init__(self, ring_batches: int) -> None:
        self.log: list[tuple[EngineHash, bool]] = []
        self.ring_batches = ring_batches

    def publish(self, block: int) -> int:
        held = block in self.state(len(self.log))
        self.log.append((EngineHash(block), not held))
        return len(self.log) - 1

    def state(self, count: int) -> set[int]:
        held: set[int] = set()
        for block, added in self.log[:count]:
            (held.add if added else held.remove)(block)
        return held

    def ring(self, start: int) -> range:
        return range(max(start, len(self.log) - self.ring_batches), len(self.log))


class Follower:
    """Carries a cursor's actions out; replays and snapshots happen when the test lets them."""

    def __init__(self, worker: Worker, cursor: Cursor) -> None:
        self.worker = worker
        self.cursor = cursor
        self.held: set[int] = set()
        self.request: RequestReplay | RequestSnapshot | None = None
        self.carry_out(cursor.start())

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Apply(seq):
                    block, added = self.worker.log[seq]
                    (self.held.add if added else self.held.discard)(block)
                case Reset(_, events):
                    self.held = {h for event in events if isinstance(event, Stored) for h in event.hashes}
                case RequestReplay() | RequestSnapshot():
                    self.request = action

    def live(self, seq: int) -> None:
        self.carry_out(self.cursor.on_live(seq, b(seq)))

    def answer(self, *, fail: bool = False, during: Iterable[int] = ()) -> None:
        """Answer the standing request; the batches `during` arrive in the middle of that."""
        request, self.request = self.request, None
        if isinstance(request, RequestReplay):
            for seq in self.worker.ring(request.start):
                self.carry_out(self.cursor.on_replayed(seq, b(seq)))
                if self.request is not None:
                    return
            for seq in during:
                self.live(seq)
            self.carry_out(self.cursor.on_replay_failed() if fail else self.cursor.on_replay_end())
        elif fail:
            self.carry_out(self.cursor.on_snapshot_failed())
        elif request is not None:
            count = len(self.worker.log)
            events = [Stored((EngineHash(h),), None, (0,), 1) for h in self.worker.state(count)]
            for seq in during:
                self.live(seq)
            self.carry_out(self.cursor.on_snapshot(count - 1, events))


@settings(max_examples=300)
@given(st.data())
def test_any_loss_duplication_and_delay_ends_with_the_workers_state(data: st.DataObject) -> None:
    worker = Worker(ring_batches=data.draw(st.integers(1, 8), "ring"))
    for _ in range(data.draw(st.integers(0, 10), "history")):
        worker.publish(data.draw(st.integers(0, 3)))
    follower = Follower(worker, Cursor(max_pending=data.draw(st.integers(1, 5), "pending")))
    in_flight: list[int] = []
    steps = st.sampled_from(["publish", "publish", "lose", "deliver", "twice", "answer", "fail", "recheck"])
    for step in data.draw(st.lists(steps, max_size=40), "steps"):
        match step:
            case "publish":
                in_flight.append(worker.publish(data.draw(st.integers(0, 3))))
            case "lose" if in_flight:
                in_flight.pop(data.draw(st.integers(0, len(in_flight) - 1)))
            case "deliver" if in_flight:
                follower.live(in_flight.pop(data.draw(st.integers(0, len(in_flight) - 1))))
            case "twice" if in_flight:
                follower.live(in_flight[data.draw(st.integers(0, len(in_flight) - 1))])
            case "answer":
                follower.answer(during=in_flight[: data.draw(st.integers(0, 3))])
            case "fail":
                follower.answer(fail=True)
            case "recheck":
                follower.carry_out(follower.cursor.on_recheck())
    settle(follower)
    assert follower.held == worker.state(len(worker.log))


def settle(follower: Follower) -> None:
    """The worker is quiet and reachable: answer until nothing is asked, recheck, and again.

    Two rechecks: one makes good a snapshot that failed, one finds a loss that nothing told of.
    """
    for _ in range(3):
        for _ in range(20):
            follower.answer()
            if follower.request is None:
                break
        assert follower.request is None
        assert follower.cursor.mode is Mode.LIVE
        follower.carry_out(follower.cursor.on_recheck())
    follower.answer()


@given(st.lists(st.integers(0, 30), max_size=60), st.booleans(), st.booleans())
def test_batches_applied_after_a_reset_have_consecutive_numbers(
    seqs: list[int], can_replay: bool, can_snapshot: bool
) -> None:
    cursor = Cursor(can_replay=can_replay, can_snapshot=can_snapshot, max_pending=3)
    actions = cursor.start()
    for seq in seqs:
        actions += cursor.on_live(seq, b(seq))
        if seq % 7 == 0:
            actions += cursor.on_replay_failed() + cursor.on_snapshot_failed()
        elif seq % 5 == 0:
            actions += cursor.on_replayed(seq + 1, b(seq + 1)) + cursor.on_replay_end()
    expected: int | None = 0 if can_replay else None
    for action in actions:
        match action:
            case Reset():
                expected = None
            case Apply(seq):
                assert expected in (None, seq)
                expected = seq + 1
