"""A request waits for workers that failed it as long as the mesh knows that one comes back."""

import asyncio
import math
from collections.abc import Callable

import pytest

from kvmesh.frontend.presence import CUT_OFF_S, KEY_PREFIX, NEVER, NEWS_S, FailedWorker, MeshPresence
from kvmesh.mesh.discovery import Deleted, Put
from kvmesh.protocol.errors import DrainingError, EngineError, IdentityError, MeshError, PeerLostError, UnreachableError
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import KeptCard, Role, WorkerCard, encode
from tests.support.routing import card as worker_card

LOST = PeerLostError("the connection broke")
BUSY = UnreachableError("a step takes long")  # what a worker says itself
DRAINING = DrainingError("this worker is drained")
BROKEN = EngineError("boom")


def caused_by(cause: Exception) -> MeshError:
    error = UnreachableError("cannot connect")
    error.__cause__ = cause
    return error


REFUSED = caused_by(ConnectionRefusedError())
SILENT = caused_by(TimeoutError())


EXPIRED = IdentityError("the certificate of this frontend has expired")


class News:
    """Implements kvmesh.router.feeds.WorkerNews."""

    def listen(self, joined: Callable[[WorkerCard], object], left: Callable[[WorkerId], object]) -> None:
        self.join, self.leave = joined, left


class Site:
    def __init__(self) -> None:
        self.news = News()
        self.resting: dict[WorkerId, WorkerCard] = {}
        self.presence = MeshPresence(self.news, self.resting)

    def keep(self, *names: str, owner: str = "one") -> None:
        self.presence.on_notice(Put(KEY_PREFIX + owner, encode(KeptCard(workers=names))))

    def join(self, worker_id: str, name: str = "d") -> None:
        self.news.join(worker_card(worker_id, name=name))

    def waits_until(self, reason: MeshError, at_s: float = 100.0) -> float:
        return self.presence.waits_until(FailedWorker(WorkerId("d-1"), "d", reason, at_s))


@pytest.fixture
async def site() -> Site:
    return Site()


async def test_a_worker_that_nobody_starts_again_is_not_waited_for(site: Site) -> None:
    for reason in (LOST, REFUSED, SILENT, DRAINING, BROKEN):
        assert site.waits_until(reason) == NEVER


async def test_a_worker_that_its_owner_starts_again_is_waited_for(site: Site) -> None:
    site.keep("c", "d")
    for reason in (LOST, REFUSED, SILENT, DRAINING, BROKEN):
        assert site.waits_until(reason) == math.inf
    site.keep("c")  # it is down, or it is taken away
    assert site.waits_until(LOST) == NEVER


async def test_an_owner_that_ends_keeps_no_worker(site: Site) -> None:
    site.keep("d")
    site.presence.on_notice(Deleted(KEY_PREFIX + "one"))
    assert site.waits_until(LOST) == NEVER


async def test_a_worker_that_rests_is_not_waited_for(site: Site) -> None:
    site.keep("d")
    site.resting[WorkerId("d-1")] = worker_card("d-1", name="d")
    assert site.waits_until(DRAINING) == NEVER


@pytest.mark.parametrize(
    ("reason", "left_alone", "kept"),
    [
        (LOST, math.inf, math.inf),  # perhaps only the network was away
        (BUSY, math.inf, math.inf),
        (REFUSED, NEVER, math.inf),  # its process has ended
        (SILENT, 100 + CUT_OFF_S, 100 + CUT_OFF_S),
        (DRAINING, 100 + NEWS_S, 100 + NEWS_S),  # its card will say what it does
        (BROKEN, NEVER, 100 + NEWS_S),  # it may be about to end
    ],
)
async def test_a_worker_whose_card_stands_is_judged_by_its_failure(
    site: Site, reason: MeshError, left_alone: float, kept: float
) -> None:
    site.join("d-1")
    assert site.waits_until(reason) == left_alone
    site.keep("d")
    assert site.waits_until(reason) == kept


async def test_a_model_is_waited_for_while_its_worker_is_started_again(site: Site) -> None:
    site.keep("c", "d")
    model = worker_card("d-1").model
    assert site.presence.waits_for_model(model) == NEVER, "no worker of the model was ever here"
    site.join("d-1")
    site.news.leave(WorkerId("d-1"))
    assert site.presence.waits_for_model(model) == math.inf
    assert site.presence.waits_for_model("another") == NEVER
    site.join("d-2")
    assert site.presence.waits_for_model(model) <= asyncio.get_running_loop().time() + NEWS_S
    site.news.leave(WorkerId("d-2"))
    site.keep("c")  # it is down
    assert site.presence.waits_for_model(model) == NEVER
    site.keep("c", "d")
    assert site.presence.waits_for_model(model) == NEVER, "its model is forgotten"


async def test_a_model_is_not_waited_for_without_an_owner_of_its_worker(site: Site) -> None:
    site.join("d-1")
    site.news.leave(WorkerId("d-1"))
    assert site.presence.waits_for_model(worker_card("d-1").model) == NEVER


async def test_a_prefill_worker_that_is_started_again_answers_nothing(site: Site) -> None:
    site.keep("p")
    site.news.join(card := worker_card("p-1", Role.PREFILL, name="p"))
    site.news.leave(WorkerId("p-1"))
    assert site.presence.waits_for_model(card.model) == NEVER


async def test_a_worker_that_came_back_is_used_soon_or_not_at_all(site: Site) -> None:
    site.keep("d")
    site.join("d-2")
    now = asyncio.get_running_loop().time()
    assert now < site.waits_until(LOST) <= now + NEWS_S


async def test_failures_to_reach_a_worker_count_from_the_first() -> None:
    failed = FailedWorker(WorkerId("d-1"), "d", SILENT, 100.0)
    assert failed.failed_again(SILENT, 107.0).at_s == 100.0
    assert failed.failed_again(BUSY, 107.0).at_s == 107.0


async def test_news_wake_all_that_wait(site: Site) -> None:
    waiting = [asyncio.create_task(site.presence.news(60.0)) for _ in range(3)]
    await asyncio.sleep(0)
    site.join("d-2")
    await asyncio.wait_for(asyncio.gather(*waiting), 5)
    await site.presence.news(0.001)


async def test_a_notice_that_cannot_be_read_is_left_out(site: Site) -> None:
    site.presence.on_notice(Put(KEY_PREFIX + "one", b"?"))
    assert site.waits_until(LOST) == NEVER


async def test_a_worker_that_refuses_the_certificate_is_waited_for_as_one_that_is_cut_off(site: Site) -> None:
    site.join("d-1")
    first = FailedWorker(WorkerId("d-1"), "d", EXPIRED, at_s=100.0)
    again = first.failed_again(EXPIRED, now_s=105.0)
    assert site.presence.waits_until(again) == 100.0 + CUT_OFF_S
