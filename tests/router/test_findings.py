"""Tests of the report on the search for workers: what it says, what it keeps to itself, and when the log says it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from kvmesh.mesh.discovery.file import FileDiscovery
from kvmesh.mesh.discovery.memory import MemoryDiscovery
from kvmesh.mesh.discovery.place import SearchPlace
from kvmesh.mesh.discovery.store import Discovery
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import WorkerCard, encode
from kvmesh.router import feeds, findings
from kvmesh.router.feeds import WorkerFeed, tell_missing
from kvmesh.router.findings import (
    GAP_S,
    GRACE_S,
    MAX_IGNORED,
    NOTHING_SEARCHED,
    UNREADABLE,
    Complaint,
    DiscoveryReport,
    Findings,
    IgnoredKey,
    sentence,
)
from tests.support.patience import PATIENCE_S
from tests.support.routing import BLOCK, card

PLACE = SearchPlace("file:/mesh", is_read=True)


def report(*ignored: str, found: int = 0) -> DiscoveryReport:
    reported = Findings()
    for key in ignored:
        reported.ignore(key, "it is odd")
    for number in range(found):
        reported.count(f"workers/{number}")
    return reported.report(PLACE)


# --- the report ---------------------------------------------------------------------------------------


def test_reasons_are_bounded_and_keys_are_all_counted() -> None:
    found = report(*(f"workers/{number}" for number in range(MAX_IGNORED + 5)))
    assert (found.workers_found, len(found.ignored)) == (MAX_IGNORED + 5, MAX_IGNORED)


def test_a_key_that_counts_again_or_goes_is_not_ignored() -> None:
    found = Findings()
    for key in "abc":
        found.ignore(key, "it is odd")
    found.count("a")
    found.forget("b")
    told = found.report(PLACE, [("d", "it only prefills")])
    assert (told.workers_found, [one.key for one in told.ignored]) == (2, ["c", "d"])


def test_odd_names_of_files_fit_into_json() -> None:
    found = Findings()
    found.ignore("workers/\udcff" + 1000 * "x", UNREADABLE)
    [ignored] = msgspec.json.decode(msgspec.json.encode(found.report(SearchPlace("file:/\udcff"))))["ignored"]
    assert ignored["key"] == "workers/?" + 91 * "x"


def test_a_place_that_is_away_says_since_when() -> None:
    assert SearchPlace("x", True, 0.0).status() == "away since 1970-01-01T00:00:00Z"


def test_the_line_names_place_number_and_reasons() -> None:
    head = "no worker can be used: searched in file:/mesh (reached), found "
    assert sentence(report()) == head + "0; give workers the same --discovery"
    down = msgspec.structs.replace(report(), down=[IgnoredKey("decode-1", "it ends")])
    assert sentence(down) == head + "0; decode-1: it ends"
    assert sentence(report("workers/a")) == head + "1; workers/a: it is odd"
    assert sentence(report(*(f"workers/{n}" for n in range(10)))).endswith("; and 2 more, see /health")


# --- when the log says it -----------------------------------------------------------------------------


def test_a_missing_worker_is_told_once_after_a_grace() -> None:
    complaint = Complaint()
    lines = [complaint.on_time(second, False, report) for second in range(100)]
    assert [second for second, line in enumerate(lines) if line] == [int(GRACE_S)]


def test_a_changed_finding_is_told_again_after_a_gap() -> None:
    complaint = Complaint()
    found = [report(f"workers/{n}") for n in range(100)]
    told = [second for second in range(41) if complaint.on_time(second, False, lambda second=second: found[second])]
    assert told == [int(GRACE_S + n * GAP_S) for n in range(4)]


def test_a_mesh_with_workers_is_not_complained_about_until_they_go() -> None:
    complaint = Complaint()
    assert not any(complaint.on_time(second, second != 3, report) for second in range(100))
    told = [second for second in range(100, 200) if complaint.on_time(second, False, report)]
    assert told == [100 + int(GRACE_S)]


async def test_the_log_has_one_line(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "GRACE_S", 0.0)
    monkeypatch.setattr(feeds, "LOOK_S", 0.001)
    telling = asyncio.create_task(tell_missing(lambda: False, lambda: NOTHING_SEARCHED))
    await asyncio.sleep(0.1)
    telling.cancel()
    assert [record.levelname for record in caplog.records if "no worker can be used" in record.message] == ["WARNING"]


# --- what the feed finds ------------------------------------------------------------------------------


class Site:
    def __init__(self, discovery: Discovery) -> None:
        self.discovery, self.feed = discovery, WorkerFeed()
        self.joined: set[WorkerId] = set()
        self.feed.listen(lambda card: self.joined.add(card.worker_id), self.joined.discard)

    async def put(self, key: str, value: WorkerCard | bytes) -> None:
        await self.discovery.put(f"workers/{key}", value if isinstance(value, bytes) else encode(value))

    async def finds(self, count: int) -> dict[str, str]:
        """Return the ignored keys with their reasons when `count` workers are found."""
        async with asyncio.timeout(PATIENCE_S):
            while self.feed.report().workers_found != count:
                await asyncio.sleep(0.01)
        return {one.key: one.reason for one in self.feed.report().ignored}


@pytest_asyncio.fixture(params=["memory", "file"])
async def site(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Site]:
    site = Site(MemoryDiscovery() if request.param == "memory" else FileDiscovery(str(tmp_path)))
    following = asyncio.create_task(site.feed.run(site.discovery))
    yield site
    following.cancel()
    await asyncio.wait([following])
    await site.discovery.close()


async def test_a_feed_that_has_not_begun_has_reached_nothing() -> None:
    assert WorkerFeed().report() == NOTHING_SEARCHED


async def test_a_card_that_cannot_be_read_is_named_without_its_content(site: Site) -> None:
    await site.put("junk", b'{"role": "secret"}')
    assert await site.finds(1) == {"workers/junk": UNREADABLE}
    await site.put("junk", card("junk"))
    async with asyncio.timeout(PATIENCE_S):
        while not site.joined:
            await asyncio.sleep(0.01)
    assert await site.finds(1) == {}


async def test_a_card_without_a_usable_capacity_is_named(site: Site) -> None:
    await site.put("a", card("a", capacity=float("inf")))
    assert list(await site.finds(1)) == ["workers/a"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"block_size": 2 * BLOCK}, f"its block size is {2 * BLOCK}, that of the other workers of its model {BLOCK}"),
        ({"context_tokens": 7}, f"its context is 7, that of the other workers of its model {1 << 16}"),
    ],
)
async def test_a_worker_that_contradicts_the_others_is_named_until_they_leave(
    site: Site, fields: dict[str, object], reason: str
) -> None:
    first = await site.discovery.put("workers/a", encode(card("a")))
    assert await site.finds(1) == {}
    await site.put("b", card("b", **fields))
    assert await site.finds(2) == {"workers/b": reason}
    await first.withdraw()
    assert await site.finds(1) == {}
    assert site.joined == {WorkerId("b")}
