"""Test kill -9 of a router that runs by itself: streams continue, and requests are placed until it is back."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvmesh.protocol.messages import RouterCard, decode
from tests.faults.conftest import PATIENT
from tests.faults.prompts import LENGTHS, prompt_of
from tests.support.mesh import TRUSTED, Mesh, running_mesh, until
from tests.support.patience import PATIENCE_S
from tests.support.recovery import OWN_WAY_S
from tests.support.streams import Stream, check_mock_answer

PROMPT_BLOCKS = 2000
WEEKLY = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    flags = ["--engine", "mock", "--kv-transfer", "shm", "--router", "remote"]
    with running_mesh(tmp_path_factory.mktemp("routed"), *flags, module=PATIENT) as mesh:
        yield mesh


def router(mesh: Mesh) -> RouterCard:
    """Return the card of the router that runs, or the last one that did."""
    [value] = mesh.entries("routers/").values()
    return decode(value, RouterCard)


def kill_router(mesh: Mesh) -> int:
    """Kill the router; if it has died lately, the next one."""
    until(lambda: router_note(mesh) == "", what="a router that answers")
    killed = router(mesh).pid
    os.kill(killed, signal.SIGKILL)
    return killed


def ask(mesh: Mesh, length: int, first: int = 0, max_tokens: int = 10) -> Stream:
    return Stream(mesh.url, prompt_of(length, first), max_tokens, kvmesh={"trace": True, "disaggregate": False})


def in_flight(mesh: Mesh) -> int:
    """Return the number as the router reports it; -1 while the router does not answer."""
    try:
        return int(httpx.get(router(mesh).http_url + "/health", verify=TRUSTED).json()["in_flight"])
    except httpx.HTTPError:
        return -1


def fallbacks(mesh: Mesh) -> float:
    return mesh.metric("kvmesh_router_fallbacks_total")


def router_note(mesh: Mesh) -> str:
    health = httpx.get(mesh.url + "/health", verify=TRUSTED)
    assert health.status_code == 200, health.text
    return str(health.json()["router"])


def test_a_stopped_router_costs_no_request(routed: Mesh) -> None:
    """Frontends place requests themselves until a router is back, and say so in the log, in /health and by a metric."""
    check_mock_answer(ask(routed, 20).join())
    assert router_note(routed) == ""
    before, frozen = fallbacks(routed), router(routed).pid
    os.kill(frozen, signal.SIGSTOP)
    try:
        for i in range(6):
            stream = ask(routed, 20, i).join()
            check_mock_answer(stream)
            assert stream.took_s <= OWN_WAY_S, "a request waits for the router"
        assert fallbacks(routed) >= before + 6
        assert "no router answers" in router_note(routed)
    finally:
        os.kill(frozen, signal.SIGCONT)
    until(lambda: router_note(routed) == "", what="the router to be asked again")
    at_most = fallbacks(routed)
    check_mock_answer(ask(routed, 20).join())
    assert fallbacks(routed) == at_most
    log = (routed.run_dir / "logs" / "frontend.log").read_text()
    assert (log.count("places requests itself"), log.count("a router answers again")) == (1, 1)


def test_streams_continue_and_new_requests_are_answered(routed: Mesh) -> None:
    streams = [Stream(routed.url, prompt_of(n, n), 80) for n in LENGTHS]
    for stream in streams:
        stream.until_tokens(5)
    killed = kill_router(routed)
    while router(routed).pid == killed:
        check_mock_answer(ask(routed, 20).join())
    for stream in streams:
        check_mock_answer(stream.join())
        assert stream.trace["migrations"] == 0


@pytest.mark.long
def test_the_new_router_counts_what_runs(routed: Mesh) -> None:
    """The frontends report running requests to a new router; when these end, no booking is left."""
    streams = [Stream(routed.url, prompt_of(n, n), 1000) for n in LENGTHS]  # they outlast the start of a router
    for stream in streams:
        stream.until_tokens(5)
    killed = kill_router(routed)
    until(lambda: router(routed).pid != killed, what="another router")
    until(lambda: in_flight(routed) == sum(not stream.is_over for stream in streams) > 0, what="its load to be right")
    for stream in streams:
        check_mock_answer(stream.join())
    until(lambda: in_flight(routed) == 0, what="its load to be gone")


def test_the_new_router_learns_what_the_caches_hold(routed: Mesh) -> None:
    prompt = 300
    first = ask(routed, prompt, 7).join()
    check_mock_answer(first)
    kill_router(routed)

    def known() -> bool:
        stream = ask(routed, prompt, 7).join()
        return stream.status == 200 and stream.trace["cached_tokens"] == 288

    until(known, what="the prefix to be found again")


def test_a_request_without_worker_and_router_waits_for_both(routed: Mesh) -> None:
    streams = [Stream(routed.url, prompt_of(n, n), 80) for n in LENGTHS]
    for stream in streams:
        stream.until_tokens(5)
    kill_router(routed)
    routed.kill("decode-0")
    for stream in streams:
        check_mock_answer(stream.join())


@pytest.mark.parametrize("blocks", [40_000, pytest.param(2_000_000, marks=[pytest.mark.weekly, WEEKLY])])
def test_a_killed_router_knows_all_blocks_again(tmp_path: Path, blocks: int) -> None:
    """Requests are answered meanwhile; every prefix is found again, and its index is as large as before."""
    prompts = blocks // PROMPT_BLOCKS
    flags = ["--engine", "mock", "--kv-transfer", "shm", "--router", "remote", "--prefill", "0", "--mock-speedup", "0"]
    flags += ["--num-blocks", str(blocks // 2 + 5000), "--max-step-tokens", "65536", "--log-level", "warning"]
    with running_mesh(tmp_path, *flags, "--no-kv-peers", module=PATIENT) as mesh:
        until(lambda: mesh.workers_seen() == 2, what="all workers")

        def fill(number: int) -> None:
            pinned = {"worker": f"decode-{number % 2}", "disaggregate": False}
            mesh.complete(long_prompt(number), max_tokens=1, kvmesh=pinned)

        for number in range(prompts):
            fill(number)
        held = sum(mesh.metric("kvmesh_worker_cached_blocks", f"decode-{n}") for n in range(2))
        assert held >= blocks
        until(lambda: index_blocks(mesh) == held, what="the router to know all blocks")
        killed = kill_router(mesh)
        while router(mesh).pid == killed:
            check_mock_answer(ask(mesh, 20).join())
        began_s = time.monotonic()
        until(lambda: index_blocks(mesh) >= held, 5 * PATIENCE_S, "the new router to know all blocks")
        print(f"{held:.0f} blocks known again after {time.monotonic() - began_s:.1f} s")
        until(lambda: router_note(mesh) == "", what="the frontend to ask the new router")
        for number in range(0, prompts, max(1, prompts // 10)):
            trace = mesh.complete(long_prompt(number), max_tokens=1)["kvmesh"]
            assert trace["decode_worker"] == f"decode-{number % 2}", trace
            assert trace["overlap_tokens"] >= 16 * (PROMPT_BLOCKS - 1), trace


def long_prompt(number: int) -> list[int]:
    return [10 + number % 1900, 10 + number // 1900, *prompt_of(16 * PROMPT_BLOCKS - 2, number)]


def index_blocks(mesh: Mesh) -> float:
    """Return the size of the router's index; -1 while the router does not answer."""
    try:
        return mesh.metric("kvmesh_router_index_blocks", url=f"{router(mesh).http_url}/metrics")
    except httpx.HTTPError:
        return -1.0
