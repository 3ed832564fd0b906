"""GET /openapi.json and /docs: the API described by the very types that read and write it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import msgspec
from msgspec import Struct

from frontend import parameters
from frontend.anthropic import parse as anthropic_parse
from frontend.anthropic import shapes as anthropic
from frontend.embeddings import EmbeddingsReply, EmbeddingsRequest
from frontend.hints import MAX_PRIORITY
from frontend.openai import (
    ChatChoice,
    ChatChunkChoice,
    ChatRequest,
    Chunk,
    CompletionChoice,
    CompletionChunkChoice,
    CompletionRequest,
    Message,
    ModelList,
    ModelObject,
    Response,
    TextPart,
)
from frontend.parameters import Only
from frontend.responses import parse as responses_parse
from frontend.responses import shapes as responses
from frontend.tokenize import DetokenizeReply, DetokenizeRequest, TokenizeReply, TokenizeRequest
from mesh.http.request import JSON
from router.api import PlaceReply

REF = "#/components/schemas/{name}"
SSE = "text/event-stream"

Schema = dict[str, Any]
Kind = Any  # a type or a union of types, as msgspec reads it


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


# --- what the types do not say ------------------------------------------------------------------------

PARTLY_SUPPORTED: Sequence[tuple[type[Struct], Mapping[str, Only]]] = (
    (ChatRequest, parameters.CHAT_DEFAULTS),
    (Message, parameters.MESSAGE_DEFAULTS),
    (TextPart, parameters.PART_DEFAULTS),
    (responses.ResponsesRequest, responses_parse.DEFAULTS),
    (responses.TextConfig, responses_parse.TEXT_DEFAULTS),
    (responses.ReasoningConfig, responses_parse.REASONING_DEFAULTS),
    (responses.FunctionTool, responses_parse.TOOL_DEFAULTS),
    (responses.ContentPart, responses_parse.PART_DEFAULTS),
    (anthropic.CountRequest, anthropic_parse.PROMPT_DEFAULTS),
    (anthropic.MessagesRequest, {**anthropic_parse.PROMPT_DEFAULTS, **anthropic_parse.MESSAGES_DEFAULTS}),
    (anthropic.ToolSpec, anthropic_parse.TOOL_DEFAULTS),
)
READ_LATER: Mapping[tuple[type[Struct], str], Sequence[type[Struct]]] = {  # objects of one of several kinds
    (responses.ResponsesRequest, "input"): (
        responses.MessageItem,
        responses.FunctionCallItem,
        responses.FunctionOutputItem,
        responses.ReasoningItem,
    ),
    (responses.ResponsesRequest, "tools"): (responses.FunctionTool,),
    (responses.ResponsesRequest, "tool_choice"): (responses.FunctionToolChoice, responses.AllowedTools),
}

NEEDED: Sequence[tuple[type[Struct], str]] = (  # by the kinds of parts that are supported
    (TextPart, "text"),
    (responses.ContentPart, "text"),
)
LOGIT_BIAS_KEYS: Schema = {"pattern": "^[0-9]{1,10}$"}  # token ids
_ASKING = "Tell me a story."
EXAMPLES: Mapping[tuple[type[Struct], str], object] = {
    (ChatRequest, "messages"): [{"role": "user", "content": _ASKING}],
    (anthropic.MessagesRequest, "messages"): [{"role": "user", "content": _ASKING}],
    (anthropic.CountRequest, "messages"): [{"role": "user", "content": _ASKING}],
    (Message, "content"): _ASKING,
    (Message, "role"): "user",
    (TextPart, "text"): _ASKING,
    (CompletionRequest, "prompt"): "Once upon a time",
    (responses.ResponsesRequest, "input"): _ASKING,
    (responses.ContentPart, "text"): _ASKING,
    (anthropic.Message, "content"): _ASKING,
    (EmbeddingsRequest, "input"): "Once upon a time",
    (TokenizeRequest, "prompt"): "Once upon a time",
    (DetokenizeRequest, "tokens"): [16, 17, 18],
}

# --- headers --------------------------------------------------------------------------------------------

_NAME: Schema = {"type": "string", "pattern": r"^[\x21-\x7e]([\x20-\x7e]{0,254}[\x21-\x7e])?$"}
HINT_HEADERS: Mapping[str, tuple[str, Schema]] = {  # of frontend.hints
    "x-kvmesh-worker": ("the worker that is to decode, by name or id", _NAME),
    "x-kvmesh-prefill-worker": ("the worker that is to compute the prompt", _NAME),
    "x-kvmesh-dp-rank": ("a data-parallel rank of that worker", {"type": "integer", "minimum": 0, "maximum": 999_999}),
    "x-kvmesh-session": ("requests of one session go to one worker", _NAME),
    "x-kvmesh-tenant": ("who shares the queue with whom", _NAME),
    "x-kvmesh-priority": (
        "in the queue the higher goes first",
        {"type": "integer", "minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY},
    ),
    "x-kvmesh-explain": ("1: answer with the reasons", {"type": "string", "enum": ["0", "1"]}),
}
_RETRY_AFTER = {"retry-after": ("seconds until it is worth another try", {"type": "integer", "minimum": 0})}
_SHOWN_ID = {"x-request-id": ("the id that you sent, or ours", {"type": "string"})}


def _asked_headers(max_timeout_s: float) -> dict[str, tuple[str, Schema]]:
    timeout = {"type": "number", "exclusiveMinimum": 0, "maximum": max_timeout_s, "examples": [60]}
    return {
        "x-request-id": ("your own id for the request; comes back, and stands in our logs", {"type": "string"}),
        "x-request-timeout-s": ("seconds until the request is given up", timeout),
    }


# --- operations -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What one route takes and gives."""

    summary: str
    request: tuple[Kind, ...] = ()  # the body is one of these
    reply: Kind = None  # None: anything
    reply_type: str = JSON
    events: tuple[Kind, ...] = ()  # where it can stream: the data of an event is one of these
    ends_with_done: bool = False  # ... or [DONE]
    error: Kind = ErrorBody
    failures: tuple[int, ...] = ()
    is_open: bool = False  # needs no key
    is_asked: bool = False  # it has an id and a timeout
    takes_hints: bool = False

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return tuple(kind for kind in (*self.request, self.reply, *self.events, self.error) if kind is not None)


_ASKED = (400, 401, 404, 408, 413, 429, 431, 500, 502, 503, 504)
_TOLD = (400, 401, 404, 408, 413, 431, 500, 503)
OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        summary="Answer a chat",
        request=(ChatRequest,),
        reply=Response[ChatChoice],
        events=(Chunk[ChatChunkChoice], ErrorBody),
        ends_with_done=True,
        failures=_ASKED,
        is_asked=True,
        takes_hints=True,
    ),
    ("POST", "/v1/completions"): Operation(
        summary="Go on with a text",
        request=(CompletionRequest,),
        reply=Response[CompletionChoice],
        events=(Chunk[CompletionChunkChoice], ErrorBody),
        ends_with_done=True,
        failures=_ASKED,
        is_asked=True,
        takes_hints=True,
    ),
    ("POST", "/v1/responses"): Operation(
        summary="Answer, in the shape of OpenAI's Responses API; nothing is stored",
        request=(responses.ResponsesRequest,),
        reply=responses.Response,
        events=(responses.Event,),
        failures=_ASKED,
        is_asked=True,
        takes_hints=True,
    ),
    ("POST", "/v1/messages"): Operation(
        summary="Answer, in the shape of Anthropic's Messages API",
        request=(anthropic.MessagesRequest,),
        reply=anthropic.Answer,
        events=(anthropic.Event,),
        error=anthropic.ErrorAnswer,
        failures=_ASKED,
        is_asked=True,
        takes_hints=True,
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        summary="Count the tokens of a prompt",
        request=(anthropic.CountRequest,),
        reply=anthropic.TokenCount,
        error=anthropic.ErrorAnswer,
        failures=_ASKED,
        is_asked=True,
    ),
    ("POST", "/v1/embeddings"): Operation(
        summary="Turn texts into vectors",
        request=(EmbeddingsRequest,),
        reply=EmbeddingsReply,
        failures=_ASKED,
        is_asked=True,
        takes_hints=True,
    ),
    ("POST", "/tokenize"): Operation(
        summary="The tokens of a text or of a chat", request=(TokenizeRequest,), reply=TokenizeReply, failures=_TOLD
    ),
    ("POST", "/detokenize"): Operation(
        summary="The text of tokens", request=(DetokenizeRequest,), reply=DetokenizeReply, failures=_TOLD
    ),
    ("POST", "/kvmesh/route"): Operation(
        summary="Where a chat or a text would run, and why; it is not run",
        request=(ChatRequest, CompletionRequest),
        reply=PlaceReply,
        failures=_ASKED,
        is_asked=True,
        takes_hints=True,
    ),
    ("GET", "/v1/models"): Operation(summary="What can be asked", reply=ModelList, failures=(401,)),
    ("GET", "/v1/models/{name:path}"): Operation(summary="One model", reply=ModelObject, failures=(401, 404, 503)),
    ("GET", "/health"): Operation(summary="Can requests be answered?", reply=Health, failures=(503,), is_open=True),
    ("GET", "/live"): Operation(summary="Does the process run?", reply=Live, is_open=True),
    ("GET", "/metrics"): Operation(summary="Metrics for Prometheus", reply_type="text/plain", is_open=True),
    ("GET", "/openapi.json"): Operation(summary="This description", is_open=True),
    ("GET", "/docs"): Operation(summary="This description, to be read", reply_type="text/html", is_open=True),
}


# --- the document ---------------------------------------------------------------------------------------


def openapi(version: str, max_timeout_s: float) -> bytes:
    """The document as JSON. `max_timeout_s`: the most that a request may ask for."""
    described = Described()
    asked = _asked_headers(max_timeout_s)
    paths: dict[str, Schema] = {}
    for (method, path), operation in OPERATIONS.items():
        shown = path.replace(":path}", "}")
        paths.setdefault(shown, {})[method.lower()] = _operation(method, shown, operation, described, asked)
    document = {
        "openapi": "3.1.0",
        "info": {"title": "kvmesh", "version": version, "description": "A mesh for disaggregated LLM serving."},
        "paths": paths,
        "components": {
            "schemas": described.components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
    return msgspec.json.encode(document)


class Described:
    """The schemas of all types that the operations name."""

    def __init__(self) -> None:
        later = [kind for kinds in READ_LATER.values() for kind in kinds]
        named = [kind for operation in OPERATIONS.values() for kind in operation.kinds]
        parts = [kind for kind, _ in [*PARTLY_SUPPORTED, *NEEDED, *EXAMPLES]]
        types = list(dict.fromkeys([*named, *later, *parts]))
        schemas, components = msgspec.json.schema_components(types, ref_template=REF)
        self.components: dict[str, Schema] = components
        self._schemas: dict[Kind, Schema] = dict(zip(types, schemas, strict=True))
        for kind, defaults in PARTLY_SUPPORTED:
            for name, harmless in defaults.items():
                field = self._properties(kind)[harmless.json_name or name]
                field.clear()
                field.update({"enum": [None, *harmless.values], "default": None})
        for kind, name in NEEDED:
            self._properties(kind)[name] = {"type": "string"}
            self._component(kind)["required"].append(name)
        for kind in (ChatRequest, CompletionRequest, responses.ResponsesRequest):
            biases, _ = self._properties(kind)["logit_bias"]["anyOf"]
            biases["propertyNames"] = LOGIT_BIAS_KEYS
        for (kind, name), example in EXAMPLES.items():
            field = self._properties(kind)[name]
            field["examples"] = [example]
            field.pop("default", None)
        for (kind, name), objects in READ_LATER.items():
            for place in _bare_objects(self._properties(kind)[name]):
                place.clear()
                place.update(self.one_of(objects))

    def one_of(self, kinds: Sequence[Kind]) -> Schema:
        """The schema of a value that is of any of them."""
        if len(kinds) == 1:
            return self._schemas[kinds[0]]
        return {"anyOf": [self._schemas[kind] for kind in kinds]}

    def _component(self, kind: type[Struct]) -> Schema:
        return self.components[self._schemas[kind]["$ref"].rpartition("/")[2]]

    def _properties(self, kind: type[Struct]) -> dict[str, Schema]:
        found: dict[str, Schema] = self._component(kind)["properties"]
        return found


def _bare_objects(schema: Schema) -> list[Schema]:
    """The parts that say no more than that there is an object."""
    if schema == {"type": "object"}:
        return [schema]
    parts = [*schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else [])]
    return [place for part in parts for place in _bare_objects(part)]


def _operation(
    method: str, path: str, operation: Operation, described: Described, asked: Mapping[str, tuple[str, Schema]]
) -> Schema:
    shown: Schema = {
        "summary": operation.summary,
        "operationId": f"{method.lower()}{path}".replace("/", "_").replace("{", "").replace("}", "").replace(".", "_"),
        "responses": _responses(operation, described),
        "security": [] if operation.is_open else [{}, {"key": []}],
    }
    if parameters := _parameters(path, operation, asked):
        shown["parameters"] = parameters
    if operation.request:
        body = described.one_of(operation.request)
        shown["requestBody"] = {"required": True, "content": {JSON: {"schema": body}}}
    return shown


def _parameters(path: str, operation: Operation, asked: Mapping[str, tuple[str, Schema]]) -> list[Schema]:
    found: list[Schema] = []
    if "{name}" in path:
        found.append({"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}})
    headers = {**(asked if operation.is_asked else {}), **(HINT_HEADERS if operation.takes_hints else {})}
    for name, (description, schema) in headers.items():
        found.append({"name": name, "in": "header", "description": description, "schema": schema})
    return found


def _responses(operation: Operation, described: Described) -> Schema:
    schema = described.one_of((operation.reply,)) if operation.reply is not None else {}
    content: Schema = {operation.reply_type: {"schema": schema}}
    error = {JSON: {"schema": described.one_of((operation.error,))}}
    if operation.reply is Health:
        error = dict(content)
    if operation.events:
        content[SSE] = {"schema": _event(operation, described)}
    named = _SHOWN_ID if operation.is_asked else {}
    shown = {"200": {"description": "It is done.", "headers": _headers(named), "content": content}}
    for status in operation.failures:
        again = _RETRY_AFTER if status in (429, 503) and error != content else {}
        headers = _headers({**named, **again})
        shown[str(status)] = {"description": _DESCRIBED[status], "headers": headers, "content": error}
    return shown


def _event(operation: Operation, described: Described) -> Schema:
    """Of one event, its data being text that holds JSON: OpenAPI 3.1 leaves open what the schema of a stream is."""
    data: Schema = {
        "type": "string",
        "contentMediaType": JSON,
        "contentSchema": described.one_of(operation.events),
    }
    if operation.ends_with_done:
        data = {"anyOf": [{"const": "[DONE]"}, data]}
    return {
        "description": "One event of the stream.",
        "type": "object",
        "properties": {"event": {"type": "string"}, "data": data},
        "required": ["data"],
    }


def _headers(named: Mapping[str, tuple[str, Schema]]) -> Schema:
    return {name: {"description": description, "schema": schema} for name, (description, schema) in named.items()}


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
