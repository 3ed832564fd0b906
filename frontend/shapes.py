"""Types of the fields that several APIs have in common: constrained numbers and strings, and kvmesh's own extension."""

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

MAX_STOPS = 32
MAX_STOP_CHARS = 1024  # bounds what a stop string costs per token
MAX_USER_CHARS = 512
MAX_U32 = 2**32 - 1
MAX_TOOLS = 1536
MAX_MESSAGES = 100_000

TopP = Annotated[float, Meta(ge=0, le=1)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_U32)]
Count = Annotated[int, Meta(ge=1, le=MAX_U32)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Salt = Annotated[str, Meta(min_length=1, max_length=256)]
ModelName = Annotated[str, Meta(min_length=1, max_length=512)]

encode = msgspec.json.encode


class Strict(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the shapes that clients send: a field that a shape does not have is refused."""


class Lenient(Struct, frozen=True, kw_only=True):
    """Base of the shapes inside a conversation. Unknown fields are ignored, because clients send back what a server
    answered, with fields of their own."""


class KvmeshOptions(Strict, frozen=True):
    """Our extension of the request, under `kvmesh`."""

    disaggregate: bool | None = None  # null: the router decides
    worker: Annotated[str, Meta(min_length=1, max_length=256)] | None = None  # decode there
    trace: bool | None = None  # report under `kvmesh` what happened to the request
    explain: bool | None = None  # ... and why it was placed where it was


class TraceReport(Struct, frozen=True, kw_only=True):
    """Our extension of the answer, under `kvmesh`, on request only."""

    prefill_worker: str | None
    decode_worker: str | None
    transfer: str | None
    kv_bytes_pulled: int
    overlap_tokens: int  # of the prompt, that the router expected to be cached; cached_tokens: that were
    cached_tokens: int
    waited_ms: float  # for the router, part of ttft_ms
    ttft_ms: float | None
    itl_ms: float | None  # mean; null for answers of one token
    route_reason: str
    migrations: int
    pull_error: str
    explanations: list[dict[str, Any]] | UnsetType = UNSET  # see kvmesh.router.api.explained; one per placement
