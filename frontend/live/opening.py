"""Open the live page of a frontend: on the port of the API, or on a port of its own."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvmesh.frontend.config import FrontendConfig
from kvmesh.frontend.extension import FrontendParts, Run
from kvmesh.frontend.live.hub import LiveHub
from kvmesh.frontend.live.looking import distant_look, local_look
from kvmesh.frontend.live.pages import routes
from kvmesh.frontend.live.picture import Picture, Row
from kvmesh.frontend.live.planners import PlannerFollower
from kvmesh.frontend.whatif.runner import WhatIfRunner
from kvmesh.mesh.http.server import App, HttpLimits, listening
from kvmesh.protocol.version import RELEASE
from kvmesh.router.local import LocalRouter

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 256  # to a port of its own
MAX_BODY_BYTES = 1024  # nobody sends anything


def prepare(config: FrontendConfig) -> Run | None:
    return show if config.ui else None


@asynccontextmanager
async def show(parts: FrontendParts) -> AsyncIterator[None]:
    """Serve the live page to those who may see all requests."""
    if not parts.is_shown:
        log.info("the live page is off: strangers reach the port of the API, and there are no API keys")
        yield
        return
    config, router, dispatcher = parts.config, parts.router, parts.dispatcher
    what_if, admission = parts.shared.find(WhatIfRunner), parts.admission
    hub = LiveHub(
        Picture(about_of(config)), parts.workers, dispatcher, parts.timelines, lambda: admission.inflight, parts.stop
    )
    hub.look = local_look(router) if isinstance(router, LocalRouter) else distant_look(hub.in_flight_by_worker)
    hub.recent = None if what_if is None else what_if.recent
    hub.planners = PlannerFollower(parts.discovery, parts.plane.credentials, hub.planned)
    dispatcher.on_failure = hub.failed
    try:
        if config.ui_port is None:
            parts.routes += routes(hub, what_if)
            yield
            return
        app = App(
            routes(hub, what_if),
            HttpLimits(max_body_bytes=MAX_BODY_BYTES, max_connections=MAX_CONNECTIONS),
            guard=parts.guard,
            allowed_hosts=config.allowed_hosts,
        )
        async with listening(
            app, config.host, config.ui_port, advertise_host=config.advertise_host, tls=parts.tls
        ) as url:
            log.info("the live page is there", extra={"url": f"{url}/ui"})
            yield
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
