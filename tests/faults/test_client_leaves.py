"""Clients that go away: whatever their request held is free again at once."""

import json
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.faults.conftest import LEASE_S, LONE, in_flight
from tests.faults.prompts import LENGTHS, prompt_of
from tests.support.mesh import Mesh, running_mesh, until
from tests.support.patience import PATIENCE_S
from tests.support.streams import Stream, check_mock_answer

AT_ONCE_S = LEASE_S / 2  # it is some milliseconds; the machine may be busy


def until_free(mesh: Mesh, timeout_s: float = AT_ONCE_S) -> None:
    until(lambda: not in_flight(mesh), timeout_s, f"everything to be free: {in_flight(mesh)}")


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_in_mid_stream(mesh: Mesh, stream: bool) -> None:
    streams = [Stream(mesh.url, prompt_of(n, n), 5000, stream=stream) for n in LENGTHS]
    busy = {"decode-0", "decode-1"}
    until(lambda: sum(mesh.metric("kvmesh_worker_running_requests", w) for w in busy) == len(streams), what="streams")
    assert mesh.metric("kvmesh_router_in_flight") == len(streams)
    for one in streams:
        one.leave()
    until_free(mesh)


def test_during_a_disaggregated_prefill(mesh: Mesh) -> None:
    streams = [Stream(mesh.url, prompt_of(30000, i), 10, kvmesh={"disaggregate": True}) for i in range(4)]
    until(lambda: mesh.metric("kvmesh_worker_running_requests", "prefill-0") > 0)
    until(lambda: mesh.metric("kvmesh_worker_waiting_requests", "prefill-0") > 0)
    for stream in streams:
        stream.leave()
    until_free(mesh)


def test_some_leave_and_the_others_do_not_notice(mesh: Mesh) -> None:
    streams = [Stream(mesh.url, prompt_of(n, n), 80) for n in LENGTHS * 3]
    for stream in streams[::2]:
        stream.until_tokens(3).leave()
    for stream in streams[1::2]:
        check_mock_answer(stream.join())
    until_free(mesh)


def test_at_any_moment(mesh: Mesh) -> None:
    """Let 80 clients leave, one each millisecond, also while a request is placed, prefilled or handed over."""
    streams = []
    for i in range(80):
        streams.append(Stream(mesh.url, prompt_of(70, i), 500, kvmesh={"disaggregate": True}))
        if i >= 8:
            streams[i - 8].leave()
        time.sleep(0.001)
    for stream in streams:
        stream.leave()
    until_free(mesh)
    for stream in streams:
        assert not stream.join().is_done


def test_offers_of_1600_clients_that_leave_at_random_are_released(mesh: Mesh) -> None:
    """Some tickets are on their way to the frontend when their clients leave."""
    draw = random.Random(30)
    stays_s = [draw.uniform(0, 0.1) for _ in range(1600)]

    def leave_early(number: int) -> None:
        stream = Stream(mesh.url, prompt_of(70, number), 500, kvmesh={"disaggregate": True})
        time.sleep(stays_s[number])
        stream.leave()
        stream.join()

    with ThreadPoolExecutor(64) as clients:
        list(clients.map(leave_early, range(len(stays_s))))
    until_free(mesh)


def test_200_leave_between_the_end_of_the_prefill_and_the_pull(tmp_path: Path) -> None:
    flags = ["--engine", "mock", "--kv-transfer", "shm", "--decode", "1", "--max-num-seqs", "256"]
    with running_mesh(tmp_path, *flags, "--offer-lease-s", "100", "--log-level", "warning") as mesh:
        until(lambda: mesh.workers_seen() == len(LONE), what="all workers")
        with mesh.stopped("decode-0"):
            streams = [Stream(mesh.url, prompt_of(70, i), 20, kvmesh={"disaggregate": True}) for i in range(200)]
            until(lambda: mesh.metric("kvmesh_worker_kv_offers", "prefill-0") == len(streams), what="200 offers")
            assert mesh.metric("kvmesh_worker_used_blocks", "prefill-0") > len(streams)
            for stream in streams:
                stream.leave()
            until(lambda: not busy(mesh, "prefill-0"), what="every offer and block to be free")
        until_free(mesh, PATIENCE_S)
    assert not any(stream.join().is_done for stream in streams)


def busy(mesh: Mesh, worker: str) -> float:
    return sum(mesh.metric(f"kvmesh_worker_{name}", worker) for name in ("kv_offers", "used_blocks"))


def test_a_pinned_request_that_leaves_the_head_of_the_queue_lets_the_next_one_run(tmp_path: Path) -> None:
    pinned = {"kvmesh": {"worker": "decode-0", "disaggregate": False}}
    flags = ["--engine", "mock", "--kv-transfer", "shm", "--decode", "1", "--max-num-seqs", "4"]
    with running_mesh(tmp_path, *flags) as mesh:
        until(lambda: mesh.workers_seen() == len(LONE), what="all workers")
        running = [Stream(mesh.url, prompt_of(20, i), 5000, **pinned) for i in range(4)]
        until(lambda: mesh.metric("kvmesh_worker_running_requests", "decode-0") == 4, what="a full worker")
        head = Stream(mesh.url, prompt_of(20, 100), 10, **pinned)
        until(lambda: mesh.metric("kvmesh_router_waiting") == 1, what="the head of the queue")
        following = Stream(mesh.url, prompt_of(20, 101), 10, **pinned)
        until(lambda: mesh.metric("kvmesh_router_waiting") == 2, what="the next request")
        head.leave()
        until(lambda: mesh.metric("kvmesh_router_waiting") == 1, what="the head to be gone")
        running[0].leave()
        check_mock_answer(following.join())
        for stream in running:
            stream.leave()
        until_free(mesh)


def test_a_client_that_does_not_read_holds_up_nobody(mesh: Mesh) -> None:
    host, _, port = urlsplit(mesh.url).netloc.partition(":")
    fields = {
        "model": "tiny",
        "prompt": [5, 6, 7],
        "max_tokens": 20000,
        "ignore_eos": True,
        "stream": True,
        "logprobs": 5,
    }
    body = json.dumps(fields)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.create_connection((host, int(port))) as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.sendall(f"{head}\r\n\r\n{body}".encode())
        until(lambda: mesh.metric("kvmesh_frontend_inflight") == 1)
        for stream in [Stream(mesh.url, prompt_of(n, n), 30) for n in LENGTHS]:
            check_mock_answer(stream.join())
    until_free(mesh)
