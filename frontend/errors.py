"""Failures that are the frontend's own, as OpenAI's API shows them. The rest stands in mesh/http/errors.py."""

from mesh.http.errors import CODES, error_body
from protocol.errors import InvalidRequestError, MeshError

OUTCOMES = CODES | {"ok", "internal", "client_gone"}  # label values of the request counter


class UnknownModelError(InvalidRequestError):
    code = "model_not_found"


def outcome(error: MeshError) -> str:
    """The error as a metric label: from OUTCOMES."""
    return error.code if error.code in CODES else "internal"


def error_event(error: MeshError) -> bytes:
    """The error as the last event of a stream. No [DONE] may follow it."""
    return b"data: " + error_body(error) + b"\n\n"
