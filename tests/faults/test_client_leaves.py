"""Clients that go away: whatever their request held is free again at once."""

import json
import socket
import time
from urllib.parse import urlsplit

import pytest

from tests.faults.conftest import LEASE_S, in_flight
from tests.faults.prompts import LENGTHS, prompt_of
from tests.support.mesh import Mesh, until
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
    """Let 80 clients leave, one each millisecond, also while a request is placed, prefilled or handed over.

    A ticket may be on its way to a client that has just left: its offer is left to its lease.
    """
    streams = []
    for i in range(80):
        streams.append(Stream(mesh.url, prompt_of(70, i), 500, kvmesh={"disaggregate": True}))
        if i >= 8:
            streams[i - 8].leave()
        time.sleep(0.001)
    for stream in streams:
        stream.leave()
    until_free(mesh, LEASE_S + 2)
    for stream in streams:
        assert not stream.join().is_done


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
