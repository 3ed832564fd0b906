"""Undo the content encodings of request bodies: gzip and deflate, piece by piece, within a limit. Pure."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvmesh.mesh.http.errors import BodyTooLargeError, UnsupportedEncodingError
from kvmesh.protocol.errors import InvalidRequestError

ACCEPTED = "gzip, deflate"
MOST_LAYERS = 2  # encodings on one body
MOST_MEMBERS = 1024  # of one gzip file: each costs more than its bytes
SLICE_IN_BYTES = 16 << 10
SLICE_OUT_BYTES = 64 << 10
_GZIP, _ZLIB, _RAW = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS

Pieces = Iterable[bytes]


def read_encodings(header: str) -> tuple[str, ...]:
    """Return the encodings that a Content-Encoding header names, in the order in which they were applied.

    Raise UnsupportedEncodingError.
    """
    names = [name for part in header.lower().split(",") if (name := part.strip()) and name != "identity"]
    for name in names:
        if name not in _LAYERS:
            raise UnsupportedEncodingError(
                f"the content encoding {name[:40]!r} is not supported",
                hint=f"send {ACCEPTED.replace(', ', ' or ')}, or the body as it is",
            )
    if len(names) > MOST_LAYERS:
        found = f"the body has {len(names)} content encodings"
        raise UnsupportedEncodingError(found, hint=f"send {MOST_LAYERS} at most")
    return tuple(names)


def decoded(body: bytes, encodings: Sequence[str], limit_bytes: int) -> Iterator[bytes]:
    """Yield the body without its encodings, in pieces of at most SLICE_OUT_BYTES; some are empty.

    Each step takes less than a millisecond. No layer may have more than `limit_bytes`: a small body can stand for
    terabytes. Raise BodyTooLargeError, or InvalidRequestError if the body is not what its header says.
    """
    view = memoryview(body)
    pieces: Pieces = (bytes(view[at : at + SLICE_IN_BYTES]) for at in range(0, len(view), SLICE_IN_BYTES))
    for name in reversed(encodings):
        pieces = _limited(_LAYERS[name](pieces), limit_bytes)
    yield from pieces


def _limited(pieces: Pieces, limit_bytes: int) -> Iterator[bytes]:
    left_bytes = limit_bytes
    for piece in pieces:
        left_bytes -= len(piece)
        if left_bytes < 0:
            raise BodyTooLargeError(f"the request body inflates to more than {limit_bytes} bytes", hint="send less")
        yield piece


def _gzip(pieces: Pieces) -> Iterator[bytes]:
    """A gzip file may have several members, and zeros behind them (RFC 1952)."""
    members, inflater = 0, None
    for piece in pieces:
        data = piece
        while data:
            if inflater is None:
                data = data.lstrip(b"\0") if members else data
                if not data:
                    break
                members += 1
                if members > MOST_MEMBERS:
                    raise InvalidRequestError(f"the gzip body has more than {MOST_MEMBERS} members", hint="send one")
                inflater = zlib.decompressobj(_GZIP)
            yield from _inflated(inflater, data, "gzip")
            data, inflater = (inflater.unused_data, None) if inflater.eof else (b"", inflater)
        yield b""
    if inflater is not None:
        raise _cut_off("gzip")


def _deflate(pieces: Pieces) -> Iterator[bytes]:
    """The zlib format, as RFC 9110 says, or the bare stream that some clients send."""
    head, inflater = b"", None
    for piece in pieces:
        data = piece
        if inflater is None:
            head = data = head + piece
            if len(head) < 2:
                continue
            inflater = zlib.decompressobj(_ZLIB if _is_zlib(head) else _RAW)
        yield from _inflated(inflater, data, "deflate")
        if inflater.unused_data:
            raise InvalidRequestError("the body goes on behind its deflate stream", hint="send one stream")
        yield b""
    if head and (inflater is None or not inflater.eof):
        raise _cut_off("deflate")


def _is_zlib(head: bytes) -> bool:
    """Return whether the first two bytes are zlib's header (RFC 1950)."""
    return head[0] & 0x0F == zlib.DEFLATED and (head[0] << 8 | head[1]) % 31 == 0


def _inflated(inflater: "zlib._Decompress", data: bytes, name: str) -> Iterator[bytes]:
    """Yield what comes out of `inflater` for `data`. Raise InvalidRequestError."""
    is_full = True  # there may be more inside
    while (data or is_full) and not inflater.eof:
        try:
            piece = inflater.decompress(data, SLICE_OUT_BYTES)
        except zlib.error as error:
            raise InvalidRequestError(
                f"the body is not valid {name}: {error}", hint="send it as its Content-Encoding says"
            ) from error
        data, is_full = inflater.unconsumed_tail, len(piece) == SLICE_OUT_BYTES
        yield piece


def _cut_off(name: str) -> InvalidRequestError:
    return InvalidRequestError(f"the {name} body ends too early", hint="send all of it")


_LAYERS: dict[str, Callable[[Pieces], Iterator[bytes]]] = {"gzip": _gzip, "x-gzip": _gzip, "deflate": _deflate}
