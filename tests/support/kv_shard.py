"""A process that is one shard of a worker, with its heads of every block: it offers them, and fetches those of others.

Arguments: backend, rank, size. Lines in: `fill`, `offer <ids>`, `release <id> <nonce>`,
`fetch <skip> <ids> | <tickets>`, `wrong <remote ids> | <ids>`. Lines out: base64 of a ticket, the bytes fetched or an
error, or how many bytes of these blocks are not the ones that the source was filled with.
"""

import asyncio
import base64
import os
import sys

import numpy as np

from kvmesh.kvcache.transfer.heads import HeadShard, heads_of, layout_of
from kvmesh.kvcache.transfer.sharded import fetch_heads
from kvmesh.protocol.errors import TransferError
from kvmesh.protocol.messages import KvLayout, Ticket, decode, encode
from tests.support.kv_peer import NUM_BLOCKS, open_with_region

WHOLE = KvLayout(
    num_layers=3, num_kv_heads=int(os.environ.get("KV_HEADS", "4")), head_dim=8, block_size=4, dtype="float32"
)


def blocks_of(shard: HeadShard) -> np.ndarray:
    """Return all blocks of a shard, uint8 [NUM_BLOCKS, block_bytes]. Every item differs from all others."""
    shape = (NUM_BLOCKS, WHOLE.num_layers, 2, WHOLE.num_kv_heads, WHOLE.block_size, WHOLE.head_dim)
    every = np.arange(1, np.prod(shape) + 1, dtype=np.float32).reshape(shape)
    heads = heads_of(WHOLE.num_kv_heads, shard)
    return np.ascontiguousarray(every[:, :, :, heads.start : heads.stop]).view(np.uint8).reshape(NUM_BLOCKS, -1)


def numbers(words: str) -> list[int]:
    return [int(word) for word in words.split()]


async def serve(name: str, shard: HeadShard) -> None:
    backend, cache = await open_with_region(name, f"shard-{shard.rank}-of-{shard.size}", layout_of(WHOLE, shard))
    while line := await asyncio.to_thread(sys.stdin.readline):
        command, _, rest = line.strip().partition(" ")
        left, _, right = rest.partition("|")
        match command:
            case "fill":
                cache[:] = blocks_of(shard)
                reply = "ok"
            case "offer":
                reply = base64.b64encode(encode(backend.offer(numbers(left), 4 * len(numbers(left))))).decode()
            case "release":
                reply = str(backend.release(*numbers(left)))
            case "fetch":
                tickets = [decode(base64.b64decode(word), Ticket) for word in right.split()]
                skip, *into = numbers(left)
                try:
                    reply = str(await fetch_heads(backend, tickets, WHOLE, shard, skip, into))
                except TransferError as error:
                    reply = f"TransferError: {error}"
            case "wrong":
                reply = str(int(np.sum(cache[numbers(right)] != blocks_of(shard)[numbers(left)])))
            case _:
                break
        print(reply, flush=True)
    await backend.close()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], HeadShard(int(sys.argv[2]), int(sys.argv[3]))))
