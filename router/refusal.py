"""Say why no worker can take a request, and what to do next. Pure."""

from collections.abc import Collection, Sequence

from kvmesh.protocol.errors import NoWorkerError, OtherWeightsError
from kvmesh.protocol.messages import Role, RouteRequest, WorkerCard
from kvmesh.router.pairing import may_continue


def no_worker(cards: Sequence[WorkerCard], request: RouteRequest) -> NoWorkerError:
    """Return the error for a request that no worker of `cards` can decode."""
    model, lora = request.model, request.lora
    wanted = repr(model) if lora is None else f"{model!r} with the adapter {lora!r}"
    serving = [card for card in cards if card.model == model]
    decoders = [card for card in serving if card.role is not Role.PREFILL]
    able = [card for card in decoders if lora is None or lora in card.loras]
    if (error := none_continues(able, request)) is not None:
        return error
    able = [card for card in able if may_continue(card, request)]
    if request.pin is not None:
        return _not_pinned(request, wanted, able)
    if able and request.among is not None and all(card.worker_id not in request.among for card in able):
        problem = f"none of the {len(request.among)} workers that the caller allows decodes the model {wanted}"
        return NoWorkerError(problem, hint="allow others, or see `GET /workers`")
    if able:  # and the request excludes all of them
        problem = f"every worker of the model {wanted} that could decode has failed this request"
        return NoWorkerError(problem, hint="see the logs of the workers")
    if decoders:
        adapters = _listed({name for card in decoders for name in card.loras})
        problem = f"no worker that decodes the model {wanted} is ready; adapters: {adapters}"
        return NoWorkerError(problem, hint="start one with --loras, or ask for one of these")
    if serving:
        problem = f"only prefill workers of the model {wanted} are ready, and none that decodes"
        return NoWorkerError(problem, hint="start one: `kvmesh worker --role decode`")
    others = _listed({card.model for card in cards})
    problem = f"no worker of the model {wanted} is ready; models with workers: {others}"
    return NoWorkerError(problem, hint="start one: `kvmesh up`, or `kvmesh worker`")


def none_continues(able: Collection[WorkerCard], request: RouteRequest) -> OtherWeightsError | None:
    """Return the error for an answer that all workers that are left would continue with other weights."""
    left = [card for card in able if card.worker_id not in request.exclude]
    if not left or any(may_continue(card, request) for card in left):
        return None
    problem = (
        f"no worker of the model {request.model!r} has the weights with which this answer began: none continues it"
    )
    return OtherWeightsError(problem, hint="send the request again")


def _not_pinned(request: RouteRequest, wanted: str, able: Sequence[WorkerCard]) -> NoWorkerError:
    pinned = [card for card in able if request.pin in (card.worker_id, card.name)]
    ranks = max((card.dp_size for card in pinned), default=0)
    if request.pin_rank is not None and 0 < ranks <= request.pin_rank:
        problem = f"the worker {request.pin!r} has no rank {request.pin_rank}; it has {ranks}, counted from 0"
        return NoWorkerError(problem, hint="pin another rank, or none")
    if pinned and all(card.worker_id in request.exclude for card in pinned):
        return NoWorkerError(f"the worker {request.pin!r} has failed this request", hint="see its log")
    names = _listed({card.name for card in able})
    problem = f"no worker {request.pin!r} decodes the model {wanted}; there are: {names}"
    return NoWorkerError(problem, hint="pin one of them by its name or id")


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "none"
