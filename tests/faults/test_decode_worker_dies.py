"""Test kill -9 of decode workers in mid-stream."""

import signal

import pytest

from tests.faults.conftest import LEASE_S
from tests.faults.prompts import LENGTHS, prompt_of
from tests.support.mesh import Mesh, until
from tests.support.streams import Stream, check_answer, check_failed_loudly, check_mock_answer

LONG_TOKENS = 1500  # so many take a second on a fast machine: the worker must die before the answers end


@pytest.mark.parametrize("disaggregate", [True, False])
def test_streams_go_on_elsewhere_without_losing_or_repeating_a_token(mesh: Mesh, disaggregate: bool) -> None:
    how = {"kvmesh": {"trace": True, "disaggregate": disaggregate}}
    streams = [Stream(mesh.url, prompt_of(n, n), 80, **how) for n in LENGTHS]
    for stream in streams:
        stream.until_tokens(5)
    killed = mesh.kill("decode-0")
    for stream in streams:
        check_mock_answer(stream.join())
    assert any(stream.trace["migrations"] for stream in streams)
    assert {stream.trace["decode_worker"] for stream in streams} == {"decode-1"}
    mesh.until_replaced("decode-0", killed)


def test_a_worker_that_was_started_again_is_used_again(mesh: Mesh) -> None:
    mesh.until_replaced("decode-1", mesh.kill("decode-1"))

    def used() -> bool:
        streams = [Stream(mesh.url, prompt_of(40, i), 4).join() for i in range(4)]
        for stream in streams:
            check_mock_answer(stream)
        return mesh.metric("kvmesh_worker_requests_total", "decode-1", outcome="ok") > 0

    until(used, what="a request for the new worker")


def test_migrated_tokens_of_the_real_engine_are_unchanged(nixl_mesh: Mesh) -> None:
    prompts = [prompt_of(n, n) for n in (1, 16, 33, 100)]
    plain = {"kvmesh": {"disaggregate": False}, "cache_salt": "plain"}
    expected = [Stream(nixl_mesh.url, prompt, LONG_TOKENS, **plain) for prompt in prompts]
    answers = [stream.join().tokens for stream in expected]
    disaggregated = {"trace": True, "disaggregate": True}
    streams = [Stream(nixl_mesh.url, prompt, LONG_TOKENS, kvmesh=disaggregated) for prompt in prompts]
    for stream in streams:
        stream.until_tokens(5)
    until(lambda: nixl_mesh.metric("kvmesh_worker_running_requests", "decode-0") > 0)
    nixl_mesh.kill("decode-0")
    for stream, answer in zip(streams, answers, strict=True):
        check_answer(stream.join(), answer)
    assert any(stream.trace["migrations"] for stream in streams)


def test_without_another_worker_streams_wait_for_the_replacement(lone_mesh: Mesh) -> None:
    streams = [Stream(lone_mesh.url, prompt_of(n, n), 80) for n in LENGTHS]
    for stream in streams:
        stream.until_tokens(5)
    lone_mesh.kill("decode-0")
    late = [Stream(lone_mesh.url, prompt_of(n, 5 + n), 10) for n in LENGTHS]
    for stream in (*streams, *late):
        check_mock_answer(stream.join())


def test_new_requests_wait_for_a_worker_that_is_started_again(lone_mesh: Mesh) -> None:
    ended = lone_mesh.pid("decode-0")
    lone_mesh.signal("decode-0", signal.SIGTERM)  # it leaves in good order: the frontend knows no worker at once
    streams = list[Stream]()

    def is_back() -> bool:
        streams.append(Stream(lone_mesh.url, prompt_of(40, len(streams)), 4))
        return any(card.name == "decode-0" and card.pid != ended for card in lone_mesh.workers().values())

    until(is_back, what="a new decode-0")
    for stream in streams:
        check_mock_answer(stream.join())


def test_the_offer_for_a_killed_worker_is_released(mesh: Mesh) -> None:
    """The frontend releases the offer at once; its lease would take longer."""
    pinned = {"disaggregate": True, "worker": "decode-0"}
    with mesh.stopped("decode-0"):
        held = [Stream(mesh.url, prompt_of(n, n), 20, kvmesh=pinned) for n in LENGTHS]
        until(lambda: mesh.metric("kvmesh_worker_kv_offers", "prefill-0") == len(held), what="offers")
        assert mesh.metric("kvmesh_worker_used_blocks", "prefill-0") >= sum(-(-n // 16) for n in LENGTHS[:-1])
        mesh.kill("decode-0")
    until(lambda: mesh.metric("kvmesh_worker_kv_offers", "prefill-0") == 0, LEASE_S / 2, "the offers' end")
    until(lambda: mesh.metric("kvmesh_worker_used_blocks", "prefill-0") == 0, what="free blocks")
    for stream in held:  # pinned by the caller: the new worker of that name answers
        check_mock_answer(stream.join())


def test_waiting_requests_notice_a_dead_worker(lone_mesh: Mesh) -> None:
    """A dead worker's card stays until its lease has passed. A request sent there must not hang or look answered."""
    lone_mesh.kill("decode-0")
    streams = [Stream(lone_mesh.url, prompt_of(20, i), 5, timeout_s=8) for i in range(20)]
    for stream in streams:
        stream.join()
        if stream.status == 200:
            check_mock_answer(stream)
        else:
            check_failed_loudly(stream)
