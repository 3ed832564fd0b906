"""Faults that break no connection hold requests up for a short time only, with default settings."""

import os
import signal
import time
from collections.abc import Iterator

import pytest

from kvmesh.kvcache.transfer.nixl import why_unavailable
from tests.faults.conftest import PAIR, PATIENT, watched
from tests.faults.prompts import LENGTHS, prompt_of
from tests.support.mesh import Mesh, running_mesh, until
from tests.support.recovery import RECOVERED_S, WITHOUT_S
from tests.support.streams import Stream, check_answer


@pytest.fixture(scope="module")
def tcp_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """KV over NIXL and TCP, as between hosts: a peer that hangs sends nothing."""
    if reason := why_unavailable():
        pytest.skip(f"NIXL: {reason}")
    folder = tmp_path_factory.mktemp("tcp")
    flags = ["--kv-transfer", "nixl", "--pull-timeout-s", str(WITHOUT_S)]
    with running_mesh(folder, *flags, env={"UCX_TLS": "tcp"}, module=PATIENT) as mesh:
        yield from watched(mesh, PAIR)


@pytest.mark.parametrize("has_pulled", [False, True])
def test_a_prefill_worker_that_freezes_before_a_pull_costs_no_timeout(tcp_mesh: Mesh, has_pulled: bool) -> None:
    mesh, worker = tcp_mesh, "decode-1" if has_pulled else "decode-0"
    prompts = [prompt_of(n, n) for n in LENGTHS]
    answers = [
        stream.join().tokens
        for stream in [Stream(mesh.url, p, 8, kvmesh={"disaggregate": False}, cache_salt="alone") for p in prompts]
    ]
    pinned = {"kvmesh": {"trace": True, "disaggregate": True, "worker": worker}, "cache_salt": f"frozen {has_pulled}"}
    if has_pulled:
        assert Stream(mesh.url, prompt_of(40, 7), 5, **pinned).join().trace["kv_bytes_pulled"] > 0
    with mesh.stopped(worker):
        streams = [Stream(mesh.url, prompt, 8, **pinned) for prompt in prompts]
        until(lambda: mesh.metric("kvmesh_worker_kv_offers", "prefill-0") == len(streams), what="offers")
        frozen = mesh.pid("prefill-0")
        os.kill(frozen, signal.SIGSTOP)
    began_s = time.monotonic()
    try:
        for stream, answer in zip(streams, answers, strict=True):
            check_answer(stream.join(), answer)
            assert stream.ended_s - began_s <= RECOVERED_S
            assert stream.trace["pull_error"] and stream.trace["kv_bytes_pulled"] == 0
    finally:
        os.kill(frozen, signal.SIGCONT)
