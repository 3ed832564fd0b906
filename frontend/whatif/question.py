"""Hold what is asked, and the mesh as it was. The simulator reads both."""

from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from kvmesh.protocol.messages import Role
from kvmesh.router.policies import Policy

FEWEST_JUDGED = 20  # requests that the error is measured on; a p90 of fewer means nothing
_Text = Annotated[str, Meta(max_length=400)]
_Seconds = Annotated[float, Meta(gt=0)]
_Count = Annotated[int, Meta(ge=1, le=1 << 40)]


class WhatIfQuestion(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Counts, blocks and policies are lists with commas; each combination of them is one case.

    Without any of them the cases are one worker more and one less of each role.
    """

    last_s: Annotated[float, Meta(gt=0, le=86_400)] = 600.0
    limit: Annotated[int, Meta(ge=2 * FEWEST_JUDGED, le=100_000)] = 1000  # the latest requests of that time
    model: _Text = ""
    prefill: _Text = ""  # 3: three workers; +1, -1: that many more or less
    decode: _Text = ""
    aggregated: _Text = ""
    blocks: _Text = ""  # of each worker: 4096, or x2, x0.5
    policy: _Text = ""
    step_tokens: Annotated[int, Meta(ge=1, le=1 << 20)] = (
        512  # prompt tokens of a step of the workers, as they were set
    )


class SeenWorker(NamedTuple):
    name: str
    role: Role


class PastMesh(Struct, frozen=True, kw_only=True):
    """The workers of one model and the settings of its routers, as they were."""

    model: str
    workers: tuple[SeenWorker, ...] = ()  # empty: those that the requests name
    block_size: _Count
    blocks: _Count
    max_num_seqs: _Count
    max_step_tokens: _Count
    policy: Policy = "kv"
    recompute_price: Annotated[float, Meta(ge=0)] = 0.0
    saturation_tokens: Annotated[int, Meta(ge=0)] = 2048
    ttft_slo_s: _Seconds = 2.0
    itl_slo_s: _Seconds = 0.1
    keeps_itl: bool = False  # its routers know this SLO


class AskedMesh(Struct, frozen=True, kw_only=True):
    """A question and the meshes of all models, as they travel to the process that simulates."""

    question: WhatIfQuestion
    meshes: tuple[PastMesh, ...]
