"""Place requests while no router answers: at the worker that has the fewest requests of this frontend.

The workers still answer, so a request must not fail because nobody could say which one is best. This frontend knows
their cards and what it has placed itself; it knows neither what caches hold nor what other frontends have placed.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from kvmesh.protocol.errors import NoWorkerError, OverloadedError
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import Placed, Role, RouteRequest, WorkerCard
from kvmesh.router.feeds import WorkerNews
from kvmesh.router.pairing import may_continue, why_apart
from kvmesh.router.refusal import none_continues

REASON = "no router answers: fewest requests of this frontend"
DECODING = (Role.DECODE, Role.AGGREGATED)
LONG_TOKENS = 512  # a longer prompt is computed by a prefill worker, if there is one
FULL_TIMES = 4  # requests for each place in a batch: a worker that has so many gets no more
RETRY_AFTER_S = 2


class FallbackRouter:
    """Counts the requests of this frontend by worker, and chooses the worker with the fewest for its size."""

    def __init__(self, workers: WorkerNews) -> None:
        self._cards: dict[WorkerId, WorkerCard] = {}
        self._in_flight: dict[WorkerId, int] = {}
        self._turn = 0  # of equally busy workers, each gets a request in turn
        workers.listen(self._join, self._leave)

    @property
    def is_ready(self) -> bool:
        return any(card.role in DECODING for card in self._cards.values())

    def place(self, request: RouteRequest) -> Placed:
        """Return where the request runs. Raise NoWorkerError, OverloadedError."""
        decode = self._choose(request, DECODING)
        if decode is None:
            able = [card for card in self._cards.values() if card.role in DECODING and card.model == request.model]
            if (error := none_continues(able, request)) is not None:
                raise error
            raise NoWorkerError(
                f"no worker of the model {request.model!r} is ready, and no router answers",
                hint="start one: `kvmesh router`",
            )
        if self._share(decode) >= FULL_TIMES:
            raise OverloadedError(
                "no router answers, and every worker has all the requests that it can take",
                hint="try again later",
                retry_after_s=RETRY_AFTER_S,
            )
        wants = request.isl_tokens >= LONG_TOKENS if request.disaggregate is None else request.disaggregate
        prefill = self._choose(request, (Role.PREFILL,)) if wants and decode.role is Role.DECODE else None
        if prefill is not None and why_apart(prefill, decode, request.lora):
            prefill = None
        return Placed(
            decode=decode.target(
                request.pin_rank if request.pin_rank is not None else self._rank(decode), lora=request.lora
            ),
            prefill=None if prefill is None else prefill.target(self._rank(prefill), lora=request.lora),
            reason=REASON,
        )

    @contextmanager
    def counted(self, placed: Placed) -> Iterator[None]:
        """Count a request at its worker while the block runs, whoever has placed it."""
        worker_id = placed.decode.worker_id
        self._in_flight[worker_id] = self._in_flight.get(worker_id, 0) + 1
        try:
            yield
        finally:
            if (left := self._in_flight[worker_id] - 1) > 0:
                self._in_flight[worker_id] = left
            else:
                del self._in_flight[worker_id]

    def _choose(self, request: RouteRequest, roles: Collection[Role]) -> WorkerCard | None:
        able = [card for card in self._cards.values() if card.role in roles and _can_take(card, request)]
        if not able:
            return None
        self._turn += 1
        turned = [*able[self._turn % len(able) :], *able[: self._turn % len(able)]]
        return min(turned, key=self._share)

    def _share(self, card: WorkerCard) -> float:
        """Return how many requests of ours run at a worker, for each place in its batch."""
        return self._in_flight.get(card.worker_id, 0) / max(1, card.max_num_seqs * card.dp_size)

    def _rank(self, card: WorkerCard) -> int:
        return self._turn % card.dp_size

    def _join(self, card: WorkerCard) -> None:
        self._cards[card.worker_id] = card

    def _leave(self, worker_id: WorkerId) -> None:
        self._cards.pop(worker_id, None)


def _can_take(card: WorkerCard, request: RouteRequest) -> bool:
    if card.model != request.model or card.worker_id in request.exclude:
        return False
    if request.lora is not None and request.lora not in card.loras:
        return False
    if not may_continue(card, request):
        return False
    if card.role is Role.PREFILL:
        return request.pin_prefill is None or request.pin_prefill in (card.worker_id, card.name)
    if request.among is not None and card.worker_id not in request.among:
        return False
    return request.pin is None or request.pin in (card.worker_id, card.name)
