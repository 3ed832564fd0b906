"""Failures that are the frontend's own, as OpenAI's API shows them. The rest stands in mesh/http/errors.py."""

from kvmesh.mesh.http.errors import CODES, error_body
from kvmesh.protocol.errors import ContextLengthError, InvalidRequestError, MeshError

OUTCOMES = CODES | {"ok", "internal", "client_gone"}  # label values of the request counter


class UnknownModelError(InvalidRequestError):
    code = "model_not_found"


class ModelNotAllowedError(InvalidRequestError):
    """The key may not ask for the model. It reads the same whether or not the model exists."""

    code = "model_not_allowed"

    def __init__(self, model: str) -> None:
        super().__init__(
            f"this API key may not use the model {model[:200]!r}",
            hint="GET /v1/models lists those that it may use",
            param="model",
        )


class PromptTooLongError(ContextLengthError):
    """The prompt leaves no room for an answer. `length` says how long it is, in words."""

    def __init__(self, length: str, prompt_tokens: int, context_tokens: int, param: str) -> None:
        """Make OpenAI's text, by which clients know to shorten the prompt."""
        super().__init__(
            f"This model's maximum context length is {context_tokens} tokens. However, your prompt has {length}, and "
            "the answer needs at least one token",
            hint="shorten the prompt",
            param=param,
        )
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens


def outcome(error: MeshError) -> str:
    """The error as a metric label: from OUTCOMES."""
    return error.code if error.code in CODES else "internal"


def error_event(error: MeshError) -> bytes:
    """The error as the last event of a stream. No [DONE] may follow it."""
    return b"data: " + error_body(error) + b"\n\n"
