"""Say which workers there are and how requests are routed, as the simulator needs it."""

from collections import defaultdict
from collections.abc import Callable, Sequence

from kvmesh.frontend.service_level import ServiceLevel
from kvmesh.frontend.whatif.question import PastMesh, SeenWorker, WhatIfQuestion
from kvmesh.protocol.errors import InvalidRequestError
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import WorkerCard
from kvmesh.router.feeds import WorkerFeed
from kvmesh.router.local import LocalRouter

ALL_LOGS = "ask `kvmesh whatif --access-log` with the logs of all"


class KnownFleet:
    """Follows the workers of the mesh."""

    def __init__(self, workers: WorkerFeed, router: object, slo: ServiceLevel, *, has_siblings: bool) -> None:
        """Follow the workers from now on. `has_siblings`: other processes answer at the same port."""
        self._router = router
        self._slo = slo
        self._has_siblings = has_siblings
        self._cards: dict[WorkerId, WorkerCard] = {}
        workers.listen(self._join, self._leave)

    def meshes(self, question: WhatIfQuestion) -> Sequence[PastMesh]:
        """Return the workers of each model. Raise InvalidRequestError where not all requests are known here."""
        router = self._router
        if not isinstance(router, LocalRouter):
            raise InvalidRequestError("the router is elsewhere, and may serve other frontends too", hint=ALL_LOGS)
        if self._has_siblings or (router.gossip is not None and router.gossip.peers):
            raise InvalidRequestError("other frontends serve requests too, which this one has not seen", hint=ALL_LOGS)
        rules, models = router.state.rules, defaultdict[str, list[WorkerCard]](list)
        for card in self._cards.values():
            models[card.model].append(card)

        def mesh(model: str, cards: Sequence[WorkerCard]) -> PastMesh:
            return PastMesh(
                model=model,
                workers=tuple(SeenWorker(card.name, card.role) for card in cards),
                block_size=same(model, "blocks of so many tokens", cards, lambda card: card.block_size),
                blocks=round(sum(card.total_blocks for card in cards) / len(cards)),
                max_num_seqs=round(sum(card.max_num_seqs for card in cards) / len(cards)),
                max_step_tokens=question.step_tokens,
                policy=rules.policy,
                recompute_price=rules.recompute_price,
                saturation_tokens=0 if rules.saturation is None else rules.saturation.queued_tokens,
                ttft_slo_s=self._slo.ttft_s,
                itl_slo_s=self._slo.itl_s,
                keeps_itl=rules.slo_itl_s == self._slo.itl_s,
            )

        found = [mesh(model, cards) for model, cards in models.items() if question.model in ("", model)]
        if not found:
            raise InvalidRequestError(
                f"there are no workers of {question.model!r}" if question.model else "there are no workers",
                hint=f"models here: {', '.join(sorted(models)[:10]) or 'none'}",
            )
        return found

    def _join(self, card: WorkerCard) -> None:
        self._cards[card.worker_id] = card

    def _leave(self, worker_id: WorkerId) -> None:
        self._cards.pop(worker_id, None)


def same(model: str, what: str, cards: Sequence[WorkerCard], value: Callable[[WorkerCard], int]) -> int:
    """Return what is the same at all workers. Raise InvalidRequestError if it is not, or for workers with ranks."""
    values = sorted({value(card) for card in cards})
    if len(values) > 1 or any(card.dp_size > 1 for card in cards):
        found = f"{values}" if len(values) > 1 else "data-parallel ranks"
        raise InvalidRequestError(f"the workers of {model} have {what}: {found}", hint="such fleets are not simulated")
    return values[0]
