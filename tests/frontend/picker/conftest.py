"""A running endpoint picker, and workers that are cards alone: nobody answers at their endpoints."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from kvmesh.frontend.picker.service import serve
from kvmesh.mesh.discovery import Discovery, Registration, open_discovery
from kvmesh.protocol.messages import Role, encode_card
from kvmesh.router.config import RouterConfig
from tests.frontend import tiny
from tests.support.gateway import Gateway, connected
from tests.support.patience import PATIENCE_S
from tests.support.ports import free_port


@dataclass
class RunningPicker:
    """A picker with its gateway and the workers that have joined."""

    gateway: Gateway
    port: int
    url: str  # of its HTTP API
    stop: asyncio.Event
    discovery: Discovery
    folder: Path  # of the model
    workers: dict[str, Registration] = field(default_factory=dict)

    async def join(self, name: str, endpoint: str, role: Role = Role.AGGREGATED, **fields: Any) -> None:
        card = replace(tiny.card(name, role, path=self.folder), http_endpoint=endpoint, **fields)
        self.workers[name] = await self.discovery.put(f"workers/{name}", encode_card(card))

    async def leave(self, name: str) -> None:
        await self.workers.pop(name).withdraw()

    async def health(self) -> dict[str, Any]:
        async with httpx.AsyncClient() as client:
            found: dict[str, Any] = (await client.get(f"{self.url}/health")).json()
        return found

    async def in_flight(self) -> int:
        return int((await self.health())["in_flight"])

    async def until(self, holds: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not await holds():
                await asyncio.sleep(0.02)

    async def until_known(self, *names: str) -> None:
        """Wait until the picker knows just these workers, and can read their models."""

        async def knows() -> bool:
            async with httpx.AsyncClient() as client:
                rows = (await client.get(f"{self.url}/workers")).json()["workers"]
            return {row["name"] for row in rows} == set(names)

        await self.until(knows)


@asynccontextmanager
async def running(folder: Path, model: Path, **settings: Any) -> AsyncIterator[RunningPicker]:
    place = f"file:{folder}"
    port, http_port = free_port(), free_port()
    defaults: dict[str, Any] = {"discovery": place, "drain_timeout_s": 0.0, "gossip": False}
    config = RouterConfig(ext_proc_port=port, http_port=http_port, **(defaults | settings))
    stop, discovery = asyncio.Event(), open_discovery(place)
    serving = asyncio.create_task(serve(config, stop))
    try:
        async with connected(port) as gateway:
            picker = RunningPicker(gateway, port, f"http://127.0.0.1:{http_port}", stop, discovery, model)

            async def is_up() -> bool:
                if serving.done():
                    await serving
                try:
                    return bool(await picker.health())
                except httpx.TransportError:
                    return False

            await picker.until(is_up)
            yield picker
    finally:
        await discovery.close()
        stop.set()
        await serving


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def picker(tmp_path: Path, model_folder: Path) -> AsyncIterator[RunningPicker]:
    """A picker with two workers."""
    async with running(tmp_path, model_folder, ext_proc_wait_s=0.3, ramp_s=0.0) as found:
        await found.join("w1", "10.0.0.1:8000")
        await found.join("w2", "10.0.0.2:8000")
        await found.until_known("w1", "w2")
        yield found
