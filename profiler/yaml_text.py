"""Plain values as YAML: enough for the files that we write, without a dependency. Pure."""

import json
import re
from collections.abc import Mapping, Sequence

_PLAIN = re.compile(r"[A-Za-z/][\w./-]*(?: ?[\w./-]+)*")
_BLOCK = re.compile(r"[!-~][ -~]*(?:\n+[!-~][ -~]*)+")  # lines that need no escapes, none indented
_ESCAPED = re.compile(r"[^ !#-\[\]-~]")  # all but printable ASCII
_NOT_TEXT = re.compile(r"(?i)(true|false|yes|no|on|off|y|n|null|nan|inf)")

Value = None | bool | int | float | str | Sequence["Value"] | Mapping[str, "Value"]


def to_yaml(value: Value) -> str:
    return "\n".join(_lines(value)) + "\n"


def to_yaml_documents(values: Sequence[Value]) -> str:
    return "---\n".join(map(to_yaml, values))


def _lines(value: Value) -> list[str]:
    if isinstance(value, Mapping) and value:
        return [line for key, item in value.items() for line in _entry(f"{_scalar(key)}:", item, "  ")]
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        return [line for item in value for line in _item(item)]
    return [_inline(value)]


def _entry(head: str, item: Value, indent: str) -> list[str]:
    if isinstance(item, str) and _BLOCK.fullmatch(item):
        body = [indent + line if line else "" for line in item.split("\n")]
        return [f"{head} |-", *body]
    if isinstance(item, (Mapping, list, tuple)) and item and not _is_flat(item):
        return [head, *(indent + line if line else "" for line in _lines(item))]
    return [f"{head} {_inline(item)}"]


def _item(item: Value) -> list[str]:
    if isinstance(item, Mapping) and item:
        first, *rest = _lines(item)
        return [f"- {first}", *("  " + line if line else "" for line in rest)]
    return [f"- {_inline(item)}"]


def _is_flat(item: Value) -> bool:
    return isinstance(item, (list, tuple)) and all(not isinstance(one, (Mapping, list, tuple)) for one in item)


def _inline(value: Value) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_scalar(key)}: {_inline(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_quoted(item) if isinstance(item, str) else _inline(item) for item in value) + "]"
    return _scalar(value)


def _scalar(value: Value) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    return value if _PLAIN.fullmatch(value) and not _NOT_TEXT.fullmatch(value) else _quoted(value)


def _quoted(text: str) -> str:
    return '"' + _ESCAPED.sub(lambda found: _escape(found[0]), text) + '"'


def _escape(char: str) -> str:
    return "\\" + char if char in '"\\' else f"\\U{ord(char):08x}"
