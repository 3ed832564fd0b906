"""Frontends hold a key to its limits together, whatever becomes of one of them."""

import asyncio
import random
from collections import deque
from typing import Any, cast

import pytest

from kvmesh.frontend.keys.budget import KeyLimits
from kvmesh.frontend.keys.meter import KeyVisit, RateLimitedError
from kvmesh.frontend.keys.meters import Meters
from kvmesh.frontend.keys.sharing import LimitSharing
from kvmesh.frontend.keys.window import SLOT_S, WINDOW_S
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.protocol.errors import MeshError, UnreachableError
from kvmesh.protocol.messages import BudgetAsk, BudgetGrant, decode, encode

STEP_S = 0.05


class Site:
    """One frontend of a test: its meters, and whether it can be reached."""

    def __init__(self, name: str, world: "World") -> None:
        self.sharing = LimitSharing(name, lambda: world.now)
        self.meters = Meters(lambda: world.now, self.sharing)
        self.is_cut_off = False
        self.admitted = 0

    async def request(self, world: "World", tokens: int = 0) -> KeyVisit | None:
        _, meter = self.meters.of("key", world.limits)
        assert meter is not None
        try:
            visit = await meter.begin()
        except RateLimitedError:
            return None
        try:
            await visit.reserve(tokens, 0)
        except RateLimitedError:
            visit.end(0)
            return None
        self.admitted += 1
        world.uses.append((world.now, tokens))
        return visit


class World:
    """Frontends that reach each other by calls in this process, under a clock that is set."""

    def __init__(self, count: int, limits: KeyLimits) -> None:
        self.now = 1000.0
        self.limits = limits
        self.uses: deque[tuple[float, int]] = deque()
        self.sites: dict[str, Site] = {}
        self.asks = 0
        for n in range(count):
            self.add(f"f{n}")
        self.now += 20.0

    def add(self, name: str) -> Site:
        site = self.sites[name] = Site(name, self)
        site.sharing._plane = cast(PlaneClient, _Plane(self, name))
        for known in self.sites:
            self.sites[known].sharing.owners.put(self.now, name, name)
            site.sharing.owners.put(self.now, known, known)
        for other in self.sites.values():
            other.sharing.hand_over()
        return site

    def lose(self, name: str) -> None:
        """End a frontend; the others hear of it."""
        del self.sites[name]
        for site in self.sites.values():
            site.sharing.owners.remove(self.now, name)

    @property
    def owner(self) -> str:
        return next(iter(self.sites.values())).sharing.owners.owner("key")

    async def step(self, requests: int, rng: random.Random, tokens: int = 0) -> None:
        """Let each frontend get requests, which end at once."""
        for site in rng.sample(list(self.sites.values()), len(self.sites)):
            for _ in range(requests):
                if (visit := await site.request(self, tokens)) is not None:
                    visit.end(tokens)
        self.now += STEP_S
        for site in self.sites.values():
            site.sharing.look()
        await asyncio.sleep(0)

    async def run(self, seconds: float, requests: int, rng: random.Random, tokens: int = 0) -> int:
        """Return how many requests were let in."""
        before = len(self.uses)
        for _ in range(round(seconds / STEP_S)):
            await self.step(requests, rng, tokens)
        return len(self.uses) - before

    def most_in_a_minute(self) -> int:
        times, most, first = [time for time, _ in self.uses], 0, 0
        for n, time in enumerate(times):
            while times[first] <= time - WINDOW_S:
                first += 1
            most = max(most, n - first + 1)
        return most


class _Plane:
    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._name = name

    async def ask(self, address: str, method: str, body: BudgetAsk, reply: Any, timeout_s: float) -> BudgetGrant:
        world = self._world
        world.asks += 1
        await asyncio.sleep(0)
        other = world.sites.get(address)
        if other is None or other.is_cut_off or world.sites[self._name].is_cut_off:
            raise UnreachableError("away")
        grant = other.sharing.owned.answer(world.now, decode(encode(body), BudgetAsk))
        return decode(encode(grant), BudgetGrant)


@pytest.mark.parametrize("count", [1, 2, 4, 7])
async def test_under_overload_the_sum_is_the_limit(count: int) -> None:
    world = World(count, KeyLimits(requests=600))
    admitted = await world.run(3 * (WINDOW_S + SLOT_S), 1, random.Random(count))
    assert 0.95 * 1800 <= admitted <= 1800
    assert world.most_in_a_minute() <= 600


async def test_the_busiest_frontend_may_use_the_whole_limit() -> None:
    world = World(4, KeyLimits(requests=100))
    busy = next(site for name, site in world.sites.items() if name != world.owner)
    for _ in range(200):
        await busy.request(world)
    assert busy.admitted == 100


async def test_what_one_frontend_does_not_use_another_gets() -> None:
    world, rng = World(4, KeyLimits(requests=100)), random.Random(1)
    await world.run(1.0, 1, rng)  # 20 at each
    await world.run(2.5, 0, rng)  # idle: leases return
    [first, *_] = world.sites.values()
    for _ in range(100):
        await first.request(world)
    assert len(world.uses) == 100


@pytest.mark.parametrize("seed", range(5))
async def test_tokens_that_are_settled_add_up_to_the_limit(seed: int) -> None:
    world, rng = World(4, KeyLimits(tokens=20_000)), random.Random(seed)
    running: list[tuple[float, KeyVisit, int, int]] = []
    used: list[tuple[float, int]] = []
    while world.now < 1000.0 + 3 * WINDOW_S:
        for site in world.sites.values():
            _, meter = site.meters.of("key", world.limits)
            assert meter is not None
            try:
                visit = await meter.begin()
            except RateLimitedError:
                continue
            prompt, most = rng.randrange(50, 300), rng.randrange(20, 400)
            try:
                await visit.reserve(prompt, most)
                running.append((world.now + rng.uniform(0.1, 8), visit, prompt, rng.randrange(1, most)))
                used.append((world.now, prompt + running[-1][3]))
            except RateLimitedError:
                visit.end(0)
        world.now += 0.1
        for entry in [entry for entry in running if entry[0] <= world.now]:
            entry[1].end(entry[2] + entry[3])
            running.remove(entry)
        for site in world.sites.values():
            site.sharing.look()
        await asyncio.sleep(0)
    for start in (1000.0, 1060.0, 1100.0):
        total = sum(amount for time, amount in used if start <= time < start + WINDOW_S)
        assert 0.9 * 20_000 <= total <= 20_000


async def test_streams_are_shared() -> None:
    world = World(4, KeyLimits(streams=10))
    rng, visits = random.Random(2), list[KeyVisit]()
    for _ in range(int(10 / STEP_S)):
        for site in world.sites.values():
            if (visit := await site.request(world)) is not None:
                visits.append(visit)
        assert len(visits) <= 10
        await world.step(0, rng)
    assert len(visits) == 10
    for visit in visits[:4]:
        visit.end(0)
    await world.run(2.5, 0, rng)
    again = [await site.request(world) for site in world.sites.values() for _ in range(3)]
    assert sum(visit is not None for visit in again) == 4


async def test_the_frontends_go_on_when_the_owner_dies() -> None:
    """The dead owner cannot say what it granted, and yet no minute holds much more than the limit."""
    world, rng = World(4, KeyLimits(requests=600)), random.Random(3)
    await world.run(90.0, 1, rng)
    owner = world.owner
    world.sites[owner].is_cut_off = True  # its card still stands
    during = await world.run(3.0, 1, rng)
    assert during <= 0.75 * 600
    world.lose(owner)
    admitted = await world.run(2 * WINDOW_S, 1, rng)
    assert 0.95 * 1200 <= admitted <= 1.05 * 1200
    assert world.most_in_a_minute() <= 1.05 * 600


async def test_a_key_that_only_the_dead_owner_knew_comes_back_at_its_rate() -> None:
    world = World(4, KeyLimits(requests=600))
    owner = world.owner
    for _ in range(600):
        await world.sites[owner].request(world)
    world.lose(owner)
    assert await world.run(6.0, 5, random.Random(7)) <= 1.1 * 60


async def test_a_key_that_is_little_used_is_not_refused_when_the_owner_dies() -> None:
    world, rng = World(4, KeyLimits(requests=600)), random.Random(8)
    await world.run(0.5, 1, rng)
    world.lose(world.owner)
    assert await world.run(0.5, 1, rng) == 3 * 10


async def test_a_frontend_that_joins_gets_no_second_budget() -> None:
    for n in range(8):  # with some of them it owns the key
        world, rng = World(2, KeyLimits(requests=600)), random.Random(n)
        await world.run(20.0, 2, rng)
        world.add(f"new-{n}")
        await world.run(100.0, 2, rng)
        assert world.most_in_a_minute() <= 1.05 * 600


async def test_whoever_cannot_reach_the_owner_has_a_fair_part() -> None:
    world, rng = World(4, KeyLimits(requests=600)), random.Random(4)
    lonely = next(site for name, site in world.sites.items() if name != world.owner)
    lonely.is_cut_off = True
    await world.run(90.0, 3, rng)
    assert 1 <= lonely.admitted <= 2 * 150
    assert world.most_in_a_minute() <= 600 + 150


async def test_a_frontend_that_discovery_does_not_show_owns_nothing() -> None:
    world = World(4, KeyLimits(requests=600))
    owner = world.sites[world.owner]
    owner.sharing.owners.remove(world.now, owner.sharing.owners.own)
    for _ in range(400):
        await owner.request(world)
    assert owner.admitted == 150


async def test_few_asks_are_needed() -> None:
    world, rng = World(4, KeyLimits(requests=100_000)), random.Random(6)
    await world.run(20.0, 5, rng)
    assert len(world.uses) == 4 * 5 * 20 / STEP_S
    assert world.asks <= 3 * 20 * 6, "a handful a second and frontend"


async def test_a_message_for_another_frontend_is_refused() -> None:
    world = World(2, KeyLimits(requests=1))
    ask = BudgetAsk(key="key", asker="f0", owner="gone", need_requests=1)
    with pytest.raises(MeshError, match="gone is not here"):
        world.sites["f0"].sharing.owned.answer(0.0, ask)
