"""Take placements from the headers of an endpoint picker: no second one is made behind a gateway.

The picker has placed the request and booked its load. This frontend carries it out at the workers that are named.
"""

from collections.abc import Collection
from types import TracebackType

from kvmesh.frontend.hints import WORKER_HEADER
from kvmesh.protocol.errors import InvalidRequestError, NoWorkerError
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import Placed, Role, RouteRequest, WorkerCard
from kvmesh.router.feeds import WorkerNews
from kvmesh.router.pairing import may_continue

DECODING = (Role.DECODE, Role.AGGREGATED)
PREFILLING = (Role.PREFILL,)


class _NamedPlace:
    """A placement that nothing is booked for: whoever made it has booked it."""

    def __init__(self, placed: Placed) -> None:
        self.placed = placed

    def prefill_done(self, reused_tokens: int | None = None) -> None:
        return

    def finished(self, osl_tokens: int) -> None:
        """Do nothing: no router learns from it."""

    def progress(self, osl_tokens: int) -> None:
        return

    async def __aenter__(self) -> "_NamedPlace":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        return


class DirectRouter:
    """Implements router.booking.Router. Requests that name no worker go to the worker `own`, if that is given."""

    def __init__(self, workers: WorkerNews, own: str = "") -> None:
        self._cards: dict[WorkerId, WorkerCard] = {}
        self._named: dict[str, dict[WorkerId, WorkerCard]] = {}  # by id, name and HTTP endpoint
        self._own = own
        workers.listen(self._join, self._leave)

    def book(self, request: RouteRequest, timeout_s: float) -> _NamedPlace:
        """Return the placement that the request names. Raise InvalidRequestError, NoWorkerError."""
        return _NamedPlace(self._placed(request))

    def check(self, request: RouteRequest, timeout_s: float) -> None:
        """Do nothing: the gateway has decided that the request runs."""

    async def preview(self, request: RouteRequest, timeout_s: float) -> Placed:
        """Return the placement that the request names. Raise InvalidRequestError, NoWorkerError."""
        return self._placed(request)

    def _placed(self, request: RouteRequest) -> Placed:
        wanted = request.pin or self._own
        if not wanted:
            raise InvalidRequestError(
                f"the request has no header {WORKER_HEADER}, and this frontend places none itself",
                hint="send it through the gateway, or start the frontend with --direct-worker",
                param=WORKER_HEADER,
            )
        decode = self._find(wanted, request, DECODING)
        if decode is None:
            raise NoWorkerError(
                f"the worker {wanted!r} of the model {request.model!r} is not here, or has failed this request",
                hint="see its log and GET /health",
            )
        prefill = None
        if request.pin_prefill is not None and request.disaggregate is not False:
            prefill = self._find(request.pin_prefill, request, PREFILLING)  # without it the prompt is computed here
        return Placed(
            decode=decode.target(request.pin_rank or 0, lora=request.lora),
            prefill=None if prefill is None else prefill.target(0, lora=request.lora),
            reason="named by the gateway" if request.pin else "the frontend's own worker",
        )

    def _find(self, wanted: str, request: RouteRequest, roles: Collection[Role]) -> WorkerCard | None:
        """Return the worker with this id, name or HTTP endpoint that can do its part."""
        for card in self._named.get(wanted, {}).values():
            is_able = card.model == request.model and card.role in roles and card.worker_id not in request.exclude
            if is_able and may_continue(card, request):
                return card
        return None

    def _join(self, card: WorkerCard) -> None:
        self._leave(card.worker_id)
        self._cards[card.worker_id] = card
        for name in _names_of(card):
            self._named.setdefault(name, {})[card.worker_id] = card

    def _leave(self, worker_id: WorkerId) -> None:
        if (card := self._cards.pop(worker_id, None)) is None:
            return
        for name in _names_of(card):
            self._named[name].pop(worker_id, None)
            if not self._named[name]:
                del self._named[name]


def _names_of(card: WorkerCard) -> set[str]:
    return {card.worker_id, card.name, card.http_endpoint} - {""}
