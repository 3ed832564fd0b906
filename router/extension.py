"""The seam for extensions of the router's program: a service that runs in place of the router."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvmesh.router.config import RouterConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterExtension:
    """The endpoint picker, which `--ext-proc-port` asks for: the `EXTENSION` of its module `extension`."""

    serve: Callable[[RouterConfig, asyncio.Event], Awaitable[None]]  # until the event is set
