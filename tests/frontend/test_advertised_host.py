"""A frontend that listens everywhere says in its card where it can be reached."""

import asyncio
from pathlib import Path

from kvmesh.frontend.config import FrontendConfig
from kvmesh.frontend.service import serve
from kvmesh.mesh.discovery import open_discovery
from kvmesh.protocol.messages import FrontendCard, decode
from kvmesh.router.config import RouterConfig


async def test_the_card_has_the_advertised_host(tmp_path: Path) -> None:
    stop, discovery = asyncio.Event(), open_discovery(f"file:{tmp_path}")
    settings = FrontendConfig(host="0.0.0.0", port=0, advertise_host="10.0.0.7", discovery=f"file:{tmp_path}")
    running = asyncio.create_task(serve(settings, RouterConfig(), stop))
    async for change in discovery.watch("frontends/"):
        assert decode(change.value, FrontendCard).url.startswith("http://10.0.0.7:")
        break
    await discovery.close()
    stop.set()
    await running
