"""Run `kvmesh announce`: publish a running server until Ctrl-C, so that `kvmesh attach --discover` attaches it.

It is for the program that starts servers, because that program knows their addresses and roles.
"""

import asyncio
import os
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvmesh.cluster.attach.command import split_urls
from kvmesh.cluster.attach.servers import ANNOUNCED, ServerEntry, name_of
from kvmesh.mesh.config import load
from kvmesh.mesh.discovery import DiscoveryUrl, open_discovery
from kvmesh.mesh.discovery.file import leaving_no_folder
from kvmesh.mesh.lifecycle import run
from kvmesh.mesh.telemetry import LogLevel
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.messages import Role


class AnnounceConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_ANNOUNCE_<NAME>`, that over [announce] of `--config`, that over the default."""

    name: Annotated[str, Meta(description="name of its worker in the mesh; default: host-port")] = ""
    role: Annotated[Role, Meta(description="role of the server")] = Role.AGGREGATED
    kv_events: Annotated[str, Meta(description="its KV events, tcp://host:port; default: it is asked")] = ""
    replay: Annotated[str, Meta(description="their replay socket")] = ""
    model: Annotated[str, Meta(description="model, as the server calls it; default: the one it has")] = ""
    model_path: Annotated[str, Meta(description="folder of its tokenizer, where `kvmesh attach` runs")] = ""
    discovery: DiscoveryUrl = "file:.run/discovery"
    log_level: LogLevel = "info"


def main(argv: list[str]) -> int:
    urls, flags = split_urls(argv)
    config = load(
        AnnounceConfig,
        flags,
        os.environ,
        prefix="KVMESH_ANNOUNCE_",
        prog="kvmesh announce",
        description="Publish a running server in discovery until Ctrl-C: `kvmesh announce http://host:8000`.",
        section="announce",
    )
    if len(urls) != 1:
        raise ConfigError(f"{len(urls)} servers to announce", hint="`kvmesh announce http://host:port`, one at a time")
    entry = entry_of(config, urls[0])
    with leaving_no_folder(config.discovery):
        return run(lambda stop: announce(config.discovery, entry, stop))


def entry_of(config: AnnounceConfig, url: str) -> ServerEntry:
    """Raises ConfigError for what is no URL."""
    return ServerEntry(
        url=url,
        name=config.name or name_of(url),
        role=config.role,
        kv_events=config.kv_events,
        replay=config.replay,
        model=config.model,
        model_path=config.model_path,
    )


async def announce(discovery_url: str, entry: ServerEntry, stop: asyncio.Event) -> None:
    discovery = open_discovery(discovery_url)
    try:
        await discovery.put(f"{ANNOUNCED}{entry.name}", msgspec.json.encode(entry))
        await stop.wait()
    finally:
        await discovery.close()
