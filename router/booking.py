"""The seam between a frontend and its router, which runs in the frontend's process or by itself."""

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from kvmesh.protocol.messages import Placed, RouteRequest


class Booking(Protocol):
    """A placement that counts as load until its context is left."""

    placed: Placed

    def prefill_done(self, reused_tokens: int | None = None) -> None:
        """Report the first token. `reused_tokens` of the prompt were in the worker's cache, if the worker says so."""

    def progress(self, osl_tokens: int) -> None:
        """Report that the request lives and how many tokens it has. A booking without such reports ends by itself."""

    def finished(self, osl_tokens: int) -> None:
        """Report that the answer is complete, and how many tokens it has. The booking ends right after it."""


class Router(Protocol):
    """Implemented by kvmesh.router.local.LocalRouter and kvmesh.router.client.RemoteRouter."""

    def book(self, request: RouteRequest, timeout_s: float) -> AbstractAsyncContextManager[Booking]:
        """Place a request; its load counts until the block is left.

        Raises NoWorkerError, OverloadedError, DeadlineExceededError.
        """

    def check(self, request: RouteRequest, timeout_s: float) -> None:
        """Raise OverloadedError if a request of this kind would certainly be refused, whatever its prompt is.

        It takes no time, so the prompt need not be known yet: neither its hashes nor its length count.
        """

    async def preview(self, request: RouteRequest, timeout_s: float) -> Placed:
        """Return where the request would run if it came now, with the explanation.

        Raises NoWorkerError, DeadlineExceededError.
        """
