"""Bound the memory of all request bodies that are being read. Pure."""

from kvmesh.protocol.errors import OverloadedError


class BodyBudget:
    """Counts the bytes of request bodies, of all streams together."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.held_bytes = 0

    def hold(self, size_bytes: int) -> None:
        """Count more bytes. Raise OverloadedError, and count nothing, if they would be too many."""
        if self.held_bytes + size_bytes > self._limit_bytes:
            raise OverloadedError(
                f"the bodies of the requests that wait here have {self.held_bytes} bytes", hint="try again later"
            )
        self.held_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        self.held_bytes -= size_bytes
