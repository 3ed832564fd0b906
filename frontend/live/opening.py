"""Open the live page of a frontend: on the port of the API, or on a port of its own."""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from kvmesh.frontend.admission import Admission
from kvmesh.frontend.config import FrontendConfig
from kvmesh.frontend.dispatch import Dispatcher
from kvmesh.frontend.http import HttpSettings
from kvmesh.frontend.keys.guard import Doorkeeper
from kvmesh.frontend.live.hub import LiveHub
from kvmesh.frontend.live.looking import distant_look, local_look
from kvmesh.frontend.live.pages import home, routes
from kvmesh.frontend.live.picture import Picture, Row
from kvmesh.frontend.live.planners import PlannerFollower
from kvmesh.frontend.timeline import Timelines
from kvmesh.frontend.whatif.fleet import KnownFleet
from kvmesh.frontend.whatif.recent import RecentRequests
from kvmesh.frontend.whatif.runner import WhatIfRunner
from kvmesh.mesh.discovery import Discovery
from kvmesh.mesh.http.server import App, HttpLimits, Route, listening
from kvmesh.mesh.identity.credentials import Credentials
from kvmesh.protocol.version import RELEASE
from kvmesh.router.booking import Router
from kvmesh.router.feeds import WorkerFeed
from kvmesh.router.local import LocalRouter

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 256  # to a port of its own
MAX_BODY_BYTES = 1024  # nobody sends anything


@dataclass(frozen=True, slots=True)
class LiveParts:
    """The parts of a frontend that the page shows."""

    router: Router
    dispatcher: Dispatcher
    workers: WorkerFeed
    discovery: Discovery
    admission: Admission
    timelines: Timelines
    what_if: WhatIfRunner
    is_shown: bool  # to those who reach the port of the API, or have a key

    def of_api(self, further: Sequence[Route]) -> dict[str, Any]:
        """Return what the API shares with the page, as arguments of FrontendApi."""
        what_if = self.what_if if self.is_shown else None
        return {"admission": self.admission, "timelines": self.timelines, "further": further, "what_if": what_if}


def live_parts(
    config: FrontendConfig,
    router: Router,
    dispatcher: Dispatcher,
    workers: WorkerFeed,
    discovery: Discovery,
    settings: HttpSettings,
    guard: Doorkeeper | None,
) -> LiveParts:
    """Return what the page and what-if questions need. Strangers at a closed mesh's port are shown nothing."""
    timelines = Timelines()
    fleet = KnownFleet(workers, router, settings.slo, has_siblings=bool(config.shares_port_with))
    return LiveParts(
        router,
        dispatcher,
        workers,
        discovery,
        Admission(settings.max_inflight),
        timelines,
        WhatIfRunner(RecentRequests(timelines), fleet.meshes),
        is_shown=guard is not None or not settings.is_closed,
    )


@asynccontextmanager
async def live_page(
    config: FrontendConfig,
    parts: LiveParts,
    credentials: Credentials | None,
    guard: Doorkeeper | None,
    tls: ssl.SSLContext | None,
    stop: asyncio.Event,
) -> AsyncIterator[Sequence[Route]]:
    """Serve the live page; yield the routes that it needs on the port of the API."""
    if not config.ui:
        yield (home("/docs"),)
        return
    if not parts.is_shown:
        log.info("the live page is off: strangers reach the port of the API, and there are no API keys")
        yield (home("/docs"),)
        return
    router, dispatcher, admission = parts.router, parts.dispatcher, parts.admission
    hub = LiveHub(
        Picture(about_of(config)), parts.workers, dispatcher, parts.timelines, lambda: admission.inflight, stop
    )
    hub.look = local_look(router) if isinstance(router, LocalRouter) else distant_look(hub.in_flight_by_worker)
    hub.recent = parts.what_if.recent
    hub.planners = PlannerFollower(parts.discovery, credentials, hub.planned)
    dispatcher.on_failure = hub.failed
    try:
        if config.ui_port is None:
            yield routes(hub, parts.what_if)
            return
        app = App(
            routes(hub, parts.what_if),
            HttpLimits(max_body_bytes=MAX_BODY_BYTES, max_connections=MAX_CONNECTIONS),
            guard=guard,
            allowed_hosts=config.allowed_hosts,
        )
        async with listening(app, config.host, config.ui_port, advertise_host=config.advertise_host, tls=tls) as url:
            log.info("the live page is there", extra={"url": f"{url}/ui"})
            yield (home("/docs"),)
    finally:
        await hub.close()


def about_of(config: FrontendConfig) -> Row:
    """Return who shows the page, and where its figures come from."""
    if config.router == "embedded":
        loads = "Loads and caches: the router of this frontend, with what all routers have placed."
    else:
        loads = "Loads: the requests of this frontend alone. Caches are not known here, because no router runs in it."
    if config.shares_port_with:
        requests = "Requests, decisions and rates: those of one process of this frontend; it has several."
    else:
        requests = "Requests, decisions and rates: those of this frontend."
    return {"frontend": config.name, "release": RELEASE, "router": config.router, "sees": f"{loads} {requests}"}
