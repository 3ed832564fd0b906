"""Run one frontend: the HTTP API in front, a router beside, the workers behind."""

import asyncio
import logging
import os
import ssl
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from frontend import metrics
from frontend.admission import Admission
from frontend.config import FrontendConfig
from frontend.direct import DirectRouter
from frontend.dispatch import Dispatcher
from frontend.http import FrontendApi, HttpSettings
from frontend.model_files import ModelFolders, default_cache_dir
from frontend.models import ModelRegistry
from frontend.responses.opening import check_setting, open_store
from frontend.responses.retention import StoreLimits
from frontend.responses.state import KeptResponses
from frontend.security import ApiKeyGuard, open_to, tls_context
from mesh.discovery import Discovery, open_discovery
from mesh.http.cors import Cors
from mesh.http.server import listening
from mesh.lifecycle import watch_parent
from mesh.merged_metrics import sharing
from mesh.plane.client import PlaneClient
from mesh.telemetry import log_ready
from protocol.ids import new_generation
from protocol.messages import FrontendCard, encode_card
from router.booking import Router
from router.client import RemoteRouter
from router.config import RouterConfig
from router.down import DownWorkers
from router.feeds import LinkWatch, WorkerFeed, tell_missing
from router.findings import DiscoveryReport
from router.local import LocalRouter

log = logging.getLogger(__name__)

CUT_OFF_S = 2.0  # for telling the clients of requests that are cut off
FIRST_NEWS_S = 3.0  # of workers, for a process that shares its port


async def serve(config: FrontendConfig, router_config: RouterConfig, stop: asyncio.Event) -> None:
    """Answer until `stop` is set, then finish what is in flight."""
    watch_parent(stop)
    tls = tls_context(config.tls_cert, config.tls_key, config.tls_client_ca)
    guard, cors = ApiKeyGuard(config.api_keys_file) if config.api_keys_file else None, open_to(config.cors_origins)
    responses = kept_responses(config)
    async with AsyncExitStack() as cleanup:
        plane = PlaneClient()
        cleanup.push_async_callback(plane.close)
        discovery = open_discovery(config.discovery)
        cleanup.push_async_callback(discovery.close)
        models = open_registry(config, plane)
        workers = worker_feed(plane, models)
        async with asyncio.TaskGroup() as feeds:
            down = DownWorkers()
            search = partial(searched, workers, models, down)
            follow = follow_workers(feeds, workers, down, discovery, models)
            opened = await open_router(config, router_config, plane, workers, discovery, cleanup)
            if opened.run is not None:
                follow.append(feeds.create_task(opened.run, name="frontend: follow routers"))
            dispatcher = Dispatcher(opened.router, plane, lambda model: models.find(model).facts.block_size)
            folder = Path(config.shares_port_with) if config.shares_port_with else None
            if folder is not None:
                await cleanup.enter_async_context(sharing(folder))
                await heard_of(workers)
            follow += keep(responses, feeds, cleanup)
            settings = settings_of(config)
            api = FrontendApi(settings, models, dispatcher, opened.is_ready, folder, responses=responses, search=search)
            configure(api, config, guard, cors)
            observe(models, search)
            async with listening_at(config, api, tls) as url:
                card = FrontendCard(name=config.name, url=url, pid=os.getpid())
                registration = await discovery.put(f"frontends/{config.name}", encode_card(card))
                log_ready(log, metrics=f"{url}/metrics", discovery=config.discovery, url=url)
                await stop.wait()
                await registration.withdraw()
                await drain(api.admission, config.drain_timeout_s)
            await dispatcher.close()
            for feed in follow:
                feed.cancel()


def listening_at(
    config: FrontendConfig, api: FrontendApi, tls: ssl.SSLContext | None
) -> AbstractAsyncContextManager[str]:
    """Return the listener of the API. It yields the URL for others."""
    shares = bool(config.shares_port_with)
    return listening(
        api.app, config.host, config.port, advertise_host=config.advertise_host, tls=tls, reuse_port=shares
    )


class OpenedRouter(NamedTuple):
    """A router as a frontend uses it."""

    router: Router
    is_ready: Callable[[], bool]
    run: Coroutine[None, None, None] | None  # what follows other routers


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
        remote = RemoteRouter(plane)
        return OpenedRouter(remote, remote.is_ready, remote.run(discovery))
    local = LocalRouter(named_for(config, router_config), plane, workers)
    cleanup.push_async_callback(local.close)
    if local.gossip is None:
        return OpenedRouter(local, always, None)
    await discovery.put(f"routers/{local.name}", encode_card(local.card()))
    return OpenedRouter(local, always, local.gossip.run(discovery))


def configure(api: FrontendApi, config: FrontendConfig, guard: ApiKeyGuard | None, cors: Cors | None) -> None:
    """Set what the application lets in and logs."""
    api.app.guard, api.app.cors, api.app.logs_access = guard, cors, config.access_log
    api.app.is_draining = lambda: api.admission.draining
    api.app.limits = replace(api.app.limits, max_connections=config.max_connections)


def observe(models: ModelRegistry, search: Callable[[], DiscoveryReport]) -> None:
    """Let the gauges read what is known when they are scraped, by whichever process of ours is asked."""
    metrics.MODELS_READY.set_function(lambda: len(models.ready()))
    metrics.WORKERS_DOWN.set_function(lambda: len(search().down))


def open_registry(config: FrontendConfig, plane: PlaneClient) -> ModelRegistry:
    """Return an empty registry. Raises ConfigError if the tokenizer's package is missing."""
    cache_dir = Path(config.model_cache) if config.model_cache else default_cache_dir()
    folders = ModelFolders(plane, cache_dir, int(config.model_cache_mib * 2**20))
    return ModelRegistry(config.tokenizer, int(config.tokenizer_cache_mib * 2**20), folders=folders)


def worker_feed(plane: PlaneClient, models: ModelRegistry) -> WorkerFeed:
    """Return the feed of workers, which tells the registry and the links of the workers that come and go."""
    workers = WorkerFeed(plane)
    workers.listen(models.add, models.remove)
    LinkWatch(plane, workers)
    workers.listen(models.load_early, lambda worker_id: None)
    return workers


def follow_workers(
    feeds: asyncio.TaskGroup,
    workers: WorkerFeed,
    down: DownWorkers,
    discovery: Discovery,
    models: ModelRegistry,
) -> list[asyncio.Task[None]]:
    """Follow the workers, and say in the log why there is none."""
    missing = tell_missing(lambda: bool(models.ready()), partial(searched, workers, models, down))
    return [
        feeds.create_task(workers.run(discovery), name="frontend: follow workers"),
        feeds.create_task(down.run(discovery), name="frontend: follow workers that are down"),
        feeds.create_task(missing, name="frontend: tell of missing workers"),
    ]


def searched(workers: WorkerFeed, models: ModelRegistry, down: DownWorkers) -> DiscoveryReport:
    """Return where workers were searched, and why those that were found do not count."""
    return structs.replace(workers.report(models.unusable()), down=down.report())


async def heard_of(workers: WorkerFeed) -> None:
    """Others answer on the same port: a process that knows no worker yet would turn away what they could do."""
    with suppress(TimeoutError):
        async with asyncio.timeout(FIRST_NEWS_S):
            await workers.seen.wait()


def always() -> bool:
    """Return True: a router in this process is ready when the frontend is."""
    return True


def named_for(config: FrontendConfig, router_config: RouterConfig) -> RouterConfig:
    """Other routers tell it from those in other frontends, and from that in the process before this one."""
    return structs.replace(router_config, name=f"{config.name}-{new_generation():x}")


def kept_responses(config: FrontendConfig) -> KeptResponses | None:
    """Return the stored responses, None where none are stored. Raise ConfigError."""
    check_setting(config.responses_store, is_one_process=not config.shares_port_with)
    limits = StoreLimits(
        max_count=config.responses_max,
        max_bytes=int(config.responses_max_mib * 2**20),
        ttl_s=config.responses_ttl_s,
    )
    store = open_store(config.responses_store, limits)
    if store is None:
        return None
    return KeptResponses(store, config.responses_background, is_keyed=bool(config.api_keys_file))


def keep(
    responses: KeptResponses | None, feeds: asyncio.TaskGroup, cleanup: AsyncExitStack
) -> list[asyncio.Task[None]]:
    """Keep the stored responses in order, if there are any; close them at the end."""
    if responses is None:
        return []
    cleanup.push_async_callback(responses.close)
    return [feeds.create_task(responses.run(), name="frontend: keep responses")]


def settings_of(config: FrontendConfig) -> HttpSettings:
    return HttpSettings(
        max_body_bytes=int(config.max_body_mib * 2**20),
        request_timeout_s=config.request_timeout_s,
        max_inflight=config.max_inflight,
        is_steered=config.router == "direct",
    )


async def drain(admission: Admission, timeout_s: float) -> None:
    """New requests get 503 while those in flight finish; those that take too long end with an error."""
    log.info("draining")
    admission.drain()
    if await idle_within(admission, timeout_s):
        return
    log.warning("cutting off %d requests after %.1f s", admission.inflight, timeout_s)
    admission.cut_off()
    await idle_within(admission, CUT_OFF_S)


async def idle_within(admission: Admission, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await admission.wait_idle()
    except TimeoutError:
        return False
    return True
