"""Test kill -9 of a router that runs by itself: streams continue, and soon another router places requests."""

import os
import signal
from collections.abc import Iterator

import httpx
import pytest

from protocol.messages import RouterCard, decode
from tests.faults.conftest import PATIENT
from tests.faults.prompts import LENGTHS, prompt_of
from tests.support.mesh import TRUSTED, Mesh, running_mesh, until
from tests.support.streams import Stream, check_mock_answer


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    flags = ["--engine", "mock", "--kv-transfer", "shm", "--router", "remote"]
    with running_mesh(tmp_path_factory.mktemp("routed"), *flags, module=PATIENT) as mesh:
        yield mesh


def router(mesh: Mesh) -> RouterCard:
    [value] = mesh.entries("routers/").values()
    return decode(value, RouterCard)


def ask(mesh: Mesh, length: int, first: int = 0, max_tokens: int = 10) -> Stream:
    return Stream(mesh.url, prompt_of(length, first), max_tokens, kvmesh={"trace": True, "disaggregate": False})


def in_flight(mesh: Mesh) -> int:
    """Return the number as the router reports it; -1 while the router does not answer."""
    try:
        return int(httpx.get(router(mesh).http_url + "/health", verify=TRUSTED).json()["in_flight"])
    except httpx.HTTPError:
        return -1


def answered(mesh: Mesh) -> bool:
    stream = ask(mesh, 20).join()
    if stream.status == 503:
        assert (stream.error["code"], int(stream.headers["retry-after"])) == ("no_worker", 2)
        return False
    check_mock_answer(stream)
    return True


def test_streams_continue_and_new_requests_get_a_retry_time(routed: Mesh) -> None:
    streams = [Stream(routed.url, prompt_of(n, n), 80) for n in LENGTHS]
    for stream in streams:
        stream.until_tokens(5)
    killed = router(routed).pid
    os.kill(killed, signal.SIGKILL)
    until(lambda: answered(routed), what="a request to be placed again")
    assert router(routed).pid != killed
    for stream in streams:
        check_mock_answer(stream.join())
        assert stream.trace["migrations"] == 0


def test_the_new_router_counts_what_runs(routed: Mesh) -> None:
    """The frontends report running requests to a new router; when these end, no booking is left."""
    streams = [Stream(routed.url, prompt_of(n, n), 1000) for n in LENGTHS]  # they outlast the start of a router
    for stream in streams:
        stream.until_tokens(5)
    killed = router(routed).pid
    os.kill(killed, signal.SIGKILL)
    until(lambda: router(routed).pid != killed, what="another router")
    until(lambda: in_flight(routed) == sum(not stream.is_over for stream in streams) > 0, what="its load to be right")
    for stream in streams:
        check_mock_answer(stream.join())
    until(lambda: in_flight(routed) == 0, what="its load to be gone")


def test_the_new_router_learns_what_the_caches_hold(routed: Mesh) -> None:
    prompt = 300
    first = ask(routed, prompt, 7).join()
    check_mock_answer(first)
    os.kill(router(routed).pid, signal.SIGKILL)

    def known() -> bool:
        stream = ask(routed, prompt, 7).join()
        return stream.status == 200 and stream.trace["cached_tokens"] == 288

    until(known, what="the prefix to be found again")


def test_a_request_without_worker_and_router_waits_for_both(routed: Mesh) -> None:
    streams = [Stream(routed.url, prompt_of(n, n), 80) for n in LENGTHS]
    for stream in streams:
        stream.until_tokens(5)
    os.kill(router(routed).pid, signal.SIGKILL)
    routed.kill("decode-0")
    for stream in streams:
        check_mock_answer(stream.join())
