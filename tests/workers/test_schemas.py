"""Schemas for guides: what is written in other keywords, and where a schema is at fault."""

import itertools
import json
import time
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.workers.schemas import (
    MAX_ARRANGEMENTS,
    MAX_PROBES,
    MAX_UNIQUE,
    SchemaFault,
    fault_of,
    fault_reason,
    held,
    held_text,
)
from tests.support.budget import examples

VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    2,
    -1,
    1.5,
    "",
    "a",
    "b",
    [],
    [1],
    [1, 1],
    ["a", "b"],
    {},
    {"a": 1},
    {"b": 1},
]


def fits(value: Any, schema: Any) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def same(schema: Any, *more: Any) -> Any:
    """Return what the schema becomes, once it is proven to allow the same values."""
    rewritten = held(schema, schema)
    assert "uniqueItems" not in json.dumps(rewritten)
    assert '"not"' not in json.dumps(rewritten)
    for value in (*VALUES, *more):
        assert fits(value, rewritten) == fits(value, schema), value
    return rewritten


# --- uniqueItems --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": False, "items": {"type": "integer"}},
        {"type": "array", "uniqueItems": True, "maxItems": 1},
        {"type": "string", "uniqueItems": True},
        {"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b", 1, 1.0]}},
        {"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b", 1], "type": "string", "title": "A"}},
        {"type": "array", "uniqueItems": True, "items": {"const": 1}, "minItems": 1},
        {"type": "array", "uniqueItems": True, "items": {"const": 1}, "minItems": 2},
        {"type": "array", "uniqueItems": True, "items": {"type": "boolean"}, "maxItems": 2},
        {"type": "array", "uniqueItems": True, "items": {"$ref": "#/$defs/x"}, "$defs": {"x": {"enum": [1, 2]}}},
    ],
    ids=json.dumps,
)
def test_unique_items_are_written_out_where_they_are_few(schema: dict[str, Any]) -> None:
    arrays = [list(row) for size in range(4) for row in itertools.product(["a", "b", 1, True], repeat=size)]
    same(schema, *arrays)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": True, "items": {"type": "string"}},
        {"type": "array", "uniqueItems": True},
        {"uniqueItems": True, "items": {"enum": [1, 2]}},
        {"type": "array", "uniqueItems": True, "items": {"enum": list(range(6))}},
        {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2], "not": {"const": 1}, "minimum": 0}},
    ],
    ids=json.dumps,
)
def test_other_unique_items_are_refused_with_their_place(schema: dict[str, Any]) -> None:
    root = {"type": "object", "properties": {"a/b": schema}}
    with pytest.raises(SchemaFault, match="'uniqueItems'") as refused:
        held(root, root)
    assert refused.value.path == ("properties", "a/b")
    assert refused.value.pointer == "/properties/a~1b"


def test_many_unique_items_may_stand_in_short_arrays() -> None:
    schema = {"type": "array", "uniqueItems": True, "items": {"enum": list(range(19))}, "maxItems": 2}
    assert len(held(schema, schema)["anyOf"]) == 1 + 19 + 19 * 18 <= MAX_ARRANGEMENTS


def test_arrangements_of_a_long_enum_are_not_all_counted() -> None:
    schema = {"type": "array", "uniqueItems": True, "items": {"enum": list(range(20_000))}}
    begun_s = time.process_time()
    with pytest.raises(SchemaFault, match="too many"):
        held(schema, schema)
    assert time.process_time() - begun_s < 2


@pytest.mark.parametrize(("num_chars", "num_arrays"), [(5000, 1), (1, MAX_UNIQUE + 1)])
def test_unique_items_cannot_write_out_a_large_schema(num_chars: int, num_arrays: int) -> None:
    values = [f"{n}" + "v" * num_chars for n in range(19)]
    unique = {"type": "array", "uniqueItems": True, "items": {"$ref": "#/$defs/e"}, "maxItems": 2}
    with pytest.raises(SchemaFault, match="'uniqueItems'"):
        held_text(json.dumps({"$defs": {"e": {"enum": values}}, "prefixItems": [unique] * num_arrays}))


# --- not ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"type": "null"}},
        {"not": {"type": ["string", "number"]}},
        {"type": ["integer", "null"], "not": {"type": "integer"}},
        {"type": ["integer", "null"], "not": {"type": "number", "title": "A number"}},
        {"type": "string", "not": {"type": "string"}},
        {"type": "string", "not": {"const": ""}},
        {"not": {"const": ""}, "minLength": 0},
        {"type": "string", "not": {"const": "a"}},
        {"type": "string", "not": {"enum": ["", "a", "ab", 'a"', "b\\", "\n", "a]", "-", "^"]}},
        {"type": "integer", "not": {"const": 1}},
        {"type": "integer", "minimum": 0, "not": {"enum": [-5, 0, 1, 3, 1.5, "x"]}},
        {"type": "string", "not": {"const": 5}},
        {"enum": ["a", "b", 1, None], "not": {"enum": ["b", None, 1.0]}},
        {"const": "a", "not": {"const": "a"}},
        {"const": "a", "not": {"const": "b"}},
        {"type": ["boolean", "null"], "not": {"const": True}},
        {"not": False},
        {"not": {}},
        {"type": "string", "not": True},
        {"not": {"not": {"type": "string"}}},
        {"not": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
        {"type": "object", "not": {"required": ["a"]}},
        {"type": "array", "items": {"not": {"type": "integer"}, "type": "integer"}},
    ],
    ids=json.dumps,
)
def test_not_is_written_in_other_keywords(schema: dict[str, Any]) -> None:
    same(schema, "ab", "aa", 'a"', "b\\", "b\\\\", "\n", "\n\n", "a]", "-", "^", "é", 3, 4, 100, -5)


@pytest.mark.parametrize(
    "refused",
    [
        {"pattern": "a"},
        {"const": "a"},
        {"type": "integer"},
        {"required": ["a", "b"]},
        {"minimum": 1},
    ],
    ids=json.dumps,
)
def test_another_not_is_refused_with_its_place(refused: Any) -> None:
    root = {"anyOf": [{"type": "null"}, {"not": refused}]}
    with pytest.raises(SchemaFault, match="'not' is supported only for") as fault:
        held(root, root)
    assert fault.value.path == ("anyOf", 1)


parts = st.sampled_from(
    [{"type": "null"}, {"const": ""}, {"enum": ["a", 1]}, {"type": ["string", "object"]}, True, False]
)
bases = st.sampled_from(
    [{}, {"type": "string"}, {"enum": ["a", "b", 1, None]}, {"type": ["boolean", "null"]}, {"type": "object"}]
)


@given(bases, parts, st.booleans())
@settings(max_examples=examples(200))
def test_what_is_rewritten_allows_the_same_values(base: dict[str, Any], part: Any, nested: bool) -> None:
    schema = base | {"not": {"anyOf": [part, {"const": "b"}]} if nested else part}
    try:
        same(schema)
    except SchemaFault:
        pass


def test_other_schemas_stay_as_they_are_byte_by_byte() -> None:
    text = '{"type": "object",  "properties": {"nothing": {"type": "string"}}}'
    assert held_text(text) is text
    for no_schema in ('{"not": ', '{"type": 5, "not": {"const": 1}}', '{"not":' * 10_000 + "1" + "}" * 10_000):
        assert held_text(no_schema) == no_schema


def test_examples_and_enums_are_no_schemas() -> None:
    schema = {"enum": [{"not": {}}, {"uniqueItems": True}], "examples": [{"not": 1}]}
    assert held(schema, schema) == schema


# --- faults -------------------------------------------------------------------------------------------


def complains_of(keyword: str) -> Any:
    """A compiler that refuses one keyword, wherever it is."""
    return lambda schema: f'Unimplemented keys: ["{keyword}"]' if f'"{keyword}"' in json.dumps(schema) else ""


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"if": {}}, ()),
        ({"properties": {"a": {}, "b": {"items": {"if": {}}}}}, ("properties", "b", "items")),
        ({"anyOf": [{}, {"if": {}}]}, ("anyOf", 1)),
        ({"$defs": {"x": {"if": {}}}, "items": {"$ref": "#/$defs/x"}}, ("$defs", "x")),
        ({"additionalProperties": {"if": {}}}, ("additionalProperties",)),
    ],
)
def test_a_fault_is_found_where_it_is(schema: Any, path: tuple[Any, ...]) -> None:
    fault = fault_of(json.dumps(schema), 'Unimplemented keys: ["if"]', complains_of("if"))
    assert (fault.path, str(fault)) == (path, "'if' is not supported")


def test_finding_a_fault_takes_a_bounded_number_of_compilations() -> None:
    asked = []
    schema = {"properties": {str(n): {} for n in range(1000)}, "if": {}}
    fault_of(json.dumps(schema), "bad", lambda part: asked.append(part) or "")
    assert len(asked) == MAX_PROBES
    deep = '{"items":' * 10_000 + "{}" + "}" * 10_000
    assert str(fault_of(deep, "bad", complains_of("if"))) == "the schema cannot be followed: bad"


@pytest.mark.parametrize(
    ("complaint", "schema", "reason"),
    [
        (
            "regex parse error:\n    (ab\n    ^\nerror: unclosed group",
            {"pattern": "(ab"},
            "'pattern' cannot be followed: unclosed group, at character 1 of '(ab'",
        ),
        (
            "regex parse error:\n    a[z-b]\n      ^^^\nerror: invalid range",
            {"patternProperties": {}},
            "'patternProperties' cannot be followed: invalid range, at character 3 of 'a[z-b]'",
        ),
        ("at 1(8): regex parse error:\n    *\n    ^\nerror: missing", None, "missing, at character 1 of '*'"),
        ("Unknown format: x", {}, "'format' cannot be followed: unknown format: x"),
        ("oneOf constraints are not supported. Enable", {}, "'oneOf' is supported only where no value fits two of its"),
        ("Something\nstack", {}, "the schema cannot be followed: Something"),
        (
            "LexerTooComplex",
            {},
            "the schema cannot be followed: it is too complex to follow; check that no part of it must contain itself",
        ),
        ("NoExtension", None, "no text fits: a part of it refers only to itself, or its parts exclude each other"),
    ],
)
def test_a_complaint_becomes_a_sentence_that_names_the_keyword(complaint: str, schema: Any, reason: str) -> None:
    assert fault_reason(complaint, schema).startswith(reason)
