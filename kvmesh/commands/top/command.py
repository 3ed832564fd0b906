"""Run `kvmesh top`: the live page's feed in a terminal."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from typing import Annotated

import aiohttp
from msgspec import Meta
from rich.console import Console
from rich.live import Live

from kvmesh.commands.http_client import ClientConfig, open_session, refusal_of
from kvmesh.commands.top.view import screen
from kvmesh.frontend.live.fold import ShownMesh, read_message
from kvmesh.mesh.config import load
from kvmesh.protocol.errors import UnreachableError, WireError

SILENT_S = 8.0  # the feed says something twice a second
AGAIN_S = 1.0
MAX_EVENT_BYTES = 32 << 20
NO_PAGE = "the frontend is of an older release, or runs with --no-ui"


class TopConfig(ClientConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_TOP_<NAME>`, that over the TOML file of `--config`, that over the default."""

    filter: Annotated[str, Meta(description="show workers, requests and events with this text alone")] = ""
    once: Annotated[bool, Meta(description="print one picture, after some seconds, and end")] = False


def main(argv: list[str]) -> int:
    config = load(
        TopConfig,
        argv,
        os.environ,
        prefix="KVMESH_TOP_",
        prog="kvmesh top",
        description="Show a running mesh in this terminal: workers, requests, decisions, the planner and events, as "
        "the live page at /ui does. Ctrl-C ends it.",
        section="top",
    )
    try:
        asyncio.run(show(config, Console(file=sys.stdout)))
    except KeyboardInterrupt:
        pass
    return 0


async def show(config: TopConfig, console: Console) -> None:
    """Show the mesh until cancelled, or once. Raise MeshError if nobody answers at the beginning."""
    mesh = ShownMesh()
    if config.once:
        await look_once(config, mesh, messages=6)
        console.print(screen(mesh, config.filter, console.width, console.height))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        has_begun = False
        while True:
            try:
                async for _ in follow(config, mesh):
                    has_begun = True
                    live.update(screen(mesh, config.filter, console.width, console.height), refresh=True)
                problem = "the frontend has ended the feed"
            except UnreachableError as error:
                if not has_begun:
                    raise
                problem = str(error)
            live.update(screen(mesh, config.filter, console.width, console.height, problem), refresh=True)
            await asyncio.sleep(AGAIN_S)


async def look_once(config: TopConfig, mesh: ShownMesh, messages: int) -> None:
    """Take in some messages of the feed: rates need more than one."""
    seen = 0
    async for _ in follow(config, mesh):
        seen += 1
        if seen >= messages:
            return


async def follow(config: TopConfig, mesh: ShownMesh) -> AsyncIterator[None]:
    """Take in the feed; yield after each message. Raise UnreachableError, MeshError for a refusal, WireError."""
    url = f"{config.url.rstrip('/')}/ui/events"
    try:
        async with open_session(config.api_key, config.ca_file, timeout_s=0) as http, http.get(url) as reply:
            if reply.status != 200:
                raise refusal_of(url, reply.status, await reply.content.read(65536), NO_PAGE)
            async for kind, data in read_events(reply.content):
                mesh.take(kind, read_message(data))
                yield
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        why = str(error) or f"it was silent for {SILENT_S:g} s"
        hint = "start a mesh with `kvmesh up`, or set --url"
        raise UnreachableError(f"no live feed at {url}: {why}", hint=hint) from error


async def read_events(content: aiohttp.StreamReader) -> AsyncIterator[tuple[str, bytes]]:
    """Yield the events of a stream: their names and data. Raise WireError for one that is too large, TimeoutError."""
    held = b""
    while True:
        async with asyncio.timeout(SILENT_S):
            part = await content.readany()
        if not part:
            return
        held += part
        *events, held = held.split(b"\n\n")
        if len(held) > MAX_EVENT_BYTES:
            raise WireError(f"an event of the feed has more than {MAX_EVENT_BYTES} bytes")
        for event in events:
            fields = dict(line.split(b": ", 1) for line in event.split(b"\n") if b": " in line)
            if b"data" in fields:
                yield fields.get(b"event", b"").decode(errors="replace"), fields[b"data"]
