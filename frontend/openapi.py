"""GET /openapi.json and /docs: the API described by the very types that read and write it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import msgspec
from msgspec import Struct

from frontend.anthropic import shapes as anthropic
from frontend.embeddings import EmbeddingsReply, EmbeddingsRequest
from frontend.openai import (
    ChatChoice,
    ChatRequest,
    CompletionChoice,
    CompletionRequest,
    ModelList,
    ModelObject,
    Response,
)
from frontend.responses import shapes as responses
from frontend.tokenize import DetokenizeReply, DetokenizeRequest, TokenizeReply, TokenizeRequest
from mesh.http.request import JSON

REF = "#/components/schemas/{name}"
SSE = "text/event-stream"
HEADERS = {  # that the endpoints which generate read
    "x-request-id": "your own id for the request; comes back, and stands in our logs",
    "x-request-timeout-s": "seconds until the request is given up",
}


class ErrorContent(Struct, frozen=True):
    """OpenAI's."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct, frozen=True):
    error: ErrorContent


class Health(Struct, frozen=True):
    status: str
    ready_models: list[str]
    workers: dict[str, dict[str, int]]  # by model and role
    inflight: int


class Live(Struct, frozen=True):
    status: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What one route takes and gives."""

    summary: str
    request: type | None = None
    either: tuple[type, ...] = ()  # the body is one of these
    reply: type | None = None  # None: anything
    reply_type: str = JSON
    streams: bool = False
    error: type = ErrorBody
    failures: tuple[int, ...] = ()
    is_open: bool = False  # needs no key


_ASKED = (400, 401, 404, 408, 413, 429, 431, 500, 502, 503, 504)
OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        summary="Answer a chat",
        request=ChatRequest,
        reply=Response[ChatChoice],
        streams=True,
        failures=_ASKED,
    ),
    ("POST", "/v1/completions"): Operation(
        summary="Go on with a text",
        request=CompletionRequest,
        reply=Response[CompletionChoice],
        streams=True,
        failures=_ASKED,
    ),
    ("POST", "/v1/responses"): Operation(
        summary="Answer, in the shape of OpenAI's Responses API; nothing is stored",
        request=responses.ResponsesRequest,
        reply=responses.Response,
        streams=True,
        failures=_ASKED,
    ),
    ("POST", "/v1/messages"): Operation(
        summary="Answer, in the shape of Anthropic's Messages API",
        request=anthropic.MessagesRequest,
        reply=anthropic.Answer,
        streams=True,
        error=anthropic.ErrorAnswer,
        failures=_ASKED,
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        summary="Count the tokens of a prompt",
        request=anthropic.CountRequest,
        reply=anthropic.TokenCount,
        error=anthropic.ErrorAnswer,
        failures=_ASKED,
    ),
    ("POST", "/v1/embeddings"): Operation(
        summary="Turn texts into vectors", request=EmbeddingsRequest, reply=EmbeddingsReply, failures=_ASKED
    ),
    ("POST", "/tokenize"): Operation(
        summary="The tokens of a text or of a chat", request=TokenizeRequest, reply=TokenizeReply, failures=_ASKED
    ),
    ("POST", "/detokenize"): Operation(
        summary="The text of tokens", request=DetokenizeRequest, reply=DetokenizeReply, failures=_ASKED
    ),
    ("POST", "/kvmesh/route"): Operation(
        summary="Where a chat or a text would run, and why; it is not run",
        either=(ChatRequest, CompletionRequest),
        failures=_ASKED,
    ),
    ("GET", "/v1/models"): Operation(summary="What can be asked", reply=ModelList, failures=(401,)),
    ("GET", "/v1/models/{name:path}"): Operation(summary="One model", reply=ModelObject, failures=(401, 404, 503)),
    ("GET", "/health"): Operation(summary="Can requests be answered?", reply=Health, failures=(503,), is_open=True),
    ("GET", "/live"): Operation(summary="Does the process run?", reply=Live, is_open=True),
    ("GET", "/metrics"): Operation(summary="Metrics for Prometheus", reply_type="text/plain", is_open=True),
    ("GET", "/openapi.json"): Operation(summary="This description", is_open=True),
    ("GET", "/docs"): Operation(summary="This description, to be read", reply_type="text/html", is_open=True),
}


def openapi(version: str) -> bytes:
    """The document as JSON."""
    types = list(dict.fromkeys(kind for operation in OPERATIONS.values() for kind in _types(operation)))
    schemas, components = msgspec.json.schema_components(types, ref_template=REF)
    refs = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in OPERATIONS.items():
        shown = path.replace(":path}", "}")
        paths.setdefault(shown, {})[method.lower()] = _operation(method, shown, operation, refs)
    document = {
        "openapi": "3.1.0",
        "info": {"title": "kvmesh", "version": version, "description": "A mesh for disaggregated LLM serving."},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
    return msgspec.json.encode(document)


def _types(operation: Operation) -> list[type]:
    return [
        kind for kind in (operation.request, *operation.either, operation.reply, operation.error) if kind is not None
    ]


def _operation(method: str, path: str, operation: Operation, refs: Mapping[type, Any]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": f"{method.lower()}{path}".replace("/", "_").replace("{", "").replace("}", "").replace(".", "_"),
        "responses": _responses(operation, refs),
        "security": [] if operation.is_open else [{}, {"key": []}],
    }
    if parameters := _parameters(path, operation):
        described["parameters"] = parameters
    if body := _body(operation, refs):
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": body}}}
    return described


def _body(operation: Operation, refs: Mapping[type, Any]) -> Any:
    if operation.either:
        return {"anyOf": [refs[kind] for kind in operation.either]}
    return refs[operation.request] if operation.request is not None else None


def _parameters(path: str, operation: Operation) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if "{name}" in path:
        found.append({"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}})
    if operation.streams:
        for name, description in HEADERS.items():
            schema = {"type": "number", "exclusiveMinimum": 0} if name.endswith("-s") else {"type": "string"}
            found.append({"name": name, "in": "header", "description": description, "schema": schema})
    return found


def _responses(operation: Operation, refs: Mapping[type, Any]) -> dict[str, Any]:
    schema = refs[operation.reply] if operation.reply is not None else {}
    content: dict[str, Any] = {operation.reply_type: {"schema": schema}}
    if operation.streams:
        content[SSE] = {"schema": {"type": "string"}}
    error = {JSON: {"schema": refs[operation.error]}}
    if operation.reply is Health:
        error = content
    failures: Sequence[int] = operation.failures
    return {
        "200": {"description": "It is done.", "content": content},
        **{str(status): {"description": _DESCRIBED[status], "content": error} for status in failures},
    }


_DESCRIBED = {
    400: "Something in the request cannot be honoured; the error names it.",
    401: "The API key is missing or unknown.",
    404: "There is no such model.",
    408: "The request did not come to its end in time.",
    413: "The body is too large.",
    429: "Too much is in progress; Retry-After says when to come back.",
    431: "The head is too large.",
    500: "The frontend has failed; this is a bug.",
    502: "A worker has failed, and no other could take over.",
    503: "Nobody can answer now; Retry-After says when to come back.",
    504: "The request took longer than its timeout.",
}


def docs_page() -> bytes:
    """A page that shows /openapi.json; it loads nothing from elsewhere."""
    return files("frontend").joinpath("docs.html").read_bytes()
