"""A mesh without an owner of processes loses its only worker: clients hear so at once, and the next worker is used."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.support.mesh import TRUSTED, until
from tests.support.services import NEW, Services
from tests.support.streams import Stream, check_failed_loudly, check_mock_answer

pytestmark = pytest.mark.e2e

SOON_S = 10.0  # on a busy machine; before, a request waited for 15 s at least, and then up to its deadline
WORKER = "aggregated-0"


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Services]:
    with ExitStack() as stack:
        mesh = Services(tmp_path, f"file:{tmp_path / 'discovery'}", stack)
        frontend = mesh.start("frontend", NEW, name="frontend")
        mesh.until_ready(frontend, mesh.start("aggregated", NEW, "--kv-transfer", "shm", name=WORKER))
        mesh.until_joined(frontend, 1)
        yield mesh


def prompt(number: int) -> list[int]:
    return list(range(100 + number, 140 + number))


def test_requests_without_a_worker_fail_at_once(mesh: Services) -> None:
    url = mesh.url("frontend")
    streams = [Stream(url, prompt(number), 200) for number in range(4)]
    for stream in streams:
        stream.until_tokens(5)
    mesh.kill(WORKER)
    killed_s = time.monotonic()
    for stream in streams:
        check_failed_loudly(stream.join())
        assert stream.ended_s - killed_s < SOON_S, stream
        assert stream.error is not None and stream.error["code"] == "no_worker", stream
        assert "no other one of the model 'tiny' is ready" in stream.error["message"], stream
        assert "127.0.0.1" not in stream.error["message"], stream
    body = {"model": "tiny", "prompt": prompt(9), "max_tokens": 4}
    with httpx.Client(base_url=url, timeout=60, verify=TRUSTED) as http, ThreadPoolExecutor(64) as threads:
        began_s = time.monotonic()
        replies = list(threads.map(lambda _: http.post("/v1/completions", json=body), range(512)))
    assert {reply.status_code for reply in replies} == {503}, "an empty pool is not an overload, and no unknown model"
    assert all(int(reply.headers["retry-after"]) > 0 and "127.0.0.1" not in reply.text for reply in replies)
    assert time.monotonic() - began_s < 3 * SOON_S


def test_a_worker_with_its_old_name_at_a_new_port_is_used_at_once(mesh: Services) -> None:
    url, pin = mesh.url("frontend"), {"x-kvmesh-worker": WORKER}
    check_mock_answer(Stream(url, prompt(1), 4, headers=pin).join())
    for round_ in range(2):
        mesh.kill(WORKER)
        mesh.until_ready(mesh.start("aggregated", NEW, "--kv-transfer", "shm", name=WORKER))
        ready_s = time.monotonic()
        until(lambda round_=round_: Stream(url, prompt(round_), 4).join().status == 200, what="an answer")
        for number in range(8):
            check_mock_answer(Stream(url, prompt(number), 4, headers=pin).join())
        assert time.monotonic() - ready_s < SOON_S
