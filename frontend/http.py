"""The frontend's HTTP application: a route for every endpoint of the table."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path

import msgspec

from kvmesh.frontend.admission import Admission
from kvmesh.frontend.crew import WorkerCrew
from kvmesh.frontend.endpoint import Endpoint, Services, TimeLimits
from kvmesh.frontend.gen_ai import gen_ai_metrics
from kvmesh.frontend.generator import Generator
from kvmesh.frontend.mesh_api import status
from kvmesh.frontend.models import ModelRegistry
from kvmesh.frontend.openapi import openapi
from kvmesh.frontend.parts import SharedParts
from kvmesh.frontend.refusals import Refusals
from kvmesh.frontend.service_level import NO_LIMIT, ServiceLevel
from kvmesh.frontend.table import ENDPOINTS, ERRORS_BELOW
from kvmesh.frontend.timeline import Timelines
from kvmesh.mesh.http.server import App, HttpLimits, Route
from kvmesh.router.findings import NOTHING_SEARCHED, DiscoveryReport

LIVE = "/live"
MESH_PATHS = ("/health", LIVE, "/metrics", "/kvmesh/route")  # as in mesh/identity/rights.py


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True):
    max_body_bytes: int = 16 * 2**20
    request_timeout_s: float = 600.0  # where the client sends no x-request-timeout-s
    max_request_timeout_s: float = 3600.0
    max_inflight: int = 4096  # requests in progress; more get a 429
    is_closed: bool = False  # what is within the mesh alone has a port of its own
    is_steered: bool = False  # an endpoint picker is in front, whose headers name workers
    slo: ServiceLevel = NO_LIMIT
    counts_gen_ai: bool = False  # also under OpenTelemetry's names


class FrontendApi:
    """The application of one frontend: `app` serves it, `admission` drains it. A client that leaves cancels its
    request."""

    def __init__(
        self,
        settings: HttpSettings,
        models: ModelRegistry,
        generator: Generator,
        router_ready: Callable[[], bool] = lambda: True,
        metrics_folder: Path | None = None,
        endpoints: Sequence[Endpoint] = ENDPOINTS,
        parts: SharedParts | None = None,
        search: Callable[[], DiscoveryReport] = lambda: NOTHING_SEARCHED,
        router_note: Callable[[], str] = str,
        timelines: Timelines | None = None,
        crew: WorkerCrew | None = None,
        further: Sequence[Route] = (),
        admission: Admission | None = None,
    ) -> None:
        """Build the application; in `metrics_folder` the processes that share our port meet. `parts`: those
        of extensions. `search` says what discovery has found. `further` routes are no part of the described API."""
        self.admission = admission or Admission(settings.max_inflight)
        self.timelines = timelines or Timelines()
        services = Services(
            models,
            generator,
            self.admission,
            TimeLimits(settings.request_timeout_s, settings.max_request_timeout_s),
            router_ready,
            metrics_folder,
            document=cache(partial(openapi, endpoints, version("kvmesh"), settings.max_request_timeout_s)),
            search=search,
            parts=parts or SharedParts(),
            is_steered=settings.is_steered,
            router_note=router_note,
            slo=settings.slo,
            gen_ai=gen_ai_metrics() if settings.counts_gen_ai else None,
            timelines=self.timelines,
            crew=crew,
        )
        self.mesh_app = App([route_of(endpoint, services) for endpoint in endpoints if endpoint.path in MESH_PATHS])
        if settings.is_closed:
            public = [one for one in endpoints if one.path not in MESH_PATHS or one.path == LIVE]
            endpoints = [status.BARE_HEALTH, *public]
        self.app = App(
            [*(route_of(endpoint, services) for endpoint in endpoints), *further],
            HttpLimits(max_body_bytes=settings.max_body_bytes),
            refusal=Refusals(endpoints, ERRORS_BELOW),
        )


def route_of(endpoint: Endpoint, services: Services) -> Route:
    return Route(
        endpoint.method,
        endpoint.path,
        partial(endpoint.handler, services),
        is_open=endpoint.is_open,
    )
