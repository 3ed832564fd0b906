"""Where a request runs: what a placement costs, and what each policy makes of it."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from protocol.errors import NoWorkerError
from protocol.ids import WorkerId
from router.index import Holder
from router.policies import POLICIES, Policy, choose
from router.selection import Candidate, LegKind, PlacementCost, Terms, Weights

BLOCK = 16
ISL = 160  # 10 blocks
EQUAL = Weights(prefill=1.0, decode=1.0)  # so that costs can be added up by hand


def worker(name: str, cached: int = 0, dp_rank: int = 0, **fields: object) -> Candidate:
    """It has the first `cached` blocks of the prompt on its device."""
    values = {"overlap": (cached,) * 4} | fields
    return Candidate(Holder(WorkerId(name), dp_rank), **values)  # type: ignore[arg-type]


def prompt(leg: LegKind = "whole", isl: int = ISL, weights: Weights = EQUAL, price: float = 1.0) -> PlacementCost:
    return PlacementCost(isl, BLOCK, leg, weights, price)


def chosen(
    candidates: list[Candidate],
    policy: Policy = "kv",
    temperature: float = 0.0,
    seed: int = 0,
    weights: Weights = EQUAL,
    price: float = 1.0,
) -> str:
    whole = prompt(weights=weights, price=price)
    return choose(candidates, whole, policy, temperature, random.Random(seed)).holder.worker_id


def drawn(candidates: list[Candidate], policy: Policy = "kv", temperature: float = 0.0, times: int = 400) -> Counter:
    return Counter(chosen(candidates, policy, temperature, seed) for seed in range(times))


# --- what a placement costs ----------------------------------------------------------------------------------------


def test_the_example_of_the_documentation() -> None:
    idle = worker("a", new_blocks=10)
    busy = worker("b", cached=8, held_blocks=5, new_blocks=10)
    assert (prompt().cost(idle), prompt().cost(busy)) == (20, 17)
    assert prompt().cost(replace(busy, held_blocks=10)) == 22


def test_each_term_counts_what_its_name_says() -> None:
    one = worker("a", cached=4, queued_tokens=32, held_blocks=7, new_blocks=6, requests=3)
    weights = Weights(prefill=2.0, decode=0.5, request=4.0, transfer=0.25)
    assert Terms(*prompt(weights=weights, price=3.0).terms(one)) == Terms(
        compute=2.0 * 3.0 * 6, queue=2.0 * 2, held=0.5 * 13, requests=4.0 * 3, transfer=0.0
    )


def test_prefill_looks_at_prompts_alone() -> None:
    cost = prompt("prefill").cost
    assert cost(worker("a", held_blocks=100, new_blocks=10, requests=9)) == 10
    assert cost(worker("a", cached=4, queued_tokens=32)) == 8


def test_decode_looks_at_held_blocks_and_at_what_has_to_be_pulled() -> None:
    cost = prompt("decode").cost
    assert cost(worker("a", queued_tokens=10**6, new_blocks=10)) == pytest.approx(11)
    assert cost(worker("a", cached=10, held_blocks=2, new_blocks=10)) == pytest.approx(12)


def test_a_prompt_that_is_cached_whole_costs_no_less_than_nothing() -> None:
    assert prompt(isl=8).cost(worker("a", cached=5)) == 0


def test_a_partly_filled_block_counts_as_far_as_it_is_filled() -> None:
    assert prompt(isl=8).cost(worker("a")) == 0.5


def test_the_price_of_recomputing_weighs_what_is_to_compute_and_not_what_waits() -> None:
    one = worker("a", cached=4, queued_tokens=32)
    assert prompt(price=3.0).cost(one) == 3.0 * 6 + 2


@pytest.mark.parametrize(
    ("overlap", "saved"),
    [
        ((4, 4, 4, 4), 4.0),
        ((0, 4, 4, 4), 4 * 0.75),
        ((0, 0, 4, 4), 4 * 0.25),
        ((0, 0, 0, 4), 4 * 0.1),
        ((1, 3, 6, 8), 1 + 2 * 0.75 + 3 * 0.25 + 2 * 0.1),
    ],
)
def test_a_block_saves_less_work_the_slower_the_tier_it_lies_in(overlap: tuple, saved: float) -> None:
    assert prompt().cost(worker("a", overlap=overlap)) == pytest.approx(10 - saved)


def test_what_a_tier_saves_can_be_set() -> None:
    weights = replace(EQUAL, host=0.5, disk=0.0, object=1.0)
    assert prompt(weights=weights).cost(worker("a", overlap=(0, 4, 6, 7))) == pytest.approx(10 - 2 - 0 - 1)


def test_a_worker_twice_as_fast_costs_half_as_much() -> None:
    one = worker("a", cached=2, queued_tokens=160, held_blocks=5)
    assert prompt().cost(replace(one, capacity=2.0)) == prompt().cost(one) / 2
    assert prompt().load(replace(one, capacity=2.0)) == prompt().load(one) / 2


def test_load_knows_of_no_cache() -> None:
    busy = worker("a", queued_tokens=32, held_blocks=5, requests=2)
    cached = worker("b", cached=10, queued_tokens=32, held_blocks=5, requests=2, new_blocks=0)
    assert prompt().load(busy) == prompt().load(cached) == prompt().load(replace(busy, new_blocks=10)) == 2 + 5 + 2


@pytest.mark.parametrize(("leg", "load"), [("whole", 2 + 5 + 2), ("prefill", 2 + 2), ("decode", 5 + 2)])
def test_load_is_that_of_the_leg(leg: LegKind, load: float) -> None:
    assert prompt(leg).load(worker("a", queued_tokens=32, held_blocks=5, requests=2)) == load


depths = st.lists(st.integers(0, 12), min_size=4, max_size=4).map(lambda d: tuple(sorted(d)))
candidates = st.builds(
    Candidate,
    st.builds(Holder, st.sampled_from("abcdef"), st.integers(0, 1)),
    depths,
    st.integers(0, 10_000),
    st.integers(0, 500),
    st.integers(0, 12),
    st.integers(0, 64),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.integers(0, 100),
)
LEGS: list[LegKind] = ["whole", "prefill", "decode"]


@given(candidates, st.sampled_from(LEGS), st.floats(0.1, 20.0), st.integers(0, 200))
def test_terms_are_never_negative_and_add_up_to_the_cost(c: Candidate, leg: LegKind, price: float, isl: int) -> None:
    one = prompt(leg, isl, Weights(request=0.3), price)
    assert min(one.terms(c)) >= 0
    assert sum(one.terms(c)) == pytest.approx(one.cost(c) * c.capacity)


# --- kv ------------------------------------------------------------------------------------------------------------


def test_a_cached_prefix_wins_between_equally_busy_workers() -> None:
    assert chosen([worker("a"), worker("b", cached=4)]) == "b"


def test_a_long_queue_outweighs_a_cached_prefix() -> None:
    assert chosen([worker("a"), worker("b", cached=4, queued_tokens=5 * BLOCK)]) == "a"


def test_running_streams_outweigh_a_cached_prefix() -> None:
    assert chosen([worker("a"), worker("b", cached=4, held_blocks=5)]) == "a"


def test_blocks_that_running_requests_hold_already_cost_nothing_new() -> None:
    newcomer = worker("a", new_blocks=10)
    assert chosen([newcomer, worker("b", held_blocks=9)]) == "b"
    assert chosen([newcomer, worker("b", held_blocks=9, new_blocks=10)]) == "a"


def test_weights_move_the_choice_between_reuse_and_even_load() -> None:
    both = [worker("a"), worker("b", cached=4, held_blocks=6)]
    assert chosen(both, weights=replace(EQUAL, prefill=2.0)) == "b"
    assert chosen(both, weights=replace(EQUAL, decode=2.0)) == "a"


def test_requests_may_cost_by_themselves() -> None:
    both = [worker("a", requests=3), worker("b", held_blocks=2)]
    assert chosen(both) == "a"
    assert chosen(both, weights=replace(EQUAL, request=1.0)) == "b"


def test_the_dearer_a_block_to_compute_the_longer_the_queue_that_a_prefix_is_worth() -> None:
    both = [worker("a"), worker("b", cached=4, queued_tokens=10 * BLOCK)]
    assert chosen(both, price=1.0) == "a"
    assert chosen(both, price=3.0) == "b"


def test_equal_workers_are_used_in_turn() -> None:
    assert chosen([worker("a", last_chosen=2), worker("b", last_chosen=1)]) == "b"
    assert chosen([worker("b"), worker("a")]) == "b"
    assert chosen([worker("c", cached=1), worker("a", last_chosen=2), worker("b", last_chosen=1)]) == "c"


def test_a_temperature_spreads_but_prefers_the_cheap() -> None:
    seen = drawn([worker("a", cached=9), worker("b", cached=5), worker("c")], temperature=0.5)
    assert seen["a"] > seen["b"] > seen["c"] > 0


def test_a_temperature_does_not_depend_on_the_scale_of_the_costs() -> None:
    near = [worker("a", queued_tokens=BLOCK), worker("b", queued_tokens=2 * BLOCK)]
    far = [worker("a", queued_tokens=BLOCK * 10**6), worker("b", queued_tokens=2 * BLOCK * 10**6)]
    assert drawn(near, temperature=1.0) == drawn(far, temperature=1.0)


def test_a_temperature_leaves_equal_workers_their_turns() -> None:
    assert drawn([worker("a", last_chosen=2), worker("b", last_chosen=1)], temperature=1.0) == {"b": 400}


@pytest.mark.parametrize("temperature", [1e-300, 1e300])
def test_extreme_temperatures_are_no_error(temperature: float) -> None:
    assert chosen([worker("a", cached=9), worker("b")], temperature=temperature) in ("a", "b")


@given(st.lists(candidates, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_kv_takes_the_cheapest_in_whatever_order_they_come(found: list[Candidate], rng: random.Random) -> None:
    one = prompt()
    least = min(one.cost(c) for c in found)
    for _ in range(3):
        rng.shuffle(found)
        got = choose(found, one, "kv", 0.0, rng)
        assert one.cost(got) == least
        assert got.last_chosen == min(c.last_chosen for c in found if one.cost(c) == least)


# --- the others ----------------------------------------------------------------------------------------------------


def test_least_loaded_looks_past_the_cache_to_the_load() -> None:
    both = [worker("a", queued_tokens=BLOCK), worker("b", cached=10, queued_tokens=2 * BLOCK)]
    assert chosen(both, "least-loaded") == "a"
    assert chosen(both, "kv") == "b"


def test_least_loaded_is_not_drawn_to_a_prompt_that_is_in_flight() -> None:
    both = [worker("a", new_blocks=10, last_chosen=1), worker("b", new_blocks=0, last_chosen=2)]
    assert chosen(both, "least-loaded") == "a"


def test_least_loaded_counts_requests_even_where_they_weigh_nothing() -> None:
    assert chosen([worker("a", requests=2), worker("b", requests=1)], "least-loaded") == "b"


def test_least_loaded_takes_equal_workers_in_turn() -> None:
    assert chosen([worker("a", last_chosen=2), worker("b", last_chosen=1)], "least-loaded") == "b"


def test_power_of_two_never_takes_the_most_loaded_and_mostly_the_least() -> None:
    three = [worker("a", queued_tokens=0), worker("b", queued_tokens=160), worker("c", queued_tokens=320)]
    seen = drawn(three, "power-of-two")
    assert set(seen) == {"a", "b"}
    assert seen["a"] > seen["b"]


def test_power_of_two_takes_one_alone_as_it_is() -> None:
    assert chosen([worker("a")], "power-of-two") == "a"


def test_round_robin_looks_at_nothing_but_the_turn() -> None:
    both = [worker("a", cached=9, last_chosen=9), worker("b", queued_tokens=10**6, last_chosen=3)]
    assert chosen(both, "round-robin") == "b"


def test_random_uses_all_alike() -> None:
    seen = drawn([worker("a", cached=9), worker("b", queued_tokens=10**6)], "random")
    assert min(seen["a"], seen["b"]) > 150


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_equal_input_gives_equal_output(policy: Policy, temperature: float) -> None:
    found = [worker(name, cached=n % 3, last_chosen=n) for n, name in enumerate("abcdef")]
    assert len({chosen(found, policy, temperature, seed=4) for _ in range(5)}) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_without_workers_the_error_says_what_to_start(policy: Policy) -> None:
    with pytest.raises(NoWorkerError, match="kvmesh up"):
        chosen([], policy)
