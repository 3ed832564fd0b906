"""One mesh has services of this release and of the one before it: they serve together, in both directions."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvmesh.mesh.discovery import Put, open_discovery
from kvmesh.protocol.messages import WorkerCard, decode_card
from kvmesh.protocol.version import OURS, Versions
from tests.support.mesh import until
from tests.support.services import NEW, Release, Services
from tests.support.streams import Stream, check_mock_answer

pytestmark = pytest.mark.long
BOTH = ("old", "new")
BLOCK = 16


@pytest.fixture(scope="module")
def mesh(place: str, old: Release, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """Run a frontend, a prefill worker and a decode worker of each release."""
    with ExitStack() as stack:
        mesh = Services(tmp_path_factory.mktemp("mixed"), place, stack)
        names = [mesh.start(role, one) for role in ("frontend", "prefill", "decode") for one in (old, NEW)]
        mesh.until_ready(*names)
        for frontend in BOTH:
            mesh.until_joined(f"frontend-{frontend}", 4)
        yield mesh


def prompt_of(length: int, first: int) -> list[int]:
    return [(first * 131 + 37 * i) % 1900 + 50 for i in range(length)]


def pinned(mesh: Services, frontend: str, prefill: str, decode: str, first: int) -> Stream:
    """A stream whose prompt is computed by one worker and whose tokens come from another."""
    headers = {"x-kvmesh-worker": f"decode-{decode}", "x-kvmesh-prefill-worker": f"prefill-{prefill}"}
    how = {"trace": True, "disaggregate": True}
    return Stream(mesh.url(f"frontend-{frontend}"), prompt_of(100, first), 8, headers=headers, kvmesh=how)


async def test_the_mesh_is_really_of_two_releases(mesh: Services) -> None:
    store, found = open_discovery(mesh.discovery), dict[str, Versions]()
    async for change in store.watch("workers/"):
        assert isinstance(change, Put)
        card = decode_card(change.value, WorkerCard)
        found[card.name] = card.versions
        if len(found) == 4:
            break
    await store.close()
    for role in ("prefill", "decode"):
        assert (found[f"{role}-old"], found[f"{role}-new"]) == (Versions(2, 1, "0.2.0"), OURS)


@pytest.mark.parametrize("frontend", BOTH)
def test_every_decode_worker_pulls_from_every_prefill_worker(mesh: Services, frontend: str) -> None:
    pairs = [(prefill, decode) for prefill in BOTH for decode in BOTH]
    first = 10 * BOTH.index(frontend)
    streams = [pinned(mesh, frontend, *pair, first + number) for number, pair in enumerate(pairs)]
    for stream, (prefill, decode) in zip(streams, pairs, strict=True):
        check_mock_answer(stream.join())
        trace = stream.trace
        assert (trace["prefill_worker"], trace["decode_worker"]) == (f"prefill-{prefill}", f"decode-{decode}")
        assert (trace["pull_error"] or "", trace["kv_bytes_pulled"] > 0) == ("", True), trace


@pytest.mark.parametrize(("frontend", "other"), [BOTH, BOTH[::-1]])
def test_a_frontend_follows_the_caches_of_all_workers(mesh: Services, frontend: str, other: str) -> None:
    """The other frontend has placed the prompt: only KV events tell this one where it is."""
    for number, worker in enumerate(BOTH):
        prompt = prompt_of(5 * BLOCK, 500 + number + 10 * BOTH.index(frontend))
        pin = {"x-kvmesh-worker": f"decode-{worker}"}
        alone = {"trace": True, "disaggregate": False}
        check_mock_answer(Stream(mesh.url(f"frontend-{other}"), prompt, 2, headers=pin, kvmesh=alone).join())

        def overlap(prompt: list[int] = prompt, worker: str = worker) -> int:
            asked = Stream(mesh.url(f"frontend-{frontend}"), prompt, 2, headers={"x-kvmesh-explain": "1"}).join()
            seen = {c["worker"]: c["overlap_blocks"][0] for c in asked.trace["explanations"][0]["candidates"]}
            return int(seen[f"decode-{worker}"])

        until(lambda overlap=overlap: overlap() >= 4, what="the KV events")


def test_the_routers_of_both_frontends_gossip(mesh: Services) -> None:
    for asked, told in (BOTH, BOTH[::-1]):
        before = mesh.metric(f"frontend-{told}", "kvmesh_router_gossip_received_total")
        check_mock_answer(pinned(mesh, asked, "new", "old", 700 + BOTH.index(asked)).join())
        until(
            lambda told=told, before=before: (
                mesh.metric(f"frontend-{told}", "kvmesh_router_gossip_received_total") > before
            ),
            what=f"news at the {told} router",
        )


@pytest.mark.parametrize("place", ["file"], indirect=True)
@pytest.mark.parametrize(("dies", "stays"), [BOTH, BOTH[::-1]])
def test_streams_migrate_between_the_releases(mesh: Services, old: Release, dies: str, stays: str) -> None:
    streams = [Stream(mesh.url(f"frontend-{of}"), prompt_of(40, 800 + i), 120) for i in range(4) for of in BOTH]
    for stream in streams:
        stream.until_tokens(5)
    mesh.kill(f"decode-{dies}")
    for stream in streams:
        check_mock_answer(stream.join())
    moved = [stream for stream in streams if stream.trace["migrations"]]
    assert moved and all(stream.trace["decode_worker"] == f"decode-{stays}" for stream in moved)
    mesh.until_ready(mesh.start("decode", {"old": old, "new": NEW}[dies]))
    for frontend in BOTH:
        mesh.until_joined(f"frontend-{frontend}", 4)
