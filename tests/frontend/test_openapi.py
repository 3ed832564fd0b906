"""GET /openapi.json says what the API does: all of it, and no more."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import Struct, convert
from msgspec.structs import fields
from openapi_spec_validator import OpenAPIV31SpecValidator

from kvmesh.frontend.anthropic.shapes import CountRequest, MessagesRequest
from kvmesh.frontend.bodies import Only
from kvmesh.frontend.hints import HEADERS
from kvmesh.frontend.http import FrontendApi, HttpSettings
from kvmesh.frontend.mesh_api.status import docs_page
from kvmesh.frontend.mesh_api.tokenize import DetokenizeRequest, TokenizeRequest
from kvmesh.frontend.models import ModelRegistry
from kvmesh.frontend.openai.embeddings import EmbeddingsRequest
from kvmesh.frontend.openai.shapes import ChatRequest, CompletionRequest
from kvmesh.frontend.openapi import HINT_HEADERS, SSE, openapi, shown_name
from kvmesh.frontend.openapi_fields import SENTENCES
from kvmesh.frontend.operation import HTTP_FAILURES
from kvmesh.frontend.responses.shapes import ResponsesRequest
from kvmesh.frontend.table import ENDPOINTS
from kvmesh.mesh.http.errors import CODES, http_failure
from tests.frontend.serving import Served
from tests.support.generator import ScriptedGenerator

DOCUMENT: dict[str, Any] = json.loads(openapi(ENDPOINTS, "1.2.3", 3600.0))
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]
REQUESTS = (
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    MessagesRequest,
    CountRequest,
    EmbeddingsRequest,
    TokenizeRequest,
    DetokenizeRequest,
)


def schema_of(kind: type[Struct]) -> dict[str, Any]:
    """Return the schema of a type; where two types share a name, their modules are part of it."""
    module = shown_name(f"{kind.__module__}.").removesuffix(".")  # as generated clients know it
    return SCHEMAS.get(kind.__name__) or SCHEMAS[f"{module}.{kind.__name__}"]


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def test_it_is_valid_openapi_31() -> None:
    assert DOCUMENT["openapi"] == "3.1.0"
    assert DOCUMENT["info"]["version"] == "1.2.3"
    assert list(OpenAPIV31SpecValidator(DOCUMENT).iter_errors()) == []


def test_every_route_is_an_operation_and_every_operation_a_route() -> None:
    app = FrontendApi(HttpSettings(), ModelRegistry(), ScriptedGenerator()).app
    routes = {(route.method, route.path): route for route in app.routes}
    assert routes.keys() == {(endpoint.method, endpoint.path) for endpoint in ENDPOINTS}
    opened = {(endpoint.method, endpoint.path) for endpoint in ENDPOINTS if endpoint.is_open}
    assert {key for key, route in routes.items() if route.is_open} == opened
    assert len(list(operations())) == len(routes)


def test_operations_have_names_of_their_own() -> None:
    names = [operation["operationId"] for _, _, operation in operations()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.__name__)
def test_a_requests_schema_has_exactly_its_parameters(kind: type[Struct]) -> None:
    schema = schema_of(kind)
    assert schema["properties"].keys() == {field.encode_name for field in fields(kind)}
    assert schema["additionalProperties"] is False
    assert set(schema["required"]) == {field.encode_name for field in fields(kind) if field.required}


NOTES = [endpoint.operation.notes for endpoint in ENDPOINTS]
READ_LATER = {place: kinds for notes in NOTES for place, kinds in notes.read_later.items()}
EXAMPLES = [place for notes in NOTES for place in notes.examples]
PARTS = [(kind, name, only) for notes in NOTES for kind, table in notes.partly for name, only in table.items()]


@pytest.mark.parametrize(("kind", "name", "only"), PARTS, ids=[f"{kind.__name__}.{name}" for kind, name, _ in PARTS])
def test_of_what_is_not_supported_the_harmless_values_are_described(kind: type[Struct], name: str, only: Only) -> None:
    field = schema_of(kind)["properties"][only.json_name or name]
    assert field | {"description": ""} == {"enum": [None, *only.values], "default": None, "description": ""}


@pytest.mark.parametrize(("kind", "name"), READ_LATER)
def test_objects_of_several_kinds_are_described_by_their_kinds(kind: type[Struct], name: str) -> None:
    field = json.dumps(schema_of(kind)["properties"][name])
    assert '{"type": "object"}' not in field
    assert all(f'schemas/{part.__name__}"' in field for part in READ_LATER[kind, name])


@pytest.mark.parametrize(("kind", "name"), EXAMPLES)
def test_examples_can_be_sent(kind: type[Struct], name: str) -> None:
    [example] = schema_of(kind)["properties"][name]["examples"]
    convert(example, next(field.type for field in fields(kind) if field.name == name))


def test_all_headers_that_are_hints_are_described() -> None:
    assert HINT_HEADERS.keys() == HEADERS.keys()
    chat = DOCUMENT["paths"]["/v1/chat/completions"]["post"]
    described = {parameter["name"] for parameter in chat["parameters"]}
    assert described == {"x-request-id", "x-request-timeout-s", *HEADERS}


def test_the_longest_timeout_is_that_of_the_settings() -> None:
    chat = DOCUMENT["paths"]["/v1/chat/completions"]["post"]
    [timeout] = [parameter for parameter in chat["parameters"] if parameter["name"] == "x-request-timeout-s"]
    assert timeout["schema"]["maximum"] == 3600.0


def test_whoever_is_told_to_come_back_is_told_when() -> None:
    for method, path, operation in operations():
        for status in {"429", "503"} & operation["responses"].keys():
            if (path, status) != ("/health", "503"):
                assert "retry-after" in operation["responses"][status]["headers"], (method, path, status)


def test_every_failure_of_a_chat_is_described() -> None:
    statuses = {http_failure(code).status for code in CODES - {"conflict"}} | {500}  # that one is for operators
    chat = DOCUMENT["paths"]["/v1/chat/completions"]["post"]
    assert {int(status) for status in chat["responses"]} == {200, *statuses}


def test_refusals_that_come_before_the_endpoint_are_described_everywhere() -> None:
    opened = {(endpoint.method, endpoint.path) for endpoint in ENDPOINTS if endpoint.is_open}
    for method, path, operation in operations():
        needed = {*map(str, HTTP_FAILURES), *(() if (method, path) in opened else ("401",))}
        assert needed <= operation["responses"].keys(), (method, path)
        assert "allow" in operation["responses"]["405"]["headers"]
        assert "accept-encoding" in operation["responses"]["415"]["headers"]


def test_both_ways_to_send_a_key_are_declared() -> None:
    schemes = DOCUMENT["components"]["securitySchemes"]
    assert (schemes["key"]["scheme"], schemes["x_api_key"]["name"]) == ("bearer", "x-api-key")
    for endpoint in ENDPOINTS:
        shown = DOCUMENT["paths"][endpoint.path.replace(":path}", "}")][endpoint.method.lower()]["security"]
        assert shown == ([] if endpoint.is_open else [{}, {"key": []}, {"x_api_key": []}])


FIELDS = [(schema, name) for schema, value in SCHEMAS.items() for name in value.get("properties", ())]


def test_every_field_has_a_sentence() -> None:
    without = [
        f"{schema}.{name}" for schema, name in FIELDS if "description" not in SCHEMAS[schema]["properties"][name]
    ]
    assert without == [], "add a sentence to frontend/openapi_fields.py"


def test_every_sentence_has_a_field() -> None:
    used = {key if (key := f"{schema}.{name}") in SENTENCES else name for schema, name in FIELDS}
    assert SENTENCES.keys() - used == set(), "take the sentence out of frontend/openapi_fields.py"


def test_sentences_are_short_and_complete() -> None:
    for key, text in SENTENCES.items():
        assert text.endswith("."), key
        assert not text[0].islower(), key
        assert all(len(part.split()) <= 25 for part in text.split(". ")), key


def test_every_parameter_and_header_is_described() -> None:
    for method, path, operation in operations():
        described = [*operation.get("parameters", ())]
        described += [header for reply in operation["responses"].values() for header in reply["headers"].values()]
        assert all(entry["description"] for entry in described), (method, path)


def test_a_stream_is_described_by_its_events() -> None:
    streaming = {path for _, path, operation in operations() if SSE in operation["responses"]["200"]["content"]}
    answering = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"}
    assert streaming == {*answering, "/v1/responses/{response_id}"}
    event = DOCUMENT["paths"]["/v1/messages"]["post"]["responses"]["200"]["content"][SSE]["schema"]
    assert event["properties"]["data"]["contentMediaType"] == "application/json"
    assert "message_start" in json.dumps(event["properties"]["data"]["contentSchema"])


def test_metrics_are_described_in_both_formats() -> None:
    answered = DOCUMENT["paths"]["/metrics"]["get"]["responses"]["200"]
    assert set(answered["content"]) == {"text/plain", "application/openmetrics-text"}


async def test_the_document_and_its_page_are_served(able: Served) -> None:
    status, document = await able.get("/openapi.json")
    assert status == 200
    assert document["paths"] == DOCUMENT["paths"]
    status, page = await able.get("/docs")
    assert (status, page) == (200, docs_page().decode())


def test_the_page_loads_nothing_from_elsewhere() -> None:
    page = docs_page().decode()
    assert 'fetch("openapi.json")' in page
    assert "http://" not in page
    assert "https://" not in page
