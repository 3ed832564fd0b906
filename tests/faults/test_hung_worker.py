"""A worker that is stopped (SIGSTOP): its connections stay open and it says nothing."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
import pytest_asyncio

from cluster.tiny_model import CHECKPOINT_DIR
from frontend.dispatch import Dispatcher
from frontend.generator import Hints, Trace
from mesh.discovery import Discovery, open_discovery
from mesh.plane import link as link_module
from mesh.plane.client import PlaneClient
from protocol.ids import RequestId
from protocol.messages import GenerateRequest, Role, SamplingParams, StopConditions, WorkerCard, pack_tokens
from router.config import RouterConfig
from router.feeds import WorkerFeed
from router.local import LocalRouter
from tests.faults.prompts import LENGTHS, prompt_of
from tests.support.deltas import deltas_of
from tests.support.mesh import Mesh, until
from tests.support.patience import PATIENCE_S
from tests.support.streams import VOCAB, Stream, check_failed_loudly, check_mock_answer
from workers.engines.mock.executor import mock_token


@pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
def test_a_request_ends_at_its_deadline_and_frees_everything(mesh: Mesh, name: str) -> None:
    pinned = {"kvmesh": {"trace": True, "disaggregate": True, "worker": "decode-0"}}
    with mesh.stopped(name):
        streams = [Stream(mesh.url, prompt_of(n, n), 20, timeout_s=0.5, **pinned) for n in LENGTHS]
        for stream in streams:
            stream.join()
            assert 0.45 < stream.took_s < 8
            check_failed_loudly(stream)
            assert (stream.status, stream.error["code"]) in [(200, "deadline_exceeded"), (504, "deadline_exceeded")]
        assert mesh.metric("kvmesh_router_in_flight") == 0
    check_mock_answer(Stream(mesh.url, prompt_of(30), 5, **pinned).join())


def test_stalled_streams_end_at_their_deadline_with_an_error(mesh: Mesh) -> None:
    pinned = {"kvmesh": {"worker": "decode-0"}}
    streams = [Stream(mesh.url, prompt_of(n, n), 1000, timeout_s=1.0, **pinned) for n in LENGTHS]
    for stream in streams:
        stream.until_tokens(5)
    with mesh.stopped("decode-0"):
        for stream in streams:
            check_failed_loudly(stream.join())
            assert 0.95 < stream.took_s < 8
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


# --- in this process, with a keepalive of fractions of a second instead of 5 s --------------------------


class Frontend:
    """A dispatcher over worker processes."""

    def __init__(self, discovery: Discovery) -> None:
        self.plane, workers = PlaneClient(), WorkerFeed()
        self.router = LocalRouter(RouterConfig(), self.plane, workers)
        self.cards: dict[str, WorkerCard] = {}
        workers.listen(lambda card: self.cards.update({card.name: card}), lambda worker_id: None)
        self.dispatcher = Dispatcher(self.router, self.plane, lambda model: 16)
        self.following = asyncio.create_task(workers.run(discovery))

    async def answer(self, prompt: list[int], count: int, trace: Trace, pace: asyncio.Event) -> list[int]:
        """Sets `pace` with the third token."""
        request = GenerateRequest(
            request_id=RequestId(f"r{prompt}"),
            model="tiny",
            prompt=pack_tokens(prompt),
            sampling=SamplingParams(temperature=0),
            stop=StopConditions(max_tokens=count, ignore_eos=True),
        )
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        tokens: list[int] = []
        async with aclosing(deltas_of(self.dispatcher, request, Hints(), trace, deadline)) as deltas:
            async for delta in deltas:
                tokens += delta.token_ids
                if len(tokens) >= 3:
                    pace.set()
        return tokens

    async def close(self) -> None:
        self.following.cancel()
        await asyncio.wait([self.following])
        await self.dispatcher.close()
        await self.router.close()
        await self.plane.close()


@pytest_asyncio.fixture
async def frontend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Frontend]:
    monkeypatch.setattr(link_module, "KEEPALIVE_S", 0.1)
    url = f"file:{tmp_path}"
    flags = ["--role", Role.DECODE.value, "--engine", "mock", "--model-path", str(CHECKPOINT_DIR), "--model", "tiny"]
    flags += ["--kv-transfer", "shm", "--discovery", url]
    processes = [
        subprocess.Popen([sys.executable, "-m", "workers", "--name", name, *flags], stderr=subprocess.DEVNULL)
        for name in ("a", "b")
    ]
    discovery = open_discovery(url)
    frontend = Frontend(discovery)
    async with asyncio.timeout(PATIENCE_S):
        while len(frontend.cards) < 2:
            await asyncio.sleep(0.01)
    yield frontend
    for process in processes:
        process.send_signal(signal.SIGCONT)
        process.terminate()
    await frontend.close()
    await discovery.close()
    for process in processes:
        assert process.wait(PATIENCE_S) == 0


async def test_streams_of_a_hung_worker_migrate_after_the_keepalive(frontend: Frontend) -> None:
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
    os.kill(frontend.cards["a"].pid, signal.SIGCONT)
    trace, pace = Trace(), asyncio.Event()
    hung_again = frontend.answer([1, 2, 3], 3, trace, pace)
    async with asyncio.timeout(PATIENCE_S):
        assert await hung_again == [mock_token([1, 2, 3], i, VOCAB) for i in range(3)]
