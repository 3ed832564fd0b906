"""Failures as Anthropic's API shows them."""

from msgspec import UNSET

from kvmesh.frontend.anthropic.shapes import ErrorAnswer, ErrorDetail, ErrorReason
from kvmesh.frontend.errors import PromptTooLongError
from kvmesh.frontend.shapes import encode
from kvmesh.mesh.http.errors import client_text, http_failure
from kvmesh.protocol.errors import InvalidRequestError, MeshError

_TYPE_BY_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",  # Anthropic's own status for it, 529, says the same: come back later
    504: "timeout_error",
}


class ThreadsUnsupportedError(InvalidRequestError):
    """The request asks for a thread. Anthropic's clients then send the whole conversation without a thread."""

    reason = ErrorReason("thread_unsupported_request")


def error_type(status: int) -> str:
    return _TYPE_BY_STATUS.get(status, "invalid_request_error" if status < 500 else "api_error")


def error_body(error: MeshError, request_id: str = "") -> bytes:
    """Anthropic's error object as JSON."""
    reason = error.reason if isinstance(error, ThreadsUnsupportedError) else UNSET
    detail = ErrorDetail(error_type(http_failure(error.code).status), _message(error), reason)
    return encode(ErrorAnswer(detail, request_id or UNSET))


def _message(error: MeshError) -> str:
    """Return the text of an error. A prompt that is too long gets Anthropic's words and no more: clients shorten it."""
    if isinstance(error, PromptTooLongError):
        return f"prompt is too long: {error.prompt_tokens} tokens > {error.context_tokens - 1} maximum"
    return client_text(error)
