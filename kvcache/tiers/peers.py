"""Decide which blocks of a prompt a worker pulls from a peer, and which blocks it offers to one. Pure.

Workers and tests drive this one object. A 64-bit name finds a block; whether two workers mean the same block is decided
by its content address, which stands for the model, its weights, the adapter, the salt and all tokens before.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvmesh.kvcache.pool import BlockPool, CommittedBlock
from kvmesh.kvcache.tiers.address import content_address, root_address
from kvmesh.kvcache.tiers.rates import ComputeRate, TierRates, blocks_to_load, tried_anyway
from kvmesh.kvcache.tiers.stack import LATE_TIMES, LEAST_LATE_S, Prefix
from kvmesh.protocol.ids import SequenceHash
from kvmesh.protocol.messages import MAX_PREFIX_BLOCKS

OFFERED_SHARE = 4  # one block in so many of a pool may be pinned for peers
FRESH_S = 300.0  # a rate that was measured longer ago is not reported: the network may be another one
MOST_PEERS = 1024  # that are remembered to have been connected


class TakenPrefix(NamedTuple):
    """Blocks that are pinned for a peer, and the content address of the last one."""

    block_ids: tuple[int, ...]
    address: bytes


class PeerPrefixes:
    """The exchange of one worker with its peers, in blocks of one pool."""

    def __init__(
        self, pool: BlockPool, fingerprint: Callable[[], bytes], block_bytes: int, compute: ComputeRate | None = None
    ) -> None:
        """Take `fingerprint`, with which addresses begin; while it returns b"", nothing is exchanged."""
        self.pool = pool
        self.compute = compute or ComputeRate()
        self.rates = TierRates(block_bytes)
        self.counts = Counter[str]()
        self.offered_blocks = 0  # pinned for peers
        self.most_offered = max(1, pool.num_blocks // OFFERED_SHARE)
        self._fingerprint = fingerprint
        self._measured_s: float | None = None
        self._met: dict[str, None] = {}

    # --- pulling ---------------------------------------------------------------------------------------

    def plan(self, end: int, first: int, backlog_tokens: int) -> int:
        """Return how many blocks to pull from number `first` on; 0: computing is expected to be faster.

        `end`: leading blocks of the prompt that the peer has. `backlog_tokens`: prompt tokens to compute before this
        prompt's. Every plan that is not 0 has to end with `pull_ended`.
        """
        count = min(end, MAX_PREFIX_BLOCKS) - first
        if count <= 0 or not self._fingerprint():
            return 0
        planned = blocks_to_load([(self.rates, count)], self.compute, self.pool.block_size, backlog_tokens)
        if not planned:
            self.counts["refused"] += 1
            planned = tried_anyway(self.rates, count)
        self.rates.backlog_bytes += planned * self.rates.block_bytes
        return planned

    def pull_ended(
        self, peer: str, planned: int, arrived: int, took_s: float, now: float, *, is_late: bool = False
    ) -> None:
        """Take that the first `arrived` blocks of a planned pull have come.

        A pull that was late counts as if it had gone on at its pace. The first pull from a peer connects, so its time
        says nothing about the next one.
        """
        self.rates.backlog_bytes -= planned * self.rates.block_bytes
        self.counts["pulled_blocks"] += arrived
        is_first = peer not in self._met and not is_late
        if arrived and len(self._met) < MOST_PEERS:
            self._met[peer] = None
        if is_late:
            self.rates.note_late(planned, arrived, took_s)
        elif arrived and not is_first:
            self.rates.line.note(arrived * self.rates.block_bytes, took_s)
        else:
            return
        self._measured_s = now

    def limit_s(self, blocks: int, timeout_s: float) -> float:
        """Return after how long a pull of so many blocks is late."""
        if not self.rates.line.count:
            return timeout_s
        return min(timeout_s, max(LEAST_LATE_S, LATE_TIMES * self.rates.load_s(blocks)))

    def measured(self, now: float) -> tuple[float, float]:
        """Return the seconds for each block and the latency of pulls; zeros if none was measured lately."""
        if self._measured_s is None or now - self._measured_s > FRESH_S:
            return 0.0, 0.0
        return self.rates.block_s, self.rates.line.latency_s

    def address_of(self, prefix: Prefix, blocks: int) -> bytes:
        """Return the content address of the last of a prompt's first `blocks` blocks."""
        address = root_address(self._fingerprint(), prefix.lora, prefix.salt)
        for number in range(blocks):
            address = content_address(address, prefix.tokens_of(number))
        return address

    # --- offering --------------------------------------------------------------------------------------

    def take(self, names: Sequence[SequenceHash], first: int) -> TakenPrefix | None:
        """Pin the blocks from number `first` on that are here, as far as the limit allows; None: there is none."""
        chain = self._chain(names)[: first + max(0, self.most_offered - self.offered_blocks)]
        if len(chain) <= first or not self._fingerprint():
            return None
        address = root_address(self._fingerprint(), chain[0].lora, chain[0].salt)
        for block in chain:
            address = content_address(address, block.tokens)
        taken = TakenPrefix(tuple([block.block_id for block in chain[first:]]), address)
        self.pool.acquire(taken.block_ids)
        self.offered_blocks += len(taken.block_ids)
        self.counts["offered_blocks"] += len(taken.block_ids)
        return taken

    def give_back(self, block_ids: Sequence[int]) -> None:
        """Unpin the blocks of a taken prefix."""
        self.offered_blocks -= len(block_ids)
        self.pool.release(block_ids)

    def _chain(self, names: Sequence[SequenceHash]) -> list[CommittedBlock]:
        """Return the blocks with these names, as long as each follows the one before it."""
        chain: list[CommittedBlock] = []
        for name in names[:MAX_PREFIX_BLOCKS]:
            block_id = self.pool.block_of(name)
            block = None if block_id is None else self.pool.committed(block_id)
            if block is None or block.parent != (chain[-1].name if chain else None):
                break
            if chain and (block.lora, block.salt) != (chain[0].lora, chain[0].salt):
                break
            chain.append(block)
        return chain
