"""Define the expected failures. Each crosses the wire whole, and is the same class on the other side."""

import math


class MeshError(Exception):
    """An expected failure. Its text is the message, then the hint, then when to retry."""

    code = "internal"  # names the class on the wire

    def __init__(
        self, message: str, *, hint: str = "", param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        """Make the text. `hint` says what to do next, `param` names the field of the request that is wrong."""
        self.message = message
        self.hint = hint
        self.param = param
        self.retry_after_s = None if retry_after_s is None else max(1, math.ceil(retry_after_s))
        retry = "" if self.retry_after_s is None else f"retry after {self.retry_after_s} s"
        super().__init__("; ".join(part for part in (message, hint, retry) if part))


class ConfigError(MeshError):
    code = "config"


class ExpiredError(ConfigError):
    """A certificate counts no more. It may be renewed at any time, so a process that ends for it is started again."""

    code = "expired"


class WireError(MeshError):
    """Data from the network cannot be read, or is larger than agreed."""

    code = "wire"


class InvalidRequestError(MeshError):
    """The caller asked for something that cannot be done."""

    code = "invalid_request"


class WrongStateError(InvalidRequestError):
    """Report an order that does not fit the present state. Another order comes first."""

    code = "conflict"


class ContextLengthError(InvalidRequestError):
    code = "context_length"


class NoWorkerError(MeshError):
    """The mesh has no ready worker that could serve the request."""

    code = "no_worker"


class OtherWeightsError(NoWorkerError):
    """Workers are ready, but none has the weights with which the answer began: nobody can continue it."""

    code = "other_weights"


class OverloadedError(MeshError):
    """The work was refused early because queues are full. The caller may retry later."""

    code = "overloaded"


class DeadlineExceededError(MeshError):
    code = "deadline_exceeded"


class CancelledByPeerError(MeshError):
    """The peer gave up the work, for example because the peer is shutting down."""

    code = "cancelled"


class PeerLostError(MeshError):
    """The connection to a peer broke, or it could not be reached. The work may be tried elsewhere."""

    code = "peer_lost"


class UnreachableError(PeerLostError):
    """The peer could not be connected to, so the peer has begun no work."""

    code = "unreachable"


class IdentityError(UnreachableError):
    """A certificate shows no member of this mesh, or one that may not do what it tries. Nothing has been begun."""

    code = "identity"


class DrainingError(MeshError):
    """The service takes no new work. The work may be tried elsewhere."""

    code = "draining"


class StaleCardError(DrainingError):
    """The worker has other weights than the card by which it was chosen. Its new card is on its way."""

    code = "stale_card"


class TransferError(MeshError):
    """KV blocks could not be fetched: the peer is gone, the offer has expired or the layouts differ."""

    code = "transfer"


class EngineError(MeshError):
    """The engine failed while it served a request."""

    code = "engine"


class FeedLostError(MeshError):
    """A feed of events that a service depends on has ended."""

    code = "feed_lost"


_OF_DEVICES = ("CUDA error", "CUDA out of memory")  # torch puts no values of a request into these


def shown_error(error: BaseException) -> str:
    """Return the text of an exception as far as logs and other callers may have it.

    The text of an exception that is not ours may hold a prompt, for example where an engine raises it. What a device
    says is shown, its first line.
    """
    if isinstance(error, MeshError):
        return str(error)
    if isinstance(error, OSError):
        return error.strerror or ""
    if isinstance(error, BaseExceptionGroup):
        return f"{len(error.exceptions)} failures"
    text = str(error)
    if text.startswith(_OF_DEVICES):
        return text.splitlines()[0][:300]
    return f"(a text of {len(text)} characters is left out)" if text else ""


def kind_of(error: BaseException) -> str:
    """Return an exception as one phrase without foreign texts."""
    return f"{type(error).__name__}: {shown_error(error)}".removesuffix(": ")


def _subclasses(cls: type[MeshError]) -> dict[str, type[MeshError]]:
    found = {cls.code: cls}
    for sub in cls.__subclasses__():
        found |= _subclasses(sub)
    return found


_BY_CODE = _subclasses(MeshError)


def error_class(code: str) -> type[MeshError]:
    """Return the class that has this code; MeshError for the code of a newer version."""
    return _BY_CODE.get(code, MeshError)
