"""Run the endpoint picker: `kvmesh router --ext-proc-port`. It places for gateways what a frontend would place."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from kvmesh.frontend.model_files import ModelFolders, default_cache_dir
from kvmesh.frontend.models import ModelRegistry
from kvmesh.frontend.picker.asking import BodyReading, read_objectives
from kvmesh.frontend.picker.budget import BodyBudget
from kvmesh.frontend.picker.endpoints import EndpointFeed
from kvmesh.frontend.picker.metrics import ENDPOINTS
from kvmesh.frontend.picker.picking import Keeper, Picker
from kvmesh.frontend.picker.server import PickerServer, tls_credentials
from kvmesh.mesh.address import join_address
from kvmesh.mesh.discovery import open_discovery
from kvmesh.mesh.exposition import labelled
from kvmesh.mesh.http.door import door_of
from kvmesh.mesh.http.server import listening
from kvmesh.mesh.identity.metrics import using
from kvmesh.mesh.identity.names import MeshRole
from kvmesh.mesh.lifecycle import watch_parent
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.mesh.telemetry import log_ready
from kvmesh.protocol.messages import encode_card
from kvmesh.router.config import RouterConfig
from kvmesh.router.feeds import WorkerFeed, tell_missing
from kvmesh.router.findings import DiscoveryReport
from kvmesh.router.http import RouterApi
from kvmesh.router.local import LocalRouter
from kvmesh.router.service import open_metrics_port

log = logging.getLogger(__name__)

BODIES_BYTES = 1 << 30  # of all requests together that are being read or wait


async def serve(config: RouterConfig, stop: asyncio.Event) -> None:
    """Pick endpoints until `stop` is set; then take no more requests, and let the open ones end."""
    watch_parent(stop)
    async with AsyncExitStack() as cleanup:
        mesh = await cleanup.enter_async_context(using(config.mesh_tls, MeshRole.ROUTER, config.name))
        cleanup.enter_context(labelled("picker", config.namespace))
        door = door_of(mesh, answers_probes=config.mesh_probes)
        open_metrics_port(config, door, cleanup)
        plane = PlaneClient(mesh)
        cleanup.push_async_callback(plane.close)
        workers = WorkerFeed(plane)
        endpoints = EndpointFeed(workers)
        ENDPOINTS.set_function(lambda: len(endpoints))
        models = open_registry(config, plane, endpoints)
        router = LocalRouter(config, plane, endpoints)
        cleanup.push_async_callback(router.close)
        endpoints.listen(models.load_early, lambda worker_id: None)
        server = open_server(config, router, models, endpoints, workers.seen.is_set, cleanup)
        credentials = tls_credentials(config.ext_proc_tls_cert, config.ext_proc_tls_key, config.ext_proc_client_ca)
        port = await server.start(config.host, config.ext_proc_port or 0, credentials)

        def search() -> DiscoveryReport:
            return workers.report([*endpoints.unusable(), *models.unusable()])

        api = RouterApi(router, workers, int(config.max_body_mib * 2**20), config.max_bookings, search)
        api.app.allowed_hosts = config.allowed_hosts
        url = await cleanup.enter_async_context(
            listening(api.app, config.host, config.http_port, advertise_host=config.advertise_host, door=door)
        )
        discovery = open_discovery(config.discovery, mesh)
        cleanup.push_async_callback(discovery.close)
        async with asyncio.TaskGroup() as feeds:
            follow = [feeds.create_task(workers.run(discovery), name="picker: follow workers")]
            missing = tell_missing(lambda: bool(models.ready()), search)
            follow.append(feeds.create_task(missing, name="picker: tell of missing workers"))
            if router.gossip is not None:
                follow.append(feeds.create_task(router.gossip.run(discovery), name="picker: follow routers"))
            await discovery.put(f"routers/{config.name}", encode_card(router.card(http_url=url)))
            ext_proc = join_address(config.advertise_host or config.host, port)
            log_ready(log, metrics=f"{url}/metrics", discovery=config.discovery, ext_proc=ext_proc, url=url)
            await stop.wait()
            log.info("draining")
            await asyncio.gather(server.drain(config.drain_timeout_s), api.drain(config.drain_timeout_s))
            for feed in follow:
                feed.cancel()


def open_server(
    config: RouterConfig,
    router: LocalRouter,
    models: ModelRegistry,
    endpoints: EndpointFeed,
    is_ready: Callable[[], bool],
    cleanup: AsyncExitStack,
) -> PickerServer:
    """Return the gRPC server, not yet listening. Raise ConfigError."""
    max_body_bytes = int(config.ext_proc_max_body_mib * 2**20)
    budget = BodyBudget(max(BODIES_BYTES, max_body_bytes))
    reading = BodyReading(max_body_bytes, budget)
    objectives = read_objectives(config.ext_proc_objectives)
    picker = Picker(router, models, endpoints, reading, objectives, config.ext_proc_wait_s)
    keeper = Keeper(router.lease_s / 4)
    cleanup.callback(keeper.close)
    server = PickerServer(
        picker,
        keeper,
        budget,
        is_ready,
        max_streams=config.ext_proc_max_streams,
        max_body_bytes=max_body_bytes,
    )
    cleanup.push_async_callback(server.drain, 0.0)
    return server


def open_registry(config: RouterConfig, plane: PlaneClient, endpoints: EndpointFeed) -> ModelRegistry:
    """Return the models of the workers that can be picked. Raise ConfigError if a package is missing."""
    cache_dir = Path(config.model_cache) if config.model_cache else default_cache_dir()
    folders = ModelFolders(plane, cache_dir, int(config.model_cache_mib * 2**20))
    models = ModelRegistry(
        config.tokenizer,
        int(config.tokenizer_cache_mib * 2**20),
        folders=folders,
        control_tokens_in_text=config.control_tokens_in_text,
    )
    endpoints.listen(models.add, models.remove)
    return models
