"""Promises about what other processes send: frames of the request plane, messages, cards and tickets, KV events.

Each function takes one input and fails if a promise does not hold: only documented errors, and what was read can be
written and read again as the same.
"""

from array import array
from collections.abc import Sequence

import msgspec
from xxhash import xxh3_64_intdigest

from kvmesh.frontend.lane import PlainTokenLane, TokenLane
from kvmesh.kvevents.formats import batch_ts, decode_payload, encode_payload
from kvmesh.mesh.plane import frames
from kvmesh.protocol import messages
from kvmesh.protocol.card_checks import problem_of
from kvmesh.protocol.errors import WireError
from kvmesh.protocol.hashing import pack_hashes
from kvmesh.protocol.ids import WorkerId
from kvmesh.router import index as index_module
from kvmesh.router.index import Holder, PlainIndex

KINDS = [
    kind
    for kind in vars(messages).values()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == messages.__name__
]
CARDS = [messages.WorkerCard, messages.RouterCard, messages.FrontendCard]
SNAPSHOT_VERSION = 1
A = Holder(WorkerId("a"), 0)


def plane_frames(data: bytes) -> None:
    """Any cutting of the bytes gives the same frames, and a frame that was read is written as it can be read again."""
    if not data:
        return
    cut, data = data[0], data[1:]
    whole = _fed([data])
    assert _fed([data[:cut], data[cut:]]) == whole
    for frame in whole or ():
        assert _fed([frame]) == [frame]


def _fed(pieces: Sequence[bytes]) -> list[bytes] | None:
    """Return the frames in the pieces, written again; None if they are refused."""
    reader = frames.FrameReader()
    try:
        found = [frames.encode_frame(frame) for piece in pieces for frame in reader.feed(piece)]
    except WireError:
        return None
    return found if reader.refusal is None else None


def mesh_messages(data: bytes) -> None:
    """A message is refused as unreadable, or it means the same after it was written and read again."""
    if not data:
        return
    kind = KINDS[data[0] % len(KINDS)]
    try:
        message = messages.decode(data[1:], kind)
    except WireError:
        return
    written = messages.encode(message)
    assert messages.encode(messages.decode(written, kind)) == written
    if isinstance(message, messages.GenerateRequest | messages.EmbedRequest):
        try:
            tokens = messages.unpack_tokens(message.prompt)
        except WireError:
            return
        assert messages.pack_tokens(tokens) == message.prompt


def cards(data: bytes) -> None:
    """A card is refused by name or is within its limits, and the check itself never fails."""
    if not data:
        return
    kind = CARDS[data[0] % len(CARDS)]
    try:
        card = messages.decode_card(data[1:], kind)
    except WireError:
        return
    if isinstance(card, messages.WorkerCard):
        problem = problem_of(card, card.worker_id)
        assert len(problem) < 500
        if not problem:
            assert 1 <= card.dp_size <= 256
    assert messages.decode_card(messages.encode_card(card), kind) is not None


def kv_events(data: bytes) -> None:
    """Events mean the same after they were written again, and the native index reads them as Python does."""
    try:
        batch = decode_payload(data)
    except WireError:
        batch = None
    assert batch_ts(data) >= 0.0
    plain = PlainIndex(200, 100)
    if batch is not None:
        again = decode_payload(encode_payload(batch.events, batch.ts, batch.dp_rank))
        assert again.events == batch.events
        plain.apply(A, batch.events)
    if index_module.NATIVE:
        _compare(plain, data, is_readable=batch is not None)


def _compare(plain: PlainIndex, data: bytes, *, is_readable: bool) -> None:
    native = index_module.NativeIndex(200, 100)
    try:
        native.apply_payload(A, data)
    except WireError:
        assert not is_readable, "only Python can read this"
    else:
        assert is_readable, "only the native code can read this"
        assert native.content(A) == plain.content(A)
        assert native.stats == plain.stats


def index_snapshots(data: bytes) -> None:
    """A snapshot of an index is refused, or it is the same index in Python and natively.

    The checksum is made right here, because no input would find it.
    """
    data = b"kvprefix" + SNAPSHOT_VERSION.to_bytes(4, "little") + data
    data += xxh3_64_intdigest(data, seed=0).to_bytes(8, "little")
    indexes = [PlainIndex(100, 60), *([index_module.NativeIndex(100, 60)] if index_module.NATIVE else [])]
    dumps = []
    for index in indexes:
        try:
            index.load(data)
        except WireError:
            dumps.append(None)
        else:
            index.match(pack_hashes([prefix for prefix, _ in index.content(A)]))
            dumps.append((index.num_blocks, index.num_entries, index.stats))
    assert len(set(map(str, dumps))) == 1, dumps


def token_lane(data: bytes) -> None:
    """The native lane passes exactly the messages that the plain lane passes, with the same text."""
    seen = []
    for kind in (PlainTokenLane, TokenLane):
        written: list[bytes] = []
        taken: list[bytes] = []
        lane = kind(lambda: 1.0, lambda chunk, to=written: to.append(chunk) is None, b"<", b">")
        lane.bind(lambda raw, passed, to=taken: to.append(bytes(raw)) is None, 8)
        lane.texts = _Texts()
        lane(msgspec.Raw(data))
        seen.append((written, taken, list(lane.generated), lane.take_count()))
    assert seen[0] == seen[1]


class _Texts(dict[int, bytes]):
    """A text for every token; every seventh has none of its own."""

    def __missing__(self, token: int) -> bytes:
        return b"%d " % token if token % 7 else b""


def packed_tokens(data: bytes) -> None:
    """Tokens are refused, or are the same after they were packed again."""
    try:
        tokens = messages.token_array(data)
    except WireError:
        assert len(data) % 4
        return
    assert messages.pack_tokens(tokens) == data
    assert array("I", messages.unpack_tokens(data)) == tokens
