"""The seam for extensions of the frontend: what an extension may add to one, and what it gets for that."""

import asyncio
import ssl
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from kvmesh.frontend.admission import Admission
from kvmesh.frontend.config import FrontendConfig
from kvmesh.frontend.dispatch import Dispatcher
from kvmesh.frontend.endpoint import Endpoint, ErrorShape, Handler
from kvmesh.frontend.operation import Kind
from kvmesh.frontend.parts import SharedParts
from kvmesh.frontend.timeline import Timelines
from kvmesh.mesh.discovery import Discovery
from kvmesh.mesh.http.request import Request
from kvmesh.mesh.http.server import Guard, Route
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.router.booking import Router
from kvmesh.router.feeds import WorkerFeed


@dataclass(slots=True, kw_only=True)
class FrontendParts:
    """The parts of a frontend that starts. Extensions read them, and add to the last four."""

    config: FrontendConfig
    tls: ssl.SSLContext | None  # of the API's port
    plane: PlaneClient
    discovery: Discovery
    workers: WorkerFeed
    router: Router
    dispatcher: Dispatcher
    admission: Admission
    timelines: Timelines
    stop: asyncio.Event
    feeds: asyncio.TaskGroup
    following: list[asyncio.Task[None]] = field(default_factory=list)  # cancelled when the frontend has stopped
    guard: Guard | None = None  # lets requests in; None: the API is open to everybody
    routes: list[Route] = field(default_factory=list)  # that are no part of the described API
    shared: SharedParts = field(default_factory=SharedParts)

    @property
    def is_shown(self) -> bool:
        """Return whether those who reach the API may see all requests. A closed mesh shows strangers nothing."""
        return self.guard is not None or self.plane.credentials is None

    def follow(self, work: Coroutine[None, None, None], name: str) -> None:
        """Run `work` until the frontend has stopped. Its failure ends the frontend."""
        self.following.append(self.feeds.create_task(work, name=f"frontend: {name}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsShape:
    """The shape of the list of models for clients of another API, which ask at the same paths as OpenAI's."""

    is_client: Callable[[Request], bool]
    list_models: Handler
    show_model: Handler
    page: Kind
    model: Kind
    error: Kind
    error_body: ErrorShape
    note: str  # to the summary of the endpoint
    query: Mapping[str, str]  # descriptions of its fields, which are texts


Run = Callable[[FrontendParts], AbstractAsyncContextManager[None]]  # around the time in which requests are served


def needs_nothing(config: FrontendConfig) -> None:
    """Check no setting, prepare nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendExtension:
    """The parts that one extension adds to the frontend: the `EXTENSION` of its module `extension`."""

    endpoints: Sequence[Endpoint] = ()
    errors_below: Mapping[str, ErrorShape] = field(default_factory=dict)  # on all paths that begin so
    models: ModelsShape | None = None
    settings: tuple[str, ...] = ()  # those of NEED_EXTENSIONS that it reads
    check: Callable[[FrontendConfig], None] = needs_nothing
    """Raise ConfigError. It is called before `prepare`, and in the process that starts several frontends."""
    prepare: Callable[[FrontendConfig], Run | None] = needs_nothing
    """Read settings and files before anything starts; None where they ask for nothing. Raise ConfigError."""
