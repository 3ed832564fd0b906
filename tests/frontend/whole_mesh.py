"""A mesh in a thread of this process: a frontend with its router, and two mock workers whose model has a small context.

All that a request passes through is real, the sockets between frontend and workers too; only what computes is not.
Answers are short because the context is: a request that sets no limit is as cheap as any.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx

from kvmesh.frontend.config import FrontendConfig
from kvmesh.frontend.service import serve
from kvmesh.kvcache.transfer.shm import ShmBackend
from kvmesh.mesh.discovery import open_discovery
from kvmesh.mesh.plane.server import PlaneServer
from kvmesh.protocol.messages import FrontendCard, Role, decode
from kvmesh.router.config import RouterConfig
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.engines.mock.executor import MockExecutor
from kvmesh.workers.engines.mock.vocabulary import read_vocabulary
from kvmesh.workers.membership import Membership
from kvmesh.workers.service import Worker
from kvmesh.workers.step_engine import StepEngine, StepEngineConfig

MODEL = "tiny"
WORKER = "worker-0"
PREFILL_WORKER = "prefill-0"
ADAPTER = "adapter"
START_S = 60.0
PARSERS = {"tool_parser": "hermes", "reasoning_parser": "qwen3"}
LOOPBACK = "127.0.0.1"


@contextmanager
def whole_mesh(folder: Path, model_path: Path, context_tokens: int, **settings: Any) -> Iterator[str]:
    """The URL of the frontend, which has `settings`. `folder`: for discovery."""
    url: list[str] = []
    is_up, stop_soon = threading.Event(), threading.Event()

    async def run() -> None:
        place = f"file:{folder}"
        async with (
            running_frontend(place, **settings) as found,
            running_worker(PREFILL_WORKER, Role.PREFILL, place, model_path, context_tokens),
            running_worker(WORKER, Role.AGGREGATED, place, model_path, context_tokens),
        ):
            await _until_ready(found)
            url.append(found)
            is_up.set()
            await asyncio.to_thread(stop_soon.wait)

    def run_and_tell() -> None:
        try:
            asyncio.run(run())
        finally:
            is_up.set()

    thread = threading.Thread(target=run_and_tell, name="mesh of a test")
    thread.start()
    try:
        assert is_up.wait(START_S) and url, "the mesh has not come up"
        yield url[0]
    finally:
        stop_soon.set()
        thread.join(START_S)
        assert not thread.is_alive()


@asynccontextmanager
async def running_frontend(place: str, **more: Any) -> AsyncIterator[str]:
    """Run a frontend with its router in this event loop; yield its URL."""
    stop, discovery = asyncio.Event(), open_discovery(place)
    settings = FrontendConfig(port=0, discovery=place, drain_timeout_s=0, responses_store="memory", **more)
    running = asyncio.create_task(serve(settings, RouterConfig(), stop))
    try:
        async for change in discovery.watch("frontends/"):
            yield decode(change.value, FrontendCard).url
            break
    finally:
        await discovery.close()
        stop.set()
        await running


@asynccontextmanager
async def running_worker(
    name: str, role: Role, place: str, model_path: Path, context_tokens: int
) -> AsyncIterator[None]:
    config = WorkerConfig(name=name, engine="mock", role=role, model_path=str(model_path), model=MODEL, **PARSERS)
    executor = MockExecutor(
        block_size=config.block_size,
        vocabulary=read_vocabulary(model_path),
        context_tokens=context_tokens,
        speedup=0,
        loras=(ADAPTER,),
    )
    limits = StepEngineConfig(
        model=MODEL,
        model_path=str(model_path),
        num_blocks=config.num_blocks,
        max_num_seqs=128,
        max_step_tokens=4096,
        offer_lease_s=1.0,
        pull_timeout_s=1.0,
    )
    engine, discovery = StepEngine(executor, ShmBackend(), limits), open_discovery(place)
    membership = Membership(config, engine, discovery, "")
    worker = Worker(engine, membership)
    server = PlaneServer(worker.handlers())
    membership.address = await server.start(LOOPBACK, 0)
    try:
        worker.info = await engine.start(membership.worker_id, membership.address)
        membership.follow_caches()
        await membership.join(worker.info)
        yield
    finally:
        await discovery.close()
        await engine.stop()
        await server.close()
        await membership.close()


async def _until_ready(url: str) -> None:
    """Wait until the frontend has seen both workers."""
    async with httpx.AsyncClient(base_url=url) as http:
        while sum((await http.get("/health")).json()["workers"].get(MODEL, {}).values()) < 2:
            await asyncio.sleep(0.02)
