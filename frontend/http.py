"""The frontend's HTTP application: routes, health, models and metrics."""

from collections.abc import Awaitable, Callable
from importlib.metadata import version
from pathlib import Path

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST

from frontend import metrics
from frontend.admission import Admission
from frontend.anthropic.count import count_tokens
from frontend.anthropic.dialect import MessagesDialect
from frontend.anthropic.errors import error_body as anthropic_error_body
from frontend.call import Dialect
from frontend.chat import ChatDialect
from frontend.completions import CompletionsDialect
from frontend.endpoints import CompletionService, TimeLimits, identified
from frontend.generator import Generator
from frontend.models import ModelRegistry, Served
from frontend.openai import ModelList, ModelObject
from frontend.openapi import docs_page, openapi
from frontend.responses.dialect import ResponsesDialect
from frontend.tokenize import detokenize, parse_detokenize, parse_tokenize, tokenize
from mesh.http import request as http
from mesh.http.request import Reply, ReplyStream, Request, json_reply, live
from mesh.http.server import App, HttpLimits, Route
from mesh.merged_metrics import merged_metrics
from protocol.errors import NoWorkerError


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True):
    max_body_bytes: int = 16 * 2**20
    request_timeout_s: float = 600.0  # where the client sends no x-request-timeout-s
    max_request_timeout_s: float = 3600.0
    max_inflight: int = 4096  # requests in progress; more get a 429


class FrontendApi:
    """`app` serves it; `admission` drains it. A client that leaves cancels its request."""

    def __init__(
        self,
        settings: HttpSettings,
        models: ModelRegistry,
        generator: Generator,
        router_ready: Callable[[], bool] = lambda: True,
        metrics_folder: Path | None = None,
    ) -> None:
        """`metrics_folder`: where the processes that share our port meet."""
        self.admission = Admission(settings.max_inflight)
        self._models = models
        self._router_ready = router_ready
        self._metrics_folder = metrics_folder
        self._openapi = b""  # made when it is first asked for
        self._limits = TimeLimits(settings.request_timeout_s, settings.max_request_timeout_s)
        self._service = CompletionService(models, generator, self.admission, self._limits)
        self.app = App(
            [
                self._generating("/v1/chat/completions", ChatDialect()),
                self._generating("/v1/completions", CompletionsDialect()),
                self._generating("/v1/responses", ResponsesDialect()),
                self._generating("/v1/messages", MessagesDialect()),
                Route(
                    "POST",
                    "/v1/messages/count_tokens",
                    identified(self.count_message_tokens, "count", anthropic_error_body),
                    error_body=anthropic_error_body,
                ),
                Route("POST", "/v1/embeddings", self._service.embed),
                Route("POST", "/tokenize", identified(self.tokenize, "tokenize")),
                Route("POST", "/detokenize", identified(self.detokenize, "detokenize")),
                Route("POST", "/kvmesh/route", identified(self._service.preview, "route")),
                Route("GET", "/v1/models", identified(self.list_models, "models")),
                Route("GET", "/v1/models/{name:path}", identified(self.show_model, "models")),  # names may have slashes
                Route("GET", "/health", self.health, is_open=True),
                Route("GET", "/live", live, is_open=True),
                Route("GET", "/metrics", self.show_metrics, is_open=True),
                Route("GET", "/openapi.json", self.show_openapi, is_open=True),
                Route("GET", "/docs", show_docs, is_open=True),
            ],
            HttpLimits(max_body_bytes=settings.max_body_bytes),
        )

    def _generating(self, path: str, dialect: Dialect) -> Route:
        def answer(request: Request) -> Awaitable[Reply | ReplyStream]:
            return self._service.answer(request, dialect)

        return Route("POST", path, answer, error_body=dialect.error_body)

    async def tokenize(self, request: Request) -> Reply:
        asked = parse_tokenize(request.body)
        return json_reply(await tokenize(asked, await self._models.get(asked.model)))

    async def detokenize(self, request: Request) -> Reply:
        asked = parse_detokenize(request.body)
        return json_reply(await detokenize(asked, await self._models.get(asked.model)))

    async def count_message_tokens(self, request: Request) -> Reply:
        return await count_tokens(self._service, request)

    async def list_models(self, request: Request) -> Reply:
        return json_reply(ModelList(data=[model_object(name, served) for name, served in self._models.names()]))

    async def show_model(self, request: Request) -> Reply:
        name = request.params["name"]
        served = self._models.find(name)
        if not served.ready:
            raise NoWorkerError(f"no worker of the model {name!r} is ready", hint="try again later")
        return json_reply(model_object(name, served))

    async def health(self, request: Request) -> Reply:
        """Whether requests can be answered: for load balancers and start-up."""
        ready = [served.name for served in self._models.ready()]
        if self.admission.draining:
            status = "draining"
        elif not self._router_ready():
            status = "no router is ready"
        else:
            status = "ready" if ready else "no model is ready"
        report = {
            "status": status,
            "ready_models": ready,
            "workers": self._models.count(),
            "inflight": self.admission.inflight,
        }
        return json_reply(report, status=200 if status == "ready" else 503)

    async def show_openapi(self, request: Request) -> Reply:
        if not self._openapi:
            self._openapi = openapi(version("kvmesh"), self._limits.max_s)
        return Reply(self._openapi)

    async def show_metrics(self, request: Request) -> Reply:
        metrics.MODELS_READY.set(len(self._models.ready()))
        if self._metrics_folder is None:
            return await http.show_metrics(request)
        return Reply(await merged_metrics(self._metrics_folder), content_type=CONTENT_TYPE_LATEST)


async def show_docs(request: Request) -> Reply:
    return Reply(docs_page(), content_type="text/html; charset=utf-8")


def model_object(name: str, served: Served) -> ModelObject:
    return ModelObject(
        id=name,
        created=served.created,
        parent=None if name == served.name else served.name,
        max_model_len=served.facts.context_tokens,
        block_size=served.facts.block_size,
    )
