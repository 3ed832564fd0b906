"""Test vLLM's event format, as engines of all versions and our own engines write it."""

import gc
from base64 import b64decode
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvmesh.kvevents.formats import GROUP_FACTOR, MAX_EVENTS, batch_ts, decode_payload, encode_payload
from kvmesh.protocol.errors import WireError
from kvmesh.protocol.events import Cleared, KvEvent, Removed, Stored
from kvmesh.protocol.ids import EngineHash

SALTED_FRAME = b64decode(
    b"k8tB2sBzpqPbAJGLpHR5cGWrQmxvY2tTdG9yZWSsYmxvY2tfaGFzaGVzls/9tV1ORpfk1M+pMllXhzgu4M8dce/bGiiE/88Zkqk93YV8EM+Q"
    b"sGsK7LWNxs/nbrZoh0jEc7FwYXJlbnRfYmxvY2tfaGFzaMCpdG9rZW5faWRz3ADAPWLMh8yszNHM9s0BG80BQM0BZc0Bis0Br80B1M0B+c0C"
    b"Hs0CQ80CaM0Cjc0Css0C180C/M0DIc0DRs0Da80DkM0Dtc0D2s0D/80EJM0ESc0Ebs0Ek80EuM0E3c0FAs0FJ80FTM0Fcc0Fls0Fu80F4M0G"
    b"Bc0GKs0GT80GdM0Gmc0Gvs0G480HCM0HLc0HUs0Hd80HnFV6zJ/MxMzpzQEOzQEzzQFYzQF9zQGizQHHzQHszQIRzQI2zQJbzQKAzQKlzQLK"
    b"zQLvzQMUzQM5zQNezQODzQOozQPNzQPyzQQXzQQ8zQRhzQSGzQSrzQTQzQT1zQUazQU/zQVkzQWJzQWuzQXTzQX4zQYdzQZCzQZnzQaMzQax"
    b"zQbWzQb7zQcgzQdFzQdqzQePSG3Mksy3zNzNAQHNASbNAUvNAXDNAZXNAbrNAd/NAgTNAinNAk7NAnPNApjNAr3NAuLNAwfNAyzNA1HNA3bN"
    b"A5vNA8DNA+XNBArNBC/NBFTNBHnNBJ7NBMPNBOjNBQ3NBTLNBVfNBXzNBaHNBcbNBevNBhDNBjXNBlrNBn/NBqTNBsnNBu7NBxPNBzjNB13N"
    b"B4I7YMyFzKrMz8z0zQEZzQE+zQFjzQGIzQGtzQHSzQH3zQIczQJBzQJmzQKLzQKwzQLVzQL6zQMfzQNEzQNpzQOOzQOzzQPYzQP9zQQizQRH"
    b"zQRszQSRzQS2zQTbzQUAzQUlzQVKzQVvzQWUqmJsb2NrX3NpemUgp2xvcmFfaWTApm1lZGl1baNHUFWpbG9yYV9uYW1lwKpleHRyYV9rZXlz"
    b"lpGodGVuYW50LWHAwMDAwKlncm91cF9pZHgAsmt2X2NhY2hlX3NwZWNfa2luZK5mdWxsX2F0dGVudGlvbgA="
)
HIGH = 0xFFFF_0000_0000_0001


def decode(*events: object, rank: int | None = 0) -> list[KvEvent]:
    return decode_payload(msgspec.msgpack.encode([1.5, list(events), rank])).events


def stored(*hashes: int, **changes: Any) -> Stored:
    """Blocks of two tokens."""
    fields: dict[str, Any] = {
        "hashes": tuple(map(EngineHash, hashes)),
        "parent": None,
        "token_ids": tuple(range(2 * len(hashes))),
        "block_size": 2,
    }
    return Stored(**(fields | changes))


def stored_map(**changes: object) -> dict[str, object]:
    """Return an event as vLLM 0.32 sends it."""
    return {
        "type": "BlockStored",
        "block_hashes": [1, HIGH],
        "parent_block_hash": 7,
        "token_ids": [0, 1, 2, 3],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None, None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    } | changes


def test_the_map_form_of_todays_vllm() -> None:
    removed = {"type": "BlockRemoved", "block_hashes": [HIGH], "medium": "GPU", "group_idx": 0}
    assert decode(stored_map(), removed, {"type": "AllBlocksCleared"}) == [
        stored(1, HIGH, parent=EngineHash(7)),
        Removed((EngineHash(HIGH),)),
        Cleared(),
    ]


@pytest.mark.parametrize(
    ("event", "want"),
    [
        (["BlockStored", [1], None, [0, 1], 2], stored(1)),
        (["BlockStored", [1], None, [0, 1], 2, None], stored(1)),
        (["BlockStored", [1], 5, [0, 1], 2, None, "CPU"], stored(1, parent=EngineHash(5), medium="CPU")),
        (["BlockStored", [1], None, [0, 1], 2, 3, "GPU", "my-lora"], stored(1, lora="my-lora")),
        (["BlockStored", [1], None, [0, 1], 2, 3], stored(1, lora="lora-id-3")),
        (["BlockStored", [1], None, [0, 1], 2, None, None, None, [None], 0, "full_attention", 9], stored(1)),
        (["BlockStored", [1], None, [0, 1], 2, None, None, None, [["salt"]], [{"mm": 1}]], stored(1)),
        (["BlockRemoved", [1]], Removed((EngineHash(1),))),
        (["BlockRemoved", [1], "CPU", 0, "more"], Removed((EngineHash(1),), "CPU")),
        (["AllBlocksCleared"], Cleared()),
    ],
)
def test_the_array_form_of_each_age(event: list[object], want: KvEvent) -> None:
    assert decode(event) == [want]


@pytest.mark.parametrize(
    ("sent", "want"),
    [
        (HIGH, HIGH),
        (-1, 2**64 - 1),
        (-(2**63), 2**63),
        ((5).to_bytes(8, "big"), 5),
        (b"\xff" * 24 + (6).to_bytes(8, "big"), 6),
        (b"\x07", 7),
    ],
)
def test_block_hashes_are_read_as_u64(sent: int | bytes, want: int) -> None:
    (event,) = decode(stored_map(block_hashes=[sent, sent], parent_block_hash=sent))
    assert isinstance(event, Stored)
    assert (event.hashes, event.parent) == ((want, want), want)


FULL = {"kv_cache_spec_kind": "full_attention"}
SLIDING = {"kv_cache_spec_kind": "sliding_window"}


@pytest.mark.parametrize(
    ("said", "counts"),
    [
        ({"group_idx": 0} | FULL, True),
        ({"group_idx": 3} | FULL, True),
        ({"group_idx": 1, "kv_cache_spec_kind": "mla_attention"}, True),
        ({"group_idx": 0} | SLIDING, False),
        ({"group_idx": 1, "kv_cache_spec_kind": "mamba"}, False),
        ({"group_idx": 0, "kv_cache_spec_kind": None}, True),
        ({"group_idx": None, "kv_cache_spec_kind": None}, True),
        ({"group_idx": 1, "kv_cache_spec_kind": None}, False),
    ],
)
def test_only_blocks_of_full_attention_count(said: dict[str, object], counts: bool) -> None:
    assert len(decode(stored_map(**said))) == counts


@pytest.mark.parametrize(
    ("changes", "salt"),
    [
        ({"extra_keys": [["tenant"], None]}, "tenant"),
        ({"extra_keys": [["poet", "tenant"], ["poet"]], "lora_name": "poet"}, "tenant"),
        ({"extra_keys": [["poet"], ["poet"]], "lora_name": "poet"}, None),
        ({"extra_keys": [["same", "same"], ["same"]], "lora_name": "same"}, "same"),
        ({"extra_keys": [[["image", 3], "tenant", b"digest"], None]}, "tenant"),
        ({"extra_keys": [None, ["tenant"]]}, None),
        ({"extra_keys": []}, None),
        ({"extra_keys": None}, None),
        ({"extra_keys": "something else"}, None),
        ({"extra_keys": [["theirs"], None], "cache_salt": "ours"}, "ours"),
        ({"extra_keys": [["tenant"], None], "parent_block_hash": 7}, None),
    ],
)
def test_the_salt_is_found_where_a_stock_engine_says_it(changes: dict[str, object], salt: str | None) -> None:
    (event,) = decode(stored_map(**{"parent_block_hash": None, **changes}))
    assert isinstance(event, Stored)
    assert event.salt == salt


def test_a_recorded_frame_of_a_salted_prompt() -> None:
    """Two blocks of a prompt under a salt, as vLLM 0.32 sent them; block size 32."""
    (event,) = decode_payload(SALTED_FRAME).events
    assert isinstance(event, Stored)
    assert (event.salt, event.lora, event.parent, event.block_size) == ("tenant-a", None, None, 32)
    assert len(event.hashes) * 32 == len(event.token_ids)


def test_groups_call_equal_prefixes_the_same_and_are_kept_apart() -> None:
    events = [stored_map(group_idx=group, **FULL) for group in (0, 2)]
    removed = [{"type": "BlockRemoved", "block_hashes": [1, HIGH], "group_idx": group} for group in (2, 1, 0)]
    first, third, gone_third, gone_second, gone_first = decode(*events, *removed)
    assert isinstance(first, Stored)
    assert isinstance(third, Stored)
    assert first.hashes == (1, HIGH)
    assert third.parent == 7 ^ (2 * GROUP_FACTOR % 2**64)
    assert gone_third == Removed(third.hashes)
    assert gone_first == Removed(first.hashes)
    assert not {*third.hashes, *first.hashes} & {*gone_second.hashes}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("positions", "count"),
    [([1, "full_attention"], 1), ([0, "sliding_window"], 0), ([1], 0), ([1, 9], 0), ([[{"mm": 1}], 4], 1), ([-1], 1)],
)
def test_groups_in_the_array_form(positions: list[object], count: int) -> None:
    assert len(decode(["BlockStored", [1], None, [0, 1], 2, None, None, None, [None], *positions])) == count
    (removed,) = decode(["BlockRemoved", [1], "GPU", 1])
    assert removed == Removed((EngineHash(1 ^ GROUP_FACTOR),))


def test_blocks_in_another_medium_may_come_without_tokens() -> None:
    (event,) = decode(stored_map(token_ids=[], medium="CPU", parent_block_hash=None))
    assert event == stored(1, HIGH, token_ids=(), medium="CPU")
    (event,) = decode(stored_map(token_ids=[], medium="CPU", parent_block_hash=None, block_size=0))
    assert event == stored(1, HIGH, token_ids=(), medium="CPU", block_size=0)


def test_tokens_of_blocks_without_a_size_are_refused() -> None:
    with pytest.raises(WireError):
        decode(stored_map(block_size=0))


@pytest.mark.parametrize(
    ("payload", "ts"),
    [
        (encode_payload([Cleared()], 1.5), 1.5),
        (msgspec.msgpack.encode([1, [], 0]), 0.0),
        (msgspec.msgpack.encode([float("nan"), [], 0]), 0.0),
        (msgspec.msgpack.encode([float("inf"), [], 0]), 0.0),
        (msgspec.msgpack.encode([-1.5, [], 0]), 0.0),
        (b"\x93\xcb", 0.0),
        (b"", 0.0),
    ],
)
def test_the_time_of_a_batch_is_read_without_reading_it(payload: bytes, ts: float) -> None:
    assert batch_ts(payload) == ts


def test_token_pairs_become_tokens_plus_the_last_second() -> None:
    (event,) = decode(stored_map(token_ids=[[0, 1], [1, 2], [2, 3], [3, 9]]))
    assert isinstance(event, Stored)
    assert event.token_ids == (0, 1, 2, 3, 9)


def test_unknown_keys_and_kinds_are_ignored() -> None:
    unknown = {"type": "BlockMoved", "to": "moon"}
    assert decode(stored_map(news={"deep": [1]}), unknown, ["Other", 1], ["AllBlocksCleared"]) == [
        stored(1, HIGH, parent=EngineHash(7)),
        Cleared(),
    ]


def test_the_rank_may_be_nil_or_missing() -> None:
    assert decode_payload(msgspec.msgpack.encode([1, [], None])).dp_rank is None
    assert decode_payload(msgspec.msgpack.encode([1, []])).dp_rank is None
    assert decode_payload(msgspec.msgpack.encode([1, [], 3, "more"])).dp_rank == 3


@pytest.mark.parametrize(
    "event",
    [
        stored_map(block_hashes=["x", "y"]),
        stored_map(block_hashes=[b"", b""]),
        stored_map(token_ids=[0, 1, 2]),
        stored_map(token_ids=[0, 1, 2, -1]),
        stored_map(token_ids=[0, 1, 2, 2**32]),
        stored_map(token_ids=[0, [1, 2], 2, 3]),
        stored_map(token_ids=[[1], [2], [3], [4]]),
        stored_map(block_size=0),
        {"type": "BlockStored"},
        {"kind": "BlockStored"},
        {"type": 5},
        ["BlockStored", [1]],
        ["BlockRemoved"],
        [],
        "BlockRemoved",
        None,
    ],
)
def test_a_malformed_event_is_a_wire_error(event: object) -> None:
    with pytest.raises(WireError, match="unreadable kv events"):
        decode(event)


def test_too_many_bytes_and_events_are_refused() -> None:
    with pytest.raises(WireError, match="of 101 bytes; at most 100"):
        decode_payload(bytes(101), max_bytes=100)
    with pytest.raises(WireError, match=f"length <= {MAX_EVENTS}"):
        decode(*[["AllBlocksCleared"]] * (MAX_EVENTS + 1))


def test_deep_nesting_is_a_wire_error() -> None:
    with pytest.raises(WireError):
        decode_payload(b"\x93\x01\x90" + b"\x91" * 100_000)


def test_we_write_what_vllm_writes() -> None:
    written = msgspec.msgpack.decode(encode_payload([stored(1, HIGH, parent=EngineHash(7))], 1.5, 0))
    assert written == [1.5, [stored_map()], 0]


def test_lora_and_salt_go_where_vllm_puts_them() -> None:
    event = stored(1, 2, lora="l", salt="s")
    (first,) = msgspec.msgpack.decode(encode_payload([event], 1.5, 0))[1]
    (later,) = msgspec.msgpack.decode(encode_payload([stored(1, 2, parent=EngineHash(7), salt="s")], 1.5, 0))[1]
    assert first["extra_keys"] == [["l", "s"], ["l"]]
    assert later["extra_keys"] == [None, None]
    assert first["cache_salt"] == later["cache_salt"] == "s"


def test_the_decoder_survives_garbage_collection() -> None:
    gc.collect()  # msgspec 0.22 crashes here for some types, see _Tokens
    assert decode(["AllBlocksCleared"]) == [Cleared()]


hashes = st.lists(st.integers(0, 2**64 - 1).map(EngineHash), max_size=4).map(tuple)
tokens = st.integers(0, 2**32 - 1)
stored_events = st.builds(
    lambda names, parent, block_size, fill, **rest: Stored(
        names, parent, tuple(fill for _ in range(len(names) * block_size)), block_size, **rest
    ),
    hashes,
    st.none() | st.integers(0, 2**64 - 1).map(EngineHash),
    st.integers(1, 8),
    tokens,
    lora=st.none() | st.text(min_size=1, max_size=5),
    salt=st.none() | st.text(max_size=5),
    medium=st.sampled_from(["GPU", "CPU"]),
)
kv_events = st.lists(stored_events | st.builds(Removed, hashes) | st.just(Cleared()), max_size=4)


@given(kv_events, st.none() | st.integers(0, 7))
def test_what_is_written_is_read_again(events: list[KvEvent], rank: int | None) -> None:
    batch = decode_payload(encode_payload(events, 1.5, rank))
    assert (batch.ts, batch.events, batch.dp_rank) == (1.5, events, rank)


def read_or_refuse(payload: bytes) -> None:
    try:
        decode_payload(payload)
    except WireError:
        pass


@given(st.binary(max_size=200))
@example(b"\x92\x01\xdd\xff\xff\xff\xff")
def test_random_bytes_are_read_or_refused(payload: bytes) -> None:
    read_or_refuse(payload)


@given(kv_events, st.data())
def test_mutated_payloads_are_read_or_refused(events: list[KvEvent], data: st.DataObject) -> None:
    payload = bytearray(encode_payload(events, 1.5, 0))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(payload)))
    read_or_refuse(bytes(payload))
    read_or_refuse(bytes(payload[:cut]))


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(list(stored_map())), plain), st.sampled_from(["BlockStored", "BlockRemoved"]))
def test_events_with_any_values_are_read_or_refused(changes: dict[str, object], kind: str) -> None:
    read_or_refuse(msgspec.msgpack.encode([1.5, [stored_map() | changes | {"type": kind}], 0]))
    read_or_refuse(msgspec.msgpack.encode([1.5, [[kind, *changes.values()]], 0]))
