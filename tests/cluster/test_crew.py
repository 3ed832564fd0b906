"""Workers of one host come, go and change their roles while the mesh runs."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kvmesh.cluster import crew
from kvmesh.cluster.crew import Member, WorkerStakes, cheapest_to_lose
from kvmesh.planner.connectors.local_api import MAX_WORKERS, Refusal
from kvmesh.protocol.errors import EngineError, InvalidRequestError
from kvmesh.protocol.messages import Role
from tests.support.fake_crew import FakeHost
from tests.support.patience import PATIENCE_S


@pytest_asyncio.fixture
async def host() -> AsyncIterator[FakeHost]:
    host = FakeHost()
    await host.start(prefill=2, decode=3)
    yield host
    await host.close()


def states(host: FakeHost) -> dict[str, str]:
    return {report.name: report.state for report in host.crew.reports()}


# --- a worker that keeps ending ------------------------------------------------------------------------


def notices(host: FakeHost) -> list[str]:
    """Return the workers that a frontend reports as down."""
    return [notice.key for notice in host.seen_down.report()]


async def test_the_mesh_serves_without_a_worker_that_keeps_ending(host: FakeHost) -> None:
    assert await host.crash("decode-1")
    assert states(host)["decode-1"] == "down"
    assert notices(host) == ["decode-1"]
    assert [failure.name for failure in host.crew.failures] == ["decode-1"]
    assert host.told == ["decode-1 is down, the others go on; it is tried again in 30 s. It ended with: out of memory"]


async def test_a_worker_that_comes_back_is_no_longer_down(host: FakeHost) -> None:
    await host.crash("decode-1")
    host.supervisor.revive("decode-1")
    await host.all_ready()
    assert states(host)["decode-1"] == "ready"
    assert notices(host) == []
    assert host.told[-1] == "decode-1 is back"


async def test_a_worker_that_is_down_is_replaced_when_the_planner_asks(host: FakeHost) -> None:
    await host.crash("decode-1")
    assert (await host.crew.scale({Role.DECODE: 3})).started == ("decode-3",)


async def test_a_worker_that_fails_before_the_mesh_is_complete_ends_it(host: FakeHost) -> None:
    host.crew.is_complete = False
    assert not await host.crash("decode-1")


async def test_a_worker_is_kept_until_it_is_down_or_taken_away(host: FakeHost) -> None:
    names = ["decode-0", "decode-1", "decode-2", "prefill-0", "prefill-1"]
    assert await host.kept() == names
    await host.crash("decode-1")
    assert await host.kept() == [name for name in names if name != "decode-1"]
    host.supervisor.revive("decode-1")
    await host.all_ready()
    assert await host.kept() == names
    host.supervisor.may_end.clear()
    (drained,) = (await host.crew.scale({Role.DECODE: 2})).draining
    assert await host.kept() == [name for name in names if name != drained], "before its process ends"
    host.supervisor.may_end.set()


# --- more and fewer -----------------------------------------------------------------------------------


async def test_a_worker_starts_until_its_card_is_there(host: FakeHost) -> None:
    scaled = await host.crew.scale({Role.DECODE: 4})
    assert (scaled.started, scaled.counts[Role.DECODE]) == (("decode-3",), 4)
    assert states(host)["decode-3"] == "starting"
    await host.all_ready()
    assert states(host)["decode-3"] == "ready"


async def test_the_same_count_again_changes_nothing(host: FakeHost) -> None:
    for _ in range(3):
        scaled = await host.crew.scale({Role.PREFILL: 2, Role.DECODE: 5})
    assert scaled.started == scaled.draining == ()
    assert len(host.roles()) == 7


async def test_the_least_loaded_worker_leaves_the_youngest_of_equals(host: FakeHost) -> None:
    host.loads = {"decode-0": 1.0, "decode-1": 7.0, "decode-2": 1.0}
    assert (await host.crew.scale({Role.DECODE: 2})).draining == ("decode-2",)
    assert (await host.crew.scale({Role.DECODE: 1})).draining == ("decode-0",)


def test_a_worker_with_unknown_load_leaves_last() -> None:
    loads = [(Member("decode-0", Role.DECODE), None), (Member("decode-1", Role.DECODE), WorkerStakes(90.0))]
    assert [member.name for member in cheapest_to_lose(loads, 1)] == ["decode-1"]
    assert cheapest_to_lose(loads, -1) == []


async def test_of_equally_loaded_workers_the_smallest_cache_leaves(host: FakeHost) -> None:
    host.loads = {"decode-1": 1.0}
    host.cached = {"decode-0": 40.0, "decode-1": 0.0, "decode-2": 300.0}
    assert (await host.crew.scale({Role.DECODE: 2})).draining == ("decode-0",)
    assert (await host.crew.scale({Role.DECODE: 1})).draining == ("decode-2",)


async def test_a_draining_worker_does_not_count_and_finishes(host: FakeHost) -> None:
    host.supervisor.may_end.clear()
    scaled = await host.crew.scale({Role.DECODE: 2})
    assert scaled.counts[Role.DECODE] == 2
    assert states(host)["decode-2"] == "draining"
    await asyncio.sleep(0)
    assert host.supervisor.stopped == ["decode-2"]
    host.supervisor.may_end.set()
    await host.until_ended("decode-2")


async def test_a_name_is_free_after_its_worker_ended(host: FakeHost) -> None:
    host.supervisor.may_end.clear()
    await host.crew.scale({Role.DECODE: 2})
    assert (await host.crew.scale({Role.DECODE: 3})).started == ("decode-3",)
    host.supervisor.may_end.set()
    await host.until_ended("decode-2")
    assert (await host.crew.scale({Role.DECODE: 4})).started == ("decode-2",)


async def test_a_starting_worker_is_not_drained(host: FakeHost) -> None:
    await host.crew.scale({Role.DECODE: 5})
    scaled = await host.crew.scale({Role.DECODE: 1})
    assert set(scaled.draining) == {"decode-2", "decode-1"}, "one of those that are ready stays, as asked"
    assert scaled.counts[Role.DECODE] == 3
    await host.all_ready()
    assert (await host.crew.scale({Role.DECODE: 1})).counts[Role.DECODE] == 1


async def test_roles_that_are_not_named_stay_as_they_are(host: FakeHost) -> None:
    await host.crew.scale({Role.DECODE: 1})
    assert list(host.roles().values()).count(Role.PREFILL) == 2


@pytest.mark.parametrize("count", [-1, MAX_WORKERS + 1])
async def test_a_count_that_cannot_be_is_refused(host: FakeHost, count: int) -> None:
    with pytest.raises(InvalidRequestError, match="this host takes"):
        await host.crew.scale({Role.DECODE: count})


async def test_two_changes_at_once_are_made_one_after_the_other(host: FakeHost) -> None:
    await asyncio.gather(*(host.crew.scale({Role.DECODE: 6}) for _ in range(4)))
    assert list(host.roles().values()).count(Role.DECODE) == 6


async def test_an_added_worker_that_cannot_run_is_only_reported(host: FakeHost) -> None:
    await host.crew.scale({Role.DECODE: 4})
    host.supervisor.lose("decode-3", EngineError("decode-3 does not run: no memory"))
    assert "decode-3" not in states(host)
    assert host.crew.failures == [Refusal("decode-3", "decode-3 does not run: no memory")]


async def test_a_worker_that_dies_is_starting_until_it_is_back(host: FakeHost) -> None:
    host.supervisor.start(host.supervisor.specs["decode-1"])  # as the supervisor does: another process
    assert states(host)["decode-1"] == "starting"


# --- other roles --------------------------------------------------------------------------------------


async def test_a_flipped_worker_keeps_its_name_and_has_another_role(host: FakeHost) -> None:
    flipped = await host.crew.flip(Role.DECODE, 1)
    await host.heard()
    assert flipped.flipped == ("prefill-1",)
    assert host.roles()["prefill-1"] is Role.DECODE
    assert states(host)["prefill-1"] == "ready"


async def test_a_restarted_worker_keeps_its_flipped_role(host: FakeHost) -> None:
    await host.crew.flip(Role.DECODE, 1)
    assert host.supervisor.specs["prefill-1"].argv == ["decode"]


async def test_a_flipping_worker_counts_for_its_new_role(host: FakeHost) -> None:
    host.flips_s = asyncio.Event()
    flipping = asyncio.create_task(host.crew.flip(Role.DECODE, 1))
    async with asyncio.timeout(PATIENCE_S):
        while states(host)["prefill-1"] != "flipping":
            await asyncio.sleep(0.001)
    assert host.roles()["prefill-1"] is Role.DECODE
    host.flips_s.set()
    await flipping
    await host.heard()
    assert states(host)["prefill-1"] == "ready"


async def test_a_worker_that_refuses_keeps_its_role(host: FakeHost) -> None:
    host.refuses = {"prefill-1"}
    flipped = await host.crew.flip(Role.DECODE, 1)
    assert flipped.flipped == ()
    [refusal] = flipped.refused
    assert refusal.name == "prefill-1"
    assert "cannot change its role" in refusal.why
    assert host.roles()["prefill-1"] is Role.PREFILL
    assert host.supervisor.specs["prefill-1"].argv == ["prefill"]
    assert states(host)["prefill-1"] == "ready"


async def test_a_flip_of_too_many_flips_all_ready_workers(host: FakeHost) -> None:
    flipped = await host.crew.flip(Role.DECODE, 3)
    assert len(flipped.flipped) == 2
    assert "only 2 of 3" in flipped.refused[0].why


@pytest.mark.parametrize(("role", "count"), [(Role.AGGREGATED, 1), (Role.DECODE, -1)])
async def test_a_flip_that_cannot_be_is_refused(host: FakeHost, role: Role, count: int) -> None:
    with pytest.raises(InvalidRequestError):
        await host.crew.flip(role, count)


async def test_a_flip_that_somebody_else_asked_for_is_noticed(host: FakeHost) -> None:
    await host._cards.pop("prefill-0").withdraw()
    await host._join("prefill-0", Role.DECODE)
    await host.heard()
    assert host.roles()["prefill-0"] is Role.DECODE
    assert host.supervisor.specs["prefill-0"].argv == ["decode"]


# --- cards --------------------------------------------------------------------------------------------


async def test_foreign_and_unreadable_cards_change_nothing(host: FakeHost) -> None:
    before = host.crew.reports()
    await host.discovery.put("workers/x", b"\xc1")
    await host._join("stranger-0", Role.DECODE)
    await host.heard()
    assert host.crew.reports() == before


async def test_a_worker_that_runs_stays_ready_when_its_lease_ends(host: FakeHost) -> None:
    """Its card is gone because discovery was away or emptied, not because it has left."""
    for key in (host._cards["decode-0"].key, host._cards["decode-1"].key):
        if key.startswith("workers/decode-1"):
            host.supervisor.end("decode-1")
        host.discovery.remove(key, has_lapsed=True)
    await host.heard()
    assert (states(host)["decode-0"], states(host)["decode-1"]) == ("ready", "starting")


async def test_requests_do_not_wait_long_for_a_worker_that_gives_no_sign_of_life(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew, "SILENT_S", 0.0)
    names = await host.kept()
    host.discovery.remove(host._cards["decode-0"].key, has_lapsed=True)
    await host.heard()
    async with asyncio.timeout(PATIENCE_S):
        while "decode-0" in (kept := await host.kept()):
            await asyncio.sleep(0)
    assert kept == [name for name in names if name != "decode-0"]
    assert states(host)["decode-0"] == "ready", "it is not ended"
    await host._join("decode-0", Role.DECODE)
    await host.heard()
    assert await host.kept() == names
