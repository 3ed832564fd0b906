"""Many deadlines on one timer: each entry is told of its own once, in time, and not after it has left."""

import asyncio

from kvmesh.mesh.deadlines import GRAIN_S, Deadlines
from tests.support.patience import PATIENCE_S


class Entry:
    def __init__(self) -> None:
        self.expired_at: list[float] = []
        self._told = asyncio.Event()

    def expire(self) -> None:
        self.expired_at.append(now())
        self._told.set()

    async def until_told(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self._told.wait()


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_an_entry_is_told_once_and_never_before_its_deadline() -> None:
    deadlines, entry, deadline = Deadlines(), Entry(), now() + 0.03
    deadlines.add(deadline, entry)
    deadlines.add(deadline + 2 * GRAIN_S, later := Entry())
    await later.until_told()
    assert len(entry.expired_at) == 1
    assert entry.expired_at[0] >= deadline
    assert len(deadlines) == 0


async def test_an_earlier_deadline_that_is_added_later_comes_first() -> None:
    deadlines, late, early = Deadlines(), Entry(), Entry()
    deadlines.add(now() + 3600, late)
    deadlines.add(now() + 0.01, early)
    await early.until_told()
    assert not late.expired_at
    assert len(deadlines) == 1


async def test_later_deadlines_come_after_the_first() -> None:
    deadlines, entries = Deadlines(), [Entry() for _ in range(3)]
    for number, entry in enumerate(entries):
        deadlines.add(now() + 0.01 + number * 2 * GRAIN_S, entry)
    await entries[-1].until_told()
    times = [entry.expired_at[0] for entry in entries]
    assert times == sorted(times)


async def test_a_deadline_that_has_passed_already_is_told_of() -> None:
    deadlines, entry = Deadlines(), Entry()
    deadlines.add(now() - 1.0, entry)
    await entry.until_told()


async def test_who_has_left_is_not_told_and_is_not_kept() -> None:
    deadlines, gone, there = Deadlines(), Entry(), Entry()
    deadline = now() + 0.01
    slot = deadlines.add(deadline, gone)
    deadlines.add(deadline, there)
    deadlines.discard(slot, gone)
    deadlines.discard(slot, gone)
    await there.until_told()
    assert not gone.expired_at
    assert len(deadlines) == 0


async def test_entries_may_come_and_go_while_one_expires() -> None:
    deadlines, after = Deadlines(), Entry()

    class Restless(Entry):
        def expire(self) -> None:
            super().expire()
            deadlines.discard(slot, self)
            deadlines.add(now(), after)

    restless = Restless()
    slot = deadlines.add(now() + 0.01, restless)
    await after.until_told()
    assert len(restless.expired_at) == 1


async def test_all_can_be_told_at_once() -> None:
    deadlines, entries = Deadlines(), [Entry(), Entry()]
    for number, entry in enumerate(entries):
        deadlines.add(now() + 3600 * number + 60, entry)
    deadlines.expire_all()
    assert all(len(entry.expired_at) == 1 for entry in entries)
    assert len(deadlines) == 0
