"""Types of arguments by a tool's schema, and the schemas that hold an answer to calls."""

import json
from typing import Any

import pytest

from kvmesh.frontend.parsers.events import CallArguments, CallBegun, Content, Tool
from kvmesh.frontend.parsers.tools import forced_arguments, forced_calls, named_schema, required_schema
from kvmesh.frontend.parsers.tools.schema import ANY_TYPE, argument_types, typed
from kvmesh.protocol.errors import InvalidRequestError
from tests.frontend.parsers.streams import call, run

PLACE: dict[str, object] = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/Point"}, "near": {"$ref": "#"}, "also": {"$ref": "#/properties/at"}},
    "$defs": {"Point": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Point"}}}},
}
COLOUR: dict[str, object] = {
    "properties": {"c": {"$ref": "#/definitions/Point"}},
    "definitions": {"Point": {"enum": ["red", 1]}},
}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
        ({"oneOf": [{"$ref": "#/$defs/X"}, {"enum": [1, "a"]}]}, {"array", "integer", "string"}),
        ({"allOf": [{"description": "d"}, {"$ref": "#/$defs/X"}]}, {"array"}),
        ({"const": True}, {"boolean"}),
        ({"properties": {}}, {"object"}),
        ({"$ref": "#/$defs/Circle"}, set()),
        ({"$ref": "#/$defs/Nothing"}, ANY_TYPE),
        ({"$ref": "http://elsewhere"}, ANY_TYPE),
        ({"type": "no type"}, ANY_TYPE),
        ({"type": 5}, ANY_TYPE),
        ({}, ANY_TYPE),
        (True, ANY_TYPE),
    ],
)
def test_the_types_that_a_schema_allows(schema: object, types: set[str]) -> None:
    root: dict[str, object] = {
        "properties": {"k": schema},
        "$defs": {"X": {"type": "array"}, "Circle": {"$ref": "#/$defs/Circle"}},
    }
    assert argument_types(root, "k") == types


def test_an_argument_unknown_to_the_schema_may_be_anything() -> None:
    assert argument_types({}, "k") == argument_types({"properties": []}, "k") == ANY_TYPE


def test_a_schema_that_branches_without_end_is_given_up() -> None:
    twice = {"anyOf": [{"anyOf": [{"type": "string"}] * 300}] * 300}
    assert argument_types({"properties": {"k": twice}}, "k") == ANY_TYPE


@pytest.mark.parametrize(
    ("text", "types", "written"),
    [
        ("12", {"integer"}, "12"),
        ("12", {"string"}, '"12"'),
        ("12", {"string", "null"}, '"12"'),
        ("1.5", {"integer"}, '"1.5"'),
        (" -1.5e3\n", {"number"}, "-1.5e3"),
        ("007", {"integer"}, '"007"'),
        ("None", {"string", "null"}, "null"),
        ("null", {"string"}, '"null"'),
        ("False", {"boolean"}, "false"),
        ("yes", {"boolean"}, '"yes"'),
        ('{"a": [1]}', {"object"}, '{"a": [1]}'),
        ("{'a': None}", {"object"}, '{"a": null}'),
        ("[1, 2", {"array"}, '"[1, 2"'),
        ("[1]", {"object"}, '"[1]"'),
        ("a\n\"b\"", ANY_TYPE, '"a\\n\\"b\\""'),
        ("true", ANY_TYPE, "true"),
        ("NaN", {"number"}, '"NaN"'),
        ("", set(), '""'),
    ],
)  # fmt: skip
def test_a_value_fits_its_types_or_is_a_string(text: str, types: set[str], written: str) -> None:
    assert typed(text, frozenset(types)) == written


# --- guides ---------------------------------------------------------------------------------------------


def resolve(pointer: str, schema: Any) -> Any:
    assert pointer.startswith("#/")
    for part in pointer[2:].split("/"):
        schema = schema[int(part)] if isinstance(schema, list) else schema[part]
    return schema


def test_a_required_call_is_one_of_the_tools() -> None:
    schema = required_schema([Tool("f", PLACE), Tool("g", {})], parallel=True)
    assert (schema["type"], schema["minItems"], "maxItems" in schema) == ("array", 1, False)
    first, second = schema["items"]["anyOf"]
    assert first["properties"]["name"] == {"type": "string", "enum": ["f"]}
    assert second["properties"]["parameters"] == {"type": "object"}
    assert first["required"] == ["name", "parameters"]
    assert required_schema([Tool("g", {})], parallel=False)["maxItems"] == 1


def test_references_still_lead_to_what_they_named() -> None:
    schema = required_schema([Tool("f", PLACE), Tool("g", COLOUR)], parallel=True)
    first, second = (choice["properties"]["parameters"] for choice in schema["items"]["anyOf"])
    point = resolve(first["properties"]["at"]["$ref"], schema)
    assert resolve(point["properties"]["next"]["$ref"], schema) is point
    assert resolve(first["properties"]["near"]["$ref"], schema) is first
    assert resolve(first["properties"]["also"]["$ref"], schema) is first["properties"]["at"]
    assert resolve(second["properties"]["c"]["$ref"], schema) == {"enum": ["red", 1]}


def test_the_tools_are_left_as_they_are() -> None:
    before = json.dumps(PLACE)
    required_schema([Tool("f", PLACE)], parallel=True)
    assert json.dumps(PLACE) == before


def test_a_schema_nested_too_deep_is_refused() -> None:
    deep: dict[str, object] = {}
    for _ in range(500):
        deep = {"properties": {"a": deep}}
    with pytest.raises(InvalidRequestError, match="deeper than 64 levels"):
        required_schema([Tool("f", deep)], parallel=True)


def test_a_named_call_is_its_arguments() -> None:
    assert named_schema(Tool("f", {})) == {"type": "object"}
    assert named_schema(Tool("f", PLACE)) == PLACE


def test_an_answer_held_to_required_calls_is_read_as_calls() -> None:
    text = '[\n{"name": "f", "parameters": {"a": "]"}}, {"name": "g", "parameters": {}}]'
    assert run(forced_calls(), list(text)) == [*call(0, "f", '{"a": "]"}'), *call(1, "g", "{}")]


def test_an_answer_held_to_one_call_is_all_arguments() -> None:
    parser = forced_arguments("f")
    assert list(parser.push(' {"a"')) == [CallBegun(0, "f")]
    assert list(parser.push(': "')) == [CallArguments(0, '{"a": "')]
    assert run(forced_arguments("f"), list('{"a": 1}\n')) == call(0, "f", '{"a": 1}')


def test_an_answer_that_escaped_its_guide_is_prose() -> None:
    assert run(forced_calls(), ["I would rather [not]"]) == [Content("I would rather [not]")]
    assert run(forced_arguments("f"), ["No {}"]) == [Content("No {}")]
