"""The policies choose among candidates, and settings, help and docs follow the one table of policies."""

import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvmesh.mesh.config import load
from kvmesh.protocol.errors import ConfigError, NoWorkerError
from kvmesh.router.config import RouterConfig, rules_of
from kvmesh.router.policies import POLICIES, Policy, choose, policies_help
from kvmesh.router.selection import Candidate, Weights
from tests.support.candidates import BLOCK, EQUAL, candidates, prompt, worker


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


def test_a_higher_price_makes_longer_queues_worth_a_prefix() -> None:
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


def test_temperature_is_independent_of_the_scale_of_costs() -> None:
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


def test_least_loaded_ignores_prompts_in_flight() -> None:
    both = [worker("a", new_blocks=10, last_chosen=1), worker("b", new_blocks=0, last_chosen=2)]
    assert chosen(both, "least-loaded") == "a"


def test_least_loaded_counts_requests_even_where_they_weigh_nothing() -> None:
    assert chosen([worker("a", requests=2), worker("b", requests=1)], "least-loaded") == "b"


def test_least_loaded_takes_equal_workers_in_turn() -> None:
    assert chosen([worker("a", last_chosen=2), worker("b", last_chosen=1)], "least-loaded") == "b"


def test_power_of_two_never_takes_the_most_loaded() -> None:
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


# --- one table -----------------------------------------------------------------------------------------------------


def test_the_setting_takes_every_policy_and_no_other() -> None:
    for policy in POLICIES:
        assert rules_of(load(RouterConfig, ["--policy", policy], {}, prefix="X_", prog="router")).policy == policy
    with pytest.raises(ConfigError, match="policy"):
        load(RouterConfig, ["--policy", "best"], {}, prefix="X_", prog="router")


def test_help_and_the_page_on_routing_name_every_policy() -> None:
    page = (Path(__file__).parents[2] / "docs/routing.md").read_text()
    table = page[page.index("## Policies") : page.index("## Aggregate or disaggregate")]
    for name, policy in POLICIES.items():
        assert f"{name}: by {policy.looks_at}" in policies_help()
        [row] = [line for line in table.splitlines() if line.startswith("|") and f"`{name}`" in line]
        assert row.endswith(f"| {'yes' if policy.waits_for_room else 'no'} |")
