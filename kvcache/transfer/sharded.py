"""Fetch blocks from a worker whose shards split the KV heads in another way than ours."""

import asyncio
from collections.abc import Sequence

from kvmesh.kvcache.transfer.backend import TransferBackend
from kvmesh.kvcache.transfer.heads import HeadShard, plan_heads
from kvmesh.protocol.errors import TransferError
from kvmesh.protocol.messages import KvLayout, Ticket


async def fetch_heads(
    backend: TransferBackend,
    tickets: Sequence[Ticket],
    whole: KvLayout,
    reader: HeadShard,
    skip: int,
    into: Sequence[int],
) -> int:
    """Copy the heads of shard `reader` from the shards of the source; return the bytes copied.

    `tickets`: one of each shard, by rank, for the same blocks in the same order. `whole`: the layout of a block with
    all heads. Raise as `fetch` does: then some heads may have come and others not, and what lies in `into` is no use.
    """
    shapes = {(len(ticket.block_ids), ticket.num_tokens) for ticket in tickets}
    if len(shapes) != 1:
        raise TransferError(f"the shards of a worker offer {len(shapes)} different runs of blocks")
    parts = plan_heads(whole, len(tickets), reader)
    fetches = [backend.fetch(tickets[rank], skip, into, part) for rank, part in parts.items()]
    ends = await asyncio.gather(*fetches, return_exceptions=True)  # all have ended: nothing writes to `into` any more
    for end in ends:
        if isinstance(end, BaseException):
            raise end
    return sum(end for end in ends if isinstance(end, int))
