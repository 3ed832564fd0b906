"""Where a request runs, or would run, as a client is shown it. Pure."""

import re
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from frontend.generator import Trace
from protocol.messages import Explanation, Placed, Target

MAX_HEADER_CHARS = 512
_NOT_PRINTABLE = re.compile(r"[^\x20-\x7e]")


class Place(Struct, frozen=True, kw_only=True):
    worker: str
    worker_id: str
    dp_rank: int
    overlap_tokens: int  # of the prompt, in its cache by the router's index


class Preview(Struct, frozen=True, kw_only=True):
    """The answer of POST /kvmesh/route."""

    model: str
    prompt_tokens: int
    block_size: int
    decode: Place
    prefill: Place | None  # null: the decode worker computes the prompt too
    reason: str
    explanation: dict[str, Any] | None  # see `explained`; null from a router that gives none


def preview_of(placed: Placed, model: str, prompt_tokens: int, block_size: int) -> Preview:
    def place(target: Target) -> Place:
        return Place(
            worker=target.name,
            worker_id=target.worker_id,
            dp_rank=target.dp_rank,
            overlap_tokens=min(prompt_tokens, target.overlap_blocks * block_size),
        )

    return Preview(
        model=model,
        prompt_tokens=prompt_tokens,
        block_size=block_size,
        decode=place(placed.decode),
        prefill=None if placed.prefill is None else place(placed.prefill),
        reason=placed.reason,
        explanation=None if placed.explanation is None else explained(placed.explanation),
    )


def explained(explanation: Explanation) -> dict[str, Any]:
    """As JSON has it: with all its fields. A message leaves out those that have their default."""
    return asdict(explanation) | {"candidates": [asdict(candidate) for candidate in explanation.candidates]}


def placement_headers(trace: Trace) -> dict[str, str]:
    """None before the placement is known."""
    if (placed := trace.placed) is None:
        return {}
    headers = {
        "x-kvmesh-worker": placed.decode.name,
        "x-kvmesh-overlap-tokens": str(trace.overlap_tokens),
        "x-kvmesh-route-reason": placed.reason,
    }
    if placed.prefill is not None:
        headers["x-kvmesh-prefill-worker"] = placed.prefill.name
    return {name: _NOT_PRINTABLE.sub("?", text)[:MAX_HEADER_CHARS] for name, text in headers.items()}
