"""A worker that is stopped (SIGSTOP): its connections stay open and it says nothing."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.frontend.generator import Trace
from kvmesh.mesh.discovery import open_discovery
from kvmesh.protocol.messages import Role
from kvmesh.workers.engines.mock.executor import mock_token
from tests.faults.prompts import LENGTHS, prompt_of
from tests.support.mesh import Mesh, until
from tests.support.own_frontend import OwnFrontend
from tests.support.patience import PATIENCE_S
from tests.support.recovery import RECOVERED_S, slow_without_haste
from tests.support.streams import VOCAB, Stream, check_failed_loudly, check_mock_answer


@pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
def test_a_request_ends_at_its_deadline_and_frees_everything(mesh: Mesh, name: str) -> None:
    pinned = {"kvmesh": {"trace": True, "disaggregate": True, "worker": "decode-0"}}
    with mesh.stopped(name):
        streams = [Stream(mesh.url, prompt_of(n, n), 20, timeout_s=0.5, **pinned) for n in LENGTHS]
        for stream in streams:
            stream.join()
            assert 0.45 < stream.took_s < RECOVERED_S
            check_failed_loudly(stream)
            assert (stream.status, stream.error["code"]) in [(200, "deadline_exceeded"), (504, "deadline_exceeded")]
        until(lambda: mesh.metric("kvmesh_router_in_flight") == 0, what="the bookings to end")
    check_mock_answer(Stream(mesh.url, prompt_of(30), 5, **pinned).join())


def test_stalled_streams_end_at_their_deadline_with_an_error(mesh: Mesh) -> None:
    pinned = {"kvmesh": {"worker": "decode-0"}}
    streams = [Stream(mesh.url, prompt_of(n, n), 1000, timeout_s=1.0, **pinned) for n in LENGTHS]
    for stream in streams:
        stream.until_tokens(5)
    with mesh.stopped("decode-0"):
        for stream in streams:
            check_failed_loudly(stream.join())
            assert 0.95 < stream.took_s < RECOVERED_S
            assert stream.status == 200


def test_a_short_stall_is_only_a_delay(mesh: Mesh) -> None:
    streams = [Stream(mesh.url, prompt_of(n, n), 60) for n in LENGTHS]
    for stream in streams:
        stream.until_tokens(5)
    with mesh.stopped("decode-0", "decode-1", "prefill-0"):
        time.sleep(0.3)
    for stream in streams:
        check_mock_answer(stream.join())
        assert stream.trace["migrations"] == 0


def test_a_worker_stalled_beyond_its_lease_returns(mesh: Mesh) -> None:
    """While it is away requests go elsewhere without a try; then it is found again, with what its cache holds."""
    prompt = prompt_of(200, 3)
    pinned = {"kvmesh": {"trace": True, "disaggregate": False, "worker": "decode-0"}}
    check_mock_answer(Stream(mesh.url, prompt, 5, **pinned).join())
    frontend_log = mesh.run_dir / "logs" / "frontend.log"
    gone = f"worker left worker={mesh.workers()['decode-0'].worker_id}"
    with mesh.stopped("decode-0"):
        until(lambda: gone in frontend_log.read_text(), what="the lease to pass")
        streams = [Stream(mesh.url, prompt_of(n, n), 10) for n in LENGTHS]
        for stream in streams:
            check_mock_answer(stream.join())
            assert (stream.trace["decode_worker"], stream.trace["migrations"]) == ("decode-1", 0)
        refused = Stream(mesh.url, prompt, 5, **pinned).join()
        assert (refused.status, refused.error["code"]) == (503, "no_worker")

    def back() -> bool:
        stream = Stream(mesh.url, prompt, 5, kvmesh={"trace": True}).join()
        check_mock_answer(stream)
        return stream.trace["decode_worker"] == "decode-0" and stream.trace["cached_tokens"] == 192

    until(back, what="decode-0, and the router to know its cache")


# --- in this process, with a lease that outlasts the tests: only silence tells ---------------------------


@pytest_asyncio.fixture
async def frontend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OwnFrontend]:
    slow_without_haste(monkeypatch)
    url = f"file:{tmp_path}"
    flags = ["--role", Role.DECODE.value, "--engine", "mock", "--model-path", str(CHECKPOINT_DIR), "--model", "tiny"]
    flags += ["--kv-transfer", "shm", "--discovery", url]
    processes = [
        subprocess.Popen([sys.executable, "-m", "kvmesh.workers", "--name", name, *flags], stderr=subprocess.DEVNULL)
        for name in ("a", "b")
    ]
    discovery = open_discovery(url)
    frontend = OwnFrontend(discovery)
    await frontend.until_workers(2)
    yield frontend
    for process in processes:
        process.send_signal(signal.SIGCONT)
        process.terminate()
    await frontend.close()
    await discovery.close()
    for process in processes:
        assert process.wait(PATIENCE_S) == 0


async def test_streams_of_a_hung_worker_migrate_within_three_seconds(frontend: OwnFrontend) -> None:
    prompts = [prompt_of(n, n) for n in LENGTHS]
    traces, paces = [Trace() for _ in prompts], [asyncio.Event() for _ in prompts]
    answers = [
        asyncio.create_task(frontend.answer(prompt, 100, trace, pace))
        for prompt, trace, pace in zip(prompts, traces, paces, strict=True)
    ]
    async with asyncio.timeout(PATIENCE_S):
        for pace in paces:
            await pace.wait()
    os.kill(frontend.cards["a"].pid, signal.SIGSTOP)
    async with asyncio.timeout(PATIENCE_S):
        for prompt, answering in zip(prompts, answers, strict=True):
            assert await answering == [mock_token(prompt, i, VOCAB) for i in range(100)]
    assert {trace.migrations for trace in traces} == {0, 1}
    assert {trace.decode_worker for trace in traces} == {"b"}
    assert frontend.longest_gap_s <= RECOVERED_S
    os.kill(frontend.cards["a"].pid, signal.SIGCONT)
    trace, pace = Trace(), asyncio.Event()
    hung_again = frontend.answer([1, 2, 3], 3, trace, pace)
    async with asyncio.timeout(PATIENCE_S):
        assert await hung_again == [mock_token([1, 2, 3], i, VOCAB) for i in range(3)]
