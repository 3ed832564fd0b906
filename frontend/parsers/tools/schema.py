"""Read a tool's JSON schema: the types of arguments written without types, and the schemas of guides."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvmesh.frontend.parsers.events import Tool
from kvmesh.frontend.parsers.text import is_json, quoted
from kvmesh.frontend.parsers.tools.literals import json_of_literal
from kvmesh.protocol.errors import InvalidRequestError

ANY_TYPE = frozenset({"string", "integer", "number", "boolean", "object", "array", "null"})
TEXT = frozenset({"string"})

_DEFINITIONS = ("$defs", "definitions")
_NAMED = frozenset({*_DEFINITIONS, "properties", "patternProperties"})  # schemas by name
_LISTED = frozenset({"prefixItems", "anyOf", "oneOf", "allOf"})
_SINGLE = frozenset({"items", "additionalProperties", "not"})
_FOLLOWED_FORMATS = (
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid",
)  # fmt: skip
_MAX_SCHEMA_DEPTH = 64
_MAX_LOOKED_AT = 256  # schemas followed to find one argument's types
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_BOOLEANS = {"true": "true", "false": "false", "True": "true", "False": "false"}
_NULLS = ("null", "None")
_TYPE_NAMES: tuple[tuple[type, str], ...] = (
    (str, "string"), (bool, "boolean"), (int, "integer"), (float, "number"), (dict, "object"), (list, "array"),
    (type(None), "null"),
)  # fmt: skip


def argument_types(parameters: Mapping[str, object], key: str) -> frozenset[str]:
    """The types that argument `key` may have, ANY_TYPE if the schema does not say."""
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, dict) else None
    return _types(schema, parameters)


def typed(text: str, types: frozenset[str]) -> str:
    """The JSON of a value written without quotes, as the first of these that it reads as:

    null, boolean, number, object or array, as far as `types` has them; a string otherwise.
    """
    bare = text.strip()
    if "null" in types and bare in _NULLS:
        return "null"
    if "boolean" in types and bare in _BOOLEANS:
        return _BOOLEANS[bare]
    if "number" in types and _NUMBER.fullmatch(bare):
        return bare
    if "integer" in types and _INTEGER.fullmatch(bare):
        return bare
    if bare[:1] in _brackets(types) and (nested := bare if is_json(bare) else json_of_literal(bare)):
        return nested
    return quoted(text)


def _brackets(types: frozenset[str]) -> Sequence[str]:
    return [bracket for bracket, name in (("{", "object"), ("[", "array")) if name in types]


def _types(schema: object, root: Mapping[str, object]) -> frozenset[str]:
    """Return the types of all alternatives that `schema` leads to."""
    types: set[str] = set()
    ahead: list[object] = [schema]
    seen: set[str] = set()
    for _ in range(_MAX_LOOKED_AT):
        if not ahead:
            return frozenset(types)
        found, more = _look_at(ahead.pop(), root, seen)
        types |= found
        ahead += more
    return ANY_TYPE


def _look_at(schema: object, root: Mapping[str, object], seen: set[str]) -> tuple[frozenset[str], list[object]]:
    """Return (types that this schema names, schemas that have to be looked at as well)."""
    match schema:
        case {"type": str(name)}:
            return frozenset({name}) & ANY_TYPE or ANY_TYPE, []
        case {"type": [*names]}:
            return frozenset(name for name in names if isinstance(name, str)) & ANY_TYPE or ANY_TYPE, []
        case {"const": value}:
            return frozenset({_type_name(value)}), []
        case {"enum": [*values]} if values:
            return frozenset(map(_type_name, values)), []
        case {"anyOf": [*choices]} | {"oneOf": [*choices]} if choices:
            return frozenset(), choices
        case {"allOf": [*parts]} if typed_parts := [part for part in parts if _says_type(part)]:
            return frozenset(), typed_parts[:1]
        case {"$ref": str(pointer)} if pointer not in seen:
            seen.add(pointer)
            return frozenset(), [_resolve(pointer, root)]
        case {"$ref": str(_)}:  # a circle: its types are counted already
            return frozenset(), []
        case {"properties": _}:
            return frozenset({"object"}), []
        case {"items": _}:
            return frozenset({"array"}), []
    return ANY_TYPE, []


def _says_type(schema: object) -> bool:
    return isinstance(schema, dict) and not schema.keys().isdisjoint(
        ("type", "const", "enum", "anyOf", "oneOf", "allOf", "$ref", "properties", "items")
    )


def _type_name(value: object) -> str:
    return next((name for kind, name in _TYPE_NAMES if isinstance(value, kind)), "string")


def _resolve(pointer: str, root: object) -> object:
    """Return what a `#/...` reference names, None if nothing."""
    if not pointer.startswith("#"):
        return None
    for part in pointer[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(root, dict) or name not in root:
            return None
        root = root[name]
    return root


# --- guides ---------------------------------------------------------------------------------------------


def required_schema(tools: Sequence[Tool], parallel: bool) -> dict[str, Any]:
    """Return the schema of an answer that calls at least one of `tools`, without `parallel` exactly one: see
    `forced_calls`.

    Definitions of the tools move to the root, under names of their own, and references follow them.
    Raises InvalidRequestError if a schema is nested too deep.
    """
    definitions: dict[str, Any] = {}
    calls = [_call_schema(index, tool, definitions) for index, tool in enumerate(tools)]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not parallel:
        schema["maxItems"] = 1
    return schema | ({"$defs": definitions} if definitions else {})


def named_schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of an answer that is the arguments of one call of `tool`: see `forced_arguments`."""
    return {"type": "object", **tool.parameters}


def _call_schema(index: int, tool: Tool, definitions: dict[str, Any]) -> dict[str, Any]:
    parameters = named_schema(tool)
    moved = _Moved(index)
    for keyword in _DEFINITIONS:
        if isinstance(named := parameters.get(keyword), dict):
            del parameters[keyword]
            definitions |= {
                moved.prefix(keyword) + name: _rewritten(schema, moved, 0) for name, schema in named.items()
            }
    return {
        "type": "object",
        "properties": {
            "name": {"type": "string", "enum": [tool.name]},
            "parameters": _rewritten(parameters, moved, 0),
        },
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


class _Moved:
    """Says where the parts of one tool's schema stand in the guide's."""

    def __init__(self, index: int) -> None:
        self._index = index

    def prefix(self, keyword: str) -> str:
        """Return what stands before the names of definitions that stood under `keyword`."""
        return f"tool{self._index}_{keyword.strip('$')}_"

    def reference(self, pointer: str) -> str:
        for keyword in _DEFINITIONS:
            if pointer.startswith(f"#/{keyword}/"):
                return f"#/$defs/{self.prefix(keyword)}" + pointer.removeprefix(f"#/{keyword}/")
        here = pointer == "#" or pointer.startswith("#/")
        return f"#/items/anyOf/{self._index}/properties/parameters{pointer[1:]}" if here else pointer


def _rewritten(schema: Any, moved: _Moved, depth: int) -> Any:
    """A copy of `schema` with its references following what moved."""
    if depth > _MAX_SCHEMA_DEPTH:
        raise InvalidRequestError(
            f"the parameters of a tool are nested deeper than {_MAX_SCHEMA_DEPTH} levels",
            hint="flatten the schema, or move parts of it to $defs",
            param="tools",
        )
    if isinstance(schema, list):
        return [_rewritten(item, moved, depth + 1) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: moved.reference(value) if key == "$ref" and isinstance(value, str) else _rewritten(value, moved, depth + 1)
        for key, value in schema.items()
    }


def without_annotations(schema: Any) -> Any:
    """Return the schema without the string formats that no engine can follow: they say what a text means."""
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for key, value in schema.items():
        if key == "format" and value not in _FOLLOWED_FORMATS:
            continue
        if key in _NAMED and isinstance(value, dict):
            value = {name: without_annotations(child) for name, child in value.items()}
        elif key in _LISTED and isinstance(value, list):
            value = [without_annotations(child) for child in value]
        elif key in _SINGLE:
            value = without_annotations(value)
        kept[key] = value
    return kept
