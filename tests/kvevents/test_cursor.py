"""Gaps, replay, snapshots, digests and restarts of one event stream, without a network."""

import struct
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from kvmesh.protocol.events import Digest

LATER = 1000.0  # when a second generation publishes
SAME, OTHER = Digest(3, 77), Digest(2, 5)


def b(seq: int, ts: float = 0.0) -> bytes:
    """The beginning of a payload: batch `seq` was made `seq` seconds after the first, if no time is given."""
    return b"\x93\xcb" + struct.pack(">d", ts or 100.0 + seq)


def new(seq: int) -> bytes:
    """A batch of the next generation."""
    return b(seq, LATER + seq)


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


def test_a_replay_fills_a_gap_from_the_last_known_batch() -> None:
    cursor = live_cursor(3)
    assert cursor.on_live(5, b(5)) == [RequestReplay(2)]
    assert cursor.on_replayed(2, b(2)) == []
    assert applied(cursor.on_replayed(3, b(3))) == [3]
    assert applied(cursor.on_replayed(4, b(4))) == [4, 5]
    assert cursor.on_replay_end() == []


def test_a_second_gap_is_requested_after_the_replay() -> None:
    cursor = live_cursor(3)
    cursor.on_live(5, b(5))
    cursor.on_live(8, b(8))
    for seq in (2, 3, 4, 5):
        cursor.on_replayed(seq, b(seq))
    assert cursor.on_replay_end() == [RequestReplay(5)]


def test_a_batch_that_misses_the_replay_is_applied_afterwards() -> None:
    cursor = Cursor()
    cursor.start()
    assert cursor.on_live(0, b(0)) == []
    assert cursor.on_replay_end() == [Apply(0, b(0))]
    assert cursor.mode is Mode.LIVE


def test_a_ring_that_is_too_short_leads_to_a_snapshot() -> None:
    cursor = live_cursor(3)
    cursor.on_live(9, b(9))
    assert cursor.on_replayed(7, b(7)) == [RequestSnapshot()]
    assert cursor.on_replayed(8, b(8)) == [Drop(8)]
    assert cursor.on_live(10, b(10)) == []
    assert cursor.on_live(11, b(11)) == []
    assert cursor.on_snapshot(10, [b(10)]) == [Reset("snapshot", (b(10),)), Apply(11, b(11))]
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
    cursor.on_replayed(2, b(2))
    assert cursor.on_replay_end() == [RequestSnapshot()]


def test_a_snapshot_forgets_a_number_that_no_worker_reached() -> None:
    cursor = live_cursor(3)
    cursor.on_live(2**63, b(9))
    cursor.on_replayed(2, b(2))
    assert cursor.on_replay_end() == [RequestSnapshot()]
    assert cursor.on_snapshot(2, []) == [Reset("snapshot")]
    assert applied(cursor.on_live(3, b(3))) == [3]


def test_a_ring_too_short_without_snapshots_forgets_and_goes_on() -> None:
    cursor = Cursor(can_snapshot=False)
    cursor.start()
    assert cursor.on_replayed(4, b(4)) == [Reset("batches before 4 are lost"), Apply(4, b(4))]
    assert cursor.on_replayed(5, b(5)) == [Apply(5, b(5))]
    assert cursor.on_replay_end() == []


def test_a_gap_without_any_way_back_forgets_and_goes_on() -> None:
    cursor = Cursor(can_replay=False, can_snapshot=False)
    cursor.on_live(1, b(1))
    assert cursor.on_live(4, b(4)) == [Reset("batches before 4 are lost"), Apply(4, b(4))]


def test_without_answers_the_newest_unbroken_run_is_kept() -> None:
    cursor = live_cursor(3, can_snapshot=False)
    for seq in (5, 7, 8):
        cursor.on_live(seq, b(seq))
    actions = cursor.on_replay_failed()
    assert actions == [Reset("batches before 7 are lost"), Apply(7, b(7)), Apply(8, b(8))]
    assert applied(cursor.on_live(9, b(9))) == [9]


def test_a_failed_snapshot_is_requested_again_at_the_recheck() -> None:
    cursor = live_cursor(3)
    cursor.on_live(9, b(9))
    cursor.on_replay_failed()
    assert cursor.on_snapshot_failed() == [Reset("batches before the next are lost")]
    assert applied(cursor.on_live(11, b(11))) == [11]
    assert cursor.on_recheck() == [RequestSnapshot()]
    assert cursor.on_snapshot(11, []) == [Reset("snapshot")]
    assert cursor.on_recheck() == [RequestReplay(12)]


def test_without_snapshots_a_failed_replay_is_requested_again() -> None:
    cursor = live_cursor(3, can_snapshot=False)
    cursor.on_live(5, b(5))
    assert cursor.on_replay_failed() == [Reset("batches before 5 are lost"), Apply(5, b(5))]
    assert cursor.on_recheck() == [RequestReplay(0)]
    assert cursor.on_live(6, b(6)) == []
    assert cursor.on_replayed(1, b(1)) == [Reset("all batches, from 1 on"), Apply(1, b(1))]
    assert applied(action for seq in (2, 3, 4, 5) for action in cursor.on_replayed(seq, b(seq))) == [2, 3, 4, 5, 6]
    assert cursor.on_replay_end() == []
    assert cursor.on_recheck() == [RequestReplay(6)]


def test_a_failed_recheck_forgets_nothing() -> None:
    cursor = live_cursor(3)
    assert cursor.on_recheck() == [RequestReplay(2)]
    cursor.on_live(3, b(3))
    assert cursor.on_replay_failed() == [RequestSnapshot()]
    cursor = live_cursor(3)
    cursor.on_recheck()
    assert cursor.on_replay_failed() == []
    assert cursor.mode is Mode.LIVE


@pytest.mark.parametrize(
    "bounds",
    [{"max_pending": 2}, {"max_pending_bytes": 20}, {"budget": PendingBudget(20)}],
    ids=["batches", "bytes", "budget"],
)
def test_what_waits_is_bounded_and_comes_by_another_replay(bounds: dict[str, object]) -> None:
    cursor = live_cursor(1, **bounds)
    assert cursor.on_live(2, b(2)) == [RequestReplay(0)]
    assert cursor.on_live(3, b(3)) == []
    assert cursor.on_live(4, b(4)) == [Drop(2)]
    cursor.on_replayed(0, b(0))
    assert applied(cursor.on_replayed(1, b(1))) == [1]
    assert cursor.on_replay_end() == [RequestReplay(1)]
    cursor.on_replayed(1, b(1))
    assert applied(cursor.on_replayed(2, b(2))) == [2, 3, 4]


def test_nothing_is_kept_that_will_not_be_applied() -> None:
    budget = PendingBudget()
    cursor = live_cursor(5, budget=budget)
    cursor.on_live(9, b(9))
    cursor.on_replayed(7, b(7))
    cursor.on_live(2, b(2))  # during the snapshot: it may be of a new generation
    cursor.on_snapshot_failed()
    assert (cursor.mode, budget.used_bytes) == (Mode.LIVE, 0)
    cursor = live_cursor(3, budget=budget, can_snapshot=False)
    cursor.on_live(5, b(5))
    cursor.on_replayed(7, b(7))
    cursor.on_replay_end()
    assert (cursor.mode, budget.used_bytes) == (Mode.LIVE, 0)


# --- another process takes the worker's place ---------------------------------------------------------


def test_an_old_number_with_a_later_time_starts_a_generation() -> None:
    cursor = live_cursor(5)
    reset, request = cursor.on_live(2, new(2))
    assert (reset, request) == (Reset("its batches begin again, here is 2"), RequestReplay(0))
    assert applied(cursor.on_replayed(0, new(0)) + cursor.on_replayed(1, new(1))) == [0, 1, 2]
    assert cursor.on_replay_end() == []


def test_a_late_or_repeated_batch_is_no_new_generation() -> None:
    cursor = live_cursor(5)
    assert [cursor.on_live(seq, b(seq)) for seq in (4, 0, 4)] == [[Drop(4)], [Drop(0)], [Drop(4)]]


def test_late_batches_of_before_a_snapshot_are_no_new_generation() -> None:
    cursor = live_cursor(3)
    cursor.on_live(9, b(9))
    cursor.on_replayed(7, b(7))
    cursor.on_snapshot(10, [b(10)])
    assert cursor.on_live(6, b(6)) == [Drop(6)]
    assert cursor.on_live(6, new(6))[0] == Reset("its batches begin again, here is 6")


def test_a_replay_with_a_changed_last_batch_starts_again() -> None:
    cursor = live_cursor(5)
    assert cursor.on_recheck() == [RequestReplay(4)]
    assert cursor.on_replayed(4, new(4)) == [Reset("its batch 4 is another one now"), RequestReplay(0)]


def test_a_replay_that_ends_before_the_last_batch_begins_anew() -> None:
    cursor = live_cursor(5)
    cursor.on_recheck()
    assert cursor.on_replay_end() == [Reset("its newest batch is before our last"), RequestReplay(0)]
    assert cursor.on_replay_end() == []
    assert cursor.next_seq == 0


def test_after_a_lost_connection_nothing_is_applied_unchecked() -> None:
    cursor = live_cursor(5)
    assert cursor.on_disconnected() == []
    assert cursor.on_live(5, new(5)) == [RequestReplay(4)]  # it has exactly the number that should be next
    assert cursor.on_replayed(4, new(4))[0] == Reset("its batch 4 is another one now")


def test_a_reconnection_to_the_same_process_continues() -> None:
    cursor = live_cursor(5)
    cursor.on_disconnected()
    assert cursor.on_reconnected() == [RequestReplay(4)]
    assert cursor.on_replayed(4, b(4)) == []
    assert applied(cursor.on_replayed(5, b(5))) == [5]
    assert cursor.on_replay_end() == []
    assert applied(cursor.on_live(6, b(6))) == [6]


def test_a_connection_that_breaks_during_a_replay_needs_another() -> None:
    cursor = live_cursor(5)
    cursor.on_recheck()
    cursor.on_replayed(4, b(4))
    assert cursor.on_disconnected() == [RequestReplay(4)]
    assert cursor.on_replayed(4, new(4))[0] == Reset("its batch 4 is another one now")


def test_a_connection_that_comes_back_during_a_replay_needs_another() -> None:
    cursor = live_cursor(5, numbers_restart=False)
    cursor.on_recheck()
    assert cursor.on_disconnected() == []
    assert cursor.on_reconnected() == []
    assert cursor.on_replay_end() == [RequestReplay(5)]
    assert cursor.on_replay_end() == []


def test_an_unreachable_process_is_neither_forgotten_nor_trusted() -> None:
    cursor = live_cursor(5)
    cursor.on_disconnected()
    cursor.on_reconnected()
    assert cursor.on_replay_failed() == []
    assert cursor.on_recheck() == [RequestReplay(4)]
    cursor.on_live(5, new(5))
    assert cursor.on_replay_failed() == [RequestSnapshot()]


def test_a_connection_lost_right_after_a_snapshot_needs_another() -> None:
    cursor = Cursor(can_replay=False)
    cursor.start()
    cursor.on_snapshot(7, [b(7)])
    cursor.on_disconnected()
    assert cursor.on_live(8, new(8)) == [RequestSnapshot()]


def test_without_a_way_to_ask_a_lost_connection_forgets_all() -> None:
    cursor = Cursor(can_replay=False, can_snapshot=False)
    cursor.on_live(1, b(1))
    cursor.on_disconnected()
    assert cursor.on_live(2, b(2)) == [Reset("batches before 2 are lost"), Apply(2, b(2))]


def test_a_straggler_of_an_old_generation_triggers_a_replay() -> None:
    cursor = live_cursor(5)
    cursor.on_live(0, new(0))
    cursor.on_replayed(0, new(0))
    cursor.on_replay_end()
    assert cursor.on_live(1, b(1)) == [Drop(1), RequestReplay(0)]
    cursor.on_replayed(0, new(0))
    assert cursor.on_replay_end() == []


def test_a_clock_that_was_set_back_costs_a_replay() -> None:
    cursor = live_cursor(5)
    assert cursor.on_live(5, b(5, 50.0)) == [Drop(5), RequestReplay(4)]
    cursor.on_replayed(4, b(4))
    assert applied(cursor.on_replayed(5, b(5, 50.0))) == [5]
    assert cursor.on_replay_end() == []
    assert applied(cursor.on_live(6, b(6, 51.0))) == [6]
    assert cursor.on_live(4, b(4)) == [Drop(4)]


def test_engines_with_other_time_formats_are_followed() -> None:
    cursor = live_cursor(2)
    assert applied(cursor.on_live(2, b"\x93\x01")) == [2]
    assert cursor.on_live(1, b"\x93\x01") == [Drop(1)]
    assert cursor.on_recheck() == [RequestReplay(2)]
    assert cursor.on_replayed(2, b"\x93\x01") == []


def test_an_empty_replay_proves_nothing_if_processes_have_own_names() -> None:
    cursor = live_cursor(5, numbers_restart=False)
    cursor.on_disconnected()
    assert applied(cursor.on_live(5, b(5))) == [5]
    assert cursor.on_recheck() == [RequestReplay(6)]
    assert cursor.on_replay_end() == []


# --- digests ------------------------------------------------------------------------------------------


def asked_cursor(next_seq: int = 3, **options: object) -> Cursor:
    cursor = live_cursor(next_seq, can_digest=True, **options)
    assert cursor.on_recheck(SAME) == [RequestDigest()]
    return cursor


def test_equal_digests_say_that_nothing_is_missing() -> None:
    assert asked_cursor().on_digest(2, SAME) == []


def test_a_digest_that_differs_leads_to_a_snapshot() -> None:
    cursor = asked_cursor()
    assert cursor.on_digest(2, OTHER) == [Diverged(1), RequestSnapshot()]


def test_a_digest_is_compared_at_its_own_batch() -> None:
    cursor = asked_cursor()
    cursor.on_live(3, b(3))
    assert cursor.wants_digests
    assert cursor.on_applied(3, OTHER) == []
    assert cursor.on_digest(2, SAME) == []
    assert not cursor.wants_digests


def test_a_digest_waits_for_its_batch() -> None:
    cursor = asked_cursor()
    assert cursor.on_digest(4, SAME) == [RequestReplay(2)]
    cursor.on_replayed(2, b(2))
    for seq in (3, 4):
        assert applied(cursor.on_replayed(seq, b(seq))) == [seq]
        last = cursor.on_applied(seq, OTHER)
    assert last == [Diverged(1), RequestSnapshot()]


def test_a_claimed_batch_has_until_the_next_recheck_to_arrive() -> None:
    cursor = asked_cursor()
    assert cursor.on_digest(3, SAME) == [RequestReplay(2)]
    cursor.on_replayed(2, b(2))
    assert cursor.on_replay_end() == []
    assert cursor.on_recheck(SAME) == [RequestReplay(2)]
    cursor.on_replayed(2, b(2))
    assert cursor.on_replay_end() == [RequestSnapshot()]


def test_a_digest_with_a_lower_number_means_a_new_generation() -> None:
    cursor = asked_cursor()
    assert cursor.on_digest(1, SAME) == [Reset("its last batch is 1, and we had 2"), RequestReplay(0)]


def test_without_a_digest_the_worker_is_asked_for_lost_batches() -> None:
    cursor = asked_cursor()
    assert cursor.on_digest_failed() == [RequestReplay(2)]
    assert cursor.on_digest(2, OTHER) == []


def test_a_reset_ends_a_comparison() -> None:
    cursor = asked_cursor()
    cursor.on_live(9, b(9))
    cursor.on_replayed(7, b(7))
    cursor.on_snapshot(9, [])
    assert cursor.on_digest(9, OTHER) == []


def test_a_worker_that_always_differs_is_asked_less_often() -> None:
    cursor = live_cursor(3, can_digest=True)
    divergences = 0
    for _ in range(1000):
        if cursor.on_recheck(SAME) == [RequestDigest()]:
            divergences += len(cursor.on_digest(cursor.next_seq - 1, OTHER)) // 2  # type: ignore[operator]
            cursor.on_snapshot(2, [])
        else:
            cursor.on_replay_end()
    assert divergences == 21  # 7 until every 64th time, then that
    cursor.on_recheck(SAME)


def test_without_snapshots_a_divergence_begins_anew() -> None:
    cursor = asked_cursor(can_snapshot=False)
    assert cursor.on_digest(2, OTHER) == [Diverged(1), Reset("it diverged"), RequestReplay(0)]


# --- going on -----------------------------------------------------------------------------------------


def test_a_follower_resumes_at_its_kept_position() -> None:
    position = live_cursor(5).position
    cursor = Cursor(resume=position)
    assert cursor.start() == [RequestReplay(4)]
    assert cursor.on_replayed(4, b(4)) == []
    assert applied(cursor.on_replayed(5, b(5))) == [5]


def test_it_does_not_go_on_with_another_generation() -> None:
    cursor = Cursor(resume=Position(5, 104.0))
    cursor.start()
    assert cursor.on_replayed(4, new(4)) == [Reset("its batch 4 is another one now"), RequestReplay(0)]


def test_what_cannot_be_checked_is_forgotten() -> None:
    assert Cursor(can_replay=False, can_snapshot=False, resume=Position(5, 104.0)).start() == [
        Reset("what was known before cannot be checked")
    ]


def test_no_position_exists_before_the_first_batch_or_after_losses() -> None:
    assert Cursor().position is None
    cursor = live_cursor(3, can_snapshot=False)
    cursor.on_live(5, b(5))
    cursor.on_replay_failed()
    assert cursor.position is None


def test_a_cursor_that_is_closed_gives_back_its_budget() -> None:
    budget = PendingBudget()
    cursor = Cursor(budget=budget)
    cursor.start()
    cursor.on_live(5, b(5))
    assert budget.used_bytes == 10
    cursor.close()
    assert budget.used_bytes == 0


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
