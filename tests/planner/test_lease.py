"""The lease: one planner acts at a time."""

import asyncio
from collections.abc import AsyncIterator
from itertools import count

import pytest_asyncio

from kvmesh.mesh.discovery.memory import MemoryDiscovery
from kvmesh.planner.lease import PREFIX, SETTLE_S, Lease, card_of


class Planners:
    """Leases on one discovery, whose clocks tick once for each."""

    def __init__(self) -> None:
        self.discovery = MemoryDiscovery()
        self.clock = count(10**18)
        self.holding: dict[Lease, asyncio.Task[None]] = {}

    async def come(self, name: str) -> Lease:
        lease = Lease(self.discovery, card_of(name, "", "", "local"), lambda: next(self.clock))
        self.holding[lease] = asyncio.create_task(lease.hold())
        await turns()
        return lease

    async def go(self, lease: Lease) -> None:
        task = self.holding.pop(lease)
        task.cancel()
        await asyncio.wait({task})
        await turns()


async def turns() -> None:
    """Let others run."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest_asyncio.fixture
async def planners() -> AsyncIterator[Planners]:
    planners = Planners()
    yield planners
    for lease in list(planners.holding):
        await planners.go(lease)
    await planners.discovery.close()


def later(settled: bool = True) -> float:
    return asyncio.get_running_loop().time() + (SETTLE_S if settled else 0.0)


async def test_the_only_planner_acts_after_the_settling_time(planners: Planners) -> None:
    lease = await planners.come("a")
    assert not lease.is_ours(later(settled=False))
    assert lease.is_ours(later())
    assert lease.holder() == ""


async def test_a_later_planner_waits_and_knows_the_holder(planners: Planners) -> None:
    first, second = await planners.come("a"), await planners.come("b")
    assert [one.is_ours(later()) for one in (first, second)] == [True, False]
    assert second.holder().startswith("a (pid ")


async def test_the_next_planner_acts_when_the_first_leaves(planners: Planners) -> None:
    first, second, third = [await planners.come(name) for name in "abc"]
    await planners.go(first)
    assert [one.is_ours(later()) for one in (second, third)] == [True, False]


async def test_two_planners_never_act_at_once(planners: Planners) -> None:
    there = [await planners.come(str(n)) for n in range(4)]
    while there:
        assert sum(one.is_ours(later()) for one in there) == 1
        await planners.go(there.pop(0))


async def test_a_planner_acts_only_after_its_card_is_visible(planners: Planners) -> None:
    lease = Lease(planners.discovery, card_of("a", "", "", "local"))
    assert not lease.is_ours(later())


async def test_an_unreadable_card_still_counts(planners: Planners) -> None:
    await planners.discovery.put(f"{PREFIX}0", b"\xc1")
    lease = await planners.come("a")
    assert not lease.is_ours(later())
    assert lease.holder() == "another planner"
