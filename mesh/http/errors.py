"""Translate failures for HTTP clients: a status and OpenAI's error object."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvmesh.protocol.errors import InvalidRequestError, MeshError


class BodyTooLargeError(InvalidRequestError):
    code = "body_too_large"


class HeadTooLargeError(InvalidRequestError):
    code = "head_too_large"


class NotFoundError(InvalidRequestError):
    code = "not_found"


class MethodNotAllowedError(InvalidRequestError):
    code = "method_not_allowed"

    def __init__(self, message: str, *, hint: str = "", allowed: Sequence[str] = ()) -> None:
        """Name the methods that the path takes."""
        self.allow = ", ".join(allowed)
        methods = [method for method in allowed if method != "OPTIONS"]
        super().__init__(message, hint=hint or f"send {', '.join(methods)}")


class UnsupportedEncodingError(InvalidRequestError):
    code = "unsupported_encoding"


class UnsupportedTypeError(InvalidRequestError):
    code = "unsupported_media_type"


class RequestTimeoutError(InvalidRequestError):
    code = "request_timeout"


class UnauthorizedError(InvalidRequestError):
    code = "unauthorized"


class ForbiddenError(InvalidRequestError):
    """The caller is known, and may not ask for this."""

    code = "forbidden"


@dataclass(frozen=True, slots=True)
class HttpFailure:
    """The form of one kind of failure for an HTTP client."""

    status: int
    type: str
    code: str | None
    retry_after_s: int | None = None


_INVALID = "invalid_request_error"
_INTERNAL = HttpFailure(500, "server_error", "internal")
_BY_CODE = {
    "invalid_request": HttpFailure(400, _INVALID, None),
    "context_length": HttpFailure(400, _INVALID, "context_length_exceeded"),
    "unauthorized": HttpFailure(401, _INVALID, "invalid_api_key"),
    "forbidden": HttpFailure(403, _INVALID, "forbidden"),
    "previous_response_not_found": HttpFailure(400, _INVALID, "previous_response_not_found"),
    "model_not_allowed": HttpFailure(403, _INVALID, "model_not_allowed"),
    "model_not_found": HttpFailure(404, _INVALID, "model_not_found"),
    "not_found": HttpFailure(404, _INVALID, "not_found"),
    "method_not_allowed": HttpFailure(405, _INVALID, "method_not_allowed"),
    "request_timeout": HttpFailure(408, _INVALID, "request_timeout"),
    "conflict": HttpFailure(409, _INVALID, "conflict"),
    "body_too_large": HttpFailure(413, _INVALID, "body_too_large"),
    "unsupported_media_type": HttpFailure(415, _INVALID, "unsupported_media_type"),
    "unsupported_encoding": HttpFailure(415, _INVALID, "unsupported_encoding"),
    "head_too_large": HttpFailure(431, _INVALID, "headers_too_large"),
    "overloaded": HttpFailure(429, "rate_limit_error", "overloaded", retry_after_s=1),
    "rate_limited": HttpFailure(429, "rate_limit_error", "rate_limit_exceeded", retry_after_s=1),
    "too_large_for_key": HttpFailure(429, "rate_limit_error", "rate_limit_exceeded"),  # and no time to come back
    "no_worker": HttpFailure(503, "server_error", "no_worker", retry_after_s=2),
    "other_weights": HttpFailure(503, "server_error", "other_weights", retry_after_s=2),
    "unreachable": HttpFailure(503, "server_error", "no_worker", retry_after_s=2),
    "identity": HttpFailure(503, "server_error", "no_worker", retry_after_s=2),
    "draining": HttpFailure(503, "server_error", "draining", retry_after_s=2),
    "cancelled": HttpFailure(503, "server_error", "cancelled", retry_after_s=2),  # the worker is shutting down
    "deadline_exceeded": HttpFailure(504, "server_error", "deadline_exceeded"),
    "peer_lost": HttpFailure(502, "server_error", "peer_lost"),
    "engine": HttpFailure(502, "server_error", "engine"),
    "gateway_mode": HttpFailure(500, "server_error", "internal"),
    "storage": HttpFailure(503, "server_error", "storage", retry_after_s=2),
    "transfer": HttpFailure(502, "server_error", "transfer"),
}
CODES = frozenset(_BY_CODE)  # of the errors that clients are told


def http_failure(code: str) -> HttpFailure:
    """Return the form of the error with this MeshError.code. A code that clients are not told becomes a 500."""
    return _BY_CODE.get(code, _INTERNAL)


def retry_after_s(error: MeshError) -> int | None:
    """Return when to retry: as the error says, else as is usual for its kind. None: do not retry."""
    return http_failure(error.code).retry_after_s if error.retry_after_s is None else error.retry_after_s


_HIDDEN_TEXT = "the server failed; see its log"
_PATH = r"(?<![\w./])/(?:[^\s/'\":;,()]+/)+[^\s'\":;,()]*"
_ADDRESS = r"(?:\w+://)?(?:\[[0-9a-fA-F:.%]+\]|[\w.-]+):\d{2,5}\b(?:/[^\s'\":;,()]*)?"
_PLACES = re.compile(f"{_ADDRESS}|{_PATH}")
_WITH_PLACES = frozenset({"overloaded", "unreachable", "identity", "draining", "cancelled", "deadline_exceeded",
    "peer_lost", "engine", "storage", "transfer"})  # fmt: skip


def client_text(error: MeshError) -> str:
    """Return what a client may read of a failure. Details of an internal fault, paths and addresses are for the log."""
    if error.code not in _BY_CODE:
        return _HIDDEN_TEXT
    text = str(error)
    return _PLACES.sub("...", text) if error.code in _WITH_PLACES else text


def error_body(error: MeshError) -> bytes:
    """Return OpenAI's error object as JSON."""
    failure = http_failure(error.code)
    content: dict[str, Any] = {
        "message": client_text(error),
        "type": failure.type,
        "param": error.param,
        "code": failure.code,
    }
    return msgspec.json.encode({"error": content})
