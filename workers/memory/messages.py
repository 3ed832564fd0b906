"""Messages between workers and the memory service of their host: one in a packet, with at most one descriptor.

A later release changes a tag where it changes a meaning. A peer that does not know a tag ends the connection, and the
worker loads its weights by itself.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from kvmesh.protocol.errors import WireError

MAX_PACKET_BYTES = 1 << 16
MAX_LABEL_CHARS = 200
KEY_BYTES = 32
MAX_IMAGES = 256
MAX_IMAGE_BYTES = 1 << 44

Size = Annotated[int, Meta(ge=1, le=MAX_IMAGE_BYTES)]
Label = Annotated[str, Meta(max_length=MAX_LABEL_CHARS)]


class Told(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """A message on the socket of the service."""


class WantImage(Told, frozen=True, tag="want-image/1"):
    """A worker needs an image. It keeps the connection for as long as it uses the image."""

    key: Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    label: Label  # for people


class WantSpace(Told, frozen=True, tag="want-space/1"):
    """The writer has loaded the weights and knows their size."""

    num_bytes: Size


class Wrote(Told, frozen=True, tag="wrote/1"):
    """The writer has written all bytes and keeps no writable mapping."""


class WantHoldings(Told, frozen=True, tag="want-holdings/1"):
    """Somebody asks what the service holds."""


class MayWrite(Told, frozen=True, tag="may-write/1"):
    """Nobody has the image: the worker is its writer. It is waited for until it says more or its connection ends."""


class Space(Told, frozen=True, tag="space/1"):
    """A writable descriptor comes along."""


class SharedImage(Told, frozen=True, tag="image/1"):
    """A read-only descriptor of sealed memory comes along."""

    num_bytes: Size


class NoImage(Told, frozen=True, tag="no-image/1"):
    """The service cannot help: the worker uses weights of its own."""

    reason: Annotated[str, Meta(max_length=1000)]


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """One image as people see it."""

    label: Label
    state: str  # writing or ready
    num_bytes: int
    users: int
    waiting: int


class Holdings(Told, frozen=True, tag="holdings/1"):
    """The service reports its images."""

    pid: int
    limit_bytes: int
    images: Annotated[tuple[Held, ...], Meta(max_length=MAX_IMAGES)]


FromWorker = WantImage | WantSpace | Wrote | WantHoldings
FromService = MayWrite | Space | SharedImage | NoImage | Holdings
_encoder = msgspec.msgpack.Encoder()
_of_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_of_service: msgspec.msgpack.Decoder[FromService] = msgspec.msgpack.Decoder(FromService)


def packed(message: Told) -> bytes:
    return _encoder.encode(message)


def from_worker(packet: bytes) -> FromWorker:
    """Raise WireError for what no worker says."""
    try:
        return _of_worker.decode(packet)
    except msgspec.DecodeError as error:
        raise WireError(f"a worker said what cannot be read: {error}") from error


def from_service(packet: bytes) -> FromService:
    """Raise WireError for what no memory service says."""
    try:
        return _of_service.decode(packet)
    except msgspec.DecodeError as error:
        raise WireError(f"the memory service said what cannot be read: {error}") from error
