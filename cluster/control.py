"""The control socket of `kvmesh up`: it lists the workers, scales them and changes their roles. HTTP on a Unix socket.

Only the user who runs the mesh can reach the socket: it lies in a folder that is closed to others.
"""

import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

from kvmesh.cluster.crew import Crew
from kvmesh.cluster.run_folder import PREFIX, claim, let_go
from kvmesh.mesh.http.request import Reply, Request, json_reply
from kvmesh.mesh.http.server import App, HttpLimits, Route, listening_unix
from kvmesh.planner.config import CONTROL_FILE
from kvmesh.planner.connectors.local_api import MAX_BODY_BYTES, FlipRequest, ScaleRequest, WorkersReport
from kvmesh.protocol.messages import Role

MAX_PATH_BYTES = 100  # the kernel takes 107
CONTROL_PREFIX = f"{PREFIX}c-"  # short, for the same reason


@asynccontextmanager
async def control_socket(crew: Crew, run_dir: Path) -> AsyncIterator[str]:
    """Answer as long as the block runs; yields `unix:<path>`."""
    with _folder_for(run_dir) as folder:
        path = folder / CONTROL_FILE
        path.unlink(missing_ok=True)  # of a mesh that was killed
        async with listening_unix(application(crew), path) as address:
            yield address


@contextmanager
def _folder_for(run_dir: Path) -> Iterator[Path]:
    """Yield a folder in the run directory, or a temporary one where that path is too long for a socket."""
    own = run_dir / "control"
    if len(os.fsencode(own / CONTROL_FILE)) > MAX_PATH_BYTES:
        temporary = Path(tempfile.mkdtemp(prefix=CONTROL_PREFIX))
        claim(temporary)  # the next mesh removes it if this one is killed
        try:
            yield temporary
        finally:
            let_go(temporary, keep=False)
        return
    own.mkdir(mode=0o700, exist_ok=True)
    own.chmod(0o700)
    try:
        yield own
    finally:
        with suppress(OSError):
            own.rmdir()


def application(crew: Crew) -> App:
    async def workers(_: Request) -> Reply:
        return json_reply(WorkersReport(workers=tuple(crew.reports()), failures=tuple(crew.failures)))

    async def scale(request: Request) -> Reply:
        asked = request.json(ScaleRequest)
        counts = {Role(name): getattr(asked, name) for name in asked.__struct_fields__}
        return json_reply(await crew.scale({role: count for role, count in counts.items() if count is not None}))

    async def flip(request: Request) -> Reply:
        asked = request.json(FlipRequest)
        return json_reply(await crew.flip(Role(asked.to), asked.count))

    routes = [Route("GET", "/workers", workers), Route("POST", "/scale", scale), Route("POST", "/flip", flip)]
    return App(routes, HttpLimits(max_body_bytes=MAX_BODY_BYTES))
