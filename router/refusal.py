"""Say why no worker can take a request, and what would help. Pure."""

from collections.abc import Collection, Sequence

from protocol.errors import NoWorkerError
from protocol.messages import Role, RouteRequest, WorkerCard

_START_ONE = "start one: `kvmesh up`, or `python -m workers`"


def no_worker(cards: Sequence[WorkerCard], request: RouteRequest) -> NoWorkerError:
    """Return the error for a request that no worker of `cards` can decode."""
    return NoWorkerError(_why_none(cards, request), hint=_START_ONE)


def _why_none(cards: Sequence[WorkerCard], request: RouteRequest) -> str:
    wanted = repr(request.model) if request.lora is None else f"{request.model!r} with the adapter {request.lora!r}"
    serving = [card for card in cards if card.model == request.model]
    mine = [card for card in serving if request.lora is None or request.lora in card.loras]
    able = [card for card in mine if card.role is not Role.PREFILL]
    if request.pin is not None:
        return _why_not_pinned(request, wanted, able)
    if request.exclude and able:
        return f"every worker of the model {wanted} that could decode has failed this request"
    if request.lora is not None and not able:
        adapters = {name for card in serving if card.role is not Role.PREFILL for name in card.loras}
        return f"no worker that decodes the model {wanted} is ready; adapters: {_listed(adapters)}"
    return f"no worker that decodes the model {wanted} is ready; there are: {_listed([card.role for card in mine])}"


def _why_not_pinned(request: RouteRequest, wanted: str, able: Sequence[WorkerCard]) -> str:
    pinned = [card for card in able if request.pin in (card.worker_id, card.name)]
    ranks = max((card.dp_size for card in pinned), default=0)
    if request.pin_rank is not None and 0 < ranks <= request.pin_rank:
        return f"the worker {request.pin!r} has no rank {request.pin_rank}; it has {ranks}, counted from 0"
    if pinned and all(card.worker_id in request.exclude for card in pinned):
        return f"the worker {request.pin!r} has failed this request"
    return f"no decode worker {request.pin!r} serves {wanted}; there are: {_listed([card.name for card in able])}"


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "none"
