"""The seam between the HTTP side and what computes answers: a dispatcher over workers, or a script in tests."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from protocol.messages import Delta, GenerateRequest


@dataclass(slots=True)
class Trace:
    """What happened to one request on its way; filled while it runs."""

    prefill_worker: str | None = None  # worker names
    decode_worker: str | None = None
    route_reason: str = ""
    transfer: str | None = None  # backend of the KV pull
    kv_bytes_pulled: int = 0
    cached_tokens: int = 0  # prompt tokens that no worker had to compute; what `usage` reports
    migrations: int = 0
    pull_error: str = ""


@dataclass(frozen=True, slots=True)
class Hints:
    """What the caller asks of the mesh, beside the answer."""

    disaggregate: bool | None = None  # None: the router decides
    pin: str | None = None  # the worker that has to decode


class Generator(Protocol):
    def generate(
        self, request: GenerateRequest, hints: Hints, trace: Trace, deadline: float
    ) -> AsyncGenerator[Delta, None]:
        """Stream the answer; `deadline` is in event-loop time.

        Closing the generator cancels the request everywhere; it is not closed early if it ends by itself, which
        it does right after the delta with the finish reason. Raises MeshError.
        """
        ...
