"""Run one frontend: the HTTP API in front, a router beside, the workers behind."""

import asyncio
import logging
import os
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from kvmesh.frontend import metrics
from kvmesh.frontend.access_log import AccessLogFile
from kvmesh.frontend.admission import Admission
from kvmesh.frontend.config import FrontendConfig
from kvmesh.frontend.crew import WorkerCrew
from kvmesh.frontend.direct import DirectRouter
from kvmesh.frontend.dispatch import Dispatcher
from kvmesh.frontend.extension import FrontendParts
from kvmesh.frontend.home import HOME, home
from kvmesh.frontend.http import FrontendApi, HttpSettings
from kvmesh.frontend.model_files import ModelFolders, default_cache_dir
from kvmesh.frontend.models import ModelRegistry
from kvmesh.frontend.presence import NEVER, MeshPresence
from kvmesh.frontend.security import open_to, tls_context
from kvmesh.frontend.service_level import ServiceLevel
from kvmesh.frontend.table import EXTENSIONS, check_settings
from kvmesh.frontend.timeline import Timelines
from kvmesh.frontend.tracing import Tracing
from kvmesh.mesh.discovery import Discovery, open_discovery
from kvmesh.mesh.exposition import labelled
from kvmesh.mesh.http.cors import Cors
from kvmesh.mesh.http.door import Door
from kvmesh.mesh.http.server import Guard, Leaving, Route, listening, log_line
from kvmesh.mesh.identity.credentials import Credentials
from kvmesh.mesh.identity.metrics import using
from kvmesh.mesh.identity.names import MeshRole
from kvmesh.mesh.lifecycle import unless_stopped, watch_parent
from kvmesh.mesh.merged_metrics import ready_file, sharing
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.mesh.telemetry import log_ready
from kvmesh.protocol.ids import new_generation
from kvmesh.protocol.messages import FrontendCard, encode_card
from kvmesh.protocol.version import RELEASE
from kvmesh.router.booking import Router
from kvmesh.router.client import RemoteRouter
from kvmesh.router.config import RouterConfig
from kvmesh.router.down import DownWorkers
from kvmesh.router.fallback import FallbackRouter
from kvmesh.router.feeds import LinkWatch, WorkerFeed, tell_missing
from kvmesh.router.findings import DiscoveryReport
from kvmesh.router.local import LocalRouter
from kvmesh.router.rules import DEFAULT_SLO_ITL_S

log = logging.getLogger(__name__)

CUT_OFF_S = 2.0  # for telling the clients of requests that are cut off
FIRST_NEWS_S = 3.0  # until discovery has told its workers
NEWS_LOOK_S = 0.02
HEARD_S = 0.05  # for what was told to reach those who listen
FIRST_WORKER_S = 3.0  # after the start, in which requests wait for a worker


async def serve(config: FrontendConfig, router_config: RouterConfig, stop: asyncio.Event) -> None:
    """Answer until `stop` is set, then finish what is in flight."""
    watch_parent(stop)
    check_settings(config)
    tls = tls_context(config.tls_cert, config.tls_key, config.tls_client_ca)
    cors = open_to(config.cors_origins)
    runs = [run for extension in EXTENSIONS if (run := extension.prepare(config)) is not None]
    async with AsyncExitStack() as cleanup:
        cleanup.enter_context(labelled("frontend", config.namespace))
        credentials = await cleanup.enter_async_context(using(config.mesh_tls, MeshRole.FRONTEND))
        plane = PlaneClient(credentials)
        cleanup.push_async_callback(plane.close)
        discovery = open_discovery(config.discovery, credentials)
        cleanup.push_async_callback(discovery.close)
        async with asyncio.TaskGroup() as feeds:
            models, down = open_registry(config, plane), DownWorkers()
            workers = worker_feed(plane, models)
            opened = await open_router(config, router_config, plane, workers, discovery, cleanup)
            parts = open_parts(config, tls, discovery, workers, models, opened, feeds, stop, plane)
            for run in runs:
                await cleanup.enter_async_context(run(parts))
            search = partial(searched, workers, models, down)
            follow_workers(parts, models, down, search)  # only now: whoever listens hears of every worker
            api = await open_api(parts, models, opened, search, cleanup)
            configure(api, config, parts.guard, cors, cleanup)
            await unless_stopped(hear(discovery, models), stop)
            if not stop.is_set():
                await serve_clients(config, api, discovery, credentials, tls, stop)
            await parts.dispatcher.close()
            for feed in parts.following:
                feed.cancel()


def open_parts(
    config: FrontendConfig,
    tls: ssl.SSLContext | None,
    discovery: Discovery,
    workers: WorkerFeed,
    models: ModelRegistry,
    opened: "OpenedRouter",
    feeds: asyncio.TaskGroup,
    stop: asyncio.Event,
    plane: PlaneClient,
) -> FrontendParts:
    """Return the parts that extensions read, and follow the owners of workers and the other routers."""
    presence = MeshPresence(workers, workers.resting)
    models.is_awaited = lambda model: presence.waits_for_model(model) > NEVER
    parts = FrontendParts(
        config=config,
        tls=tls,
        plane=plane,
        discovery=discovery,
        workers=workers,
        router=opened.router,
        dispatcher=Dispatcher(opened.router, plane, lambda name: models.find(name).facts.block_size, presence),
        admission=Admission(config.max_inflight),
        timelines=Timelines(),
        stop=stop,
        feeds=feeds,
    )
    parts.follow(presence.run(discovery), "follow owners of workers")
    if opened.run is not None:
        parts.follow(opened.run, "follow routers")
    return parts


async def open_api(
    parts: FrontendParts,
    models: ModelRegistry,
    opened: "OpenedRouter",
    search: Callable[[], DiscoveryReport],
    cleanup: AsyncExitStack,
) -> FrontendApi:
    """Return the application, and let the gauges read what is known when they are scraped."""
    config = parts.config
    folder = Path(config.shares_port_with) if config.shares_port_with else None
    if folder is not None:
        await cleanup.enter_async_context(sharing(folder))
    settings = settings_of(config, parts.plane.credentials)
    observe(models, search, settings.slo)
    return FrontendApi(
        settings,
        models,
        parts.dispatcher,
        opened.is_ready,
        folder,
        parts=parts.shared,
        search=search,
        router_note=opened.note,
        timelines=parts.timelines,
        crew=WorkerCrew(parts.plane, lambda: [*models.cards(), *parts.workers.resting.values()]),
        further=with_home(parts.routes),
        admission=parts.admission,
    )


def with_home(routes: Sequence[Route]) -> Sequence[Route]:
    """Return the routes, with one for `/`: where no page has it, it leads to the description of the API."""
    return routes if any(route.path == HOME for route in routes) else [*routes, home("/docs")]


async def serve_clients(
    config: FrontendConfig,
    api: FrontendApi,
    discovery: Discovery,
    credentials: Credentials | None,
    tls: ssl.SSLContext | None,
    stop: asyncio.Event,
) -> None:
    """Answer until `stop` is set, then let clients go elsewhere and finish what is in flight."""
    leaving = Leaving()
    async with (
        listening_to_members(config, api, credentials) as mesh_url,
        listening_at(config, api, tls, leaving) as url,
    ):
        card = FrontendCard(name=config.name, url=url, pid=os.getpid(), mesh_url=mesh_url)
        registration = await discovery.put(f"frontends/{config.name}", encode_card(card))
        log_ready(log, metrics=f"{mesh_url or url}/metrics", discovery=config.discovery, url=url)
        await stop.wait()
        await registration.withdraw()
        await drain(api.admission, config.drain_timeout_s, config.drain_notice_s, leaving.leave)


@asynccontextmanager
async def listening_at(
    config: FrontendConfig, api: FrontendApi, tls: ssl.SSLContext | None, leaving: Leaving
) -> AsyncIterator[str]:
    """Serve the API; yield the URL for others. Processes that share the port say that they listen."""
    shares = bool(config.shares_port_with)
    ready = ready_file(Path(config.shares_port_with), os.getpid())
    async with listening(
        api.app,
        config.host,
        config.port,
        advertise_host=config.advertise_host,
        tls=tls,
        reuse_port=shares,
        leaving=leaving,
    ) as url:
        if shares:
            ready.touch()
        try:
            yield url
        finally:
            ready.unlink(missing_ok=True)


@asynccontextmanager
async def listening_to_members(
    config: FrontendConfig, api: FrontendApi, credentials: Credentials | None
) -> AsyncIterator[str]:
    """Serve what is within the mesh alone on a port of its own; yield its URL, "" where the mesh is open."""
    if credentials is None:
        yield ""
        return
    listener = listening(
        api.mesh_app,
        config.host,
        config.mesh_port,
        advertise_host=config.advertise_host,
        door=Door(credentials),
        reuse_port=bool(config.shares_port_with and config.mesh_port),
    )
    async with listener as url:
        yield url


class OpenedRouter(NamedTuple):
    """A router as a frontend uses it."""

    router: Router
    is_ready: Callable[[], bool]
    run: Coroutine[None, None, None] | None  # what follows other routers
    note: Callable[[], str] = str  # for operators, "" for nothing


async def open_router(
    config: FrontendConfig,
    router_config: RouterConfig,
    plane: PlaneClient,
    workers: WorkerFeed,
    discovery: Discovery,
    cleanup: AsyncExitStack,
) -> OpenedRouter:
    """Return the router that the settings ask for. Raise ConfigError."""
    if config.router == "direct":
        return OpenedRouter(DirectRouter(workers, config.direct_worker), always, None)
    if config.router == "remote":
        remote = RemoteRouter(plane, FallbackRouter(workers))
        return OpenedRouter(remote, remote.is_ready, remote.run(discovery), remote.note)
    local = LocalRouter(embedded_config(config, router_config), plane, workers)
    cleanup.push_async_callback(local.close)
    if local.gossip is None:
        return OpenedRouter(local, always, None)
    await discovery.put(f"routers/{local.name}", encode_card(local.card()))
    return OpenedRouter(local, always, local.gossip.run(discovery))


def configure(
    api: FrontendApi, config: FrontendConfig, guard: Guard | None, cors: Cors | None, cleanup: AsyncExitStack
) -> None:
    """Set what the application lets in and logs."""
    api.app.guard, api.app.cors, api.app.allowed_hosts = guard, cors, config.allowed_hosts
    api.app.is_draining = lambda: api.admission.is_leaving
    api.app.limits = replace(api.app.limits, max_connections=config.max_connections)
    open_access_log(api, config, cleanup)
    open_tracing(api, config, cleanup)


def open_tracing(api: FrontendApi, config: FrontendConfig, cleanup: AsyncExitStack) -> None:
    """Have requests traced, if the settings ask for it. Raise ConfigError."""
    if not config.otlp_endpoint:
        return
    resource = {
        "service.name": "kvmesh-frontend",
        "service.namespace": config.namespace,
        "service.instance.id": config.name,
        "service.version": RELEASE,
    }
    tracing = Tracing(config.otlp_endpoint, config.trace_share, resource)
    api.timelines.trace(tracing)
    cleanup.push_async_callback(asyncio.to_thread, tracing.close)


def open_access_log(api: FrontendApi, config: FrontendConfig, cleanup: AsyncExitStack) -> None:
    """Have a line written for every request, if the settings ask for it. Raise ConfigError."""
    if not (config.access_log or config.access_log_file):
        return
    api.app.access_log = log_line
    if config.access_log_file:
        path = config.access_log_file
        file = AccessLogFile(f"{path}.{config.name}" if config.shares_port_with else path, config.access_log_mib)
        cleanup.push_async_callback(file.close)
        api.app.access_log = file.write
    api.timelines.log()


def observe(models: ModelRegistry, search: Callable[[], DiscoveryReport], slo: ServiceLevel) -> None:
    """Let the gauges read what is known when they are scraped, by whichever process of ours is asked."""
    metrics.MODELS_READY.set_function(lambda: len(models.ready()))
    metrics.WORKERS_DOWN.set_function(lambda: len(search().down))
    metrics.SLO_SECONDS.labels("ttft").set(slo.ttft_s)
    metrics.SLO_SECONDS.labels("itl").set(slo.itl_s)


def open_registry(config: FrontendConfig, plane: PlaneClient) -> ModelRegistry:
    """Return an empty registry. Raises ConfigError if the tokenizer's package is missing."""
    cache_dir = Path(config.model_cache) if config.model_cache else default_cache_dir()
    folders = ModelFolders(plane, cache_dir, int(config.model_cache_mib * 2**20))
    return ModelRegistry(
        config.tokenizer,
        int(config.tokenizer_cache_mib * 2**20),
        folders=folders,
        control_tokens_in_text=config.control_tokens_in_text,
    )


def worker_feed(plane: PlaneClient, models: ModelRegistry) -> WorkerFeed:
    """Return the feed of workers, which tells the registry and the links of the workers that come and go."""
    workers = WorkerFeed(plane)
    workers.listen(models.add, models.remove)
    LinkWatch(plane, workers)
    workers.listen(models.load_early, lambda worker_id: None)
    return workers


def follow_workers(
    parts: FrontendParts, models: ModelRegistry, down: DownWorkers, search: Callable[[], DiscoveryReport]
) -> None:
    """Follow the workers, and say in the log why there is none."""
    parts.follow(parts.workers.run(parts.discovery), "follow workers")
    parts.follow(down.run(parts.discovery), "follow workers that are down")
    parts.follow(tell_missing(lambda: bool(models.ready()), search), "tell of missing workers")


def searched(workers: WorkerFeed, models: ModelRegistry, down: DownWorkers) -> DiscoveryReport:
    """Return where workers were searched, and why those that were found do not count."""
    return structs.replace(workers.report(models.unusable()), down=down.report())


async def hear(discovery: Discovery, models: ModelRegistry) -> None:
    """Wait until discovery has told its workers: a frontend that knew none would refuse what others can do.

    While discovery is away or empty, that ends soon; then requests wait for the first worker for some time.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(FIRST_NEWS_S):
            while not discovery.where().is_read:  # noqa: ASYNC110 - a thread of the backend tells it, once
                await asyncio.sleep(NEWS_LOOK_S)
            await asyncio.sleep(HEARD_S)
    models.hold_until(time.monotonic() + FIRST_WORKER_S)


def always() -> bool:
    """Return True: a router in this process is ready when the frontend is."""
    return True


def embedded_config(config: FrontendConfig, router_config: RouterConfig) -> RouterConfig:
    """Return the settings of the router in this frontend: with a name of its own, and the frontend's SLO if one is set.

    By the name other routers tell it from those in other frontends, and from the one in the process before this one.
    """
    slo_itl_s = router_config.slo_itl_s
    if slo_itl_s is None and config.slo_itl_s != DEFAULT_SLO_ITL_S:
        slo_itl_s = config.slo_itl_s
    return structs.replace(router_config, name=f"{config.name}-{new_generation():x}", slo_itl_s=slo_itl_s)


def settings_of(config: FrontendConfig, credentials: Credentials | None) -> HttpSettings:
    return HttpSettings(
        max_body_bytes=int(config.max_body_mib * 2**20),
        request_timeout_s=config.request_timeout_s,
        max_inflight=config.max_inflight,
        is_closed=credentials is not None,
        is_steered=config.router == "direct",
        slo=ServiceLevel(config.slo_ttft_s, config.slo_itl_s),
        counts_gen_ai=config.gen_ai_metrics,
    )


async def drain(
    admission: Admission, timeout_s: float, notice_s: float = 0.0, leave: Callable[[], Awaitable[None]] | None = None
) -> None:
    """Let requests in flight finish; those that take too long end with an error.

    For `notice_s` before that, load balancers can read in /health that they should go elsewhere. Then `leave` takes no
    more clients: who connects is refused at once, and what comes on connections that stand is answered.
    """
    admission.leave()
    if notice_s:
        log.info("leaving", extra={"notice_s": notice_s})
        await asyncio.sleep(notice_s)
    log.info("draining")
    if not await idle_within(admission, timeout_s, leave):
        log.warning("cutting off %d requests after %.1f s", admission.inflight, timeout_s)
        admission.drain()
        admission.cut_off()
        await idle_within(admission, CUT_OFF_S)
    admission.drain()


async def idle_within(
    admission: Admission, timeout_s: float, leave: Callable[[], Awaitable[None]] | None = None
) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            if leave is not None:
                await leave()
            await admission.wait_idle()
    except TimeoutError:
        return False
    return True
