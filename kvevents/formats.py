"""Read and write vLLM's KV events. SGLang writes the same format, with signed hashes.

Payload: msgpack array `[ts, [event, ...], dp_rank | nil]`. An event is a map with the tag `type` (vLLM >= 0.20,
SGLang) or an array whose first element is the tag (older). Unknown keys, further positions and unknown kinds
of event are ignored. Block hashes are u64, i64 (read as u64) or bytes (the last 8, big endian). Blocks that are stored
in another medium may come without tokens: a follower that kept their hashes knows the tokens. The salt of a tenant is
in the `extra_keys` of a sequence's first block. Events of SGLang and of our engines also have it as `cache_salt`.

An engine whose model mixes kinds of attention has several groups of layers (`group_idx`; nil or absent: 0). Each group
has blocks of its own, and all groups name equal prefixes by the same hash. A prefix can be reused if the layers with
full attention hold it. A `BlockStored` therefore counts only if its `kv_cache_spec_kind` is in FULL_ATTENTION, or, if
it has no kind, if its group is 0. `BlockRemoved` has no kind; so the group becomes part of the name: every hash in an
event of group g, also the parent's, is read as `hash ^ (g * GROUP_FACTOR mod 2**64)`. The removal of a block that did
not count then names no block. In the array form the two fields are at positions 9 and 10 (removed: 3); a group that is
no u16, or a kind that is no text, counts as absent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from struct import Struct as Packed
from typing import Annotated, cast

import msgspec
from msgspec import Meta, Raw, Struct

from kvmesh.protocol.errors import WireError
from kvmesh.protocol.events import Cleared, KvEvent, Removed, Stored
from kvmesh.protocol.ids import EngineHash

MAX_PAYLOAD_BYTES = 8 << 20
MAX_EVENTS = 65_536  # of one payload

FULL_ATTENTION = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
GROUP_FACTOR = 0x9E37_79B9_7F4A_7C15

_U64 = 0xFFFF_FFFF_FFFF_FFFF
_DEVICE = "GPU"

_Hash = int | bytes
_Token = Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]
# Eagle sends pairs: [token, next token]. They are lists here because msgspec 0.22 crashes in the garbage
# collector on a union of a bounded integer and a tuple of fixed length.
_Tokens = tuple[_Token | list[_Token], ...]
_BlockSize = Annotated[int, Meta(ge=0, le=1 << 20)]  # 0: vLLM names offloaded blocks, without their tokens
_Rank = Annotated[int, Meta(ge=0, le=0xFFFF)]
_Group = Annotated[int, Meta(ge=0, le=0xFFFF)]


@dataclass(frozen=True, slots=True)
class EventBatch:
    ts: float  # s since the epoch, by the publisher's clock
    events: list[KvEvent]
    dp_rank: int | None


class _StoredMap(Struct, tag_field="type", tag="BlockStored", gc=False):
    block_hashes: list[_Hash]
    token_ids: _Tokens
    block_size: _BlockSize
    parent_block_hash: _Hash | None = None
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    group_idx: _Group | None = None
    kv_cache_spec_kind: str | None = None
    extra_keys: Raw = Raw()
    cache_salt: str | None = None  # of SGLang and of our engines; decoders of vLLM ignore it


class _RemovedMap(Struct, tag_field="type", tag="BlockRemoved", gc=False):
    block_hashes: list[_Hash]
    medium: str | None = None
    group_idx: _Group | None = None


class _ClearedMap(Struct, tag_field="type", tag="AllBlocksCleared", gc=False):
    pass


class _StoredArray(Struct, array_like=True, tag="BlockStored", gc=False):
    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None
    token_ids: _Tokens
    block_size: _BlockSize
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Raw = Raw()
    group_idx: object = None  # some producers use these positions for something else
    kv_cache_spec_kind: object = None

    @property
    def cache_salt(self) -> None:
        """Return None, because only the map form has a salt."""


class _RemovedArray(Struct, array_like=True, tag="BlockRemoved", gc=False):
    block_hashes: list[_Hash]
    medium: str | None = None
    group_idx: object = None


class _ClearedArray(Struct, array_like=True, tag="AllBlocksCleared", gc=False):
    pass


_MapEvent = _StoredMap | _RemovedMap | _ClearedMap
_ArrayEvent = _StoredArray | _RemovedArray | _ClearedArray


class _MapBatch(Struct, array_like=True, gc=False):
    """The batch of today's engines, read at once."""

    ts: float
    events: Annotated[list[_MapEvent], Meta(max_length=MAX_EVENTS)]
    dp_rank: _Rank | None = None


class _AnyBatch(Struct, array_like=True, gc=False):
    """A batch of another form, whose events are read one by one."""

    ts: float
    events: Annotated[list[Raw], Meta(max_length=MAX_EVENTS)]
    dp_rank: _Rank | None = None


class _MapKind(Struct):
    type: str


class _ArrayKind(Struct, array_like=True):
    type: str


class _StoredOut(Struct, tag_field="type", tag="BlockStored", omit_defaults=True, gc=False):
    """The form of vLLM 0.32: the first seven fields are always written, the rest if set."""

    block_hashes: Sequence[int]
    parent_block_hash: int | None
    token_ids: Sequence[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    cache_salt: str | None = None


class _RemovedOut(Struct, tag_field="type", tag="BlockRemoved", omit_defaults=True, gc=False):
    block_hashes: Sequence[int]
    medium: str
    group_idx: int | None = None


_KINDS = {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
_ARRAY_HEADERS = {0xDC, 0xDD, *range(0x90, 0xA0)}  # first byte of a msgpack array
_LEAST_WITH_SALT = 3  # bytes: a list, a list in it, a text in that
_FLOAT_64 = 0xCB  # first byte of a msgpack double
_F64 = Packed(">d")

_map_batch = msgspec.msgpack.Decoder(_MapBatch)
_any_batch = msgspec.msgpack.Decoder(_AnyBatch)
_map_event: msgspec.msgpack.Decoder[_MapEvent] = msgspec.msgpack.Decoder(_MapEvent)
_array_event: msgspec.msgpack.Decoder[_ArrayEvent] = msgspec.msgpack.Decoder(_ArrayEvent)
_extra_keys_decoder = msgspec.msgpack.Decoder(list[list[object] | None])
_map_kind = msgspec.msgpack.Decoder(_MapKind)
_array_kind = msgspec.msgpack.Decoder(_ArrayKind)
_encoder = msgspec.msgpack.Encoder()


def batch_ts(payload: bytes) -> float:
    """Return the time at which the batch was made, by the publisher's clock; 0.0 if it is not a plain double."""
    if len(payload) < 10 or payload[1] != _FLOAT_64:
        return 0.0
    ts: float = _F64.unpack_from(payload, 2)[0]
    return ts if 0.0 < ts < inf else 0.0


def decode_payload(payload: bytes | memoryview, *, max_bytes: int = MAX_PAYLOAD_BYTES) -> EventBatch:
    """Read one batch. Raises WireError for bytes that are no batch, and for more than `max_bytes`."""
    if len(payload) > max_bytes:
        raise WireError(f"kv events of {len(payload)} bytes", hint=f"at most {max_bytes} are accepted")
    try:
        return _decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        hint = "the worker's engine writes an unknown format"
        raise WireError(f"unreadable kv events: {error}", hint=hint) from error


def encode_payload(events: Sequence[KvEvent], ts: float, dp_rank: int | None = 0) -> bytes:
    """Write one batch in the map form of vLLM 0.32. A salt is written where vLLM has it, and as `cache_salt`."""
    return _encoder.encode((ts, [_to_wire(event) for event in events], dp_rank))


def _decode(payload: bytes | memoryview) -> EventBatch:
    try:
        batch = _map_batch.decode(payload)
    except msgspec.ValidationError:
        return _decode_one_by_one(payload)
    return EventBatch(batch.ts, _that_count(batch.events), batch.dp_rank)


def _decode_one_by_one(payload: bytes | memoryview) -> EventBatch:
    batch = _any_batch.decode(payload)
    known = [event for raw in batch.events if (event := _read_event(raw)) is not None]
    return EventBatch(batch.ts, _that_count(known), batch.dp_rank)


def _that_count(events: Sequence[_MapEvent | _ArrayEvent]) -> list[KvEvent]:
    return [event for wire in events if (event := _from_wire(wire)) is not None]


def _read_event(raw: Raw) -> _MapEvent | _ArrayEvent | None:
    """Read one event of either form; None for a kind that this version does not know."""
    if memoryview(raw)[0] in _ARRAY_HEADERS:
        return _array_event.decode(raw) if _array_kind.decode(raw).type in _KINDS else None
    return _map_event.decode(raw) if _map_kind.decode(raw).type in _KINDS else None


def _from_wire(event: _MapEvent | _ArrayEvent) -> KvEvent | None:
    """Convert one event; None for the blocks of a group that does not count."""
    if isinstance(event, _StoredMap | _StoredArray):
        return _stored(event) if _counts(event) else None
    if isinstance(event, _RemovedMap | _RemovedArray):
        return Removed(_hashes(event.block_hashes, _fold(event)), event.medium or _DEVICE)
    return Cleared()


def _stored(event: _StoredMap | _StoredArray) -> Stored:
    parent, fold = event.parent_block_hash, _fold(event)
    return Stored(
        hashes=_hashes(event.block_hashes, fold),
        parent=None if parent is None else _hash(parent, fold),
        token_ids=_tokens(event.token_ids, len(event.block_hashes) * event.block_size),
        block_size=event.block_size,
        lora=_lora(event.lora_name, event.lora_id),
        salt=_salt(event),
        medium=event.medium or _DEVICE,
    )


def _salt(event: _StoredMap | _StoredArray) -> str | None:
    """Return the salt of an event, if any.

    vLLM has it in the keys of a sequence's first block, `[adapter, ..., salt, ...]`: the adapter if there is one,
    images as pairs, the digest of prompt embeddings as bytes.
    """
    if event.cache_salt is not None or isinstance(event, _StoredArray) or event.parent_block_hash is not None:
        return event.cache_salt
    if len(memoryview(event.extra_keys)) < _LEAST_WITH_SALT:
        return None
    try:
        first = _extra_keys_decoder.decode(event.extra_keys)[0]
    except (msgspec.MsgspecError, IndexError, RecursionError):  # another engine's keys: no salt
        return None
    texts = [key for key in first or () if isinstance(key, str)]
    if event.lora_name and texts[:1] == [event.lora_name]:
        del texts[0]
    return texts[-1] if texts else None


def _counts(event: _StoredMap | _StoredArray) -> bool:
    """Return whether the group has full attention, or is the first group of an engine that does not tell the kind."""
    if isinstance(event.kv_cache_spec_kind, str):
        return event.kv_cache_spec_kind in FULL_ATTENTION
    return _fold(event) == 0


def _fold(event: _StoredMap | _StoredArray | _RemovedMap | _RemovedArray) -> int:
    """Return the u64 that tells the hashes of this event's group from those of other groups; 0 for group 0."""
    group = event.group_idx
    return group * GROUP_FACTOR & _U64 if type(group) is int and 0 <= group <= 0xFFFF else 0


def _hashes(hashes: Sequence[_Hash], fold: int) -> tuple[EngineHash, ...]:
    return tuple([_hash(value, fold) for value in hashes])


def _hash(value: _Hash, fold: int) -> EngineHash:
    if isinstance(value, int):
        return EngineHash((value & _U64) ^ fold)
    if not value:
        raise ValueError("a block hash of no bytes")
    return EngineHash(int.from_bytes(value[-8:], "big") ^ fold)


def _tokens(tokens: _Tokens, expected: int) -> tuple[int, ...]:
    """Return the tokens of the blocks, or none. Pairs give one more token, the second of the last pair.

    Raises ValueError for another number of tokens.
    """
    if len(tokens) not in (0, expected):
        raise ValueError(f"{len(tokens)} tokens where the blocks hold {expected}")
    if list not in set(map(type, tokens)):
        return cast(tuple[int, ...], tokens)
    pairs = [pair for pair in tokens if isinstance(pair, list) and len(pair) == 2]
    if len(pairs) != len(tokens):
        raise ValueError("tokens that are neither all single nor all pairs")
    return (*(first for first, _ in pairs), pairs[-1][1])


def _lora(name: str | None, lora_id: int | None) -> str | None:
    """Return the adapter's name, or one made of its id: old engines do not send names."""
    if name:
        return name
    return None if lora_id is None else f"lora-id-{lora_id}"


def _to_wire(event: KvEvent) -> object:
    match event:
        case Stored():
            return _StoredOut(
                block_hashes=event.hashes,
                parent_block_hash=event.parent,
                token_ids=event.token_ids,
                block_size=event.block_size,
                lora_id=None,
                medium=event.medium,
                lora_name=event.lora,
                extra_keys=_extra_keys(event),
                group_idx=0,
                kv_cache_spec_kind="full_attention",
                cache_salt=event.salt,
            )
        case Removed():
            return _RemovedOut(block_hashes=event.hashes, medium=event.medium, group_idx=0)
        case Cleared():
            return _ClearedMap()


def _extra_keys(event: Stored) -> list[list[str] | None]:
    """Return what vLLM mixes into the hash of each block: the adapter, and for the first of a sequence the salt."""
    lora = [event.lora] if event.lora else []
    salt = [event.salt] if event.salt and event.parent is None else []
    keys: list[list[str] | None] = [lora or None] * len(event.hashes)
    if keys:
        keys[0] = [*lora, *salt] or None
    return keys
