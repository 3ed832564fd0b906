"""Run a router by itself: frontends ask it over the request plane, gateways over HTTP."""

import asyncio
import logging
from contextlib import AsyncExitStack, suppress

from kvmesh.mesh.discovery import open_discovery, standing_calls
from kvmesh.mesh.exposition import labelled
from kvmesh.mesh.http.door import Door, door_of
from kvmesh.mesh.http.server import listening
from kvmesh.mesh.identity.credentials import Credentials
from kvmesh.mesh.identity.metrics import using
from kvmesh.mesh.identity.names import MeshRole
from kvmesh.mesh.lifecycle import unless_stopped, watch_parent
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.mesh.plane.probing import PeerProbing
from kvmesh.mesh.plane.server import Call, Handler, PlaneServer
from kvmesh.mesh.telemetry import log_ready, serve_metrics
from kvmesh.protocol.messages import Progress, Resume, RouteRequest, RouterIdentity, decode, encode_card
from kvmesh.router.config import RouterConfig
from kvmesh.router.feeds import WorkerFeed, tell_missing
from kvmesh.router.http import RouterApi
from kvmesh.router.local import LocalBooking, LocalRouter

log = logging.getLogger(__name__)

STILL_WAITING_S = 1.0
FIRST_NEWS_S = 1.5  # of workers, before frontends hear of this router


async def serve(config: RouterConfig, stop: asyncio.Event) -> None:
    """Place requests until `stop` is set; then place no more, and wait for the bookings to end."""
    watch_parent(stop)
    async with AsyncExitStack() as cleanup:
        credentials = await cleanup.enter_async_context(using(config.mesh_tls, MeshRole.ROUTER, config.name))
        cleanup.enter_context(labelled("router", config.namespace))
        door = door_of(credentials, answers_probes=config.mesh_probes)
        open_metrics_port(config, door, cleanup)
        plane = PlaneClient(credentials)
        cleanup.push_async_callback(plane.close)
        workers = WorkerFeed(plane)
        router = LocalRouter(config, plane, workers)
        cleanup.push_async_callback(router.close)
        discovery = open_discovery(config.discovery, credentials)
        server = PlaneServer(
            handlers(router, credentials),
            always={"progress"},
            standing=standing_calls(discovery),
            credentials=credentials,
        )
        cleanup.push_async_callback(server.close)
        address = await server.start(config.host, config.port, advertise_host=config.advertise_host)
        api = RouterApi(router, workers, int(config.max_body_mib * 2**20), config.max_bookings)
        api.app.allowed_hosts = config.allowed_hosts
        url = await cleanup.enter_async_context(
            listening(api.app, config.host, config.http_port, advertise_host=config.advertise_host, door=door)
        )
        cleanup.push_async_callback(discovery.close)
        async with asyncio.TaskGroup() as feeds:
            follow = [feeds.create_task(workers.run(discovery), name="router: follow workers")]
            missing = tell_missing(lambda: bool(router.state.fleet.cards), workers.report)
            follow.append(feeds.create_task(missing, name="router: tell of missing workers"))
            if router.gossip is not None:
                follow.append(feeds.create_task(router.gossip.run(discovery), name="router: follow routers"))
            await unless_stopped(heard_of(workers), stop)
            if not stop.is_set():
                await discovery.put(f"routers/{config.name}", encode_card(router.card(address, url)))
                log_ready(log, metrics=f"{url}/metrics", discovery=config.discovery, address=address, url=url)
                await stop.wait()
                # no new placements; running requests still count, and the other routers hear of them
                await discovery.put(f"routers/{config.name}", encode_card(router.card()))
            await drain(server, api, config.drain_timeout_s)
            for feed in follow:
                feed.cancel()


async def heard_of(workers: WorkerFeed) -> None:
    """Wait a moment for the first news of workers: a router that knows none would refuse what others could place."""
    with suppress(TimeoutError):
        async with asyncio.timeout(FIRST_NEWS_S):
            await workers.seen.wait()


async def drain(server: PlaneServer, api: RouterApi, timeout_s: float) -> None:
    log.info("draining")
    cut_off, _ = await asyncio.gather(server.drain(timeout_s), api.drain(timeout_s))
    if cut_off:
        log.warning("stopped with %d bookings open after %.1f s", cut_off, timeout_s)


def open_metrics_port(config: RouterConfig, door: Door | None, cleanup: AsyncExitStack) -> None:
    """Serve /metrics on a port of its own, if the settings name one. Raise ConfigError."""
    if config.metrics_port is None:
        return
    _, close_metrics = serve_metrics(
        config.host,
        config.metrics_port,
        advertise_host=config.advertise_host,
        door=door,
        allowed_hosts=config.allowed_hosts,
    )
    cleanup.push_async_callback(asyncio.to_thread, close_metrics)


def handlers(router: LocalRouter, credentials: Credentials | None = None) -> dict[str, Handler]:
    async def place(call: Call) -> None:
        """Place, and keep the answer open: it is the booking's lease, which ends with the caller.

        The answer begins with one None for each STILL_WAITING_S that the request waits: a silent router is taken for
        dead.
        """
        request = decode(call.body, RouteRequest)
        placing = asyncio.create_task(router.place(request, call.timeout_s), name=f"place {request.request_id}")
        try:
            while not (await asyncio.wait([placing], timeout=STILL_WAITING_S))[0]:
                await call.send(None)
        except BaseException:
            placing.add_done_callback(end_if_placed)
            placing.cancel()
            raise
        await hold(call, placing.result())

    async def resume(call: Call) -> None:
        held = decode(call.body, Resume)
        await hold(call, router.resume(held.request, held.placed, held.progress))

    async def hold(call: Call, booking: LocalBooking) -> None:
        """Keep the booking until the caller leaves. How its request ended is not said; if it has begun, it is ok."""
        try:
            await call.send(booking.placed)
            await asyncio.Event().wait()
        finally:
            booking.end(ok=booking.has_begun)

    async def progress(call: Call) -> None:
        told = decode(call.body, Progress)
        if (booking := router.booking(told.request_id)) is not None:
            if told.has_begun:
                booking.prefill_done(told.reused_tokens)
            if told.has_finished:
                booking.finished(told.osl_tokens)
            else:
                booking.progress(told.osl_tokens)

    async def preview(call: Call) -> None:
        await call.send(await router.preview(decode(call.body, RouteRequest), call.timeout_s))

    async def identify(call: Call) -> None:
        await call.send(RouterIdentity(name=router.name))

    asked = {"place": place, "resume": resume, "progress": progress, "preview": preview, "identify": identify}
    return {**asked, **PeerProbing(credentials=credentials).handlers()}


def end_if_placed(placing: asyncio.Task[LocalBooking]) -> None:
    """End the booking of a request whose caller left while it was placed."""
    if not placing.cancelled() and placing.exception() is None:
        placing.result().end(ok=False)
