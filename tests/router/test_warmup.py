"""A newcomer is not stampeded, and not starved either."""

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import Role
from kvmesh.router.index import Holder
from kvmesh.router.warmup import WarmUp
from tests.support.routing import card, prompt, request, router, where

OLD, OLDER, NEW = (Holder(WorkerId(name), 0) for name in ("old", "older", "new"))


def warm_up(joined: float = 0.0) -> WarmUp:
    """Return a warm-up with one newcomer."""
    warmup = WarmUp(ramp_s=10.0, ramp_requests=20)
    warmup.joined(NEW.worker_id, joined)
    return warmup


def test_the_share_of_a_newcomer_grows_with_time() -> None:
    warmup = warm_up(joined=100.0)
    assert [warmup.share(NEW.worker_id, now) for now in (100.0, 102.5, 105.0, 110.0, 200.0)] == [0, 0.25, 0.5, 1, 1]


def test_completed_requests_settle_a_newcomer_too() -> None:
    warmup = warm_up()
    for _ in range(10):
        warmup.completed(NEW.worker_id)
    assert [warmup.share(NEW.worker_id, now) for now in (0.0, 2.0, 7.0)] == [0.5, 0.5, 0.7]
    for _ in range(10):
        warmup.completed(NEW.worker_id)
    assert warmup.share(NEW.worker_id, 7.0) == 1


def test_a_settled_worker_is_no_longer_remembered_and_stays_settled() -> None:
    warmup = warm_up()
    assert warmup.share(NEW.worker_id, 10.0) == 1
    assert warmup._ramps == {}
    warmup.completed(NEW.worker_id)
    assert warmup.share(NEW.worker_id, 10.0) == 1


def test_a_newcomer_may_always_have_one_request() -> None:
    assert warm_up().held_back([(OLD, 30), (NEW, 0)], 30, 0.0) == []
    assert warm_up().held_back([(OLD, 30), (NEW, 1)], 30, 0.0) == [NEW]


def test_a_newcomer_gets_a_share_of_the_busiest_workers_requests() -> None:
    warmup = warm_up()
    assert warmup.held_back([(OLD, 30), (OLDER, 8), (NEW, 14)], 30, 5.0) == []
    assert warmup.held_back([(OLD, 30), (OLDER, 8), (NEW, 15)], 30, 5.0) == [NEW]
    assert warmup.held_back([(OLD, 30), (OLDER, 8), (NEW, 99)], 30, 10.0) == []


def test_beside_idle_workers_a_newcomer_gets_one_request() -> None:
    assert warm_up().held_back([(OLD, 0), (NEW, 1)], 0, 9.9) == [NEW]


def test_where_all_candidates_are_new_none_is_held_back() -> None:
    warmup = warm_up()
    warmup.joined(OLD.worker_id, 1.0)
    assert warmup.held_back([(OLD, 5), (NEW, 50)], -1, 2.0) == []
    assert warmup.held_back([], 5, 2.0) == []


def test_the_only_prefill_worker_takes_all_prompts_while_it_is_new() -> None:
    """Also while the card of the killed one before it stands: it is avoided, so nobody is compared with it."""
    state = router(card("d1"), card("p1", Role.PREFILL))
    state.fleet.add_worker(card("p2", Role.PREFILL), 60.0)
    state.fleet.avoid([WorkerId("p1")], 60.0)
    placed = [where(state.place(request(f"r{n}", prompt(n), disaggregate=True), 60.1)) for n in range(5)]
    state.remove_worker(WorkerId("p1"))
    placed += [where(state.place(request(f"s{n}", prompt(9 + n), disaggregate=True), 60.2)) for n in range(5)]
    assert placed == [("p2", "d1")] * 10


def test_each_rank_of_a_newcomer_may_have_its_share() -> None:
    rank = Holder(NEW.worker_id, 1)
    assert warm_up().held_back([(OLD, 30), (NEW, 1), (rank, 0)], 30, 0.0) == [NEW]


def test_a_worker_that_left_is_forgotten() -> None:
    warmup = warm_up()
    warmup.left(NEW.worker_id)
    warmup.left(NEW.worker_id)
    assert warmup._ramps == {}


def test_a_ramp_of_nothing_is_no_ramp() -> None:
    for warmup in (WarmUp(ramp_s=0.0), WarmUp(ramp_requests=0)):
        warmup.joined(NEW.worker_id, 0.0)
        assert warmup.held_back([(OLD, 9), (NEW, 9)], 9, 0.0) == []


loads = st.dictionaries(st.sampled_from([OLD, OLDER, NEW]), st.integers(0, 40), min_size=1)


@given(loads, st.sets(st.sampled_from([OLD, OLDER, NEW])), st.floats(0, 20), st.integers(0, 25))
def test_idle_and_settled_workers_are_never_held_back(
    in_flight: dict[Holder, int], new: set[Holder], now: float, completed: int
) -> None:
    warmup = WarmUp(ramp_s=10.0, ramp_requests=20)
    for holder in sorted(new):
        warmup.joined(holder.worker_id, 0.0)
        for _ in range(completed):
            warmup.completed(holder.worker_id)
    held_back = set(warmup.held_back(in_flight.items(), max(in_flight.values()), now))
    assert held_back <= new
    assert all(in_flight[holder] >= 1 for holder in held_back)


def test_warm_up_is_over_when_the_last_joined_settles() -> None:
    warmup = warm_up()
    warmup.joined(OLD.worker_id, 5.0)
    assert [warmup.is_over(now) for now in (0.0, 10.0, 14.9, 15.0)] == [False, False, False, True]
    assert len(warmup) == 0
