"""Bookings, what they add up to, and that each of them ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.protocol.hashing import pack_hashes
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.router.index import Holder
from kvmesh.router.load import LEASE_S, NOTHING, ActiveLoad, HolderLoad, Owner, Share
from kvmesh.router.pressure import BusyShare

A, B, P = (Holder(WorkerId(name), 0) for name in "abp")
R, S = RequestId("r"), RequestId("s")


def new_load(*holders: Holder, lease_s: float = LEASE_S) -> ActiveLoad:
    load = ActiveLoad(lease_s)
    for holder in holders or (A, B, P):
        load.join(holder)
    return load


def book(
    load: ActiveLoad,
    request_id: RequestId = R,
    decode: Holder = A,
    prefill: Holder | None = None,
    tokens: int = 40,
    blocks: tuple[int, ...] = (1, 2),
    now: float = 0.0,
) -> None:
    hashes = pack_hashes(blocks)
    load.book(request_id, decode=decode, prefill=prefill or decode, prefill_tokens=tokens, hashes=hashes, now=now)


def share(load: ActiveLoad, holder: Holder) -> Share:
    return load.shares().get(holder, NOTHING)


def is_empty(load: ActiveLoad) -> bool:
    """Return whether nothing remains of any request."""
    counts = (len(load), load.chains.num_blocks, load.prefilling.num_blocks, sum(map(len, load._of_holder.values())))
    return counts == (0, 0, 0, 0) and load.shares() == {} and not any(one.prefilling for one in load._loads.values())


# --- where a request counts ----------------------------------------------------------------------------------------


def test_a_request_counts_where_it_prefills_and_where_it_decodes() -> None:
    load = new_load()
    book(load, decode=A, prefill=P)
    assert share(load, P) == Share(queued_tokens=40)
    assert share(load, A) == Share(held_blocks=2 + 1, requests=1)


def test_one_worker_may_do_both_halves() -> None:
    load = new_load()
    book(load)
    assert load.shares() == {A: Share(40, 2 + 1, 1)}


def test_prefill_work_ends_with_the_first_token_and_only_once() -> None:
    load = new_load()
    book(load, R, prefill=P)
    book(load, S, prefill=P, tokens=7)
    load.prefill_done(R, 0.0)
    load.prefill_done(R, 0.0)
    assert share(load, P).queued_tokens == 7
    assert share(load, A).requests == 2


def test_blocks_that_requests_share_count_once() -> None:
    load = new_load()
    book(load, R, blocks=(1, 2, 3))
    book(load, S, blocks=(1, 2, 4))
    assert share(load, A).held_blocks == 4 + 2
    load.free(R, 0.0)
    assert share(load, A).held_blocks == 3 + 1


def test_an_answer_takes_more_blocks_as_it_grows() -> None:
    load = new_load()
    book(load)
    assert load.progress(R, 5, 1.0) == 4
    assert share(load, A).held_blocks == 2 + 5
    assert (load.progress(R, 5, 2.0), load.progress(S, 5, 2.0)) == (0, 0)
    load.free(R, 2.0)
    assert is_empty(load)


def test_a_booking_reports_its_holders_and_hashes() -> None:
    load = new_load()
    book(load, R, decode=A, prefill=P, blocks=(1, 2))
    book(load, S, decode=B)
    assert load.holders_of(R) == (A, P)
    assert load.holders_of(S) == (B,)
    assert load.hashes_of(R) == pack_hashes((1, 2))
    assert R in load
    load.prefill_done(R, 0.0)
    assert load.holders_of(R) == (A,)
    load.free(R, 0.0)
    assert (load.holders_of(R), load.hashes_of(R), R in load) == ((), b"", False)


def test_a_booking_knows_its_owner() -> None:
    load = new_load()
    owner = Owner("tenant", 3)
    load.book(R, decode=A, prefill=A, prefill_tokens=1, hashes=b"", now=0.0, owner=owner)
    assert load.owner_of(R) == owner


# --- how a booking ends --------------------------------------------------------------------------------------------


def test_a_request_that_ends_leaves_nothing_whenever_it_ends() -> None:
    for is_begun in (False, True):
        load = new_load()
        book(load, prefill=P)
        if is_begun:
            load.prefill_done(R, 0.0)
        load.free(R, 0.0)
        load.free(R, 0.0)
        load.prefill_done(R, 0.0)
        load.progress(R, 9, 0.0)
        assert is_empty(load)


def test_booking_again_replaces() -> None:
    """A request that migrates has one booking, at its new place."""
    load = new_load()
    book(load, decode=A, prefill=P)
    book(load, decode=B, prefill=P, tokens=7)
    assert load.shares() == {B: Share(held_blocks=3, requests=1), P: Share(queued_tokens=7)}
    load.free(R, 0.0)
    assert is_empty(load)


def test_a_worker_that_leaves_ends_bookings_of_either_half() -> None:
    for gone in (A, P):
        load = new_load()
        book(load, R, decode=A, prefill=P)
        book(load, S, decode=B)
        load.leave(gone, 0.0)
        assert R not in load
        assert load.shares() == {B: Share(40, 3, 1)}
        load.free(R, 0.0)
        load.free(S, 0.0)
        assert is_empty(load)


def test_a_prefill_worker_that_leaves_when_done_ends_no_stream() -> None:
    load = new_load()
    book(load, decode=A, prefill=P)
    load.prefill_done(R, 0.0)
    load.leave(P, 0.0)
    load.prefill_done(R, 0.0)
    load.progress(R, 4, 0.0)
    assert load.shares() == {A: Share(held_blocks=2 + 4, requests=1)}
    load.free(R, 0.0)
    assert is_empty(load)


def test_leaving_twice_or_unknown_is_no_error() -> None:
    load = new_load(A)
    for holder in (A, A, B):
        load.leave(holder, 0.0)
    assert is_empty(load)


def test_joining_twice_keeps_what_is_booked() -> None:
    load = new_load()
    book(load)
    load.join(A)
    assert share(load, A).requests == 1


def test_a_booking_of_which_nothing_is_heard_expires() -> None:
    load = new_load(lease_s=10.0)
    book(load, R, now=0.0)
    book(load, S, now=5.0)
    assert load.expired(9.9) == []
    assert load.expired(10.0) == [R]
    assert load.expired(15.0) == [R, S]


@pytest.mark.parametrize("sign_of_life", ["first token", "progress", "booked again"])
def test_any_sign_of_life_renews_the_lease(sign_of_life: str) -> None:
    load = new_load(lease_s=10.0)
    book(load, R, now=0.0)
    book(load, S, now=1.0)
    match sign_of_life:
        case "first token":
            load.prefill_done(R, 9.0)
        case "progress":
            load.progress(R, 1, 9.0)
        case _:
            book(load, R, now=9.0)
    assert load.expired(18.0) == [S]
    assert load.expired(19.0) == [S, R]


# --- who has work --------------------------------------------------------------------------------------------------


class Watched(BusyShare):
    """An account of busy time that remembers what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[int, float]] = []

    def change(self, by: int, now: float) -> None:
        super().change(by, now)
        self.told.append((by, now))

    def take(self) -> list[tuple[int, float]]:
        told, self.told = self.told, []
        return told


def watched_load() -> tuple[ActiveLoad, Watched]:
    """A load whose holders have one account of busy time."""
    load, busy = ActiveLoad(), Watched()
    for holder in (A, B, P):
        load.join(holder, busy)
    return load, busy


def test_a_holder_is_busy_from_first_to_last_prompt() -> None:
    load, busy = watched_load()
    book(load, R, prefill=P, now=1.0)
    assert busy.take() == [(1, 1.0)]
    book(load, S, prefill=P, now=2.0)
    load.prefill_done(R, 3.0)
    load.free(R, 4.0)
    assert busy.take() == []
    load.prefill_done(S, 5.0)
    assert busy.take() == [(-1, 5.0)]


def test_a_fully_cached_prompt_makes_no_holder_busy() -> None:
    load, busy = watched_load()
    book(load, tokens=0)
    load.free(R, 0.0)
    assert busy.take() == []


def test_a_holder_that_leaves_or_loses_its_request_is_idle() -> None:
    load, busy = watched_load()
    book(load, R, prefill=P)
    load.leave(A, 1.0)
    assert busy.take() == [(1, 0.0), (-1, 1.0)]
    book(load, S, decode=B)
    load.leave(B, 1.0)
    assert busy.take() == [(1, 0.0), (-1, 1.0)]


def test_a_moved_booking_moves_the_busy_time() -> None:
    load, busy = watched_load()
    book(load, decode=A)
    book(load, decode=B, now=1.0)
    assert busy.take() == [(1, 0.0), (-1, 1.0), (1, 1.0)]
    assert (load.of(A).is_busy, load.of(B).is_busy) == (False, True)


def test_prompts_of_other_routers_make_a_holder_busy_too() -> None:
    load, busy = watched_load()
    load.set_elsewhere("two", {A: Share(5, 0, 0), B: Share(0, 7, 1)}, 1.0)
    assert busy.take() == [(1, 1.0)]
    book(load, R, decode=A)
    load.set_elsewhere("two", {}, 2.0)
    assert busy.take() == []
    load.free(R, 3.0)
    assert busy.take() == [(-1, 3.0)]


def test_a_holder_that_leaves_is_idle_for_other_routers_too() -> None:
    load, busy = watched_load()
    load.set_elsewhere("two", {A: Share(5, 0, 0), B: Share(5, 0, 0)}, 0.0)
    book(load, R, decode=A)
    busy.take()
    load.leave(A, 1.0)
    assert busy.take() == [(-1, 1.0)]
    load.set_elsewhere("two", {}, 2.0)
    assert busy.take() == [(-1, 2.0)]
    load.leave(B, 3.0)
    assert busy.take() == []


# --- what is done of it by now -------------------------------------------------------------------------------------


def computing(load: ActiveLoad, tokens: int, from_s: float, to_s: float) -> HolderLoad:
    """Return a load for which one prompt was computed in that time, so that the worker's speed is known."""
    book(load, RequestId("before"), tokens=tokens, now=from_s)
    load.prefill_done(RequestId("before"), to_s)
    load.free(RequestId("before"), to_s)
    return load.of(A)


def test_a_worker_of_unknown_speed_has_done_nothing_yet() -> None:
    load = new_load()
    book(load, tokens=1000)
    assert load.of(A).done_tokens(100.0) == 0


def test_computed_tokens_are_estimated_from_earlier_prompts() -> None:
    load = new_load()
    holder = computing(load, 1000, 0.0, 10.0)
    book(load, R, tokens=500, now=20.0)
    assert holder.done_tokens(22.0) == pytest.approx(200)
    assert holder.done_tokens(1000.0) == 500, "not more than the prompt that is being computed"


def test_a_prompt_starts_when_the_one_before_is_done() -> None:
    load = new_load()
    holder = computing(load, 1000, 0.0, 10.0)
    book(load, R, tokens=500, now=20.0)
    book(load, S, tokens=300, now=21.0)
    load.prefill_done(R, 25.0)
    assert holder.done_tokens(25.0) == 0
    assert holder.done_tokens(26.0) == pytest.approx(100)


def test_the_time_of_a_cancelled_prompt_counts_for_no_other() -> None:
    load = new_load()
    holder = computing(load, 1000, 0.0, 10.0)
    book(load, R, tokens=5000, now=20.0)
    book(load, S, tokens=300, now=21.0)
    load.free(R, 60.0)
    assert holder.done_tokens(60.0) == 0
    assert holder.done_tokens(61.0) == pytest.approx(100)


def test_overtaking_in_the_worker_keeps_the_first_prompts_turn() -> None:
    load = new_load()
    holder = computing(load, 1000, 0.0, 10.0)
    book(load, R, tokens=500, now=20.0)
    book(load, S, tokens=10, now=20.0)
    load.prefill_done(S, 21.0)
    assert holder.done_tokens(22.0) == pytest.approx(200)


def test_speed_is_that_of_the_last_prompts() -> None:
    load = new_load()
    holder = computing(load, 1000, 0.0, 1.0)
    for number in range(50):
        computing(load, 1000, 10.0 * number, 10.0 * number + 10.0)
    assert holder.speed == pytest.approx(100, rel=0.05)


# --- what other routers have placed --------------------------------------------------------------------------------


def test_load_of_others_is_totalled_but_not_passed_on() -> None:
    load = new_load()
    book(load, decode=A)
    load.set_elsewhere("two", {A: Share(10, 4, 2)}, 0.0)
    load.set_elsewhere("three", {A: Share(1, 1, 1), B: Share(5, 0, 0)}, 0.0)
    assert load.of(A).total == Share(40 + 10 + 1, 3 + 4 + 1, 1 + 2 + 1)
    assert load.of(B).total == Share(5, 0, 0)
    assert load.shares() == {A: Share(40, 3, 1)}
    load.free(R, 0.0)
    assert load.of(A).total == Share(10 + 1, 4 + 1, 2 + 1)


def test_a_full_report_replaces_the_earlier_one() -> None:
    load = new_load()
    load.set_elsewhere("two", {A: Share(10, 4, 2), B: Share(5, 1, 1)}, 0.0)
    load.set_elsewhere("two", {B: Share(6, 2, 1)}, 0.0)
    assert (load.of(A).total, load.of(B).total) == (NOTHING, Share(6, 2, 1))


def test_a_partial_report_leaves_other_workers_unchanged() -> None:
    load = new_load()
    load.set_elsewhere("two", {A: Share(10, 4, 2), B: Share(5, 1, 1)}, 0.0)
    load.update_elsewhere("two", {B: NOTHING}, 0.0)
    assert (load.of(A).total, load.of(B).total) == (Share(10, 4, 2), NOTHING)


def test_a_router_that_left_is_forgotten() -> None:
    load = new_load()
    load.set_elsewhere("two", {A: Share(10, 4, 2)}, 0.0)
    load.set_elsewhere("two", {}, 0.0)
    assert load.of(A).total == NOTHING
    assert load.of(A).elsewhere == {}


def test_of_unknown_workers_nothing_is_kept() -> None:
    load = new_load(A)
    load.set_elsewhere("two", {B: Share(10, 4, 2)}, 0.0)
    load.join(B)
    assert load.of(B).total == NOTHING


def test_own_changes_are_taken_once() -> None:
    load = new_load()
    book(load, decode=A, prefill=P)
    assert load.take_own_changes() == {A: Share(0, 3, 1), P: Share(40, 0, 0)}
    assert load.take_own_changes() == {}
    load.progress(R, 1, 0.0)
    assert load.take_own_changes() == {}, "it lives; nothing has changed"
    load.progress(R, 2, 0.0)
    load.prefill_done(R, 0.0)
    assert load.take_own_changes() == {A: Share(0, 4, 1), P: NOTHING}
    load.free(R, 0.0)
    load.set_elsewhere("two", {B: Share(1, 1, 1)}, 0.0)
    assert load.take_own_changes() == {A: NOTHING}


def test_a_worker_that_left_is_not_reported() -> None:
    load = new_load()
    book(load, decode=A, prefill=P)
    load.leave(A, 0.0)
    assert load.take_own_changes() == {P: NOTHING}


# --- against a model -----------------------------------------------------------------------------------------------

steps = st.lists(
    st.tuples(
        st.sampled_from(["book", "book", "prefill_done", "progress", "free", "leave", "elsewhere"]),
        st.integers(0, 4),
        st.sampled_from([A, B]),
        st.sampled_from([A, B, P]),
        st.integers(0, 50),
        st.integers(0, 5),
    ),
    max_size=60,
)


@given(steps)
def test_the_sums_are_those_of_the_bookings_that_stand(steps: list) -> None:
    load = new_load()
    standing: dict[str, dict] = {}
    elsewhere = dict.fromkeys((A, B, P), 0)
    told = dict.fromkeys((A, B, P), NOTHING)
    for now, (what, number, decode, prefill, tokens, depth) in enumerate(steps):
        name, blocks = RequestId(f"r{number}"), tuple(range(depth))
        match what:
            case "book":
                book(load, name, decode, prefill, tokens, blocks, now)
                standing[name] = {"at": decode, "prefill": prefill, "tokens": tokens, "blocks": depth, "answer": 1}
            case "prefill_done":
                load.prefill_done(name, now)
                if name in standing:
                    standing[name] |= {"tokens": 0, "prefill": None}
            case "progress":
                load.progress(name, depth, now)
                if name in standing:
                    standing[name]["answer"] = depth
            case "free":
                load.free(name, now)
                standing.pop(name, None)
            case "leave":
                load.leave(prefill, now)
                load.join(prefill)
                standing = {n: b for n, b in standing.items() if prefill not in (b["at"], b["prefill"])}
                elsewhere[prefill], told[prefill] = 0, NOTHING
            case _:
                load.set_elsewhere("two", {prefill: Share(tokens, 0, 0)}, 0.0)
                elsewhere = dict.fromkeys((A, B, P), 0) | {prefill: tokens}
        told |= load.take_own_changes()
        assert len(load) == len(standing)
        for holder in (A, B, P):
            mine = [b for b in standing.values() if b["at"] == holder]
            queued = sum(b["tokens"] for b in standing.values() if b["prefill"] == holder)
            held = max((b["blocks"] for b in mine), default=0) + sum(b["answer"] for b in mine)
            assert share(load, holder) == told[holder] == Share(queued, held, len(mine))
            assert load.of(holder).total == Share(queued + elsewhere[holder], held, len(mine))
    for name in list(standing):
        load.free(RequestId(name), len(steps))
    assert is_empty(load)
