"""Expected failures. The code travels on the wire and comes back as the same class on the other side."""

import math
import re
from typing import Self


class MeshError(Exception):
    """An expected failure. `code` travels on the wire; `hint` says what to do next."""

    code = "internal"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(f"{message}; {hint}" if hint else message)

    @classmethod
    def from_detail(cls, detail: str) -> Self:
        """The error whose text a peer sent."""
        return cls(detail)


class ConfigError(MeshError):
    code = "config"


class WireError(MeshError):
    """What came from the network cannot be read, or is larger than agreed."""

    code = "wire"


class InvalidRequestError(MeshError):
    """The caller asked for something that cannot be done. `param` names the offending field."""

    code = "invalid_request"

    def __init__(self, message: str, *, hint: str = "", param: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.param = param


class ContextLengthError(InvalidRequestError):
    code = "context_length"


class NoWorkerError(MeshError):
    """No worker that could serve this is ready."""

    code = "no_worker"


_RETRY_AFTER = re.compile(r"; retry after (\d{1,5}) s$")


class OverloadedError(MeshError):
    """Refused early because queues are full; the caller may retry later: after `retry_after_s` if that is known."""

    code = "overloaded"

    def __init__(self, message: str, *, hint: str = "", retry_after_s: float | None = None) -> None:
        self.retry_after_s = None if retry_after_s is None else max(1, math.ceil(retry_after_s))
        told = "" if self.retry_after_s is None else f"retry after {self.retry_after_s} s"
        super().__init__(message, hint="; ".join(part for part in (hint, told) if part))

    @classmethod
    def from_detail(cls, detail: str) -> Self:
        """An error crosses the wire as its code and its text, so the time is read from there."""
        if (told := _RETRY_AFTER.search(detail)) is None:
            return cls(detail)
        return cls(detail[: told.start()], retry_after_s=int(told[1]))


class DeadlineExceededError(MeshError):
    code = "deadline_exceeded"


class CancelledByPeerError(MeshError):
    """The other side gave the work up, for example because it is shutting down."""

    code = "cancelled"


class PeerLostError(MeshError):
    """The connection to a peer broke, or it could not be reached. The work may be tried elsewhere."""

    code = "peer_lost"


class UnreachableError(PeerLostError):
    """No connection to the peer could be made: nothing was begun there."""

    code = "unreachable"


class DrainingError(MeshError):
    """The service takes no new work. The work may be tried elsewhere."""

    code = "draining"


class TransferError(MeshError):
    """KV blocks could not be fetched: the peer is gone, the offer has expired or the layouts differ."""

    code = "transfer"


class EngineError(MeshError):
    """The engine failed while it served a request."""

    code = "engine"


class FeedLostError(MeshError):
    """A feed of events that a service lives on has ended."""

    code = "feed_lost"


def _subclasses(cls: type[MeshError]) -> dict[str, type[MeshError]]:
    found = {cls.code: cls}
    for sub in cls.__subclasses__():
        found |= _subclasses(sub)
    return found


_BY_CODE = _subclasses(MeshError)


def from_wire(code: str, detail: str) -> MeshError:
    """Rebuild the error that a peer reported; an unknown code becomes a plain MeshError."""
    return _BY_CODE.get(code, MeshError).from_detail(detail)
