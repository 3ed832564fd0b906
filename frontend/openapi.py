"""GET /openapi.json: the API described by the very types that read and write it."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from kvmesh.frontend.bodies import Only
from kvmesh.frontend.endpoint import Endpoint
from kvmesh.frontend.hints import MAX_PRIORITY
from kvmesh.frontend.openapi_fields import sentence_of
from kvmesh.frontend.operation import HTTP_FAILURES, Kind, Operation
from kvmesh.mesh.http.request import JSON

REF = "#/components/schemas/{name}"
SSE = "text/event-stream"
MODULES_IN_NAMES = {"kvmesh.frontend.": "frontend.", "frontend.openai.shapes.": "frontend.openai."}
"""msgspec puts the module before names that two types share. Generated clients use the names: they never change."""
LOGIT_BIAS_KEYS: dict[str, Any] = {"pattern": "^[0-9]{1,10}$"}  # token ids

_IN_PATH = re.compile(r"\{(\w+)\}")

Schema = dict[str, Any]

SECURITY_SCHEMES: Mapping[str, Schema] = {
    "key": {
        "type": "http",
        "scheme": "bearer",
        "description": "OpenAI's clients send the API key so. A mesh without --api-keys-file needs none.",
    },
    "x_api_key": {
        "type": "apiKey",
        "in": "header",
        "name": "x-api-key",
        "description": "Anthropic's clients send the API key so. A mesh without --api-keys-file needs none.",
    },
}

# --- headers --------------------------------------------------------------------------------------------

_NAME: Schema = {"type": "string", "pattern": r"^[\x21-\x7e]([\x20-\x7e]{0,254}[\x21-\x7e])?$"}
HINT_HEADERS: Mapping[str, tuple[str, Schema]] = {  # of kvmesh.frontend.hints
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
_FAILURE_HEADERS: Mapping[int, Mapping[str, tuple[str, Schema]]] = {
    401: {"www-authenticate": ("how to send a key: Bearer", {"type": "string"})},
    405: {"allow": ("the methods that the path takes", {"type": "string"})},
    415: {"accept-encoding": ("the content encodings that a body may have", {"type": "string"})},
    429: _RETRY_AFTER,
    503: _RETRY_AFTER,
}
_SHOWN_ID = {"x-request-id": ("the id that you sent, or ours", {"type": "string"})}


def _asked_headers(max_timeout_s: float) -> dict[str, tuple[str, Schema]]:
    timeout = {"type": "number", "exclusiveMinimum": 0, "maximum": max_timeout_s, "examples": [60]}
    return {
        "x-request-id": ("your own id for the request; comes back, and stands in our logs", {"type": "string"}),
        "x-request-timeout-s": ("seconds until the request is given up", timeout),
    }


PATH_NAMES: Mapping[str, str] = {
    "name": "the name of a model or of an adapter",
    "response_id": "the id of a stored response",
    "worker": "the id of a worker, or its name where only one has that name",
}

# --- the document ---------------------------------------------------------------------------------------


def openapi(endpoints: Sequence[Endpoint], version: str, max_timeout_s: float) -> bytes:
    """Return the document as JSON. `max_timeout_s`: the most that a request may ask for."""
    described = Described([endpoint.operation for endpoint in endpoints])
    asked = _asked_headers(max_timeout_s)
    paths: dict[str, Schema] = {}
    for endpoint in endpoints:
        shown = endpoint.path.replace(":path}", "}")
        paths.setdefault(shown, {})[endpoint.method.lower()] = _operation(endpoint, shown, described, asked)
    document = {
        "openapi": "3.1.0",
        "info": {"title": "kvmesh", "version": version, "description": "A mesh for disaggregated LLM serving."},
        "paths": paths,
        "components": {
            "schemas": described.components,
            "securitySchemes": SECURITY_SCHEMES,
        },
    }
    return shown_name(msgspec.json.encode(document).decode()).encode()


def shown_name(component: str) -> str:
    """Return the name of a component as the document has it."""
    for module, shown in MODULES_IN_NAMES.items():
        component = component.replace(module, shown)
    return component


class Described:
    """The schemas of all types that the operations name."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        notes = [operation.notes for operation in operations]
        read_later = {place: kinds for note in notes for place, kinds in note.read_later.items()}
        self._describe(
            [kind for operation in operations for kind in operation.kinds],
            [kind for kinds in read_later.values() for kind in kinds],
            [kind for note in notes for kind, _ in [*note.partly, *note.needed, *note.examples]],
        )
        for note in notes:
            self._note_values(note.partly)
            self._note_needed(note.needed)
            self._note_token_ids(note.token_id_keys)
        for note in notes:
            self._note_examples(note.examples)
        for (kind, name), objects in read_later.items():
            for place in _bare_objects(self._properties(kind)[name]):
                place.clear()
                place.update(self.one_of(objects))
        self._describe_fields()

    def _describe(self, *kinds: Iterable[Kind]) -> None:
        types = list(dict.fromkeys([kind for group in kinds for kind in group]))
        schemas, components = msgspec.json.schema_components(types, ref_template=REF)
        self.components: dict[str, Schema] = components
        self._schemas: dict[Kind, Schema] = dict(zip(types, schemas, strict=True))

    def _describe_fields(self) -> None:
        """Add to each field the sentence that stands for it in `openapi_fields`."""
        for name, schema in self.components.items():
            for field_name, field in schema.get("properties", {}).items():
                if (sentence := sentence_of(shown_name(name), field_name)) is not None:
                    field["description"] = sentence

    def _note_values(self, partly: Iterable[tuple[type[Struct], Mapping[str, Only]]]) -> None:
        for kind, defaults in partly:
            for name, harmless in defaults.items():
                field = self._properties(kind)[harmless.json_name or name]
                field.clear()
                field.update({"enum": [None, *harmless.values], "default": None})

    def _note_needed(self, needed: Iterable[tuple[type[Struct], str]]) -> None:
        for kind, name in needed:
            self._properties(kind)[name] = {"type": "string"}
            self._component(kind)["required"].append(name)

    def _note_token_ids(self, keys: Iterable[tuple[type[Struct], str]]) -> None:
        for kind, name in keys:
            biases, _ = self._properties(kind)[name]["anyOf"]
            biases["propertyNames"] = LOGIT_BIAS_KEYS

    def _note_examples(self, examples: Mapping[tuple[type[Struct], str], object]) -> None:
        for (kind, name), example in examples.items():
            field = self._properties(kind)[name]
            field["examples"] = [example]
            field.pop("default", None)

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


def _operation(endpoint: Endpoint, path: str, described: Described, asked: Mapping[str, tuple[str, Schema]]) -> Schema:
    operation, method = endpoint.operation, endpoint.method
    shown: Schema = {
        "summary": operation.summary,
        "operationId": f"{method.lower()}{path}".replace("/", "_").replace("{", "").replace("}", "").replace(".", "_"),
        "responses": _responses(endpoint, described),
        "security": [] if endpoint.is_open else [{}, *({name: []} for name in SECURITY_SCHEMES)],
    }
    if parameters := _parameters(path, operation, asked):
        shown["parameters"] = parameters
    if operation.request:
        body = described.one_of(operation.request)
        shown["requestBody"] = {"required": True, "content": {JSON: {"schema": body}}}
    return shown


def _parameters(path: str, operation: Operation, asked: Mapping[str, tuple[str, Schema]]) -> list[Schema]:
    found: list[Schema] = []
    for name in _IN_PATH.findall(path):
        place = {"name": name, "in": "path", "required": True, "description": PATH_NAMES[name]}
        found.append({**place, "schema": {"type": "string", "minLength": 1}})
    for name, (description, query) in operation.query.items():
        found.append({"name": name, "in": "query", "description": description, "schema": query})
    headers = {**(asked if operation.is_asked else {}), **(HINT_HEADERS if operation.takes_hints else {})}
    for name, (description, schema) in headers.items():
        found.append({"name": name, "in": "header", "description": description, "schema": schema})
    return found


def _responses(endpoint: Endpoint, described: Described) -> Schema:
    operation = endpoint.operation
    schema = described.one_of(operation.replies) if operation.reply is not None else {}
    content: Schema = {kind: {"schema": schema} for kind in (operation.reply_type, *operation.other_reply_types)}
    own: Schema = dict(content) if operation.fails_with_reply else {}
    if operation.events:
        content[SSE] = {"schema": _event(operation, described)}
    named = _SHOWN_ID if operation.is_asked else {}
    shown = {"200": {"description": "It is done.", "headers": _headers(named), "content": content}}
    error = {JSON: {"schema": described.one_of(operation.errors)}}
    for status in _failures(endpoint):
        is_reply = bool(own) and status in operation.failures
        headers = {} if is_reply else {**_SHOWN_ID, **_FAILURE_HEADERS.get(status, {})}
        shown[str(status)] = {
            "description": _DESCRIBED[status],
            "headers": _headers(headers),
            "content": own if is_reply else error,
        }
    return shown


def _failures(endpoint: Endpoint) -> list[int]:
    """Return the statuses of refusals, also of those that come before the endpoint."""
    return sorted({*endpoint.operation.failures, *HTTP_FAILURES, *(() if endpoint.is_open else (401,))})


def _event(operation: Operation, described: Described) -> Schema:
    """Describe one event, whose data is text that holds JSON: OpenAPI 3.1 leaves open what the schema of a stream
    is."""
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
    403: "The API key may not use this model.",
    404: "There is no such thing, for example no such model; the error names it.",
    405: "The path does not take this method; Allow names those that it takes.",
    408: "The request did not come to its end in time.",
    409: "The worker is in a state that does not allow it; the error says what to order first.",
    413: "The body is too large, as it is sent or when it is inflated.",
    415: "The body has a content encoding that is not supported; Accept-Encoding names those that are.",
    429: "Too much is in progress; Retry-After says when to come back.",
    431: "The head is too large.",
    500: "The frontend has failed; this is a bug.",
    502: "A worker has failed, and no other could take over.",
    503: "Nobody can answer now; Retry-After says when to come back.",
    504: "The request took longer than its timeout.",
}
