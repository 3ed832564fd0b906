"""KV moves between workers of unequal tensor parallelism: every shard is a process, and the bytes really move."""

import base64
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from kvmesh.kvcache.transfer.heads import HeadShard, layout_of
from kvmesh.kvcache.transfer.nixl import why_unavailable
from kvmesh.protocol.messages import KvLayout, Ticket, decode

BACKENDS = [
    "shm",
    pytest.param(
        "nixl",
        marks=[
            pytest.mark.skipif(bool(why_unavailable()), reason=f"NIXL: {why_unavailable()}"),
            pytest.mark.long,
        ],
    ),
]
OFFERED, INTO = [5, 6, 7, 40, 2], [10, 11, 3, 4, 60]


class Shard:
    """A kv_shard process."""

    def __init__(self, backend: str, rank: int, size: int, heads: int) -> None:
        command = [sys.executable, "-m", "tests.support.kv_shard", backend, str(rank), str(size)]
        env = {**os.environ, "KV_HEADS": str(heads)}
        self.shard = HeadShard(rank, size)
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=env
        )

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        with self.process:
            self.process.kill()


@contextmanager
def workers(backend: str, sizes: tuple[int, int], heads: int) -> Iterator[tuple[list[Shard], list[Shard]]]:
    """Start the shards of a source, whose blocks are filled, and those of a reader."""
    with ExitStack() as cleanup:
        both = [[Shard(backend, rank, size, heads) for rank in range(size)] for size in sizes]
        for shard in [*both[0], *both[1]]:
            cleanup.callback(shard.end)
        assert said(both[0], "fill") == ["ok"] * sizes[0]
        # A source takes part in reads for some seconds after its last offer has ended: readers have to be up by then.
        assert all(said(both[1], "wrong 1 | 1"))
        yield both[0], both[1]


def said(shards: list[Shard], line: str) -> list[str]:
    """Tell all shards, which then work at the same time."""
    for shard in shards:
        shard.tell(line)
    return [shard.hear() for shard in shards]


def words(ids: list[int]) -> str:
    return " ".join(map(str, ids))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("sizes", "heads"), [((2, 1), 4), ((1, 2), 4), ((2, 1), 1), ((2, 4), 2)])
def test_every_shard_gets_its_heads_of_every_block(backend: str, sizes: tuple[int, int], heads: int) -> None:
    whole = KvLayout(num_layers=3, num_kv_heads=heads, head_dim=8, block_size=4, dtype="float32")
    with workers(backend, sizes, heads) as (sources, readers):
        tickets = said(sources, f"offer {words(OFFERED)}")
        moved = said(readers, f"fetch 0 {words(INTO)} | {' '.join(tickets)}")
        assert moved == [str(len(INTO) * layout_of(whole, reader.shard).block_bytes) for reader in readers]
        assert said(readers, f"wrong {words(OFFERED)} | {words(INTO)}") == ["0"] * len(readers)
        assert said(readers, f"fetch 3 20 21 | {' '.join(tickets)}") == [
            str(2 * layout_of(whole, reader.shard).block_bytes) for reader in readers
        ]
        assert said(readers, f"wrong {words(OFFERED[3:])} | 20 21") == ["0"] * len(readers)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_shard_whose_offer_has_ended_fails_the_fetch(backend: str) -> None:
    with workers(backend, (2, 1), 4) as (sources, [reader]):
        tickets = said(sources, "offer 5 6")
        said(sources, "offer 7")  # so that a slow reader finds a source that takes part in reads
        offer = decode(base64.b64decode(tickets[1]), Ticket)
        assert said([sources[1]], f"release {offer.offer_id} {offer.nonce}") == ["True"]
        [reply] = said([reader], f"fetch 0 1 2 | {' '.join(tickets)}")
        assert "ended before it was fetched" in reply


def test_tickets_that_are_not_those_of_one_source_are_refused() -> None:
    with workers("shm", (2, 1), 4) as (sources, [reader]):
        tickets, longer = said(sources, "offer 5 6"), said(sources, "offer 5 6 7")
        [reply] = said([reader], f"fetch 0 1 2 | {tickets[0]} {longer[1]}")
        assert "offer 2 different runs of blocks" in reply
        [reply] = said([reader], f"fetch 0 1 2 | {tickets[0]}")
        assert "KV layout is" in reply, "the source has two shards"
