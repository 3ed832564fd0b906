"""Decide which requests can get their answers in time, and refuse the others at once. Pure; the time is a parameter.

docs/overload.md says how, docs/decisions/0032-admission.md why.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Literal

from msgspec import Struct

from kvmesh.protocol.errors import OverloadedError
from kvmesh.protocol.ids import RequestId
from kvmesh.protocol.messages import RouteRequest
from kvmesh.router.estimate import ServiceEstimate, ServiceTimes

Reason = Literal["late", "hopeless", "wait", "full"]
REASONS: tuple[Reason, ...] = ("late", "hopeless", "wait", "full")

SURE = 0.8  # this share of such answers has to be fast enough for a request that comes while a queue stands
EVEN = 0.5  # ... for a request that comes in a burst
FAINT = 0.25  # ... for a request that has waited in a queue that stands
HOPEFUL = 0.05  # ... while no queue stands: what may be answered in time is not refused
PRESSURE_S = 2.0  # after a queue has stood, a request that has room is judged as well
PROBE_S = 1.0  # after so long without a placement one is made in any case, so that the estimates recover
BURST_SLACK = 2.0  # in a burst the wait may become so much longer than it seems
BURST_SHARE = 0.2  # of the time that a client gives may be waited in a burst in any case
WORK = 0.9  # this share of all tokens must not be late because of a burst's wait
UNSURE = 2.0  # the time between two ends is longer by about this factor when all workers are full
STANDING_S = 5.0  # a queue that is younger is a burst
TURNOVER_SHARE = 0.1  # of the time that an answer takes: enough to keep the workers busy
LEAST_WAITING = 4.0  # may wait in a queue that stands, so that a second tenant has its turn
LEAST_STANDING_S = 0.1  # requests do not come as evenly as that
MISSED_S = 0.05  # a request that ends so long before its deadline has missed it
RATIO_LIMITS = 0.1, 10.0  # of a time to its estimate
_FOREVER = float("inf")


@dataclass(frozen=True, slots=True)
class AdmissionRules:
    is_on: bool = True
    # Both limits apply only to requests whose client stated a deadline. 0: no limit.
    max_wait_s: float = 10.0  # in a burst
    standing_wait_s: float = 0.5  # once the queue is older than an answer takes


class RefusedError(OverloadedError):
    """A request that would not be answered in time. `code` is that of an OverloadedError."""

    def __init__(self, reason: Reason, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.reason: Reason = reason


class Placing(Struct):
    """Facts about a request at the worker where it is placed."""

    model: str
    max_tokens: int
    deadline_s: float
    uncached_tokens: int
    queued_tokens: float  # ahead of it on the worker that computes the prompt
    running: int  # on the worker that decodes


class _Flight(Struct):
    placing: Placing
    placed_s: float
    estimate: ServiceEstimate | None
    first_s: float = -1.0
    osl_tokens: int = 0
    has_finished: bool = False


class AdmissionControl:
    """Learns from the requests in flight what requests take, and judges new ones by it."""

    def __init__(self, rules: AdmissionRules) -> None:
        self.rules = rules
        self.on_error: Callable[[str, float], object] = lambda what, ratio: None  # "first" or "last", to its estimate
        self._times: dict[str, ServiceTimes] = {}  # by model
        self._flights: dict[RequestId, _Flight] = {}  # one for each booking
        self._running: dict[str, int] = {}  # of the flights, by model
        self._waited_s: dict[str, float] = {}  # when a queue for a model stood last
        self._placed_s: dict[str, float] = {}  # when a request for a model was placed last
        self._drained_s: dict[str, float] = {}  # when a request for a model left a queue last

    def keep(self, models: Container[str], is_booked: Callable[[RequestId], bool]) -> None:
        """Forget the models that nobody serves any more, and the requests that are not booked any more."""
        for model in [model for model in self._times if model not in models]:
            for known in (self._times, self._waited_s, self._placed_s, self._drained_s):
                known.pop(model, None)
        for request_id in [request_id for request_id in self._flights if not is_booked(request_id)]:
            self._pop(request_id)

    def _pop(self, request_id: RequestId) -> _Flight | None:
        flight = self._flights.pop(request_id, None)
        if flight is not None:
            self._count(flight.placing.model, -1)
        return flight

    def _count(self, model: str, change: int) -> None:
        self._running[model] = running = self._running.get(model, 0) + change
        if not running:
            del self._running[model]

    def times_of(self, model: str) -> ServiceTimes | None:
        """Return what requests for a model took, for reading; None: nothing is known."""
        return self._times.get(model)

    def gap_s(self, model: str) -> float:
        """Return the time from one request that leaves a queue to the next; 0: that is not known.

        It was measured in earlier queues, or follows from the answers in flight.
        """
        running, times = self._running.get(model, 0), self._times.get(model)
        if times is None:
            return 0.0
        return times.gap_s or (UNSURE * times.mean_s / running if running else 0.0)

    def drained(self, model: str, since_s: float, now: float) -> None:
        """Note that a request has left a queue that has been there since then."""
        if (times := self._times.get(model)) is not None:
            times.drained(now - max(since_s, self._drained_s.get(model, since_s)))
            self._drained_s[model] = now

    def estimate(
        self,
        request: RouteRequest,
        uncached_tokens: int,
        queued_tokens: float | None = None,
        running: float | None = None,
    ) -> ServiceEstimate | None:
        """Return what a request would take from its placement on; None: that is not known."""
        times = self._times.get(request.model)
        if times is None or not request.max_tokens:
            return None
        return times.estimate(uncached_tokens, request.max_tokens, queued_tokens, running)

    def needed_s(self, request: RouteRequest, uncached_tokens: int, share: float, running: float | None) -> float:
        """Return the time that has to be left when a request is placed, for this share of the answers; 0: not known.

        `running`: sequences on a worker; None: as many as where requests were placed lately.
        """
        if not self._judges(request) or (found := self.estimate(request, uncached_tokens, running=running)) is None:
            return 0.0
        return found.total_s * self._times[request.model].error(share, request.max_tokens)

    def check_wait(
        self,
        request: RouteRequest,
        uncached_tokens: int,
        wait_s: float,
        left_s: float,
        stands: bool,
        running: float | None,
        retry_after_s: float,
    ) -> None:
        """Raise RefusedError if a request that would wait for `wait_s` would not be answered in time, or soon enough.

        A request whose client stated no deadline is never refused for its wait. A burst may fill the queue. In a queue
        that `stands` every request would wait, and none would be answered sooner or more often.
        """
        if not self.judges_wait(request):
            return
        is_burst = wait_s > self.rules.standing_wait_s
        share = SURE if stands else EVEN if is_burst else HOPEFUL
        needed_s = self.needed_s(request, uncached_tokens, share, running)
        if (1.0 if stands else BURST_SLACK) * wait_s + needed_s > left_s:
            raise RefusedError(
                "late",
                f"the answer would take about {wait_s + needed_s:.1f} s, {wait_s:.1f} s of them in the queue; "
                f"{left_s:.1f} s are left for it",
                retry_after_s=retry_after_s,
            )
        limit_s = self._most_wait_s(request, left_s, stands, running)
        if wait_s > limit_s:
            raise RefusedError(
                "wait",
                f"it would wait about {wait_s:.1f} s, at most {limit_s:g} s are taken",
                retry_after_s=retry_after_s,
            )

    def came(self, model: str, now: float) -> None:
        """Note a request for a model, whatever becomes of it. The same request may be noted twice."""
        if (times := self._times.get(model)) is not None:
            times.arrivals.came(now)

    def stands(self, model: str, since_s: float, now: float) -> bool:
        """Return whether a queue does not go away: it is older than answers take, or follows such a one.

        A younger queue is a burst.
        """
        times = self._times.get(model)
        least_s = max(STANDING_S, 0.0 if times is None else times.mean_s)
        return now - since_s > least_s or now - self._waited_s.get(model, -_FOREVER) < least_s

    def _most_wait_s(self, request: RouteRequest, left_s: float, stands: bool, running: float | None) -> float:
        """Return for how long a request may wait."""
        rules, times = self.rules, self._times.get(request.model)
        most_s = rules.max_wait_s or _FOREVER
        needed_s = 0.0 if times is None or running is None else times.needed_for(WORK, running)
        most_s = min(most_s, max(BURST_SHARE * left_s, (left_s - needed_s) / BURST_SLACK))
        if rules.standing_wait_s and stands:
            turnover_s = 0.0 if times is None else TURNOVER_SHARE * times.mean_s
            most_s = min(most_s, max(rules.standing_wait_s, turnover_s))
            if times is not None and times.gap_s:
                most_s = min(most_s, max(LEAST_STANDING_S, times.arrivals.longest_s, LEAST_WAITING * times.gap_s))
        return most_s

    def check_placing(
        self, request: RouteRequest, placing: Placing, now: float, *, stands: bool | None, retry_after_s: float
    ) -> None:
        """Raise RefusedError if a request that could be placed now would not be answered in time.

        `stands`: what the queue does in which it has waited; None: it has not waited. Then only a request is refused
        that has hardly a chance, and only if others have needed its place a moment ago.
        """
        has_waited = stands is not None
        if not (self._judges(request) if has_waited else self.judges_wait(request)):
            return
        if not has_waited and not self._is_pressed(request.model, placing, now):
            return
        share = FAINT if stands else HOPEFUL
        found = self.estimate(request, placing.uncached_tokens, placing.queued_tokens, placing.running)
        if found is None:
            return
        needed_s = found.total_s * self._times[request.model].error(share, request.max_tokens)
        if now + needed_s > placing.deadline_s:
            raise RefusedError(
                "late" if stands is None else "hopeless",
                f"the answer would take about {needed_s:.1f} s, {placing.deadline_s - now:.1f} s are left for it",
                retry_after_s=retry_after_s,
            )

    def waits(self, model: str, since_s: float, now: float) -> None:
        """Note that requests for a model wait, in a queue that has been there since then."""
        if self.stands(model, since_s, now):
            self._waited_s[model] = now  # of a model with a queue, so of one with workers, or that waits for one

    # --- learning --------------------------------------------------------------------------------------------------

    def placed(self, request_id: RequestId, placing: Placing, now: float) -> None:
        times = self._times.setdefault(placing.model, ServiceTimes())
        found = times.estimate(placing.uncached_tokens, placing.max_tokens, placing.queued_tokens, placing.running)
        times.placed(placing.queued_tokens, placing.running)
        self._placed_s[placing.model] = now
        self._pop(request_id)
        self._flights[request_id] = _Flight(placing, now, found)
        self._count(placing.model, +1)

    def began(self, request_id: RequestId, now: float) -> None:
        """Note the first token of a request."""
        flight = self._flights.get(request_id)
        if flight is None or flight.first_s >= 0:
            return
        flight.first_s = now
        took_s, placing = now - flight.placed_s, flight.placing
        self._times[placing.model].began(placing.queued_tokens + placing.uncached_tokens, took_s)
        if flight.estimate is not None and flight.estimate.first_s > 0:
            self.on_error("first", took_s / flight.estimate.first_s)

    def grew(self, request_id: RequestId, osl_tokens: int) -> None:
        if (flight := self._flights.get(request_id)) is not None:
            flight.osl_tokens = osl_tokens

    def finished(self, request_id: RequestId, osl_tokens: int) -> None:
        """Note that an answer is complete. Without that nothing is known of its length."""
        if (flight := self._flights.get(request_id)) is not None:
            flight.osl_tokens, flight.has_finished = osl_tokens, True

    def ended(self, request_id: RequestId, now: float, running: int) -> None:
        """Learn from a request that has ended: because its answer is complete, by its deadline, or otherwise.

        `running`: the sequences on its worker.
        """
        flight = self._pop(request_id)
        if flight is None or flight.placing.model not in self._times:
            return
        placing, times = flight.placing, self._times[flight.placing.model]
        osl, took_s = flight.osl_tokens, now - flight.placed_s
        itl_s = (now - flight.first_s) / (osl - 1) if flight.first_s >= 0 and osl > 1 else None
        if itl_s is not None:
            times.ended((placing.running + running + 1) // 2, itl_s, osl)
        if flight.has_finished and placing.max_tokens:
            times.answered(osl, placing.max_tokens, took_s)
        elif now < placing.deadline_s - MISSED_S:
            return  # its client has left, or its worker has failed, or nobody has reported its end
        elif itl_s is not None and placing.max_tokens:  # what was still to come counts as well
            more_tokens = max(0.0, times.expected_tokens(placing.max_tokens) - osl)
            took_s += more_tokens * itl_s
            times.missed(osl + more_tokens)
        if flight.estimate is not None and flight.estimate.total_s > 0:
            least, most = RATIO_LIMITS
            ratio = min(max(took_s / flight.estimate.total_s, least), most)
            times.compared(placing.max_tokens, ratio)
            self.on_error("last", ratio)

    def judges_wait(self, request: RouteRequest) -> bool:
        """Return whether a request may be refused for its wait: only if its client stated a deadline."""
        return request.has_deadline and self._judges(request)

    def _judges(self, request: RouteRequest) -> bool:
        return self.rules.is_on and not request.is_continued

    def _is_pressed(self, model: str, placing: Placing, now: float) -> bool:
        waited_s, placed_s = self._waited_s.get(model, -_FOREVER), self._placed_s.get(model, -_FOREVER)
        return placing.running > 0 and now - waited_s < PRESSURE_S and now - placed_s < PROBE_S
