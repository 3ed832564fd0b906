"""A worker gives a peer the blocks that it really has, and pulls only where that is faster than computing."""

from collections.abc import Sequence

from kvmesh.kvcache.pool import BlockPool
from kvmesh.kvcache.tiers.peers import FRESH_S, OFFERED_SHARE, PeerPrefixes
from kvmesh.kvcache.tiers.rates import TRIED_BLOCKS, TRY_EVERY
from kvmesh.kvcache.tiers.stack import Prefix
from kvmesh.protocol.hashing import hash_seed, sequence_hashes

BLOCK, BLOCK_BYTES = 2, 1000
PROMPT = list(range(100, 120))  # 10 blocks
NAMES = sequence_hashes(PROMPT, BLOCK)


def peers(num_blocks: int = 64, fingerprint: bytes = b"model") -> PeerPrefixes:
    return PeerPrefixes(BlockPool(num_blocks, BLOCK), lambda: fingerprint, BLOCK_BYTES)


def holding(tokens: Sequence[int] = PROMPT, num_blocks: int = 64, salt: str | None = None) -> PeerPrefixes:
    """Return a worker that has computed a prompt."""
    one = peers(num_blocks)
    names = sequence_hashes(tokens, BLOCK, hash_seed(None, salt))
    table = one.pool.allocate(len(names))
    for i, name in enumerate(names):
        previous = table[i - 1] if i else None
        one.pool.commit(table[i], name, previous, tokens[i * BLOCK : (i + 1) * BLOCK], salt=salt)
    one.pool.release(table)
    return one


def prefix(tokens: Sequence[int] = PROMPT, salt: str | None = None) -> Prefix:
    names = sequence_hashes(tokens, BLOCK, hash_seed(None, salt))
    return Prefix(names, lambda number: tokens[number * BLOCK : (number + 1) * BLOCK], None, salt)


def measured(pull_s: float, compute_s: float) -> PeerPrefixes:
    """Return a worker that pulls and computes a block in these times."""
    one = peers()
    for blocks in (1, 10, 1, 10):
        one.compute.note_step(blocks * BLOCK, 0, blocks * compute_s)
        one.rates.backlog_bytes += blocks * BLOCK_BYTES
        one.pull_ended("w", blocks, blocks, blocks * pull_s, now=0.0)
    return one


def test_the_blocks_that_are_here_are_pinned_until_they_are_given_back() -> None:
    one = holding()
    taken = one.take([*NAMES[:6], *sequence_hashes([7, 7, 7], BLOCK)], 2)
    assert taken is not None
    assert len(taken.block_ids) == 4
    assert one.pool.held_blocks == one.offered_blocks == 4
    one.give_back(taken.block_ids)
    assert one.pool.held_blocks == one.offered_blocks == 0


def test_both_sides_compute_one_address_for_one_prompt() -> None:
    taken = holding().take(NAMES, 3)
    assert taken is not None
    assert taken.address == peers().address_of(prefix(), 10)


def test_another_prompt_tenant_model_or_depth_has_another_address() -> None:
    taken, own = holding().take(NAMES, 0), peers()
    assert taken is not None
    addresses = {
        taken.address,
        own.address_of(prefix(), 9),
        own.address_of(prefix([99, *PROMPT[1:]]), 10),
        own.address_of(prefix(salt="tenant"), 10),
        peers(fingerprint=b"other weights").address_of(prefix(), 10),
    }
    assert len(addresses) == 5


def test_blocks_that_do_not_follow_each_other_are_not_offered() -> None:
    one = holding()
    assert one.take(NAMES[2:], 0) is None
    taken = one.take([NAMES[0], NAMES[1], NAMES[3]], 0)
    assert taken is not None
    assert len(taken.block_ids) == 2


def test_names_of_a_salted_prompt_find_its_own_blocks_alone() -> None:
    assert holding(salt="a").take(NAMES, 0) is None
    assert holding().take(prefix(salt="a").names, 0) is None


def test_what_peers_pin_is_limited() -> None:
    one = holding(num_blocks=16)
    first = one.take(NAMES, 0)
    assert first is not None
    assert len(first.block_ids) == 16 // OFFERED_SHARE
    assert first.address == one.address_of(prefix(), 4)
    assert one.take(NAMES, 0) is None
    one.give_back(first.block_ids)
    assert one.take(NAMES, 8) is not None


def test_what_was_never_measured_is_tried() -> None:
    assert peers().plan(8, 0, 0) == 8


def test_no_more_is_pulled_than_the_peer_has() -> None:
    one = measured(pull_s=0.001, compute_s=0.01)
    assert (one.plan(8, 2, 0), one.plan(2, 2, 0), one.plan(1, 2, 0)) == (6, 0, 0)


def test_computing_is_preferred_where_pulling_is_slower() -> None:
    one = measured(pull_s=0.02, compute_s=0.01)
    planned = [one.plan(10, 0, 0) for _ in range(TRY_EVERY)]
    assert planned == [0] * (TRY_EVERY - 1) + [TRIED_BLOCKS]
    assert one.counts["refused"] == TRY_EVERY
    assert one.plan(10, 0, backlog_tokens=100) == 10, "computing could not begin before the blocks are here"


def test_pulls_in_progress_make_the_next_one_later() -> None:
    one = measured(pull_s=0.006, compute_s=0.01)
    assert [one.plan(10, 0, 0) for _ in range(2)] == [10, 0]
    one.pull_ended("w", 10, 10, 0.06, now=1.0)
    assert one.plan(10, 0, 0) == 10


def test_the_first_pull_from_a_peer_is_not_measured() -> None:
    one = peers()
    one.pull_ended("w", 0, 10, 5.0, now=0.0)
    assert one.measured(0.0) == (0.0, 0.0)
    one.pull_ended("w", 0, 10, 0.02, now=1.0)
    block_s, latency_s = one.measured(1.0)
    assert 10 * block_s + latency_s == 0.02


def test_a_late_pull_that_brought_nothing_was_slow() -> None:
    one = peers()
    one.pull_ended("w", 0, 10, 0.02, now=0.0)
    one.pull_ended("w", 10, 0, 5.0, now=0.0, is_late=True)
    assert one.measured(0.0)[0] == 0.5


def test_old_measurements_are_not_reported() -> None:
    one = measured(pull_s=0.001, compute_s=0.01)
    assert one.measured(FRESH_S)[0] > 0
    assert one.measured(FRESH_S + 1.0) == (0.0, 0.0)
