"""Open the store of responses that a setting names, and keep it while the frontend runs."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from kvmesh.frontend.config import FrontendConfig
from kvmesh.frontend.extension import FrontendParts, Run
from kvmesh.frontend.responses.directory_store import DirectoryStore
from kvmesh.frontend.responses.memory_store import MemoryStore
from kvmesh.frontend.responses.retention import StoreLimits
from kvmesh.frontend.responses.state import KeptResponses
from kvmesh.frontend.responses.store import ResponseStore
from kvmesh.protocol.errors import ConfigError

OFF, MEMORY, DIRECTORY = "off", "memory", "dir:"


def check(config: FrontendConfig) -> None:
    """Raise ConfigError for a store that does not exist, or that the processes of one port cannot share."""
    setting = config.responses_store
    is_directory = setting.startswith(DIRECTORY) and setting != DIRECTORY
    if setting not in (OFF, MEMORY) and not is_directory:
        raise ConfigError(f"no store of responses {setting!r}", hint="set --responses-store to off, memory or dir:PATH")
    if setting == MEMORY and (config.processes > 1 or config.shares_port_with):
        raise ConfigError(
            "--responses-store memory is one process's own, and another one would not find its responses",
            hint="use dir:PATH with --processes",
        )


def open_store(config: FrontendConfig) -> ResponseStore | None:
    """Return the store, None for `off`. Raise ConfigError."""
    limits = StoreLimits(
        max_count=config.responses_max,
        max_bytes=int(config.responses_max_mib * 2**20),
        ttl_s=config.responses_ttl_s,
    )
    if config.responses_store == OFF:
        return None
    if config.responses_store == MEMORY:
        return MemoryStore(limits)
    return DirectoryStore(Path(config.responses_store.removeprefix(DIRECTORY)), limits)


def prepare(config: FrontendConfig) -> Run | None:
    """Open the store. Raise ConfigError."""
    store = open_store(config)
    return None if store is None else partial(keep, store)


@asynccontextmanager
async def keep(store: ResponseStore, parts: FrontendParts) -> AsyncIterator[None]:
    """Keep the stored responses in order, and close them at the end."""
    responses = KeptResponses(store, parts.config.responses_background, is_keyed=parts.guard is not None)
    parts.shared.add(responses)
    parts.follow(responses.run(), "keep responses")
    try:
        yield
    finally:
        await responses.close()
