"""The router of the coarse world: the live queue and the live admission, without caches and costs."""

from collections.abc import Callable

from kvmesh.protocol.errors import OverloadedError
from kvmesh.protocol.ids import RequestId
from kvmesh.protocol.messages import RouteRequest
from kvmesh.router.admission import AdmissionControl, AdmissionRules, Placing
from kvmesh.router.queue import Pending, PendingQueue, QueueRules
from kvmesh.router.rules import RouterRules
from kvmesh.simulator.config import SimConfig
from kvmesh.simulator.requests import SimRequest

_MODEL = "simulated"
_FOREVER = float("inf")


class CoarseRouter:
    """Lets requests wait, refuses those that would wait too long, and learns what the others take."""

    def __init__(self, config: SimConfig) -> None:
        self._states_deadline = config.states_deadline
        slo_itl_s = config.itl_slo_s if config.keeps_itl else 0.0
        self._rules = RouterRules(admission=AdmissionRules(is_on=config.admission), slo_itl_s=slo_itl_s)
        self._admission = AdmissionControl(self._rules.admission)
        self._queue: PendingQueue[RouteRequest] = PendingQueue(QueueRules(self._rules.queue.order))

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def isl_tokens(self) -> int:
        """Return the prompt tokens of the requests that wait."""
        return self._queue.isl_tokens

    def push(self, request_id: RequestId, facts: SimRequest, now: float) -> list[RequestId]:
        """Let a request wait. Return the requests that are refused for that: it, or others."""
        route = RouteRequest(
            request_id=request_id,
            model=_MODEL,
            isl_tokens=facts.isl_tokens,
            sequence_hashes=b"",
            has_deadline=self._states_deadline,
        )
        pending = Pending(request_id, facts.tenant, 0, now, _FOREVER, facts.isl_tokens, facts.isl_tokens, route)
        admission, queue = self._admission, self._queue
        admission.came(_MODEL, now)
        wait_s = queue.wait_s(pending, now, admission.gap_s(_MODEL)) if queue else 0.0
        stands = admission.stands(_MODEL, queue.since_s if queue else now, now)
        try:
            admission.check_wait(route, facts.isl_tokens, wait_s, _FOREVER, stands, None, retry_after_s=1.0)
            return [other.request_id for other in queue.push(pending, now)]
        except OverloadedError:
            return [request_id]

    def pop(self, now: float, fits: Callable[[], bool]) -> RequestId | None:
        """Take out the next request if a worker has room for one; None: none has, or nobody waits."""
        if not self._queue:
            return None
        self._admission.waits(_MODEL, self._queue.since_s, now)
        if not fits():
            return None
        item = self._queue.pop_next(now, lambda _: True)
        if item is None:
            return None
        self._admission.drained(_MODEL, self._queue.since_s, now)
        return item.request_id

    def spare_share(self, running: int) -> float:
        """Return which share of its time a decode worker with so many answers may give to prompts."""
        times = self._admission.times_of(_MODEL)
        return (
            1.0
            if times is None or not running or not self._rules.slo_itl_s
            else times.spare_share(running + 1, self._rules.slo_itl_s)
        )

    def placed(self, request_id: RequestId, tokens: int, queued_tokens: int, running: int, now: float) -> None:
        self._admission.placed(request_id, Placing(_MODEL, 0, _FOREVER, tokens, queued_tokens, running), now)

    def began(self, request_id: RequestId, now: float) -> None:
        self._admission.began(request_id, now)

    def ended(self, request_id: RequestId, osl_tokens: int, running: int, now: float) -> None:
        self._admission.grew(request_id, osl_tokens)
        self._admission.ended(request_id, now, running)
