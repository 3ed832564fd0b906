"""The cost of host memory is compared on one engine, in turn with its tier and without."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

pytest.importorskip("torch")

from kvmesh.lab.bench.kv_cost import compare, itl_cost, one_shot_cost
from kvmesh.lab.bench.kv_engines import BenchedEngine, FreshPrompts, KvBenchConfig, running
from kvmesh.workers.tiers import MIB, TierSettings


class Switched:
    """A side whose requests take 1.2 s with the tier, and 1.0 s without."""

    def __init__(self) -> None:
        self.has_tiers = True
        self.asked: list[bool] = []

    @contextmanager
    def without_tiers(self) -> Iterator[None]:
        self.has_tiers = False
        yield
        self.has_tiers = True

    async def rest(self) -> None:
        assert self.has_tiers

    async def ask(self) -> float:
        self.asked.append(self.has_tiers)
        return 1.2 if self.has_tiers else 1.0


def test_a_round_asks_once_with_the_tier_and_twice_without() -> None:
    side = Switched()
    cost = asyncio.run(compare(side, side.ask, 6))
    assert (round(cost.ratio, 6), cost.control, round(cost.spread, 6)) == (1.2, 1.0, 0.0)
    rounds = [side.asked[first : first + 3] for first in range(0, 21, 3)]
    assert all(sum(turns) == 1 for turns in rounds)
    assert {turns.index(True) for turns in rounds} == {0, 1, 2}


def test_an_engine_without_its_tiers_copies_nothing_and_has_them_again() -> None:
    asyncio.run(_compare_an_engine())


async def _compare_an_engine() -> None:
    config = KvBenchConfig(isl_tokens=64, rounds=1)
    prompts = FreshPrompts()
    async with running(config, TierSettings(64 * MIB)) as engine:
        side = BenchedEngine(engine)
        with side.without_tiers():
            for _ in range(8):
                await side.ask(prompts.fresh(64))
        assert side.count("saved") == side.count("misses") == 0
        for _ in range(8):
            await side.ask(prompts.fresh(64))
        await side.rest()
        assert side.count("saved") > 0
        assert side.count("misses") == 8
        for cost in (await one_shot_cost(side, prompts, 64, 3), await itl_cost(side, prompts, 64, 3)):
            assert min(cost.ratio, cost.control) > 0
        assert side.failed == 0
