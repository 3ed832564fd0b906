"""Places: a limited number, in order of arrival, and no key gets all of them."""

import asyncio

import pytest

from kvmesh.mesh.jobs.places import Places


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_no_more_than_the_total_are_inside() -> None:
    places, order = Places(2, 2), list[int]()

    async def visit(number: int, leave: asyncio.Event) -> None:
        async with places.hold("a"):
            order.append(number)
            await leave.wait()

    leaves = [asyncio.Event() for _ in range(4)]
    visits = [asyncio.create_task(visit(n, leave)) for n, leave in enumerate(leaves)]
    await turn()
    assert order == [0, 1]
    leaves[1].set()
    await turn()
    assert order == [0, 1, 2]
    for leave in leaves:
        leave.set()
    await asyncio.gather(*visits)
    assert order == [0, 1, 2, 3]


async def test_a_key_with_its_share_lets_others_pass() -> None:
    places = Places(3, 2)
    for _ in range(2):
        await places.enter("mallory")
    waiting = asyncio.create_task(places.enter("mallory"))
    await asyncio.wait_for(places.enter("alice"), 1)
    assert not waiting.done()
    places.leave("alice")
    await turn()
    assert not waiting.done()
    places.leave("mallory")
    await asyncio.wait_for(waiting, 1)


@pytest.mark.parametrize("turns", [0, 1])
async def test_a_cancelled_caller_holds_no_place(turns: int) -> None:
    places = Places(1, 1)
    await places.enter("a")
    waiting = asyncio.create_task(places.enter("a"))
    await turn()
    if turns:
        places.leave("a")  # served and cancelled in one turn of the loop
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    if not turns:
        places.leave("a")
    await asyncio.wait_for(places.enter("b"), 1)
    assert places.num_waiting == 0
