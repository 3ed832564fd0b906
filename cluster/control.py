"""The control socket of `kvmesh up`: it shows, scales and controls the workers. HTTP on a Unix socket.

Only the user who runs the mesh can reach the socket: it lies in a folder that is closed to others.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

from kvmesh.cluster.crew import Crew
from kvmesh.cluster.run_folder import PREFIX, claim, let_go
from kvmesh.frontend.crew import CrewList, WorkerControl
from kvmesh.mesh.http.request import Reply, Request, json_reply
from kvmesh.mesh.http.server import App, HttpLimits, Route, listening_unix
from kvmesh.mesh.short_folder import fits, short_folder
from kvmesh.planner.config import CONTROL_FILE
from kvmesh.planner.connectors.local_api import MAX_BODY_BYTES, FlipRequest, ScaleRequest, WorkersReport
from kvmesh.protocol.messages import Role

CONTROL_PREFIX = f"{PREFIX}c-"  # short, for the same reason


@asynccontextmanager
async def control_socket(
    crew: Crew, run_dir: Path, is_planned: Callable[[], bool] = lambda: False
) -> AsyncIterator[str]:
    """Answer as long as the block runs; yields `unix:<path>`. `is_planned`: a planner decides the counts now."""
    with _folder_for(run_dir) as folder:
        path = folder / CONTROL_FILE
        path.unlink(missing_ok=True)  # of a mesh that was killed
        async with listening_unix(application(crew, is_planned), path) as address:
            yield address


@contextmanager
def _folder_for(run_dir: Path) -> Iterator[Path]:
    """Yield a folder in the run directory. If its path is too long for a socket, it is a link to a temporary one."""
    own = run_dir / "control"
    if own.is_symlink():  # of a mesh that was killed
        own.unlink()
    if not fits(own / CONTROL_FILE):
        temporary = short_folder(CONTROL_PREFIX, CONTROL_FILE)
        claim(temporary)  # the next mesh removes it if this one is killed
        try:
            own.symlink_to(temporary)
            yield temporary
        finally:
            own.unlink(missing_ok=True)
            let_go(temporary, keep=False)
        return
    own.mkdir(mode=0o700, exist_ok=True)
    own.chmod(0o700)
    try:
        yield own
    finally:
        with suppress(OSError):
            own.rmdir()


def application(crew: Crew, is_planned: Callable[[], bool]) -> App:
    async def workers(_: Request) -> Reply:
        reports, failures = tuple(crew.reports()), tuple(crew.failures)
        return json_reply(WorkersReport(workers=reports, failures=failures, is_planned=is_planned()))

    async def scale(request: Request) -> Reply:
        asked = request.json(ScaleRequest)
        counts = {Role(name): getattr(asked, name) for name in asked.__struct_fields__}
        return json_reply(await crew.scale({role: count for role, count in counts.items() if count is not None}))

    async def flip(request: Request) -> Reply:
        asked = request.json(FlipRequest)
        return json_reply(await crew.flip(Role(asked.to), asked.count))

    async def members(_: Request) -> Reply:
        return json_reply(CrewList(await crew.operators.members()))

    async def control(request: Request) -> Reply:
        card = crew.operators.find(request.params["worker"])
        return json_reply(await crew.operators.control(card, request.json(WorkerControl)))

    routes = [
        Route("GET", "/workers", workers),
        Route("POST", "/scale", scale),
        Route("POST", "/flip", flip),
        Route("GET", "/kvmesh/workers", members),  # as a frontend has them, for `kvmesh workers`
        Route("POST", "/kvmesh/workers/{worker}/control", control),
    ]
    return App(routes, HttpLimits(max_body_bytes=MAX_BODY_BYTES))
