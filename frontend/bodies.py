"""Read a request body and refuse what cannot be honoured: every error names the parameter. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import msgspec

from kvmesh.mesh.http.request import utf8_text
from kvmesh.protocol.errors import InvalidRequestError
from kvmesh.protocol.messages import UNREADABLE

MAX_TOLD_CHARS = 200  # of what a client has sent and an error repeats
MAX_NESTS = 1 << 20  # lists and objects in a body, each of which takes 60 bytes and more; brackets in text count too

BodyT = TypeVar("BodyT")

_MISSING = re.compile(r"^Object missing required field `([^`]*)`")
_UNKNOWN = re.compile(r"^Object contains unknown field `([^`]*)`")
_BYTE = re.compile(r" \(byte (\d+)\)$")
_CUT = "Input data was truncated"  # msgspec says so too of half a surrogate pair within the last bytes of a body
_HALF_PAIR = re.compile(rb"(?<!\\)(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2})(?:[^\\]|\\[^u])")
_PAIR_BYTES = 12
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")


def decode_body(body: bytes, decoder: msgspec.json.Decoder[BodyT]) -> BodyT:
    """Raises InvalidRequestError."""
    if len(body) > MAX_NESTS and (nests := body.count(b"[") + body.count(b"{")) > MAX_NESTS:
        raise InvalidRequestError(
            f"the request body has {nests} opening brackets and braces, more than {MAX_NESTS}", hint="send less"
        )
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise validation_error(str(error)) from error
    except UNREADABLE as error:
        if (text := utf8_text(body)) is not body:
            return decode_body(text, decoder)
        raise InvalidRequestError(f"the request body is not valid JSON: {_json_fault(body, error)}") from error


def _json_fault(body: bytes, error: Exception) -> str:
    """Return what is wrong, with its line and column."""
    try:
        body.decode()
    except UnicodeDecodeError as fault:
        return f"{fault.reason} of UTF-8 at {_place(body, fault.start)}"
    if (found := _BYTE.search(str(error))) is not None:
        reason = str(error)[: found.start()].removeprefix("JSON is malformed: ")
        return f"{reason} at {_place(body, int(found.group(1)))}"
    if str(error) != _CUT:
        return str(error)
    if (half := _HALF_PAIR.search(body, max(len(body) - _PAIR_BYTES, 0))) is not None:
        return f"half of a utf-16 surrogate pair at {_place(body, half.start(1))}"
    return f"the text ends too early, at {_place(body, len(body))}"


def _place(body: bytes, byte: int) -> str:
    """Return the line, and the column in characters, both from 1."""
    lines_before = body.count(b"\n", 0, byte)
    line_begin = body.rfind(b"\n", 0, byte) + 1
    return f"line {lines_before + 1}, column {len(body[line_begin:byte].decode(errors='replace')) + 1}"


def validation_error(text: str) -> InvalidRequestError:
    """Return OpenAI's error for msgspec's: the message names the parameter, and so does `param`."""
    found = _PATH.search(text)
    path = shortened(found.group(1)) if found else ""
    reason = text[: found.start()] if found else text
    if missing := _MISSING.match(reason):
        param = _join(path, missing.group(1))
        return InvalidRequestError(f"Missing required parameter: '{param}'", param=param)
    if unknown := _UNKNOWN.match(reason):
        param = _join(path, shortened(unknown.group(1)))
        return InvalidRequestError(f"Unrecognized request argument supplied: {param}", param=param)
    reason = shortened(reason)
    if not path:
        return InvalidRequestError(f"Invalid request body: {reason[:1].lower()}{reason[1:]}")
    return InvalidRequestError(f"Invalid value for '{path}': {reason[:1].lower()}{reason[1:]}", param=path)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def shortened(text: str) -> str:
    """Shorten what an error repeats: a body may hold megabytes."""
    return text if len(text) <= MAX_TOLD_CHARS else text[:MAX_TOLD_CHARS] + "..."


def refuse(param: str, reason: str) -> NoReturn:
    raise InvalidRequestError(f"Invalid value for '{param}': {reason}", param=param)


def not_supported(param: str, what: str = "", hint: str = "leave it out") -> NoReturn:
    """Refuse a parameter by name; `what` says what it is, if its name alone does not."""
    reason = f"The parameter '{param}' is not supported" + (f": {what}" if what else "")
    raise InvalidRequestError(reason, hint=hint, param=param)


# --- parameters that are known and not supported ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Only:
    """The values of a parameter that ask for nothing; null is always one of them."""

    values: tuple[object, ...]
    hint: str  # what to do instead of sending another
    json_name: str  # where it is not that of the field


def only(*values: object, hint: str = "its default is accepted, or leave it out", json_name: str = "") -> Only:
    return Only(values, hint, json_name)


def refuse_unsupported(holder: msgspec.Struct, defaults: Mapping[str, Only], where: str = "") -> None:
    """A parameter that would change the answer is refused by name. `where`: before the name."""
    for name, harmless in defaults.items():
        value = getattr(holder, name)
        if value is not None and value not in harmless.values:
            not_supported(where + (harmless.json_name or name), hint=harmless.hint)
