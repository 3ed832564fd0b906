"""A network that takes everything and delivers nothing, in one direction or in both: no connection ever breaks."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import pytest_asyncio

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.frontend.generator import Trace
from kvmesh.mesh.discovery import open_discovery
from kvmesh.mesh.discovery.memory import MemoryDiscovery
from kvmesh.protocol.messages import Role, WorkerCard, decode, encode_card
from kvmesh.workers.engines.mock.executor import mock_token
from tests.faults.prompts import LENGTHS, prompt_of
from tests.support.own_frontend import OwnFrontend
from tests.support.patience import PATIENCE_S
from tests.support.proxy import Proxy
from tests.support.recovery import OWN_WAY_S
from tests.support.streams import VOCAB

ONE_WAY = [pytest.param(True, False, marks=pytest.mark.long), pytest.param(False, True, marks=pytest.mark.long)]
DIRECTIONS = [(True, True), *ONE_WAY]


class Mesh(NamedTuple):
    frontend: OwnFrontend
    hole: Proxy  # in front of worker a


@pytest_asyncio.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    """Two decode workers, a and b. The frontend reaches a through a proxy."""
    url = f"file:{tmp_path}"
    flags = ["--role", Role.DECODE.value, "--engine", "mock", "--model-path", str(CHECKPOINT_DIR), "--model", "tiny"]
    flags += ["--kv-transfer", "shm", "--discovery", url]
    processes = [
        subprocess.Popen([sys.executable, "-m", "kvmesh.workers", "--name", name, *flags], stderr=subprocess.DEVNULL)
        for name in ("a", "b")
    ]
    real, shown = open_discovery(url), MemoryDiscovery()
    found: dict[str, WorkerCard] = {}
    async with asyncio.timeout(PATIENCE_S):
        async for change in real.watch("workers/"):
            card = decode(change.value, WorkerCard)
            found[card.name] = card
            if len(found) == 2:
                break
    hole = await Proxy(int(found["a"].address.rpartition(":")[2])).start()
    found["a"] = msgspec.structs.replace(found["a"], address=f"127.0.0.1:{hole.port}")
    for card in found.values():
        await shown.put(f"workers/{card.worker_id}", encode_card(card))
    frontend = OwnFrontend(shown)
    await frontend.until_workers(2)
    yield Mesh(frontend, hole)
    await frontend.close()
    await hole.close()
    await real.close()
    for process in processes:
        process.terminate()
    for process in processes:
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize(("requests", "answers"), DIRECTIONS)
async def test_streams_leave_a_black_hole_within_three_seconds(mesh: Mesh, requests: bool, answers: bool) -> None:
    prompts = [prompt_of(n, n) for n in LENGTHS]
    traces, paces = [Trace() for _ in prompts], [asyncio.Event() for _ in prompts]
    running = [
        asyncio.create_task(mesh.frontend.answer(prompt, 700, trace, pace))
        for prompt, trace, pace in zip(prompts, traces, paces, strict=True)
    ]
    async with asyncio.timeout(PATIENCE_S):
        for pace in paces:
            await pace.wait()
    mesh.hole.swallows_requests, mesh.hole.swallows_answers = requests, answers
    async with asyncio.timeout(PATIENCE_S):
        for prompt, answering in zip(prompts, running, strict=True):
            assert await answering == [mock_token(prompt, i, VOCAB) for i in range(700)]
    assert {trace.migrations for trace in traces} == {0, 1}
    assert mesh.frontend.longest_gap_s <= OWN_WAY_S


@pytest.mark.long
@pytest.mark.parametrize(("requests", "answers"), DIRECTIONS)
async def test_new_requests_avoid_a_known_black_hole(mesh: Mesh, requests: bool, answers: bool) -> None:
    """The first request finds it; then a connection has to show that somebody answers before it gets a call."""
    mesh.hole.swallows_requests, mesh.hole.swallows_answers = requests, answers
    for i in range(12):
        prompt = prompt_of(20, i)
        assert await mesh.frontend.answer(prompt, 5, Trace(), asyncio.Event()) == [
            mock_token(prompt, n, VOCAB) for n in range(5)
        ]
        await asyncio.sleep(0.3)
    assert mesh.frontend.longest_gap_s <= OWN_WAY_S
    assert mesh.hole.calls <= 1


async def test_a_worker_behind_a_healed_black_hole_is_used_again(mesh: Mesh) -> None:
    mesh.hole.swallows_requests = mesh.hole.swallows_answers = True
    for i in range(3):
        await mesh.frontend.answer(prompt_of(20, i), 3, Trace(), asyncio.Event())
    mesh.hole.swallows_requests = mesh.hole.swallows_answers = False
    async with asyncio.timeout(PATIENCE_S):
        for i in range(1000):
            trace = Trace()
            await mesh.frontend.answer(prompt_of(20, i), 3, trace, asyncio.Event())
            if trace.decode_worker == "a":
                return
