"""The frontend's HTTP application: a route for every endpoint of the table."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path

import msgspec

from frontend.admission import Admission
from frontend.endpoint import Endpoint, Services, TimeLimits
from frontend.generator import Generator
from frontend.models import ModelRegistry
from frontend.openapi import openapi
from frontend.refusals import Refusals
from frontend.responses.state import KeptResponses
from frontend.table import ENDPOINTS, ERRORS_BELOW
from mesh.http.server import App, HttpLimits, Route
from router.findings import NOTHING_SEARCHED, DiscoveryReport


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True):
    max_body_bytes: int = 16 * 2**20
    request_timeout_s: float = 600.0  # where the client sends no x-request-timeout-s
    max_request_timeout_s: float = 3600.0
    max_inflight: int = 4096  # requests in progress; more get a 429
    is_steered: bool = False  # an endpoint picker is in front, whose headers name workers


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
        responses: KeptResponses | None = None,
        search: Callable[[], DiscoveryReport] = lambda: NOTHING_SEARCHED,
    ) -> None:
        """Build the application; in `metrics_folder` the processes that share our port meet. Without `responses`
        none are stored. `search` says what discovery has found."""
        self.admission = Admission(settings.max_inflight)
        services = Services(
            models,
            generator,
            self.admission,
            TimeLimits(settings.request_timeout_s, settings.max_request_timeout_s),
            router_ready,
            metrics_folder,
            document=cache(partial(openapi, endpoints, version("kvmesh"), settings.max_request_timeout_s)),
            search=search,
            responses=responses,
            is_steered=settings.is_steered,
        )
        self.app = App(
            [route_of(endpoint, services) for endpoint in endpoints],
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
