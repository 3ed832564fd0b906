"""Failures in Anthropic's words."""

import json

import pytest

from kvmesh.frontend.anthropic.errors import error_body
from kvmesh.frontend.errors import UnknownModelError
from kvmesh.mesh.http.errors import (
    BodyTooLargeError,
    HeadTooLargeError,
    MethodNotAllowedError,
    NotFoundError,
    RequestTimeoutError,
    UnauthorizedError,
)
from kvmesh.protocol.errors import (
    CancelledByPeerError,
    ContextLengthError,
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    MeshError,
    OverloadedError,
    UnreachableError,
)

TYPES: list[tuple[type[MeshError], str]] = [
    (InvalidRequestError, "invalid_request_error"),
    (ContextLengthError, "invalid_request_error"),
    (MethodNotAllowedError, "invalid_request_error"),
    (HeadTooLargeError, "invalid_request_error"),
    (UnauthorizedError, "authentication_error"),
    (UnknownModelError, "not_found_error"),
    (NotFoundError, "not_found_error"),
    (RequestTimeoutError, "timeout_error"),
    (BodyTooLargeError, "request_too_large"),
    (OverloadedError, "rate_limit_error"),
    (UnreachableError, "overloaded_error"),
    (CancelledByPeerError, "overloaded_error"),
    (DeadlineExceededError, "timeout_error"),
    (EngineError, "api_error"),
    (MeshError, "api_error"),
]


@pytest.mark.parametrize(("error", "kind"), TYPES, ids=lambda value: getattr(value, "__name__", value))
def test_every_kind_of_failure_has_a_type(error: type[MeshError], kind: str) -> None:
    text = "the server failed; see its log" if error is MeshError else "no; try this"
    body = json.loads(error_body(error("no", hint="try this")))
    assert body == {"type": "error", "error": {"type": kind, "message": text}}


def test_the_request_is_named_where_it_is_known() -> None:
    assert json.loads(error_body(MeshError("no"), "msg-1"))["request_id"] == "msg-1"
