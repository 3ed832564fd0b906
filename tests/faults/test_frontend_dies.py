"""Test kill -9 of the frontend: workers drop its requests, and it is restarted."""

import os
import signal

from tests.faults.prompts import LENGTHS, prompt_of
from tests.support.mesh import Mesh, until
from tests.support.streams import Stream, check_mock_answer, mock_answer


def kill_frontend(mesh: Mesh) -> None:
    os.kill(mesh.find_frontend().pid, signal.SIGKILL)


def until_frontend(mesh: Mesh, old_pid: int) -> None:
    """The new one; where any port will do it has another URL."""
    until(lambda: bool(mesh.entries("frontends/")) and mesh.find_frontend().pid != old_pid, what="a new frontend")


def check_broke_off(stream: Stream) -> None:
    """The client's part of the answer is right, and does not look complete."""
    assert not stream.is_done
    assert stream.finish_reason is None
    assert stream.tokens == mock_answer(stream.prompt, stream.max_tokens)[: len(stream.tokens)]


def test_workers_drop_requests_of_a_dead_frontend_at_once(lone_mesh: Mesh) -> None:
    streams = [Stream(lone_mesh.url, prompt_of(n, n), 5000) for n in LENGTHS]
    for stream in streams:
        stream.until_tokens(5)
    assert lone_mesh.metric("kvmesh_worker_running_requests", "decode-0") == len(streams)
    pid = lone_mesh.find_frontend().pid
    kill_frontend(lone_mesh)
    until(lambda: lone_mesh.metric("kvmesh_worker_running_requests", "decode-0") == 0, 15)
    until(lambda: lone_mesh.metric("kvmesh_worker_used_blocks", "decode-0") == 0, what="free blocks")
    for stream in streams:
        check_broke_off(stream.join())
    until_frontend(lone_mesh, pid)

    def answered() -> bool:
        stream = Stream(lone_mesh.url, prompt_of(40), 5).join()
        if stream.status == 503:  # it has not seen the workers yet; the model does exist
            return False
        check_mock_answer(stream)
        return True

    until(answered)


def test_also_those_that_prefill_or_wait(lone_mesh: Mesh) -> None:
    streams = [Stream(lone_mesh.url, prompt_of(30000, i), 10, kvmesh={"disaggregate": True}) for i in range(4)]
    until(lambda: lone_mesh.metric("kvmesh_worker_running_requests", "prefill-0") > 0)
    until(lambda: lone_mesh.metric("kvmesh_router_waiting") > 0, what="the others to wait in its router")
    pid = lone_mesh.find_frontend().pid
    kill_frontend(lone_mesh)
    until(lambda: lone_mesh.metric("kvmesh_worker_running_requests", "prefill-0") == 0, 5, "not after seconds of work")
    for stream in streams:
        check_broke_off(stream.join())
    until_frontend(lone_mesh, pid)


def test_offers_that_nobody_will_fetch_end_with_their_lease(lone_mesh: Mesh) -> None:
    with lone_mesh.stopped("decode-0"):
        streams = [Stream(lone_mesh.url, prompt_of(n, n), 10, kvmesh={"disaggregate": True}) for n in LENGTHS]
        until(lambda: lone_mesh.metric("kvmesh_worker_kv_offers", "prefill-0") == len(streams), what="offers")
        pid = lone_mesh.find_frontend().pid
        kill_frontend(lone_mesh)
        for stream in streams:
            check_broke_off(stream.join())
        until(lambda: lone_mesh.metric("kvmesh_worker_kv_offers", "prefill-0") == 0, what="the lease to end")
        until(lambda: lone_mesh.metric("kvmesh_worker_used_blocks", "prefill-0") == 0, what="free blocks")
    until_frontend(lone_mesh, pid)


def test_the_new_frontend_learns_what_the_caches_hold(mesh: Mesh) -> None:
    prompt = prompt_of(300, 11)
    first = Stream(mesh.url, prompt, 5, kvmesh={"trace": True, "disaggregate": False}).join()
    check_mock_answer(first)
    pid = mesh.find_frontend().pid
    kill_frontend(mesh)
    until_frontend(mesh, pid)

    def known() -> bool:
        stream = Stream(mesh.url, prompt, 5).join()
        return stream.status == 200 and stream.trace["cached_tokens"] == 288

    until(known, what="the prefix to be found again")
