"""Make the question to the router: what has to be computed, and what the caller asks of its place."""

import asyncio
from collections.abc import Sequence

from kvmesh.frontend.generator import Hints
from kvmesh.protocol.hashing import hash_seed, plain_sequence_hash_bytes, sequence_hash_bytes
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.kv_content import UNKNOWN
from kvmesh.protocol.messages import RouteRequest

SLOW_HASH_BYTES = 4 * 32_768  # of prompt; without native code a longer one would hold up the event loop for over 1 ms


async def sequence_hashes_of(tokens: bytes, block_size: int, lora: str | None, salt: str | None) -> bytes:
    """Return the sequence hashes of a prompt's full blocks, packed."""
    seed = hash_seed(lora, salt)
    if sequence_hash_bytes is plain_sequence_hash_bytes and len(tokens) > SLOW_HASH_BYTES:
        return await asyncio.to_thread(sequence_hash_bytes, tokens, block_size, seed)
    return sequence_hash_bytes(tokens, block_size, seed)


def route_request(
    request_id: RequestId,
    model: str,
    lora: str | None,
    isl_tokens: int,
    hashes: bytes,
    hints: Hints,
    failed: Sequence[WorkerId] = (),
    among: Sequence[WorkerId] | None = None,
    max_tokens: int = 0,
    is_continued: bool = False,
    content: str = UNKNOWN,
) -> RouteRequest:
    """Return the question. `failed`: workers that have failed the request; `among`: the only ones that may decode.
    `max_tokens`: of the answer, that may still come; `content`: of the tokens that it has."""
    return RouteRequest(
        request_id=request_id,
        model=model,
        isl_tokens=isl_tokens,
        lora=lora,
        sequence_hashes=hashes,
        exclude=tuple(failed),
        among=None if among is None else tuple(among),
        disaggregate=hints.disaggregate,
        pin=None if hints.pin is None else WorkerId(hints.pin),
        pin_rank=hints.pin_rank,
        pin_prefill=None if hints.pin_prefill is None else WorkerId(hints.pin_prefill),
        session=hints.session,
        tenant=hints.tenant,
        priority=hints.priority,
        explain=hints.explain,
        max_tokens=max_tokens,
        has_deadline=hints.has_deadline,
        is_continued=is_continued,
        content=content,
    )
