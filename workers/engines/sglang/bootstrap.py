"""The meeting place of a SGLang prefill and decode engine, and the tickets that carry it. Pure."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvmesh.protocol.errors import EngineError, TransferError
from kvmesh.protocol.messages import UNREADABLE, GenerateRequest, Ticket

MAX_ROOM = (1 << 63) - 1
MAX_OPAQUE_BYTES = 1024


class Bootstrap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The place where a prefill and a decode engine meet; travels as JSON in Ticket.opaque."""

    host: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:%\[\]-]{1,253}$")]
    port: Annotated[int, Meta(ge=1, le=65535)]
    room: Annotated[int, Meta(ge=0, le=MAX_ROOM)]

    @property
    def kwargs(self) -> dict[str, Any]:
        return {"bootstrap_host": self.host, "bootstrap_port": self.port, "bootstrap_room": self.room}


def backend_name(transfer: str) -> str:
    """Return the backend of tickets and cards: engines with different transfer backends cannot meet."""
    return f"sglang-{transfer}"


def encode_bootstrap(bootstrap: Bootstrap) -> bytes:
    return msgspec.json.encode(bootstrap)


def bootstrap_of(ticket: Ticket, backend: str) -> Bootstrap:
    """Return where to meet. Raise TransferError for a ticket of another `backend`, or one that cannot be read."""
    if ticket.backend != backend:
        raise TransferError(
            f"a ticket of {ticket.backend!r}, {backend!r} was expected",
            hint="start prefill and decode workers with the same engine and transfer backend",
        )
    if len(ticket.opaque) > MAX_OPAQUE_BYTES:
        raise TransferError(f"a bootstrap of {len(ticket.opaque)} bytes; at most {MAX_OPAQUE_BYTES} are accepted")
    try:
        return msgspec.json.decode(ticket.opaque, type=Bootstrap)
    except UNREADABLE as error:
        raise TransferError(f"unreadable bootstrap: {error}", hint="run one version everywhere") from error


def bootstrap_to_decode(request: GenerateRequest, backend: str, *, remedy: str) -> Bootstrap:
    """Return where a decode engine finds the KV of `request`.

    Raise EngineError if there is none: a decode engine computes no prompt, but another pair of workers may.
    """
    if request.ticket is None:
        raise EngineError("a SGLang decode engine computes no prompts", hint=remedy)
    try:
        return bootstrap_of(request.ticket, backend)
    except TransferError as error:
        raise EngineError(str(error)) from error
