"""KV events go from the wire into the index in one step, and mean there what kvevents/formats.py says."""

from array import array
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvmesh.kvevents.formats import GROUP_FACTOR, MAX_EVENTS, MAX_PAYLOAD_BYTES, encode_payload
from kvmesh.protocol.errors import WireError
from kvmesh.protocol.events import Cleared, Removed, Stored
from kvmesh.protocol.hashing import hash_seed, pack_hashes, sequence_hashes
from kvmesh.protocol.ids import EngineHash, WorkerId
from kvmesh.protocol.tiers import Tier
from kvmesh.router import index as index_module
from kvmesh.router.index import Holder, PlainIndex
from tests.support.implementations import INDEXES, needs_native

NewIndex = Callable[..., PlainIndex]

A = Holder(WorkerId("a"), 0)
HIGH = 0xFFFF_0000_0000_0001

both = pytest.mark.parametrize("new_index", INDEXES)


def packed(*events: object, rank: object = 0) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), rank])


def stored_map(**changes: object) -> dict[str, object]:
    """Return an event as vLLM 0.32 sends it, with the tag first."""
    return {
        "type": "BlockStored",
        "block_hashes": [1, HIGH],
        "parent_block_hash": None,
        "token_ids": [5, 300, 70_000, 2**32 - 1],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None, ["x", {"deep": [1, 2.5, b"", True]}]],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    } | changes


def prefixes(lora: str | None = None, salt: str | None = None) -> list[int]:
    return list(sequence_hashes([5, 300, 70_000, 2**32 - 1], 2, hash_seed(lora, salt)))


# --- what is usual: read natively -------------------------------------------------------------------------

USUAL: list[tuple[str, list[object], set[tuple[int, int]]]] = [
    ("the map form", [stored_map()], {(p, Tier.DEVICE) for p in prefixes()}),
    ("another tier", [stored_map(medium="cpu")], {(p, Tier.HOST) for p in prefixes()}),
    ("an unknown medium", [stored_map(medium="tape")], {(p, Tier.SHARED) for p in prefixes()}),
    ("no medium", [stored_map(medium=None)], {(p, Tier.DEVICE) for p in prefixes()}),
    ("an adapter", [stored_map(lora_name="l", lora_id=3)], {(p, Tier.DEVICE) for p in prefixes("l")}),
    ("its number alone", [stored_map(lora_id=-3)], {(p, Tier.DEVICE) for p in prefixes("lora-id--3")}),
    ("a large one", [stored_map(lora_id=2**64 - 1)], {(p, 0) for p in prefixes(f"lora-id-{2**64 - 1}")}),
    ("a salt", [stored_map(cache_salt="s")], {(p, Tier.DEVICE) for p in prefixes(None, "s")}),
    ("a salt in the keys", [stored_map(extra_keys=[["s"], None])], {(p, 0) for p in prefixes(None, "s")}),
    (
        "an adapter and a salt in the keys",
        [stored_map(extra_keys=[[["image", 3], "l", b"digest", "s"], ["l"]], lora_name="l")],
        {(p, 0) for p in prefixes("l", "s")},
    ),
    ("an adapter alone in the keys", [stored_map(extra_keys=[["l"], ["l"]], lora_name="l")], {
        (p, 0) for p in prefixes("l")
    }),
    ("keys of a later block", [stored_map(extra_keys=[None, ["s"]])], {(p, 0) for p in prefixes()}),
    ("no keys", [stored_map(extra_keys=None)], {(p, 0) for p in prefixes()}),
    ("both empty", [stored_map(cache_salt="", lora_name="")], {(p, Tier.DEVICE) for p in prefixes()}),
    ("the array form", [["BlockStored", [1, 2], None, [5, 300, 70_000, 2**32 - 1], 2]], {(p, 0) for p in prefixes()}),
    (
        "the array form of today",
        [["BlockStored", [1, 2], None, [5, 300, 70_000, 2**32 - 1], 2, 7, "CPU", "l", [None], 0, "full_attention", 9]],
        {(p, Tier.HOST) for p in prefixes("l")},
    ),
    (
        "hashes as bytes and signed, continued and removed",
        [
            stored_map(block_hashes=[b"\1" * 32], token_ids=[5, 300]),
            stored_map(block_hashes=[-1], token_ids=[70_000, 2**32 - 1], parent_block_hash=b"\1" * 8),
            {"type": "BlockRemoved", "block_hashes": [0x0101_0101_0101_0101], "medium": "GPU", "group_idx": 0},
        ],
        {(prefixes()[1], Tier.DEVICE)},
    ),
    ("removed, as an array", [stored_map(), ["BlockRemoved", [1, HIGH], None, 0, "more"]], set()),
    ("cleared", [stored_map(), ["AllBlocksCleared"], {"type": "AllBlocksCleared", "more": 1}], set()),
    ("unknown kinds", [{"type": "Moved", "to": {}}, ["Other", 1], stored_map()], {(p, 0) for p in prefixes()}),
    ("another group's", [stored_map(group_idx=1, kv_cache_spec_kind="sliding_window")], set()),
    (
        "another group that looks at all",
        [stored_map(group_idx=2), {"type": "BlockRemoved", "block_hashes": [1], "group_idx": 2}],
        {(prefixes()[1], Tier.DEVICE)},
    ),
    ("kept elsewhere, without tokens", [stored_map(), stored_map(token_ids=[], medium="CPU")], {
        (p, tier) for p in prefixes() for tier in (Tier.DEVICE, Tier.HOST)
    }),
]  # fmt: skip


@both
@pytest.mark.parametrize(("events", "content"), [case[1:] for case in USUAL], ids=[case[0] for case in USUAL])
def test_what_engines_send_is_taken_from_the_wire(
    new_index: NewIndex, events: list[object], content: set[tuple[int, int]]
) -> None:
    for rank in (0, None, 0xFFFF):
        index = new_index()
        count = index.apply_payload(A, packed(*events, rank=rank))
        assert index.content(A) == content
        assert index.stats.malformed_blocks == index.stats.orphan_blocks == 0
    assert count <= len(events)


@needs_native
@pytest.mark.parametrize("events", [case[1] for case in USUAL], ids=[case[0] for case in USUAL])
def test_none_of_that_needs_python_to_read_it(events: list[object]) -> None:
    assert index_module.NativeIndex().apply_usual(A, packed(*events)) is not None


@both
def test_our_own_writer_is_understood(new_index: NewIndex) -> None:
    events = [
        Stored((EngineHash(7), EngineHash(8)), None, (1, 2, 3, 4), 2, "l", "s"),
        Removed((EngineHash(8),)),
        Stored((EngineHash(9),), None, (1, 2), 2, medium="CPU"),
        Cleared(),
        Stored((EngineHash(9),), None, (1, 2), 2),
    ]
    index = new_index()
    assert index.apply_payload(A, encode_payload(events, 1.5, 0)) == 5
    assert index.match(pack_hashes(sequence_hashes((1, 2), 2))) == {A: (1, 1, 1, 1)}
    assert index.stats.cleared_blocks == 2


@both
def test_a_payload_may_be_a_view_of_a_larger_message(new_index: NewIndex) -> None:
    frame = b"head" + packed(stored_map()) + b"tail"
    index = new_index()
    assert index.apply_payload(A, memoryview(frame)[4:-4]) == 1
    assert index.blocks_of(A) == 2


# --- what is unusual: Python reads it ---------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    "event",
    [
        pytest.param(stored_map(token_ids=[[5, 300], [300, 70_000], [70_000, 2**32 - 1], [2**32 - 1, 1]]), id="pairs"),
        pytest.param(dict(reversed(stored_map().items())), id="the tag last"),
        pytest.param(stored_map(medium="GPU", lora_name=None) | {"größe": "übel"}, id="no ascii"),
    ],
)
def test_unusual_events_are_taken_too(new_index: NewIndex, event: dict[str, object]) -> None:
    index = new_index()
    assert index.apply_payload(A, packed(event)) == 1
    assert index.content(A) == {(prefix, Tier.DEVICE) for prefix in prefixes()}


@both
@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x93\x01\x91",
        packed(stored_map(), stored_map(token_ids=[1, 2, 3])),
        packed(stored_map(), stored_map(block_hashes=["x"])),
        packed(stored_map(), {"type": "BlockRemoved"}),
        packed(stored_map(), 7),
        packed(stored_map(), rank=-1),
        packed(stored_map()) + b"\0",
        packed(stored_map(), *[["AllBlocksCleared"]] * MAX_EVENTS),
        packed(stored_map(extra_keys=bytes(MAX_PAYLOAD_BYTES))),
        b"\x92\x01\xdd\xff\xff\xff\xff",
        b"\x92\x01\x91\x85\xa4type\xabBlockStored\xacblock_hashes\xdd\xff\xff\xff\xff",
    ],
)
def test_of_what_cannot_be_read_nothing_is_applied(new_index: NewIndex, payload: bytes) -> None:
    index = new_index()
    index.apply_payload(A, packed(stored_map(block_hashes=[1], token_ids=[9, 9])))
    before = index.dump()
    with pytest.raises(WireError):
        index.apply_payload(A, payload)
    assert index.dump() == before


# --- the two side by side ---------------------------------------------------------------------------------

names = st.integers(0, 5) | st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=10)
optional_texts = st.none() | st.sampled_from(["", "GPU", "CPU", "full_attention", "x", "é"])
groups = st.none() | st.integers(0, 2)
numbers = st.integers(-(2**63), 2**64 - 1) | st.floats()
anything = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=4) | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def wire_events(draw: st.DrawFn) -> object:
    hashes = draw(st.lists(names, max_size=3))
    size = draw(st.integers(1, 3))
    tokens = draw(st.lists(st.integers(0, 2) | st.integers(0, 2**32 - 1), min_size=3 * size, max_size=3 * size))
    stored: dict[str, Any] = {
        "block_hashes": hashes,
        "parent_block_hash": draw(st.none() | names),
        "token_ids": tokens[: len(hashes) * size],
        "block_size": size,
        "lora_id": draw(st.none() | st.integers(-(2**63), 2**64 - 1)),
        "medium": draw(optional_texts),
        "lora_name": draw(optional_texts),
        "extra_keys": draw(anything),
        "group_idx": draw(groups),
        "kv_cache_spec_kind": draw(optional_texts),
    }
    changes = draw(st.dictionaries(st.sampled_from(sorted(stored)), anything, max_size=1))
    removed = {"block_hashes": hashes, "medium": stored["medium"], "group_idx": stored["group_idx"]}
    forms = {"BlockStored": (stored, stored | changes), "BlockRemoved": (removed,), "AllBlocksCleared": ({},)}
    kind = draw(st.sampled_from(["BlockStored", "BlockStored", "BlockRemoved", "AllBlocksCleared"]))
    fields = draw(st.sampled_from(forms[kind]))
    if draw(st.booleans()):
        return {"type": kind} | fields
    return [kind, *fields.values()][: draw(st.integers(1, 12))]


payloads = st.builds(
    lambda ts, events, rest: msgspec.msgpack.encode([ts, events, *rest]),
    st.floats() | st.integers(-5, 5),
    st.lists(wire_events() | anything, max_size=4),
    st.just([0]) | st.lists(anything, max_size=2),
)


def apply_to_both(payload: bytes) -> None:
    """Payloads that the native parser takes mean the same to Python; payloads that it leaves have no effect."""
    plain, native = PlainIndex(), index_module.NativeIndex()
    for index in (plain, native):
        index.apply(A, [Stored((EngineHash(1), EngineHash(2)), None, (1, 2), 1)])
    before = native.dump()
    count: int | None
    try:
        count = plain.apply_payload(A, payload)
    except WireError:
        count = None
    exact = memoryview(array("B", payload))  # no byte more, so that tools notice who reads it
    usual = native.apply_usual(A, exact)
    assert usual in (None, count)
    if usual is None:
        assert native.dump() == before
        if count is None:
            with pytest.raises(WireError):
                native.apply_payload(A, exact)
        else:
            assert native.apply_payload(A, exact) == count
    assert (native.stats, native.content(A), native.digest(A)) == (plain.stats, plain.content(A), plain.digest(A))
    plain.load(native.dump())


@needs_native
@given(payloads)
def test_generated_payloads_mean_the_same_to_both(payload: bytes) -> None:
    apply_to_both(payload)


@needs_native
@given(payloads, st.data())
def test_mutated_payloads_mean_the_same_to_both(payload: bytes, data: st.DataObject) -> None:
    mutated = bytearray(payload)
    heads = st.sampled_from(b"\x90\x81\xa3\xc0\xc1\xc4\xcc\xcf\xd3\xd4\xd9\xdb\xdc\xdd\xdf\xff")
    for _ in range(data.draw(st.integers(1, 4))):
        mutated[data.draw(st.integers(0, len(mutated) - 1))] = data.draw(heads | st.integers(0, 255))
    apply_to_both(bytes(mutated[: data.draw(st.just(len(mutated)) | st.integers(0, len(mutated)))]))


@needs_native
@given(st.binary(max_size=100))
@example(b"\x93\x01\x91\x82\xa4type\xa5Other\xc3\xc0\x00")  # a key that is no text
def test_random_bytes_mean_the_same_to_both(payload: bytes) -> None:
    apply_to_both(payload)


@needs_native
@pytest.mark.parametrize("depth", [1, 20, 30, 1000, 100_000])
def test_deep_nesting_does_no_harm(depth: int) -> None:
    apply_to_both(b"\x93\x01\x91\x82\xa4type\xa5Other\xa1x" + b"\x91" * depth + b"\x01\x00")


@needs_native
def test_the_group_factor_is_that_of_the_format() -> None:
    plain, native = PlainIndex(), index_module.NativeIndex()
    for index in (plain, native):
        index.apply_payload(A, packed(stored_map(group_idx=3)))
        index.remove(A, array("Q", [(1 ^ 3 * GROUP_FACTOR) % 2**64]))
        assert index.stats.removed_blocks == 1
