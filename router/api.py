"""Read and write the bodies of the router's HTTP API: bodies in, plain data out. Pure. docs/api.md describes it."""

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import asdict

from kvmesh.protocol.errors import InvalidRequestError
from kvmesh.protocol.hashing import hash_seed, pack_hashes, sequence_hash_bytes, token_bytes
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.messages import UNREADABLE, Explanation, Placed, RouteRequest, Target, WorkerCard
from kvmesh.router.index import Depths, Holder
from kvmesh.router.load import HolderLoad, Share

MAX_EXCLUDED = 64
_MAX_TOKENS = 1 << 31

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Tokens = Annotated[int, Meta(ge=0, le=_MAX_TOKENS)]
_TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
_Hash = Annotated[int, Meta(ge=0)]


class Body(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all bodies that clients send."""


class PromptBody(Body, frozen=True):
    """A prompt: its tokens, or the sequence hashes of its full blocks, or its length alone."""

    model: Annotated[str, Meta(min_length=1, max_length=512)]
    prompt_tokens: list[_TokenId] | None = None
    prompt_tokens_b64: bytes | None = None  # u32, little endian
    sequence_hashes: list[_Hash] | None = None
    isl_tokens: Annotated[int, Meta(ge=1, le=_MAX_TOKENS)] | None = None
    lora: Name | None = None
    cache_salt: Name | None = None


class OverlapBody(PromptBody, frozen=True):
    pass


class PlaceBody(PromptBody, frozen=True):
    """A prompt to place. Its fields have the names of kvmesh.protocol.messages.RouteRequest."""

    book: bool = True
    timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 30.0
    exclude: Annotated[list[Name], Meta(max_length=MAX_EXCLUDED)] = []
    disaggregate: bool | None = None
    pin: Name | None = None
    pin_rank: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None
    pin_prefill: Name | None = None
    session: Annotated[str, Meta(max_length=256)] = ""
    tenant: Annotated[str, Meta(max_length=256)] = ""
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    explain: bool = False


class ProgressBody(Body, frozen=True):
    first_token: bool = False
    reused_tokens: Tokens | None = None
    osl_tokens: Tokens | None = None


BodyT = TypeVar("BodyT", bound=Body)


def read(data: bytes, kind: type[BodyT]) -> BodyT:
    """Decode a body. Raises InvalidRequestError that says where and why."""
    try:
        return msgspec.json.decode(data, type=kind)
    except UNREADABLE as error:
        raise InvalidRequestError(f"the body cannot be taken: {error}", hint="see docs/api.md") from error


def prompt_of(body: PromptBody, block_size: int) -> tuple[int, bytes]:
    """Return the prompt's tokens and the sequence hashes of its full blocks, packed u64. Raises InvalidRequestError."""
    given = [name for name in ("prompt_tokens", "prompt_tokens_b64", "sequence_hashes") if getattr(body, name)]
    if len(given) > 1:
        raise InvalidRequestError(f"{given[0]} and {given[1]} were sent", hint="send one of them", param=given[1])
    hashes = b""
    if body.sequence_hashes:
        hashes = _packed(body.sequence_hashes)
        least, most = len(hashes) // 8 * block_size, _MAX_TOKENS
    elif given:
        tokens = _token_bytes(body)
        hashes = sequence_hash_bytes(tokens, block_size, hash_seed(body.lora, body.cache_salt))
        least = most = len(tokens) // 4
    else:
        least, most = 1, _MAX_TOKENS
    isl_tokens = body.isl_tokens or (least if given else 0)
    if not isl_tokens:
        raise InvalidRequestError(
            "the prompt is missing", hint="send prompt_tokens, prompt_tokens_b64, sequence_hashes or isl_tokens"
        )
    if not least <= isl_tokens <= most:
        raise InvalidRequestError(
            f"isl_tokens is {isl_tokens}, the prompt has {least}{'' if least == most else ' or more'}",
            hint="leave it out",
            param="isl_tokens",
        )
    return isl_tokens, hashes


def _packed(hashes: list[int]) -> bytes:
    try:
        return pack_hashes(hashes)
    except OverflowError:
        raise InvalidRequestError("a hash is larger than a u64", param="sequence_hashes") from None


def _token_bytes(body: PromptBody) -> bytes:
    if body.prompt_tokens:
        return token_bytes(body.prompt_tokens)
    data = body.prompt_tokens_b64 or b""
    if len(data) % 4:
        raise InvalidRequestError(
            f"{len(data)} bytes are not whole tokens", hint="send u32 little endian", param="prompt_tokens_b64"
        )
    return data


def route_request(body: PlaceBody, request_id: RequestId, isl_tokens: int, hashes: bytes) -> RouteRequest:
    """Return the request for a body. Raises InvalidRequestError."""
    if body.pin_rank is not None and body.pin is None:
        raise InvalidRequestError("pin_rank needs a worker", hint="send pin as well", param="pin_rank")
    return RouteRequest(
        request_id=request_id,
        model=body.model,
        isl_tokens=isl_tokens,
        sequence_hashes=hashes,
        exclude=tuple(WorkerId(name) for name in body.exclude),
        disaggregate=body.disaggregate,
        pin=None if body.pin is None else WorkerId(body.pin),
        pin_rank=body.pin_rank,
        pin_prefill=None if body.pin_prefill is None else WorkerId(body.pin_prefill),
        session=body.session,
        tenant=body.tenant,
        priority=body.priority,
        lora=body.lora,
        explain=body.explain,
    )


# --- answers ------------------------------------------------------------------------------------------


class PlaceReply(Struct, frozen=True, kw_only=True):
    booking: str | None  # null: nothing was booked
    lease_s: float | None  # a booking without a sign of life for so long ends
    model: str
    block_size: int
    isl_tokens: int
    decode: dict[str, Any]  # a Target
    prefill: dict[str, Any] | None  # null: the decode worker computes the prompt too
    reason: str
    explanation: dict[str, Any] | None


def place_reply(request: RouteRequest, placed: Placed, block_size: int, lease_s: float | None) -> PlaceReply:
    """Return the answer for a placement. `lease_s` is None if nothing was booked."""
    return PlaceReply(
        booking=None if lease_s is None else request.request_id,
        lease_s=lease_s,
        model=request.model,
        block_size=block_size,
        isl_tokens=request.isl_tokens,
        decode=_target(placed.decode),
        prefill=None if placed.prefill is None else _target(placed.prefill),
        reason=placed.reason,
        explanation=None if placed.explanation is None else explained(placed.explanation),
    )


def _target(target: Target) -> dict[str, Any]:
    return asdict(target)


def explained(explanation: Explanation) -> dict[str, Any]:
    """Return an explanation with all its fields: a message leaves out fields that have their default."""
    return asdict(explanation) | {"candidates": [asdict(candidate) for candidate in explanation.candidates]}


def overlap_row(card: WorkerCard, holder: Holder, depths: Depths, load: HolderLoad) -> dict[str, Any]:
    """Return how much of a prompt a worker holds. A tier counts leading blocks that are there or in a faster one."""
    return {
        "worker_id": card.worker_id,
        "name": card.name,
        "role": card.role,
        "dp_rank": holder.dp_rank,
        "overlap_blocks": dict(zip(("device", "host", "disk", "any"), depths, strict=True)),
        "load": load_of(load),
    }


def worker_row(card: WorkerCard, kv_events: str, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    return asdict(card) | {"kv_events": kv_events, "kv_endpoint": card.kv_events, "ranks": ranks}


def rank_row(dp_rank: int, index_blocks: int, load: HolderLoad) -> dict[str, Any]:
    return {"dp_rank": dp_rank, "index_blocks": index_blocks, "load": load_of(load)}


def load_of(load: HolderLoad) -> dict[str, Any]:
    """Return the total load of a holder, and the part of it that the worker reports and no router has booked."""
    return _share(load.total) | {"unbooked": _share(load.unbooked)}


def _share(share: Share) -> dict[str, Any]:
    return {
        "queued_tokens": int(share.queued_tokens),
        "held_blocks": share.held_blocks,
        "requests": share.requests,
    }
