"""Turn a server's error into ours: whose fault it is, and whether another worker should try. Pure."""

import msgspec

from kvmesh.protocol.errors import (
    ContextLengthError,
    DrainingError,
    EngineError,
    InvalidRequestError,
    MeshError,
    OverloadedError,
)
from kvmesh.protocol.messages import UNREADABLE

MAX_MESSAGE_CHARS = 2000
MAX_RETRY_DIGITS = 6  # of Retry-After, in seconds: a longer wait is no advice

_BAD_REQUEST = {400, 404, 413, 415, 422}
_ACCESS = {401, 403}
_LENGTH_PARAMS = {"input_tokens", "max_tokens", "input_text"}


class ServerErrorBody(msgspec.Struct):
    """The shape that servers agree on, more or less: `{"error": {...}}`."""

    message: str = ""
    type: str | None = None
    param: str | None = None
    code: int | str | None = None


class _Wrapped(msgspec.Struct):
    error: ServerErrorBody | str | None = None
    message: str = ""
    detail: object = None


def refusal(status: int, body: bytes, retry_after: str = "") -> MeshError:
    """The error for an answer with `status`, which is no 2xx. `retry_after`: that header."""
    return _error_of(status, _read(body), retry_after)


def failure_in_stream(error: ServerErrorBody) -> MeshError:
    """The error for an event that says that the rest will not come."""
    code = error.code if isinstance(error.code, int) else 500
    return _error_of(code if 400 <= code < 600 else 500, error, "")


def _error_of(status: int, error: ServerErrorBody, retry_after: str) -> MeshError:
    said = f"the server said {status}: {error.message[:MAX_MESSAGE_CHARS] or 'no reason'}"
    if status in _BAD_REQUEST:
        is_too_long = error.param in _LENGTH_PARAMS or "context length" in error.message
        return (ContextLengthError if is_too_long else InvalidRequestError)(said)
    if status == 429:
        seconds = int(retry_after) if retry_after.isdecimal() and len(retry_after) <= MAX_RETRY_DIGITS else None
        return OverloadedError(said, retry_after_s=seconds)
    if status == 503:
        return DrainingError(said)
    if status in _ACCESS:
        return EngineError(said, hint="give the server's key to this worker in KVMESH_ATTACH_API_KEY")
    return EngineError(said, hint="see the server's log")


def _read(body: bytes) -> ServerErrorBody:
    """The text itself where it is no JSON that we know."""
    try:
        wrapped = msgspec.json.decode(body, type=_Wrapped)
    except UNREADABLE:
        return ServerErrorBody(message=body[:MAX_MESSAGE_CHARS].decode(errors="replace").strip())
    if isinstance(wrapped.error, ServerErrorBody):
        return wrapped.error
    return ServerErrorBody(message=wrapped.error or wrapped.message or str(wrapped.detail or ""))
