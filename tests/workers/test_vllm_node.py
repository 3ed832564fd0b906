"""A node that does not lead: it computes for another node's worker, and no router hears of it."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from kvmesh.mesh.discovery.memory import MemoryDiscovery
from kvmesh.protocol.errors import ConfigError, EngineError
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.messages import GenerateRequest, pack_tokens
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.engines.opening import open_engine
from kvmesh.workers.engines.vllm.arguments import leads
from kvmesh.workers.engines.vllm.engine import VllmEngine
from kvmesh.workers.engines.vllm.node import VllmNode
from kvmesh.workers.engines.vllm.starting import Starting
from kvmesh.workers.membership import Membership
from tests.support.patience import PATIENCE_S

NODE_1 = "--nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --tensor-parallel-size 2"


class FakeNode:
    """Implements kvmesh.workers.engines.vllm.driver.Node."""

    def __init__(self, flags: Sequence[str], environ: Mapping[str, str]) -> None:
        self.flags = list(flags)
        self.ended = ""
        self.closed = 0

    def failure(self) -> str:
        return self.ended

    async def close(self) -> None:
        self.closed += 1


class RefusingDiscovery(MemoryDiscovery):
    async def put(self, key: str, value: bytes) -> Any:
        raise AssertionError(f"{key} was registered")


def config(engine_args: str, **settings: Any) -> WorkerConfig:
    return msgspec.convert({"model_path": "/m", "engine": "vllm", "engine_args": engine_args, **settings}, WorkerConfig)


@pytest.mark.parametrize(
    ("engine_args", "is_leader"),
    [
        ("", True),
        ("--nnodes 2 --node-rank 0", True),
        (NODE_1, False),
        ("-n 2 -r 1", False),
        ("--node_rank=3", False),
        ("--headless --data-parallel-start-rank 2", False),
    ],
)
def test_the_flags_say_whether_a_node_leads(engine_args: str, is_leader: bool) -> None:
    engine = open_engine(config(engine_args))
    assert isinstance(engine, VllmEngine if is_leader else VllmNode)


def test_a_node_rank_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="--node-rank is 'two'; number the nodes from 0"):
        leads(config("--node-rank two"))


async def test_it_joins_nothing_and_refuses_requests() -> None:
    engine = VllmNode(config(NODE_1), "m", FakeNode)
    discovery = RefusingDiscovery()
    membership = Membership(config(NODE_1), engine, discovery, "")
    try:
        info = await engine.start(WorkerId("w"), "127.0.0.1:1")
        assert not info.serves
        await membership.join(info)
        request = GenerateRequest(request_id=RequestId("r"), model="m", prompt=pack_tokens([1]))
        with pytest.raises(EngineError, match="computes for another; send requests to the node with --node-rank 0"):
            await anext(engine.generate(request))
    finally:
        await engine.stop()
        await membership.close()
        await discovery.close()


async def test_its_health_is_that_of_its_processes() -> None:
    made: list[FakeNode] = []

    def open_fake(flags: Sequence[str], environ: Mapping[str, str]) -> FakeNode:
        made.append(FakeNode(flags, environ))
        return made[0]

    engine = VllmNode(config(NODE_1), "m", open_fake)
    with pytest.raises(EngineError, match="has not started"):
        engine.check_health()
    await engine.start(WorkerId("w"), "127.0.0.1:1")
    engine.check_health()
    made[0].ended = "one of its processes ended"
    with pytest.raises(EngineError, match=r"one of its processes ended.*see its log"):
        engine.check_health()
    await engine.stop()
    await engine.stop()
    assert made[0].closed == 1


@pytest.mark.parametrize(("dp_size", "tells"), [(1, False), (2, True)])
async def test_events_are_told_where_there_is_a_scheduler(dp_size: int, tells: bool) -> None:
    """A part of a rank has none; a whole rank has one, whose events the leading node's worker follows."""
    made: list[FakeNode] = []
    engine = VllmNode(
        config(f"--headless {NODE_1}", dp_size=dp_size),
        "m",
        lambda flags, environ: made.append(FakeNode(flags, environ)) or made[0],  # type: ignore[func-returns-value]
    )
    await engine.start(WorkerId("w"), "127.0.0.1:1")
    assert ("--kv-events-config" in made[0].flags) == tells
    if tells:
        assert json.loads(made[0].flags[made[0].flags.index("--kv-events-config") + 1])["endpoint"] == "tcp://*:0"
    assert "--headless" not in made[0].flags, "the parser of vLLM's engine flags does not know it"
    await engine.stop()


# --- stopping what still starts -------------------------------------------------------------------------


async def test_a_start_without_a_leader_can_be_ended() -> None:
    """The waiting vLLM is a process of its own; without that process the start fails."""
    has_begun = threading.Event()

    def wait_for_a_process() -> None:
        process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
        has_begun.set()
        assert process.wait() == 0, "it was killed"

    starting = Starting(wait_for_a_process)
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.to_thread(has_begun.wait)
        assert await starting.end() is None
    with pytest.raises(AssertionError, match="it was killed"):
        await starting.result()


async def test_what_has_started_meanwhile_is_handed_over_to_be_closed() -> None:
    starting = Starting(lambda: 7)
    assert await starting.result() == 7
    assert await starting.end() == 7
