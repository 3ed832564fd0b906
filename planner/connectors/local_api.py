"""The requests and answers of the control socket of `kvmesh up`: JSON over HTTP.

GET /workers -> WorkersReport; POST /scale ScaleRequest -> Scaled; POST /flip FlipRequest -> Flipped. A refusal of the
whole request is a status of 400 or more with {"error": {"code", "message"}}. The socket also has the frontend's
/kvmesh/workers, without a key.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from kvmesh.protocol.messages import Role

MAX_BODY_BYTES = 64 << 10
MAX_WORKERS = 256  # of a role on one host

State = Literal["starting", "ready", "flipping", "draining", "down"]
Count = Annotated[int, Meta(ge=0, le=MAX_WORKERS)]


class MemberReport(Struct, frozen=True, kw_only=True):
    name: str
    role: Role  # its role, or the role that it is about to have
    state: State
    pid: int | None = None


class Refusal(Struct, frozen=True):
    """A reason why a worker did not do what was asked. The name is "" if the whole request is meant."""

    name: str
    why: str


class WorkersReport(Struct, frozen=True, kw_only=True):
    workers: tuple[MemberReport, ...]
    failures: tuple[Refusal, ...] = ()  # the latest: workers that were given up, roles that were not changed
    is_planned: bool = False  # a planner of the mesh decides how many workers there are


class ScaleRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Roles that are left out stay as they are."""

    prefill: Count | None = None
    decode: Count | None = None
    aggregated: Count | None = None


class Scaled(Struct, frozen=True, kw_only=True):
    """The workers of each role that are not being taken away."""

    counts: dict[Role, int]
    started: tuple[str, ...] = ()
    draining: tuple[str, ...] = ()


class FlipRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    to: Literal["prefill", "decode"]
    count: Count = 1


class Flipped(Struct, frozen=True, kw_only=True):
    """The workers in `flipped` are changing their role, or have changed it."""

    flipped: tuple[str, ...] = ()
    refused: tuple[Refusal, ...] = ()
