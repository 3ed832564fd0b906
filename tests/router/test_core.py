"""The router as a state machine: what bookings, sessions and models change, and that all of it ends."""

import pytest

from kvmesh.protocol.errors import NoWorkerError
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.router.load import Share
from kvmesh.router.queue import QueueRules
from kvmesh.router.selection import Weights
from tests.support.routing import (
    BLOCK,
    ONE_AT_A_TIME,
    P,
    at,
    busy,
    card,
    done,
    end,
    holds,
    load_of,
    order,
    place,
    prompt,
    request,
    results,
    router,
    submit,
)

# --- load ----------------------------------------------------------------------------------------------------------


def test_a_request_counts_until_it_ends_however_it_ends() -> None:
    for ok in (True, False):
        state = router(card("p", P), card("d"))
        place(state, "r")
        assert state.load.shares() == {at("p"): Share(320, 0, 0), at("d"): Share(0, 21, 1)}
        done(state, "r")
        assert state.load.shares() == {at("d"): Share(0, 21, 1)}
        end(state, "r", ok=ok)
        end(state, "r", ok=ok)
        assert (state.load.shares(), len(state.load)) == ({}, 0)


def test_an_answer_takes_a_block_per_begun_block_of_tokens() -> None:
    state = router(card("d"))
    place(state, "r")
    for osl_tokens, blocks in ((1, 1), (BLOCK - 1, 1), (BLOCK, 2), (5 * BLOCK + 3, 6)):
        state.progress(RequestId("r"), osl_tokens, 1.0)
        assert load_of(state, "d").held_blocks == 20 + blocks


def test_a_dead_worker_ends_its_requests_load_on_both_workers() -> None:
    for gone, left in (("p", "d"), ("d", "p")):
        state = router(card("p", P), card("d"))
        place(state, "r")
        state.remove_worker(WorkerId(gone))
        assert load_of(state, left) == Share()
        done(state, "r")
        state.progress(RequestId("r"), 100, 1.0)
        end(state, "r")
        assert (len(state.load), load_of(state, left)) == (0, Share())


def test_a_prefill_worker_that_leaves_afterwards_ends_no_stream() -> None:
    state = router(card("p", P), card("d"))
    place(state, "r")
    done(state, "r")
    state.remove_worker(WorkerId("p"))
    done(state, "r")
    state.progress(RequestId("r"), 100, 1.0)
    assert load_of(state, "d") == Share(0, 20 + 7, 1)
    end(state, "r")
    assert state.load.shares() == {}


def test_a_silent_booking_ends_and_is_counted() -> None:
    state = router(card("d"), lease_s=10.0)
    place(state, "silent", prompt(0), now=0.0)
    place(state, "alive", prompt(1), now=0.0)
    state.progress(RequestId("alive"), 1, 9.0)
    assert state.sweep(9.9) == []
    assert state.sweep(10.0) == ["silent"]
    assert load_of(state, "d").requests == 1
    assert state.sweep(19.0) == ["alive"]
    assert (state.load.shares(), state.stats["expired"]) == ({}, 2)


def test_an_expired_booking_makes_room_and_leaves_no_prefix() -> None:
    state = router(card("d", kv_events=""), saturation=ONE_AT_A_TIME, lease_s=10.0)
    place(state, "silent")
    submit(state, "r", prompt(1))
    assert state.dispatch(5.0) == []
    state.sweep(10.0)
    assert results(state.dispatch(10.0)) == {"r": "d"}
    assert state.fleet.overlaps("m", request().sequence_hashes, 10.0) == {}


def test_a_request_that_is_placed_again_counts_once() -> None:
    state = router(card("d1"), card("d2"))
    first = place(state, "r")
    second = place(state, "r", exclude=(WorkerId(first),))
    assert state.load.shares() == {at(second): Share(320, 21, 1)}


def test_load_of_other_routers_counts_until_they_leave() -> None:
    state = router(card("d1"), card("d2"))
    state.load.set_elsewhere("two", {at("d1"): Share(1000, 50, 3)}, 0.0)
    assert [place(state, f"r{n}", prompt(n, 1)) for n in range(3)] == ["d2"] * 3
    state.load.set_elsewhere("two", {at("d2"): Share(1000, 50, 3)}, 0.0)
    assert [place(state, f"s{n}", prompt(n + 5, 1)) for n in range(3)] == ["d1"] * 3
    state.load.set_elsewhere("two", {}, 0.0)
    end(state, "r0", "r1", "r2", "s0", "s1", "s2")
    assert {place(state, f"t{n}", prompt(n + 10, 1)) for n in range(2)} == {"d1", "d2"}


# --- sessions ------------------------------------------------------------------------------------------------------


def test_a_session_stays_with_its_worker() -> None:
    state = router(card("d1"), card("d2"), affinity_ttl_s=60.0)
    first = place(state, "r0", prompt(0), session="s")
    for number in range(1, 4):
        assert place(state, f"r{number}", prompt(number), session="s") == first
    assert place(state, "other", prompt(9), session="t") != first


def test_sessions_are_not_kept_unless_that_is_asked_for() -> None:
    state = router(card("d1"), card("d2"))
    assert {place(state, f"r{n}", prompt(n), session="s") for n in range(2)} == {"d1", "d2"}


def test_tenants_and_requests_without_a_session_have_none_in_common() -> None:
    state = router(card("d1"), card("d2"), affinity_ttl_s=60.0)
    assert place(state, "r0", prompt(0), session="s", tenant="a") == "d1"
    assert place(state, "r1", prompt(1), session="s", tenant="b") == "d2"
    assert place(state, "r2", prompt(2, 1)) == "d1"
    assert place(state, "r3", prompt(3, 1)) == "d2"


def test_a_session_is_given_up_where_its_worker_is_full() -> None:
    state = router(card("d1"), card("d2"), affinity_ttl_s=60.0, saturation=ONE_AT_A_TIME)
    first = place(state, "r0", prompt(0), session="s")
    submit(state, "r1", prompt(1), session="s")
    [moved] = results(state.dispatch(0.0)).values()
    assert moved != first
    done(state, "r0", "r1")
    assert place(state, "r2", prompt(2), session="s") == moved


def test_a_session_ends_with_its_worker_and_with_its_time() -> None:
    state = router(card("d1"), card("d2"), affinity_ttl_s=60.0)
    assert place(state, "r0", prompt(0), session="s") == "d1"
    state.remove_worker(WorkerId("d1"))
    state.add_worker(card("d1"))
    busy(state, "d1", 1)
    assert place(state, "r1", prompt(2), session="s") == "d2"
    busy(state, "d2", 3)
    assert place(state, "r2", prompt(4), now=59.0, session="s") == "d2"
    assert place(state, "r3", prompt(5), now=119.0, session="s") == "d1"


def test_a_session_goes_not_where_its_request_may_not() -> None:
    state = router(card("d1"), card("d2"), affinity_ttl_s=60.0)
    assert place(state, "r0", prompt(0), session="s") == "d1"
    assert place(state, "r1", prompt(1), session="s", exclude=(WorkerId("d1"),)) == "d2"


# --- models --------------------------------------------------------------------------------------------------------


def test_models_do_not_see_each_others_prefixes() -> None:
    state = router(card("d1"), card("x1", model="x", kv_events=""), card("x2", model="x"))
    holds(state, "x2", 20)
    place(state, "r0", model="x", pin=WorkerId("x1"))
    done(state, "r0")
    assert state.fleet.overlaps("m", request().sequence_hashes, 0.0) == {}
    placed = state.place(request("r1"), 0.0)
    assert placed.decode.overlap_blocks == 0
    assert load_of(state, "d1").queued_tokens == 320


def test_caches_of_another_model_shorten_no_prompt_in_the_queue() -> None:
    state = router(card("d"), card("x", model="x"), saturation=ONE_AT_A_TIME)
    busy(state, "d")
    place(state, "r0", prompt(1, 40), model="x")
    submit(state, "long", prompt(1, 40))
    submit(state, "short", prompt(2, 5))
    end(state, "busy d 99")
    assert order(state, ["long", "short"]) == ["short", "long"]


def test_models_do_not_see_each_others_demand_and_load() -> None:
    state = router(card("d1"), card("d2"), card("x", model="x"), weights=Weights(decode=0.0), predict_ttl_s=0.0)
    holds(state, "d1", 20)
    holds(state, "x", 20)
    for number in range(20):
        place(state, f"x{number}", model="x")
        end(state, f"x{number}")
    busy_x = state.place(request("busy x", prompt(9), model="x"), 0.0)
    explanation = state.preview(request(), 50.0).explanation
    assert explanation is not None
    assert (explanation.asked_before, explanation.busy_share) == (0.0, 0.0)
    assert busy_x.decode.worker_id == "x"


def test_models_have_queues_of_their_own() -> None:
    state = router(card("d"), card("x", model="x"), saturation=ONE_AT_A_TIME, queue=QueueRules(max_requests=1))
    for name, model in (("d", "m"), ("x", "x")):
        place(state, f"busy {name}", prompt(1), model=model)
        submit(state, f"waits {name}", prompt(2), model=model)
    assert state.waiting == 2
    end(state, "busy x")
    assert results(state.dispatch(0.0)) == {"waits x": "x"}


# --- a router that is gone -----------------------------------------------------------------------------------------


def test_what_another_router_placed_can_be_booked_again() -> None:
    ours, theirs = (router(card("p", P), card("d")) for _ in range(2))
    placed = theirs.place(request(), 0.0)
    ours.resume(request(), placed, 5.0, is_prefilling=True)
    assert ours.load.shares() == theirs.load.shares()
    done(theirs, "r")
    ours.resume(request(), placed, 6.0, is_prefilling=False)
    assert ours.load.shares() == theirs.load.shares() == {at("d"): Share(0, 21, 1)}
    end(ours, "r")
    assert ours.load.shares() == {}


def test_what_another_router_placed_on_unknown_workers_cannot() -> None:
    placed = router(card("d1")).place(request(), 0.0)
    ours = router(card("d2"))
    with pytest.raises(NoWorkerError, match="no worker 'd1'"):
        ours.resume(request(), placed, 0.0, is_prefilling=True)
    assert len(ours.load) == 0
