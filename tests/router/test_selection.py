"""A placement has a cost on each candidate, made of five terms."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvmesh.router.selection import Candidate, LegKind, Terms, Weights
from tests.support.candidates import EQUAL, candidates, prompt, worker

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


def test_the_decode_leg_costs_held_and_pulled_blocks() -> None:
    cost = prompt("decode").cost
    assert cost(worker("a", queued_tokens=10**6, new_blocks=10)) == pytest.approx(11)
    assert cost(worker("a", cached=10, held_blocks=2, new_blocks=10)) == pytest.approx(12)


def test_a_fully_cached_prompt_has_no_negative_cost() -> None:
    assert prompt(isl=8).cost(worker("a", cached=5)) == 0


def test_a_partly_filled_block_counts_in_part() -> None:
    assert prompt(isl=8).cost(worker("a")) == 0.5


def test_the_price_applies_to_missing_blocks_alone() -> None:
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
def test_blocks_in_slower_tiers_save_less_work(overlap: tuple, saved: float) -> None:
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
def test_the_load_of_a_leg_counts_only_its_terms(leg: LegKind, load: float) -> None:
    assert prompt(leg).load(worker("a", queued_tokens=32, held_blocks=5, requests=2)) == load


LEGS: list[LegKind] = ["whole", "prefill", "decode"]


@given(candidates, st.sampled_from(LEGS), st.floats(0.1, 20.0), st.integers(0, 200))
def test_terms_are_never_negative_and_add_up_to_the_cost(c: Candidate, leg: LegKind, price: float, isl: int) -> None:
    one = prompt(leg, isl, Weights(request=0.3), price)
    assert min(one.terms(c)) >= 0
    assert sum(one.terms(c)) == pytest.approx(one.cost(c) * c.capacity)
