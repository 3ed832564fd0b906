"""The frontend's HTTP application: routes, error replies, health and metrics."""

from collections.abc import Callable

import msgspec
from aiohttp import web

from frontend import metrics
from frontend.admission import Admission
from frontend.endpoints import CompletionService, TimeLimits
from frontend.generator import Generator
from frontend.models import ModelRegistry, Served
from frontend.openai import ModelList, ModelObject
from frontend.parameters import Endpoint, parse_chat, parse_completion
from mesh import http
from mesh.http import json_reply, live, reply_errors
from protocol.errors import NoWorkerError

ADMISSION = web.AppKey("admission", Admission)  # the drain hook: app[ADMISSION].drain(), then wait_idle()
_MODELS = web.AppKey("models", ModelRegistry)
_SERVICE = web.AppKey("service", CompletionService)
_ROUTER_READY: web.AppKey[Callable[[], bool]] = web.AppKey("router_ready")


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True):
    max_body_bytes: int = 16 * 2**20
    request_timeout_s: float = 600.0  # where the client sends no x-request-timeout-s
    max_request_timeout_s: float = 3600.0
    max_inflight: int = 4096  # requests in progress; more get a 429


def build_app(
    settings: HttpSettings,
    models: ModelRegistry,
    generator: Generator,
    router_ready: Callable[[], bool] = lambda: True,
) -> web.Application:
    """Run it with mesh.http.listening: a client that leaves then cancels its request."""
    app = web.Application(client_max_size=settings.max_body_bytes, middlewares=[reply_errors])
    admission = Admission(settings.max_inflight)
    limits = TimeLimits(settings.request_timeout_s, settings.max_request_timeout_s)
    app[ADMISSION] = admission
    app[_MODELS] = models
    app[_ROUTER_READY] = router_ready
    app[_SERVICE] = CompletionService(models, generator, admission, limits)
    app.add_routes(
        [
            web.post("/v1/chat/completions", chat_completions),
            web.post("/v1/completions", completions),
            web.post("/kvmesh/route", route),
            web.get("/v1/models", list_models),
            web.get("/v1/models/{name:.+}", show_model),  # names may contain slashes
            web.get("/health", health),
            web.get("/live", live),
            web.get("/metrics", show_metrics),
        ]
    )
    return app


async def chat_completions(request: web.Request) -> web.StreamResponse:
    return await request.app[_SERVICE].answer(request, Endpoint.CHAT, parse_chat)


async def completions(request: web.Request) -> web.StreamResponse:
    return await request.app[_SERVICE].answer(request, Endpoint.COMPLETIONS, parse_completion)


async def route(request: web.Request) -> web.StreamResponse:
    """Where a request would run, and why. It is not run."""
    return await request.app[_SERVICE].preview(request)


# --- the rest -----------------------------------------------------------------------------------------


async def list_models(request: web.Request) -> web.Response:
    models = request.app[_MODELS].ready()
    return json_reply(ModelList(data=[model_object(served) for served in models]))


async def show_model(request: web.Request) -> web.Response:
    served = request.app[_MODELS].find(request.match_info["name"])
    if not served.ready:
        raise NoWorkerError(f"no worker of the model {served.name!r} is ready", hint="try again later")
    return json_reply(model_object(served))


def model_object(served: Served) -> ModelObject:
    return ModelObject(
        id=served.name,
        created=served.created,
        max_model_len=served.context_tokens,
        block_size=served.block_size,
    )


async def health(request: web.Request) -> web.Response:
    """Whether requests can be answered: for load balancers and start-up."""
    models, admission = request.app[_MODELS], request.app[ADMISSION]
    ready = [served.name for served in models.ready()]
    if admission.draining:
        status = "draining"
    elif not request.app[_ROUTER_READY]():
        status = "no router is ready"
    else:
        status = "ready" if ready else "no model is ready"
    report = {
        "status": status,
        "ready_models": ready,
        "workers": models.count(),
        "inflight": admission.inflight,
    }
    return json_reply(report, status=200 if status == "ready" else 503)


async def show_metrics(request: web.Request) -> web.Response:
    metrics.MODELS_READY.set(len(request.app[_MODELS].ready()))
    return await http.show_metrics(request)
