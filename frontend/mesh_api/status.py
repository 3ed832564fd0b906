"""Serve what operators and tools read: health, metrics and the description of the API. None of them needs a key."""

from importlib.resources import files

from msgspec import Struct

from kvmesh.frontend.endpoint import Endpoint, Handler, Services
from kvmesh.frontend.operation import Operation
from kvmesh.mesh.exposition import OPEN_METRICS, OPEN_TYPE, PLAIN, PLAIN_TYPE, open_page, page, wants_open_metrics
from kvmesh.mesh.http import request as http
from kvmesh.mesh.http.request import JSON, Reply, Request, json_reply
from kvmesh.mesh.merged_metrics import merged_metrics
from kvmesh.router.findings import DiscoveryReport

HTML = "text/html"


class Health(Struct, frozen=True):
    status: str
    ready_models: list[str]
    workers: dict[str, dict[str, int]]  # by model and role
    inflight: int
    discovery: DiscoveryReport
    router: str = ""  # what is wrong with the routers, "" for nothing


class BareHealth(Struct, frozen=True):
    """Hold what /health says on the public port of a closed mesh."""

    status: str


class Live(Struct, frozen=True):
    status: str


async def health(services: Services, request: Request) -> Reply:
    """Report whether requests can be answered: for load balancers and start-up."""
    ready = [served.name for served in services.models.ready()]
    if services.admission.is_leaving:
        status = "draining"
    elif not services.router_ready():
        status = "no router is ready"
    else:
        status = "ready" if ready else "no model is ready"
    counts, inflight = services.models.count(), services.admission.inflight
    report = Health(status, ready, counts, inflight, services.search(), services.router_note())
    return json_reply(report, status=200 if status == "ready" else 503)


async def bare_health(services: Services, request: Request) -> Reply:
    """Report whether requests can be answered, and nothing of the mesh: strangers ask here."""
    found = await health(services, request)
    return json_reply(BareHealth("ready" if found.status == 200 else "not ready"), status=found.status)


async def live(services: Services, request: Request) -> Reply:
    return await http.live(request)


async def show_metrics(services: Services, request: Request) -> Reply:
    """Return the metrics as text; as OpenMetrics, which names traces, to scrapers that ask for it."""
    is_open = wants_open_metrics(request.header("accept") or "")
    if services.metrics_folder is not None:
        text = await merged_metrics(services.metrics_folder, is_open=is_open)
    else:
        text = open_page() if is_open else page()
    return Reply(text, content_type=OPEN_TYPE if is_open else PLAIN_TYPE)


async def show_openapi(services: Services, request: Request) -> Reply:
    return Reply(services.document())


async def show_docs(services: Services, request: Request) -> Reply:
    return Reply(docs_page(), content_type="text/html; charset=utf-8")


def docs_page() -> bytes:
    """Return a page that shows /openapi.json; it loads nothing from elsewhere."""
    return files("kvmesh.frontend").joinpath("docs.html").read_bytes()


def _open(path: str, handler: Handler, operation: Operation) -> Endpoint:
    return Endpoint(method="GET", path=path, handler=handler, operation=operation, is_open=True)


BARE_HEALTH = _open(
    "/health",
    bare_health,
    Operation(summary="Can requests be answered?", reply=BareHealth, failures=(503,), fails_with_reply=True),
)
ENDPOINTS = (
    _open(
        "/health",
        health,
        Operation(summary="Can requests be answered?", reply=Health, failures=(503,), fails_with_reply=True),
    ),
    _open("/live", live, Operation(summary="Does the process run?", reply=Live)),
    _open(
        "/metrics",
        show_metrics,
        Operation(summary="Metrics for Prometheus", reply_type=PLAIN, other_reply_types=(OPEN_METRICS,)),
    ),
    _open("/openapi.json", show_openapi, Operation(summary="This description", reply_type=JSON)),
    _open("/docs", show_docs, Operation(summary="This description, to be read", reply_type=HTML)),
)
