"""The control socket of `kvmesh up`: who works here, more or fewer of them, other roles. HTTP on a Unix socket.

Only the user who runs the mesh can reach it: it lies in a folder that is closed to others.
"""

import logging
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec
from aiohttp import web

from cluster.crew import Crew
from mesh.http.errors import error_body, http_failure
from planner.config import CONTROL_FILE
from planner.connectors.local_api import MAX_BODY_BYTES, FlipRequest, ScaleRequest, WorkersReport
from protocol.errors import InvalidRequestError, MeshError
from protocol.messages import Role

log = logging.getLogger(__name__)

MAX_PATH_BYTES = 100  # the kernel takes 107
SHUTDOWN_S = 2.0  # for calls that are being answered
T = TypeVar("T")


@asynccontextmanager
async def control_socket(crew: Crew, run_dir: Path) -> AsyncIterator[str]:
    """Answer as long as the block runs; `unix:<path>`, where."""
    with _folder_for(run_dir) as folder:
        path = Path(folder) / CONTROL_FILE
        path.unlink(missing_ok=True)  # of a mesh that was killed
        runner = web.AppRunner(application(crew), access_log=None, shutdown_timeout=SHUTDOWN_S)
        await runner.setup()
        try:
            await web.UnixSite(runner, str(path)).start()
            yield f"unix:{path}"
        finally:
            await runner.cleanup()
            path.unlink(missing_ok=True)


class _folder_for:  # noqa: N801 - a context manager
    """In the run directory, or in a folder of its own where that path is too long for a socket."""

    def __init__(self, run_dir: Path) -> None:
        self._own = run_dir / "control"
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> str:
        if len(os.fsencode(self._own / CONTROL_FILE)) > MAX_PATH_BYTES:
            self._temporary = tempfile.TemporaryDirectory(prefix="mesh-control-")
            return self._temporary.name
        self._own.mkdir(mode=0o700, exist_ok=True)
        self._own.chmod(0o700)
        return str(self._own)

    def __exit__(self, *args: object) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()
        else:
            with suppress(OSError):
                self._own.rmdir()


def application(crew: Crew) -> web.Application:
    app = web.Application(client_max_size=MAX_BODY_BYTES)

    async def workers(request: web.Request) -> object:
        return WorkersReport(workers=tuple(crew.reports()), failures=tuple(crew.failures))

    async def scale(request: web.Request) -> object:
        asked = await read(request, ScaleRequest)
        counts = {Role(name): getattr(asked, name) for name in asked.__struct_fields__}
        return await crew.scale({role: count for role, count in counts.items() if count is not None})

    async def flip(request: web.Request) -> object:
        asked = await read(request, FlipRequest)
        return await crew.flip(Role(asked.to), asked.count)

    app.add_routes([web.get("/workers", told(workers)), web.post("/scale", told(scale)), web.post("/flip", told(flip))])
    return app


async def read(request: web.Request, kind: type[T]) -> T:
    """Raises InvalidRequestError."""
    try:
        return msgspec.json.decode(await request.read(), type=kind)
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f"the body is not what is asked here: {error}") from error


def told(answer: Callable[[web.Request], Awaitable[object]]) -> Callable[[web.Request], Awaitable[web.Response]]:
    """The one place where a failure becomes a reply."""

    async def respond(request: web.Request) -> web.Response:
        try:
            body, status = msgspec.json.encode(await answer(request)), 200
        except MeshError as error:
            body, status = error_body(error), http_failure(error.code).status
        return web.Response(body=body, status=status, content_type="application/json")

    return respond
