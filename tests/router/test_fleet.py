"""Workers that come, change and leave, and what their caches are believed to hold."""

from collections import Counter

import pytest

from kvmesh.kvevents.formats import encode_payload
from kvmesh.protocol.events import Cleared
from kvmesh.protocol.ids import WorkerId
from tests.support.routing import (
    BLOCK,
    TOKENS,
    P,
    at,
    busy,
    card,
    done,
    end,
    holds,
    load_of,
    place,
    prompt,
    request,
    router,
    where,
)

# --- workers that come, change and leave ---------------------------------------------------------------------------


def test_late_events_do_not_bring_a_worker_back() -> None:
    state = router(card("d1"), card("d2"))
    holds(state, "d1", 20)
    state.remove_worker(WorkerId("d1"))
    holds(state, "d1", 20)
    assert state.fleet.on_kv_batch(WorkerId("d1"), 0, b"") == 0
    assert state.fleet.digest(WorkerId("d1"), 0) is None
    state.fleet.forget_kv(WorkerId("d1"), 0)
    assert state.fleet.indexes["m"].num_blocks == 0
    assert [one.worker_id for one in state.fleet.cards] == ["d2"]
    state.remove_worker(WorkerId("never there"))


def test_the_blocks_of_one_holder_can_be_forgotten() -> None:
    state = router(card("d", dp_size=2))
    for dp_rank in (0, 1):
        holds(state, "d", 20, dp_rank=dp_rank)
    state.fleet.forget_kv(WorkerId("d"), 1)
    assert set(state.fleet.overlaps("m", request().sequence_hashes, 0.0)) == {at("d", 0)}


def test_a_changed_card_keeps_the_workers_blocks_and_load() -> None:
    state = router(card("d1"), card("d2"))
    holds(state, "d1", 20)
    place(state, "r")
    state.add_worker(card("d1", address="elsewhere:1"))
    placed = state.place(request("s"), 0.0)
    assert (placed.decode.address, placed.decode.overlap_blocks) == ("elsewhere:1", 20)
    assert load_of(state, "d1").requests == 2


@pytest.mark.parametrize("fields", [{"role": P}, {"model": "other"}, {"dp_size": 2}])
def test_a_card_of_another_kind_is_another_worker(fields: dict) -> None:
    state = router(card("d1"), card("d2"))
    holds(state, "d1", 20)
    place(state, "r")
    state.add_worker(card("d1", **fields))
    assert len(state.load) == 0
    assert state.fleet.overlaps("m", request().sequence_hashes, 0.0) == {}
    assert place(state, "s", pin=WorkerId("d2")) == "d2"


def test_the_block_size_is_that_of_the_model() -> None:
    state = router(card("d1"), card("d2", model="other", block_size=32))
    assert (state.fleet.block_size_of("m"), state.fleet.block_size_of("other"), state.fleet.block_size_of("none")) == (
        16,
        32,
        1,
    )


# --- newcomers -----------------------------------------------------------------------------------------------------


def test_an_unproven_newcomer_gets_one_request() -> None:
    state = router(card("old"), ramp_s=10.0)
    busy(state, "old", now=100.0)
    state.add_worker(card("new"), 100.0)
    seen = Counter(place(state, f"r{n}", prompt(n), now=100.0) for n in range(6))
    assert seen == {"new": 1, "old": 5}
    assert place(state, "later", prompt(9), now=110.0) == "new"


def test_a_newcomer_that_completes_requests_gets_more() -> None:
    state = router(card("old"), ramp_s=1e9)
    for number in range(20):
        busy(state, "old", number, now=2e9)
    state.add_worker(card("new"), 2e9)
    for number in range(30, 46):
        assert place(state, f"r{number}", prompt(number), now=2e9) == "new"
        end(state, f"r{number}", now=2e9)
    assert Counter(place(state, f"r{n}", prompt(n), now=2e9) for n in range(50, 55)) == {"new": 5}


def test_a_newcomer_that_fails_requests_gets_no_more_for_it() -> None:
    state = router(card("old"), ramp_s=1e9, suspect_s=0.0)
    for number in range(20):
        busy(state, "old", number, now=2e9)
    state.add_worker(card("new"), 2e9)
    for number in range(30, 46):
        place(state, f"r{number}", prompt(number), now=2e9)
        end(state, f"r{number}", now=2e9, ok=False)
    assert Counter(place(state, f"r{n}", prompt(n), now=2e9) for n in range(50, 55)) == {"new": 1, "old": 4}


def test_a_new_prefill_worker_is_not_stampeded_either() -> None:
    state = router(card("old", P), card("d"), saturation=None)
    for number in range(8):
        place(state, f"busy {number}", prompt(number), now=100.0, disaggregate=True)
    state.add_worker(card("new", P), 100.0)
    prefills = Counter(
        where(state.place(request(f"r{n}", prompt(n), disaggregate=True), 100.0))[0] for n in range(10, 16)
    )
    assert prefills == {"new": 1, "old": 5}
    for number in range(16):
        busy_name = f"s{number}"
        place(state, busy_name, prompt(number + 20), now=100.0, pin_prefill=WorkerId("new"))
        done(state, busy_name, now=100.0)
    placed = state.place(request("settled", prompt(99), disaggregate=True), 100.0)
    assert where(placed)[0] == "new", "its prefills have ended well"


def test_where_all_workers_are_new_none_is_held_back() -> None:
    state = router(card("d1"), card("d2"))
    assert Counter(place(state, f"r{n}", prompt(n)) for n in range(6)) == {"d1": 3, "d2": 3}


def test_a_card_that_changes_makes_no_newcomer() -> None:
    state = router(card("d1"), card("d2"))
    place(state, "r", prompt(0), now=100.0)
    state.add_worker(card("d2", max_num_seqs=7), 100.0)
    assert Counter(place(state, f"r{n}", prompt(n), now=100.0) for n in range(1, 6)) == {"d1": 2, "d2": 3}


# --- what is believed to be cached ---------------------------------------------------------------------------------


def test_a_prompt_in_flight_counts_as_cached_where_it_runs() -> None:
    state = router(card("d1"), card("d2"), recompute_price=2.0)
    first = place(state, "r0")
    placed = state.place(request("r1", TOKENS + prompt(1, 1)), 0.0)
    assert (placed.decode.worker_id, placed.decode.overlap_blocks) == (first, 20)


def test_a_prompt_in_flight_counts_where_it_is_prefilled() -> None:
    state = router(card("p1", P), card("p2", P), card("d"), recompute_price=2.0)
    first = where(state.place(request("r0", disaggregate=True), 0.0))[0]
    placed = state.place(request("r1", TOKENS + prompt(1, 1), disaggregate=True), 0.0)
    assert placed.prefill is not None
    assert (placed.prefill.worker_id, placed.prefill.overlap_blocks) == (first, 20)


def test_siblings_follow_a_prefix_before_the_events_tell_of_it() -> None:
    state = router(card("p1", P), card("p2", P), card("d"), predict_ttl_s=5.0)
    first = where(state.place(request("r0", disaggregate=True), 0.0))[0]
    done(state, "r0", now=1.0)
    end(state, "r0", now=1.0)
    for now, overlap in ((5.9, 20), (6.0, 0)):
        placed = state.place(request("r1", disaggregate=True), now)
        assert placed.prefill is not None
        assert placed.prefill.overlap_blocks == overlap
        assert overlap == 0 or placed.prefill.worker_id == first
        end(state, "r1", ok=False)


def test_a_request_that_failed_leaves_no_prefix_behind() -> None:
    state = router(card("d1"))
    place(state, "r0")
    done(state, "r0")
    end(state, "r0", ok=False)
    assert state.fleet.overlaps("m", request().sequence_hashes, 0.0) == {}


def test_predictions_can_be_turned_off() -> None:
    state = router(card("d1"), predict_ttl_s=0.0)
    place(state, "r0")
    done(state, "r0")
    assert state.fleet.overlaps("m", request().sequence_hashes, 0.0) == {}


def test_events_replace_predictions() -> None:
    for tell in (
        lambda state: state.fleet.on_kv_events(WorkerId("d1"), 0, [Cleared()]),
        lambda state: state.fleet.on_kv_batch(WorkerId("d1"), 0, encode_payload([Cleared()], 0.0)),
    ):
        state = router(card("d1"))
        place(state, "r0")
        done(state, "r0")
        end(state, "r0")
        assert state.fleet.overlaps("m", request().sequence_hashes, 0.0) == {at("d1"): (20,) * 4}
        tell(state)
        assert state.fleet.overlaps("m", request().sequence_hashes, 0.0) == {}


def test_a_prediction_does_not_hide_deeper_blocks_in_slower_tiers() -> None:
    state = router(card("d1"))
    holds(state, "d1", 15, medium="CPU")
    place(state, "r0", TOKENS[: 10 * BLOCK])
    assert state.fleet.overlaps("m", request().sequence_hashes, 0.0) == {at("d1"): (10, 15, 15, 15)}


@pytest.mark.parametrize("kv_events", ["tcp://d:1", ""])
def test_predictions_for_a_worker_end_when_it_leaves(kv_events: str) -> None:
    state = router(card("d", kv_events=kv_events))
    place(state, "r0")
    done(state, "r0")
    end(state, "r0")
    state.remove_worker(WorkerId("d"))
    state.add_worker(card("d", kv_events=kv_events))
    assert state.fleet.overlaps("m", request().sequence_hashes, 0.0) == {}


def test_placements_predict_the_cache_of_a_worker_without_events() -> None:
    state = router(card("d1", kv_events=""), card("d2", kv_events=""), approximate_ttl_s=120.0)
    first = place(state, "r0")
    done(state, "r0")
    end(state, "r0")
    assert state.fleet.overlaps("m", request().sequence_hashes, 119.0) == {at(first): (20,) * 4}
    busy(state, first, blocks=1, now=119.0)
    assert place(state, "r1", now=119.0) == first
    end(state, "r1", ok=False)
    assert state.fleet.overlaps("m", request("r2").sequence_hashes, 120.0) == {}


def test_predictions_do_not_exceed_the_pool_of_a_worker() -> None:
    state = router(card("d1", kv_events="", total_blocks=30), saturation=None)
    for number in range(3):
        place(state, f"r{number}", prompt(number))
        end(state, f"r{number}")
    cached = [state.fleet.overlaps("m", request(tokens=prompt(n)).sequence_hashes, 0.0) for n in range(3)]
    assert cached == [{}, {at("d1"): (10,) * 4}, {at("d1"): (20,) * 4}]


def test_both_workers_of_a_disaggregated_request_will_have_its_prompt() -> None:
    state = router(card("p", P, kv_events=""), card("d", kv_events=""))
    place(state, "r", disaggregate=True)
    done(state, "r")
    end(state, "r")
    assert set(state.fleet.overlaps("m", request().sequence_hashes, 0.0)) == {at("p"), at("d")}


def test_predictions_for_workers_without_events_can_be_turned_off() -> None:
    state = router(card("d1", kv_events=""), approximate_ttl_s=0.0)
    place(state, "r0")
    done(state, "r0")
    end(state, "r0")
    assert state.fleet.overlaps("m", request().sequence_hashes, 0.0) == {}
