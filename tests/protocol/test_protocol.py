"""Test the hashes of blocks and prefixes against the field's other routers, and the reading of messages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.protocol.errors import WireError
from kvmesh.protocol.hashing import block_hashes, extend_chain, hash_seed, sequence_hashes
from kvmesh.protocol.messages import Delta, GenerateRequest, decode, encode, pack_tokens, unpack_tokens

# Values that the public ai-dynamo-runtime 1.6.1 wheel returned (compute_block_hash_for_seq).
GOLDEN: list[tuple[list[int], int, str | None, str | None, list[int]]] = [
    ([15204, 56281, 1862494042], 1, None, None, [17483680146741327580, 2352968789988466714, 17848202239889956200]),
    ([139387, 82351, 118799, 65123, 63988], 4, None, None, [7672057917631077705]),
    (
        [1927728186, 19189, 1795823848, 39841, 110545, 2869965264, 82247, 91797, 119591, 1159380353, 17039, 3012885302],
        4,
        "adapter",
        "tenant-a",
        [10492011795674107534, 13675410513633132955, 4670129296340989973],
    ),
    (
        [
            1137122202,
            42320,
            53795,
            138479,
            142389,
            138440,
            23857,
            68449,
            43789,
            58403,
            131779,
            58469,
            51156,
            105037,
            59438,
            2116481898,
        ],
        16,
        None,
        None,
        [12988684625473146847],
    ),
    (
        [
            7221,
            3886310153,
            38318,
            124349,
            91857,
            2354868575,
            598077320,
            51067,
            55323,
            913882253,
            85456,
            109841,
            15965,
            92742,
            135465,
            131504,
            2192782745,
            48000,
            39269,
            3114681390,
            85454,
            139126,
            27815,
            14895,
            72592,
            272167093,
            132527,
            52272,
            118579,
            125314,
            64921,
            68050,
            53107,
            35948,
            102855,
            19017,
            112286,
            2875360973,
            40487,
            95992,
            3791738146,
            57563,
            24674,
            127732,
            960836459,
            135162,
            110435,
            1368056914,
        ],
        16,
        None,
        "tenant-a",
        [12143537357862410135, 16429541851023123302, 5682990704065181249],
    ),
    (
        [
            86972,
            79801,
            34980,
            260537059,
            26088,
            128349,
            135406,
            122132,
            31064,
            143937,
            4201018061,
            4588,
            20044,
            117820,
            101409,
            55236,
            387848844,
            68631,
            34761,
            133364,
            29537,
            60655,
            127438,
            41698,
            1936000748,
            36885,
            98593,
            86854,
            3224378145,
            31468,
            51312,
        ],
        32,
        None,
        None,
        [],
    ),
    ([15204, 56281, 1862494042], 1, "adapter", None, [6584400388379163708, 5235362050307707229, 5857628541885332490]),
]
tokens_lists = st.lists(st.integers(0, 2**32 - 1), max_size=60)


@pytest.mark.parametrize(("tokens", "block_size", "lora", "salt", "expected"), GOLDEN)
def test_block_hashes_equal_those_of_the_reference(
    tokens: list[int], block_size: int, lora: str | None, salt: str | None, expected: list[int]
) -> None:
    assert block_hashes(tokens, block_size, hash_seed(lora, salt)) == expected


def test_an_empty_adapter_or_salt_is_none() -> None:
    assert hash_seed("", "") == hash_seed(None, None) == 1337


@given(tokens_lists, st.integers(1, 8))
def test_a_prefix_has_the_first_hashes_of_the_whole(tokens: list[int], block_size: int) -> None:
    whole = sequence_hashes(tokens, block_size)
    part = sequence_hashes(tokens[: len(tokens) // 2], block_size)
    assert len(whole) == len(tokens) // block_size
    assert whole[: len(part)] == part


@given(tokens_lists, st.integers(1, 8), st.integers(0, 10))
def test_a_chain_can_be_continued_from_any_block(tokens: list[int], block_size: int, cut: int) -> None:
    blocks = block_hashes(tokens, block_size)
    head = extend_chain(None, blocks[:cut])
    assert head + extend_chain(head[-1] if head else None, blocks[cut:]) == extend_chain(None, blocks)


@given(tokens_lists)
def test_tokens_travel_unchanged(tokens: list[int]) -> None:
    assert unpack_tokens(pack_tokens(tokens)) == tokens


def test_unreadable_messages_are_one_kind_of_error() -> None:
    for data in (
        b"",
        b"\xc1",
        b"\x81",
        b"\x81\xa5model\xa1\xff",
        b"\x81\xa1x" + b"\x91" * 10_000,
        encode({"request_id": 3}),
        encode([1, 2]),
    ):
        with pytest.raises(WireError, match="GenerateRequest"):
            decode(data, GenerateRequest)
    with pytest.raises(WireError, match="5 bytes"):
        unpack_tokens(b"12345")


def test_unknown_fields_are_ignored_so_that_versions_can_be_mixed() -> None:
    assert decode(encode({"request_id": "r", "model": "m", "prompt": b"", "new": 1}), GenerateRequest).model == "m"
    assert decode(encode([[1], None, None, 5, None, None, None, "new"]), Delta).cached_tokens == 5
