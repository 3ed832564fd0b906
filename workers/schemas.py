"""Prepare JSON schemas for the compiler of guides, and find the place in a schema that the compiler refuses. Pure.

The compiler knows neither `uniqueItems` nor `not`. Both are written in other keywords where that says the same.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise, permutations
from math import perm
from typing import Any, Literal

GuideWhitespace = Literal["compact", "flexible"]  # between the parts of guided JSON: none, or as the model likes
MAX_ARRANGEMENTS = 400  # arrays that stand for `uniqueItems`
ENOUGH_PLACES = 6  # so many different values already make more arrays
MAX_WRITTEN_BYTES = 256 << 10  # of the arrays that stand for one `uniqueItems`
MAX_UNIQUE = 64  # `uniqueItems` in one schema
MAX_TEXT = 64  # characters of a text that a `not` excludes; each is one level of a pattern
MAX_PROBES = 200  # compilations to find a fault
NAMED_SCHEMAS = ("$defs", "definitions", "properties", "patternProperties")
LISTED_SCHEMAS = ("prefixItems", "anyOf", "oneOf", "allOf")
SINGLE_SCHEMAS = ("items", "additionalProperties")
DEFINITIONS = ("$defs", "definitions")
_REWRITTEN = re.compile(r'"(?:uniqueItems|not)"')
_NOTES = frozenset({"title", "description", "$comment", "default", "examples"})
_TYPES = ("null", "boolean", "object", "array", "number", "string")
_REGEX_FAULT = re.compile(r"regex parse error:\n    (?P<pattern>.*)\n    (?P<gap> *)\^+\nerror: (?P<reason>.*)")
_UNKNOWN_KEYS = re.compile(r'Unimplemented keys: \["([^"]+)"')

Path = tuple[str | int, ...]
Problem = Callable[[Any], str]


class SchemaFault(Exception):
    """A schema that answers cannot be held to; `path` leads to the part of the schema that is at fault."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(reason)
        self.path = path

    @property
    def pointer(self) -> str:
        """Return the path as a JSON pointer."""
        return "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in self.path)


def children(schema: Any) -> Iterator[tuple[Path, Any]]:
    """Yield the schemas directly within a schema, with their paths; definitions come first."""
    if not isinstance(schema, dict):
        return
    for key in NAMED_SCHEMAS:
        if isinstance(named := schema.get(key), dict):
            yield from (((key, name), child) for name, child in named.items())
    for key in LISTED_SCHEMAS:
        if isinstance(listed := schema.get(key), list):
            yield from (((key, n), child) for n, child in enumerate(listed))
    yield from (((key,), schema[key]) for key in SINGLE_SCHEMAS if key in schema)


# --- what the compiler does not know ------------------------------------------------------------------


def held_text(text: str) -> str:
    """Return the JSON of a schema without `uniqueItems` and `not`. Raise SchemaFault.

    A text that is no schema is returned as it is: the compiler says what is wrong with it.
    """
    if _REWRITTEN.search(text) is None:
        return text
    if text.count('"uniqueItems"') > MAX_UNIQUE:
        raise SchemaFault((), f"'uniqueItems' is there more than {MAX_UNIQUE} times")
    try:
        schema = json.loads(text)
        return json.dumps(held(schema, schema), separators=(",", ":"))
    except (TypeError, ValueError, AttributeError, RecursionError):
        return text


def held(schema: Any, root: Any, path: Path = ()) -> Any:
    """Return the schema without `uniqueItems` and `not`. Raise SchemaFault where no other keyword says the same."""
    if not isinstance(schema, dict):
        return schema
    found: Any = dict(schema)
    for place, child in children(schema):
        rewritten = held(child, root, path + place)
        if len(place) == 1:
            found[place[0]] = rewritten
        elif rewritten is not child:
            found[place[0]] = _replaced(found[place[0]], place[1], rewritten)
    if "uniqueItems" in found:
        found = _unique(found, root, path)
    if isinstance(found, dict) and "not" in found:
        refused = found.pop("not")
        found = _excluded(found, refused, path)
    return found


def _replaced(container: Any, place: str | int, value: Any) -> Any:
    copied = container.copy()
    copied[place] = value
    return copied


def _types_of(schema: Mapping[str, Any]) -> Sequence[str]:
    kinds = schema.get("type", _TYPES)
    return (kinds,) if isinstance(kinds, str) else kinds


# --- uniqueItems --------------------------------------------------------------------------------------


def _unique(schema: dict[str, Any], root: Any, path: Path) -> Any:
    rest = {key: value for key, value in schema.items() if key != "uniqueItems"}
    most = rest.get("maxItems")
    if not schema["uniqueItems"] or "array" not in _types_of(rest) or (isinstance(most, int) and most <= 1):
        return rest
    values = _values(rest.get("items"), root)
    if values is None or rest.get("type") != "array" or "prefixItems" in rest or "anyOf" in rest:
        raise SchemaFault(
            path, "'uniqueItems' is supported only for arrays whose items are an enum, and where maxItems is 1"
        )
    sizes = range(rest.pop("minItems", 0), min(len(values), len(values) if most is None else most) + 1)
    if _are_too_many(len(values), sizes):
        raise SchemaFault(path, "'uniqueItems' allows too many different arrays; set maxItems, or shorten the enum")
    for key in ("items", "maxItems"):
        rest.pop(key, None)
    rows = [row for size in sizes for row in permutations(values, size)]
    if sum(map(len, rows)) * len(_key(values)) > MAX_WRITTEN_BYTES * max(1, len(values)):
        raise SchemaFault(
            path, "'uniqueItems' allows too much text in different arrays; shorten the values of the enum"
        )
    return rest | {"anyOf": [_array(row) for row in rows]}


def _are_too_many(num_values: int, sizes: range) -> bool:
    """Return whether there are more arrays than MAX_ARRANGEMENTS. The full number may have 10,000 digits."""
    count = 0
    for size in sizes:
        count += perm(num_values, min(size, ENOUGH_PLACES))
        if count > MAX_ARRANGEMENTS:
            return True
    return False


def _array(values: Sequence[Any]) -> dict[str, Any]:
    """Return the schema of this one array."""
    if not values:
        return {"maxItems": 0}
    size = {"minItems": len(values), "maxItems": len(values)}
    return {"prefixItems": [{"const": value} for value in values], "items": False} | size


def _values(schema: Any, root: Any) -> list[Any] | None:
    """Return the values that the schema allows, None if they cannot be listed."""
    match schema:
        case {"$ref": str(pointer)}:
            return _values(_definition(pointer, root), None)
        case {"const": value, **rest} if not rest.keys() - _NOTES - {"type"}:
            return [value] if _may_be(value, _types_of(schema)) else []
        case {"enum": list(values), **rest} if not rest.keys() - _NOTES - {"type"}:
            return list({_key(value): value for value in values if _may_be(value, _types_of(schema))}.values())
        case {"type": "boolean", **rest} if not rest.keys() - _NOTES:
            return [True, False]
    return None


def _definition(pointer: str, root: Any) -> Any:
    for keyword in DEFINITIONS:
        if isinstance(root, dict) and pointer.startswith(f"#/{keyword}/"):
            return root.get(keyword, {}).get(pointer.removeprefix(f"#/{keyword}/"))
    return None


# --- not ----------------------------------------------------------------------------------------------


def _excluded(schema: dict[str, Any], refused: Any, path: Path) -> Any:
    """Return the schema of what fits `schema` and does not fit `refused`."""
    if refused is False:
        return schema
    keywords = {} if refused is True else {key: value for key, value in refused.items() if key not in _NOTES}
    match keywords:
        case {"anyOf": list(parts), **rest} if not rest:
            for part in parts:
                schema = _excluded(schema, part, path) if isinstance(schema, dict) else schema
            return schema
        case {"not": wanted, **rest} if not rest:
            return schema | {"allOf": [*schema.get("allOf", ()), wanted]}
        case {"required": [str(name)], **rest} if not rest and schema.get("type") == "object":
            return schema | {"properties": schema.get("properties", {}) | {name: False}}
        case {"type": kinds, **rest} if not rest:
            found = _without_types(schema, (kinds,) if isinstance(kinds, str) else kinds)
        case {"const": value, **rest} if not rest:
            found = _without_values(schema, [value])
        case {"enum": list(values), **rest} if not rest:
            found = _without_values(schema, values)
        case _:
            found = False if not keywords else None
    if found is None:
        raise SchemaFault(path, "'not' is supported only for types, and for values of an enum or of one given type")
    return found


def _without_types(schema: dict[str, Any], refused: Sequence[str]) -> Any:
    """Return None if it cannot be said."""
    kinds = _types_of(schema)
    if "integer" in refused and "number" not in refused and "number" in kinds:
        return None
    left = [kind for kind in kinds if kind not in refused and not (kind == "integer" and "number" in refused)]
    return schema | {"type": left[0] if len(left) == 1 else left} if left else False


def _without_values(schema: dict[str, Any], values: Sequence[Any]) -> Any:
    """Return None if it cannot be said."""
    kinds = _types_of(schema)
    refused = {_key(value) for value in values}
    if "const" in schema:
        return False if _key(schema["const"]) in refused else schema
    if "enum" in schema:
        return schema | {"enum": [value for value in schema["enum"] if _key(value) not in refused]}
    possible = [value for value in values if _may_be(value, kinds)]
    if not possible:
        return schema
    if possible == [""]:
        return schema | {"minLength": max(1, schema.get("minLength", 0))}
    if set(kinds) <= {"boolean", "null"}:
        known = [*((True, False) if "boolean" in kinds else ()), *((None,) if "null" in kinds else ())]
        return schema | {"enum": [value for value in known if _key(value) not in refused]}
    return _without_one_kind(schema, possible)


def _without_one_kind(schema: dict[str, Any], values: Sequence[Any]) -> Any:
    """Return the texts or the integers that are left: a pattern, or ranges. Return None for other types."""
    match schema:
        case {"type": "string"} if not schema.keys() & {"pattern", "format"} and max(map(len, values)) <= MAX_TEXT:
            return schema | {"pattern": f"^(?:{_rest_but(frozenset(values))})$"}
        case {"type": "integer"} if "anyOf" not in schema:
            return schema | {"anyOf": _ranges_between(sorted({int(value) for value in values if value == int(value)}))}
    return None


def _ranges_between(values: Sequence[int]) -> list[dict[str, int]]:
    if not values:
        return [{}]
    inner = [{"minimum": low + 1, "maximum": high - 1} for low, high in pairwise(values) if high - low > 1]
    return [{"maximum": values[0] - 1}, *inner, {"minimum": values[-1] + 1}]


def _rest_but(rests: frozenset[str]) -> str:
    """Return a pattern for any text but `rests`, at one place in them. Patterns cannot look ahead: it goes letter by
    letter."""
    firsts = sorted({rest[0] for rest in rests if rest})
    others = f"[^{''.join(map(_in_class, firsts))}][\\s\\S]*" if firsts else "[\\s\\S]+"
    later = [f"{re.escape(first)}(?:{_rest_but(_after(first, rests))})" for first in firsts]
    return "|".join([*([] if "" in rests else [""]), others, *later])


def _after(first: str, rests: frozenset[str]) -> frozenset[str]:
    return frozenset(rest[1:] for rest in rests if rest[:1] == first)


def _in_class(char: str) -> str:
    return f"\\{char}" if char in r"\]^-[&~" else char


def _may_be(value: Any, kinds: Sequence[str]) -> bool:
    match value:
        case None:
            return "null" in kinds
        case bool():
            return "boolean" in kinds
        case str():
            return "string" in kinds
        case int() | float():
            return "number" in kinds or "integer" in kinds
        case dict():
            return "object" in kinds
    return "array" in kinds


def _key(value: Any) -> str:
    """Return text that is the same for equal values of JSON."""
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    return json.dumps(whole, sort_keys=True)


# --- faults -------------------------------------------------------------------------------------------


def fault_of(text: str, complaint: str, problem: Problem) -> SchemaFault:
    """Return where the schema is at fault, and why.

    `complaint` is the compiler's about the whole schema. `problem` returns that about a part, "" for none.
    """
    try:
        schema = json.loads(text)
    except RecursionError:
        return SchemaFault((), fault_reason(complaint, {}))
    definitions = {key: schema[key] for key in DEFINITIONS if isinstance(schema, dict) and key in schema}
    path, reason, probes = Path(), complaint, 0
    while True:
        for place, child in children(schema):
            probes += 1
            found = problem(definitions | child) if isinstance(child, dict) and probes <= MAX_PROBES else ""
            if found and _is_same(found, reason):
                path, schema, reason = path + place, child, found
                break
        else:
            return SchemaFault(path, fault_reason(reason, schema))


def _is_same(found: str, outer: str) -> bool:
    """Return whether the complaint about a part explains that about the whole, which may say less."""
    return found == outer or (found.startswith("Unsatisfiable") and outer.startswith("Unsatisfiable"))


def fault_reason(complaint: str, schema: Any = None) -> str:
    """Return the compiler's complaint as a sentence that names the keyword."""
    if unknown := _UNKNOWN_KEYS.match(complaint):
        return f"'{unknown[1]}' is not supported"
    if regex := _REGEX_FAULT.search(complaint):
        keyword = "patternProperties" if isinstance(schema, dict) and "pattern" not in schema else "pattern"
        named = f"'{keyword}' cannot be followed: " if schema is not None else ""
        return f"{named}{regex['reason']}, at character {len(regex['gap']) + 1} of {regex['pattern'][:100]!r}"
    first = plain_reason(complaint).replace("Expected f64", "Expected number")
    if first == _NOTHING_FITS and isinstance(schema, dict) and "$ref" in schema:
        return "'$ref' cannot be followed: the schema refers to itself, and an answer would never begin"
    if first.startswith("oneOf constraints"):
        return "'oneOf' is supported only where no value fits two of its schemas; send anyOf"
    for sign, keyword in _SIGNS:
        if first.startswith(sign):
            return f"'{keyword}' cannot be followed: {first[0].lower()}{first[1:]}"
    return first if schema is None else f"the schema cannot be followed: {first}"


def plain_reason(complaint: str) -> str:
    """Return the first line of a complaint. The parser's own names of states and counters become plain words."""
    first = complaint.strip().split("\n", 1)[0][:300]
    if first in ("NoExtension", "NoExtensionBias"):
        return _NOTHING_FITS
    if first.startswith("parser error: Too many items") or _STATE.fullmatch(first):
        return "it is too complex to follow; check that no part of it must contain itself"
    return first


_NOTHING_FITS = "no text fits: a part of it refers only to itself, or its parts exclude each other"
_STATE = re.compile(r"[A-Z][a-z]+(?:[A-Z][a-z]+)+")  # as LexerTooComplex
_SIGNS = (
    ("Invalid type", "type"),
    ("Unknown format", "format"),
    ("Pointer", "$ref"),
    ("Resource", "$ref"),
    ("properties must", "properties"),
    ("Unsatisfiable schema: anyOf is empty", "enum"),
)
