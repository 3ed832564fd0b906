"""Bookings, and what they add up to."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from protocol.ids import RequestId, SequenceHash, WorkerId
from router.index import Holder
from router.load import ActiveLoad

A, B, P = Holder(WorkerId("a"), 0), Holder(WorkerId("b"), 0), Holder(WorkerId("p"), 0)


def hashes(*numbers: int) -> list[SequenceHash]:
    return [SequenceHash(n) for n in numbers]


def book(load: ActiveLoad, name: str, decode: Holder = A, prefill: Holder | None = None, tokens: int = 40,
         blocks: tuple[int, ...] = (1, 2)) -> RequestId:  # fmt: skip
    request_id = RequestId(name)
    load.book(request_id, decode=decode, prefill=prefill or decode, prefill_tokens=tokens, hashes=hashes(*blocks))
    return request_id


def test_a_request_counts_where_it_prefills_and_where_it_decodes() -> None:
    load = ActiveLoad()
    book(load, "r", decode=A, prefill=P)
    assert (load.of(P).prefill_tokens, load.of(P).decode_blocks, load.of(P).requests) == (40, 0, 0)
    assert (load.of(A).prefill_tokens, load.of(A).decode_blocks, load.of(A).requests) == (0, 3, 1)


def test_prefill_work_ends_with_the_first_token_and_only_once() -> None:
    load = ActiveLoad()
    first, _ = book(load, "r", prefill=P), book(load, "s", prefill=P)
    load.prefill_done(first)
    load.prefill_done(first)
    assert load.of(P).prefill_tokens == 40
    assert load.of(A).requests == 2


def test_blocks_that_requests_share_count_once() -> None:
    load = ActiveLoad()
    first = book(load, "r", blocks=(1, 2, 3))
    book(load, "s", blocks=(1, 2, 4))
    assert load.of(A).decode_blocks == 4 + 2
    assert load.of(A).new_blocks(hashes(1, 2, 5)) == 1
    load.free(first)
    assert load.of(A).decode_blocks == 3 + 1
    assert load.of(A).new_blocks(hashes(1, 2, 3)) == 1


def test_a_request_that_ends_leaves_nothing() -> None:
    load = ActiveLoad()
    request = book(load, "r", prefill=P)
    assert len(load) == 1
    load.free(request)
    load.free(request)
    load.prefill_done(request)
    assert len(load) == 0
    assert load._loads == {}
    assert load._prefilling == set()


def test_booking_again_replaces() -> None:
    """A request that migrates has one booking, at its new place."""
    load = ActiveLoad()
    book(load, "r", decode=A, prefill=P)
    request = book(load, "r", decode=B, prefill=P, tokens=7)
    assert (len(load), load.of(A).requests, load.of(B).requests, load.of(P).prefill_tokens) == (1, 0, 1, 7)
    load.free(request)
    assert load._loads == {}


operations = st.lists(
    st.tuples(
        st.sampled_from(["book", "prefill_done", "free"]),
        st.integers(0, 4),
        st.sampled_from([A, B]),
        st.sampled_from([A, B, P]),
        st.integers(0, 50),
        st.lists(st.integers(0, 5), max_size=6),
    ),
    max_size=60,
)


@given(operations)
def test_the_sums_are_those_of_the_bookings_that_stand(steps: list) -> None:
    load = ActiveLoad()
    standing: dict[str, dict] = {}
    for operation, number, decode, prefill, tokens, blocks in steps:
        name = RequestId(f"r{number}")
        match operation:
            case "book":
                load.book(name, decode=decode, prefill=prefill, prefill_tokens=tokens, hashes=hashes(*blocks))
                standing[name] = {"decode": decode, "prefill": prefill, "tokens": tokens, "blocks": blocks}
            case "prefill_done":
                load.prefill_done(name)
                if name in standing:
                    standing[name]["tokens"] = 0
            case _:
                load.free(name)
                standing.pop(name, None)
        assert len(load) == len(standing)
        for holder in (A, B, P):
            mine = [b for b in standing.values() if b["decode"] == holder]
            shared = Counter(block for b in mine for block in b["blocks"])
            assert load.of(holder).requests == len(mine)
            assert load.of(holder).decode_blocks == len(shared) + len(mine)
            assert load.of(holder).prefill_tokens == sum(
                b["tokens"] for b in standing.values() if b["prefill"] == holder
            )
    for name in list(standing):
        load.free(RequestId(name))
    assert load._loads == {}
