"""Cut events into batches that every follower accepts. Pure."""

from collections.abc import Iterator, Sequence

from kvmesh.protocol.events import KvEvent, Removed, Stored

BATCH_BYTES = 1 << 20

_EVENT_BYTES = 256  # an event takes at most this besides its tokens, hashes and texts
_TOKEN_BYTES = 5
_HASH_BYTES = 9


def in_parts(events: Sequence[KvEvent], max_bytes: int = BATCH_BYTES) -> Iterator[Sequence[KvEvent]]:
    """Cut `events`, in order, into parts of at most `max_bytes` on the wire, and at least one part.

    A larger event becomes several events with the same effect; only a single block is never cut.
    """
    part: list[KvEvent] = []
    size = 0
    for event in events:
        for piece in _pieces(event, max_bytes):
            cost = _wire_bytes(piece)
            if part and size + cost > max_bytes:
                yield part
                part, size = [], 0
            part.append(piece)
            size += cost
    yield part


def _pieces(event: KvEvent, max_bytes: int) -> Iterator[KvEvent]:
    if _wire_bytes(event) <= max_bytes or not isinstance(event, Stored | Removed):
        yield event
        return
    step = max(1, (max_bytes - _fixed_bytes(event)) // _block_bytes(event))
    for first in range(0, len(event.hashes), step):
        yield _piece(event, first, first + step)


def _piece(event: Stored | Removed, first: int, end: int) -> Stored | Removed:
    """Return blocks `first` to `end` - 1 of an event."""
    hashes = event.hashes[first:end]
    if isinstance(event, Removed):
        return Removed(hashes, event.medium)
    size = event.block_size
    return Stored(
        hashes=hashes,
        parent=event.hashes[first - 1] if first else event.parent,
        token_ids=event.token_ids[first * size : end * size],
        block_size=size,
        lora=event.lora,
        salt=event.salt,
        medium=event.medium,
    )


def _wire_bytes(event: KvEvent) -> int:
    """Return an upper bound of the event's bytes on the wire, which is not much too large."""
    if not isinstance(event, Stored | Removed):
        return _EVENT_BYTES
    return _fixed_bytes(event) + len(event.hashes) * _block_bytes(event)


def _fixed_bytes(event: Stored | Removed) -> int:
    texts = (event.lora, event.salt, event.salt) if isinstance(event, Stored) else ()
    return _EVENT_BYTES + sum(4 * len(text) for text in texts if text)


def _block_bytes(event: Stored | Removed) -> int:
    if isinstance(event, Removed):
        return _HASH_BYTES
    adapter = 8 + 4 * len(event.lora) if event.lora else 1  # for each block
    return _HASH_BYTES + _TOKEN_BYTES * event.block_size + adapter
