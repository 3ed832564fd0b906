"""The requests that a mesh has answered lately, with what each of them really took."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from msgspec import Struct

from kvmesh.frontend.service_level import NO_LIMIT
from kvmesh.frontend.timeline import EMBEDDINGS
from kvmesh.frontend.whatif.question import PastMesh, SeenWorker, WhatIfQuestion
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.messages import Role
from kvmesh.simulator.access_log import AccessLine, block_names
from kvmesh.simulator.requests import SimRequest


class PastRequest(Struct, frozen=True):
    """One request, its parts, and its times as the frontend measured them."""

    request: SimRequest
    cached_tokens: int
    ttft_s: float
    itl_s: float | None
    queue_s: float  # in the router
    prefill_s: float  # from when the request was sent to a worker until its first token came
    pull_s: float
    computed_on: str  # the worker of the prompt
    answered_on: str

    @property
    def arrival_s(self) -> float:
        return self.request.arrival_s

    @property
    def new_tokens(self) -> int:
        return max(1, self.request.isl_tokens - self.cached_tokens)

    @property
    def first_s(self) -> float:
        """Return when the first token came."""
        return self.arrival_s + self.ttft_s

    @property
    def decoded_s(self) -> float:
        """Return how long it took from the first token to the last."""
        return 0.0 if self.itl_s is None else self.itl_s * (self.request.osl_tokens - 1)


class PastTraffic(Struct, frozen=True):
    mesh: PastMesh  # with its workers
    requests: Sequence[PastRequest]  # in order of arrival, the first at 0
    failed: int  # that the mesh refused or broke off
    left_out: int  # whose line does not say enough, or that asked for several answers
    is_cut: bool  # there were more than the limit


def is_generation(line: AccessLine) -> bool:
    """Tell whether the line is that of a request for an answer."""
    return line.endpoint not in ("", EMBEDDINGS)


def has_failed(line: AccessLine) -> bool:
    """Tell whether the mesh is to blame that there was no whole answer."""
    return NO_LIMIT.missed(line.outcome, None, 0.0) == "failed"


def read_traffic(
    lines: Iterable[tuple[float, AccessLine]], question: WhatIfQuestion, meshes: Sequence[PastMesh]
) -> PastTraffic:
    """Return the traffic of one model in the last seconds of the log. Raise ConfigError if there is none."""
    recent: deque[tuple[float, AccessLine]] = deque()
    for arrived_s, line in lines:
        recent.append((arrived_s, line))
        while recent[0][0] < arrived_s - question.last_s:
            recent.popleft()
    mesh = choose(recent, question, meshes)
    names = {worker.name for worker in mesh.workers}
    ours = [
        (at, line)
        for at, line in recent
        if line.worker in names or (not line.worker and line.model in ("", mesh.model))
    ]
    failed = sum([1 for _, line in ours if NO_LIMIT.missed(line.outcome, None, 0.0) == "failed"])
    served = [(at, line) for at, line in ours if line.worker and line.osl_tokens]
    whole = [(at, line) for at, line in served if is_whole(line)]
    kept = whole[-question.limit :]
    first_s = kept[0][0] if kept else 0.0
    requests = [past_request(number, at - first_s, line, mesh) for number, (at, line) in enumerate(kept)]
    return PastTraffic(mesh, requests, failed, len(served) - len(whole), len(kept) < len(whole))


def choose(
    recent: Iterable[tuple[float, AccessLine]], question: WhatIfQuestion, meshes: Sequence[PastMesh]
) -> PastMesh:
    """Return the mesh of the model that is asked about, with its workers. Raise ConfigError."""
    placed = [line for _, line in recent if line.worker]
    if not placed:
        raise ConfigError(
            "there is no request that a worker has answered", hint="send requests first, or set --last to a longer time"
        )
    seen = Counter(mesh.model for mesh in meshes if mesh.workers) or Counter(line.model for line in placed)
    if question.model not in seen and (question.model or len(seen) > 1):
        raise ConfigError(
            f"the requests are of {', '.join(sorted(seen)[:10])}", hint="name one of these models with --model"
        )
    model = question.model or next(iter(seen))
    for mesh in meshes:
        if mesh.workers and mesh.model == model:
            return mesh
    [mesh] = meshes
    ours = [line for line in placed if line.model == model]
    sizes = sorted({line.block_size for line in ours if line.block_size})
    if len(sizes) > 1:
        raise ConfigError(f"the workers have blocks of {sizes} tokens", hint="only fleets of one size are simulated")
    return PastMesh(
        model=model,
        workers=seen_workers(ours),
        block_size=sizes[0] if sizes else mesh.block_size,
        blocks=mesh.blocks,
        max_num_seqs=mesh.max_num_seqs,
        max_step_tokens=mesh.max_step_tokens,
        policy=mesh.policy,
        recompute_price=mesh.recompute_price,
        saturation_tokens=mesh.saturation_tokens,
        ttft_slo_s=mesh.ttft_slo_s,
        itl_slo_s=mesh.itl_slo_s,
        keeps_itl=mesh.keeps_itl,
    )


def seen_workers(lines: Sequence[AccessLine]) -> tuple[SeenWorker, ...]:
    """Return the workers that lines name. Where some only prefill, the others decode."""
    prefill = {line.prefill_worker for line in lines if line.prefill_worker}
    others = {line.worker for line in lines} - prefill
    role = Role.DECODE if prefill else Role.AGGREGATED
    return (
        *[SeenWorker(name, Role.PREFILL) for name in sorted(prefill)],
        *[SeenWorker(name, role) for name in sorted(others)],
    )


def is_whole(line: AccessLine) -> bool:
    """Tell whether a line says all that the simulation is compared with."""
    has_times = line.ttft_ms is not None and line.queue_ms is not None and line.prefill_ms is not None
    has_itl = line.osl_tokens == 1 or line.itl_ms is not None
    return has_times and has_itl and line.isl_tokens > 0 and line.answers == 1


def past_request(number: int, arrival_s: float, line: AccessLine, mesh: PastMesh) -> PastRequest:
    """Return the request of a line that says all. Raise ConfigError if its blocks are of another size."""
    names = block_names(line, line.isl_tokens, mesh.block_size, number)
    return PastRequest(
        request=SimRequest(arrival_s, line.isl_tokens, line.osl_tokens, names, number),
        cached_tokens=min(line.cached_tokens, line.isl_tokens),
        ttft_s=seconds(line.ttft_ms),
        itl_s=None if line.osl_tokens == 1 else seconds(line.itl_ms),
        queue_s=seconds(line.queue_ms),
        prefill_s=seconds(line.prefill_ms),
        pull_s=seconds(line.pull_ms),
        computed_on=line.prefill_worker or line.worker,
        answered_on=line.worker,
    )


def seconds(milliseconds: float | None) -> float:
    return (milliseconds or 0.0) / 1e3
