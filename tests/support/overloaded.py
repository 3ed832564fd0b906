"""The router's core in simulated time under more requests than its workers can serve."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from kvmesh.protocol.errors import MeshError
from kvmesh.protocol.ids import RequestId
from kvmesh.protocol.messages import Placed, RouteRequest
from kvmesh.router.core import Outcome, RouterState
from kvmesh.router.rules import RouterRules
from tests.support.routing import A, card

SEATS = 8  # of a worker
WORKERS = 2
PREFILL_TOKENS_PER_S = 8000.0
HOP_S = 0.001
LOOK_S = 0.05  # the router's timer, which the live one sets for the next deadline
_FOREVER = float("inf")


@dataclass
class Asked:
    at_s: float
    isl: int
    osl: int  # that the answer will have
    max_tokens: int
    deadline_s: float | None  # of the whole, from `at_s`; None: the client names none
    router: int = 0
    leaves_s: float = _FOREVER
    tenant: str = ""
    first_s: float = -1.0
    end_s: float = -1.0
    refused_s: float = -1.0
    missed: bool = False
    left: bool = False
    attempt: int = field(default=0)


def itl_s(running: int) -> float:
    """Return the time of a token on a worker with so many sequences."""
    return 0.01 + 0.002 * running


class OverloadedMesh:
    """Some routers in front of the same workers; each knows at once what the others have placed."""

    def __init__(self, rules: RouterRules | None = None, routers: int = 1) -> None:
        self.states = [RouterState(rules or RouterRules(), seed=number) for number in range(routers)]
        for state in self.states:
            for number in range(WORKERS):
                state.add_worker(
                    card(f"w{number}", A, name=f"w{number}", max_num_seqs=SEATS, total_blocks=100_000), -1000.0
                )
        self.now = 0.0
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._ticks = count()
        self._asked: dict[RequestId, Asked] = {}
        self._free_s = {f"w{number}": 0.0 for number in range(WORKERS)}
        self._running = dict.fromkeys(self._free_s, 0)
        self._worker: dict[RequestId, str] = {}

    def run(self, asked: Sequence[Asked]) -> None:
        for number, one in enumerate(asked):
            request_id = RequestId(f"r{number}")
            self._asked[request_id] = one
            self._at(one.at_s, lambda request_id=request_id: self._arrive(request_id))
        for turn in range(int((max([one.at_s for one in asked]) + 70) / LOOK_S)):
            self._at(turn * LOOK_S, lambda turn=turn: self._dispatch(turn))
        while self._agenda:
            self.now, _, do = heappop(self._agenda)
            do()

    def _at(self, when: float, do: Callable[[], None]) -> None:
        heappush(self._agenda, (when, next(self._ticks), do))

    def _arrive(self, request_id: RequestId) -> None:
        one = self._asked[request_id]
        deadline_s = self.now + (one.deadline_s or 600.0)
        request = RouteRequest(
            request_id=request_id,
            model="m",
            isl_tokens=one.isl,
            tenant=one.tenant,
            max_tokens=one.max_tokens,
            has_deadline=one.deadline_s is not None,
        )
        self._at(deadline_s, lambda: self._give_up(request_id, missed=True))
        if one.leaves_s < _FOREVER:
            self._at(self.now + one.leaves_s, lambda: self._give_up(request_id, missed=False))
        state = self.states[one.router]
        try:
            placed = state.try_place(request, self.now, deadline_s)
            if placed is None:
                displaced = state.submit(request, self.now, deadline_s)
                self._settle([*displaced, *state.dispatch(self.now)])
            else:
                self._settle([Outcome(request_id, placed)])
        except MeshError:
            one.refused_s = self.now - one.at_s

    def _dispatch(self, first: int = 0) -> None:
        """Let all routers place what they can; that whose request has ended hears of it first."""
        for number in range(len(self.states)):
            self._settle(self.states[(first + number) % len(self.states)].dispatch(self.now))

    def _settle(self, outcomes: Sequence[Outcome]) -> None:
        for request_id, result in outcomes:
            if isinstance(result, Placed):
                self._begin(request_id, result.decode.name)
            else:
                self._asked[request_id].refused_s = self.now - self._asked[request_id].at_s

    def _begin(self, request_id: RequestId, worker: str) -> None:
        self._share()
        one = self._asked[request_id]
        self._worker[request_id] = worker
        self._running[worker] += 1
        first_s = max(self.now, self._free_s[worker]) + HOP_S + one.isl / PREFILL_TOKENS_PER_S
        self._free_s[worker] = first_s
        self._at(first_s, lambda: self._first(request_id))

    def _first(self, request_id: RequestId) -> None:
        one = self._asked[request_id]
        if request_id not in self._worker:
            return
        one.first_s = self.now - one.at_s
        self.states[one.router].prefill_done(request_id, self.now)
        self._at(self.now, lambda: self._token(request_id, 1))

    def _token(self, request_id: RequestId, osl: int) -> None:
        one = self._asked[request_id]
        if request_id not in self._worker:
            return
        state = self.states[one.router]
        state.progress(request_id, osl, self.now)
        if osl >= one.osl:
            one.end_s = self.now - one.at_s
            state.admission.finished(request_id, osl)
            self._end(request_id, ok=True)
            return
        step = min(8, one.osl - osl)
        later_s = step * itl_s(self._running[self._worker[request_id]])
        self._at(self.now + later_s, lambda: self._token(request_id, osl + step))

    def _give_up(self, request_id: RequestId, missed: bool) -> None:
        one = self._asked[request_id]
        if one.end_s >= 0 or one.refused_s >= 0 or one.missed or one.left:
            return
        one.missed, one.left = missed, not missed
        self._end(request_id, ok=False)

    def _end(self, request_id: RequestId, ok: bool) -> None:
        one = self._asked[request_id]
        self.states[one.router].free(request_id, self.now, ok=ok)
        if (worker := self._worker.pop(request_id, None)) is not None:
            self._running[worker] -= 1
        self._share()
        self._dispatch(one.router)

    def _share(self) -> None:
        """Tell each router what the others have placed."""
        if len(self.states) > 1:
            for number, state in enumerate(self.states):
                shares = state.load.shares()
                for other in self.states:
                    if other is not state:
                        other.load.set_elsewhere(f"router-{number}", shares, self.now)


def poisson(
    rate: float, seconds: float, draw: Callable[[random.Random], Asked], seed: int, routers: int = 1
) -> list[Asked]:
    """Return the requests of a Poisson process, dealt out to the routers at random."""
    rng, asked, now = random.Random(seed), list[Asked](), 0.0
    while (now := now + rng.expovariate(rate)) < seconds:
        one = draw(rng)
        one.at_s, one.router = now, rng.randrange(routers)
        asked.append(one)
    return asked


def tokens_per_s(asked: Sequence[Asked], begins_s: float, ends_s: float) -> float:
    """Return the tokens of answers that ended in time between two times."""
    return sum(one.osl for one in asked if one.end_s >= 0 and begins_s <= one.at_s + one.end_s < ends_s) / (
        ends_s - begins_s
    )
