"""Where a request runs, and why."""

import random
from collections import Counter

import pytest

from protocol.errors import NoWorkerError
from protocol.ids import WorkerId
from router.index import Holder
from router.selection import Candidate, Policy, Weights, decode_cost, place, prefill_cost, whole_cost

BLOCK = 16


def worker(name: str, dp_rank: int = 0, **fields: int) -> Candidate:
    return Candidate(Holder(WorkerId(name), dp_rank), **fields)


def chosen(
    candidates: list[Candidate],
    isl: int = 160,
    weights: Weights | None = None,
    policy: Policy = "kv",
    temperature: float = 0.0,
    seed: int = 0,
) -> str:
    cost = whole_cost(isl, BLOCK, weights or Weights())
    return place(candidates, cost, policy, temperature, random.Random(seed)).holder.worker_id


def test_a_cached_prefix_wins_between_equally_busy_workers() -> None:
    assert chosen([worker("a"), worker("b", overlap_blocks=4)]) == "b"


def test_a_long_queue_outweighs_a_cached_prefix() -> None:
    assert chosen([worker("a"), worker("b", overlap_blocks=4, active_prefill_tokens=5 * BLOCK)]) == "a"


def test_running_streams_outweigh_a_cached_prefix() -> None:
    assert chosen([worker("a"), worker("b", overlap_blocks=4, active_decode_blocks=5)]) == "a"


def test_blocks_that_running_requests_hold_already_cost_nothing_new() -> None:
    candidates = [worker("a", new_blocks=10), worker("b", active_decode_blocks=9)]
    assert chosen(candidates) == "b"
    assert chosen([candidates[0], worker("b", active_decode_blocks=9, new_blocks=10)]) == "a"


def test_the_example_of_the_documentation() -> None:
    idle = worker("a", new_blocks=10)
    busy = worker("b", overlap_blocks=8, active_decode_blocks=5, new_blocks=10)
    cost = whole_cost(160, BLOCK, Weights())
    assert (cost(idle), cost(busy)) == (20, 17)
    assert cost(worker("b", overlap_blocks=8, active_decode_blocks=10, new_blocks=10)) == 22


def test_weights_move_the_choice_between_reuse_and_even_load() -> None:
    candidates = [worker("a"), worker("b", overlap_blocks=4, active_decode_blocks=6)]
    assert chosen(candidates, weights=Weights(prefill=2.0)) == "b"
    assert chosen(candidates, weights=Weights(decode=2.0)) == "a"


def test_requests_may_cost_by_themselves() -> None:
    candidates = [worker("a", active_requests=3), worker("b", active_decode_blocks=2)]
    assert chosen(candidates) == "a"
    assert chosen(candidates, weights=Weights(request=1.0)) == "b"


def test_a_prompt_that_is_cached_whole_costs_no_less_than_nothing() -> None:
    cost = whole_cost(8, BLOCK, Weights())
    assert cost(worker("a", overlap_blocks=5)) == 0


def test_prefill_looks_at_prompts_only() -> None:
    cost = prefill_cost(160, BLOCK, Weights())
    assert cost(worker("a", active_decode_blocks=100, new_blocks=10)) == 10
    assert cost(worker("a", overlap_blocks=4, active_prefill_tokens=32)) == 8


def test_decode_looks_at_held_blocks_and_at_what_has_to_be_pulled() -> None:
    cost = decode_cost(10, Weights())
    assert cost(worker("a", active_prefill_tokens=10**6, new_blocks=10)) == pytest.approx(11)
    assert cost(worker("a", overlap_blocks=10, active_decode_blocks=2, new_blocks=10)) == pytest.approx(12)


def test_equal_workers_are_used_in_turn() -> None:
    assert chosen([worker("a", last_chosen=2), worker("b", last_chosen=1)]) == "b"
    assert chosen([worker("b"), worker("a")]) == "a"
    assert chosen([worker("a", dp_rank=1), worker("a", dp_rank=0)]) == "a"


def test_equal_input_gives_equal_output_in_whatever_order_it_comes() -> None:
    candidates = [worker(name, overlap_blocks=n % 3) for n, name in enumerate("abcdef")]
    for _ in range(20):
        random.shuffle(candidates)
        assert chosen(candidates) == "c"
        assert chosen(candidates, policy="random", seed=4) == chosen(sorted(candidates, key=lambda c: c.holder),
                                                                     policy="random", seed=4)  # fmt: skip


def test_round_robin_does_not_look_at_the_cost() -> None:
    assert (
        chosen([worker("a", last_chosen=9, overlap_blocks=9), worker("b", last_chosen=3)], policy="round-robin") == "b"
    )


def test_random_uses_all() -> None:
    seen = Counter(chosen([worker("a", overlap_blocks=9), worker("b")], policy="random", seed=n) for n in range(200))
    assert set(seen) == {"a", "b"}
    assert min(seen.values()) > 50


def test_a_temperature_spreads_but_prefers_the_cheap() -> None:
    candidates = [worker("a", overlap_blocks=9), worker("b", overlap_blocks=5), worker("c")]
    seen = Counter(chosen(candidates, temperature=0.5, seed=n) for n in range(500))
    assert seen["a"] > seen["b"] > seen["c"] > 0


@pytest.mark.parametrize("temperature", [1e-300, 1e300])
def test_extreme_temperatures_are_no_error(temperature: float) -> None:
    assert chosen([worker("a", overlap_blocks=9), worker("b")], temperature=temperature) in ("a", "b")


def test_without_workers_the_error_says_what_to_start() -> None:
    with pytest.raises(NoWorkerError, match="kvmesh up"):
        chosen([])
