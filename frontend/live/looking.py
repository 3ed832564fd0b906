"""Look at the workers and the counters of this frontend, as the live page shows them."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct

from kvmesh.frontend import metrics
from kvmesh.frontend.live.picture import MeshTotals, WorkerLook
from kvmesh.mesh.histogram import Distribution
from kvmesh.mesh.tally import Tally
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import WorkerCard
from kvmesh.router.index import Holder
from kvmesh.router.local import LocalRouter

WINDOW = 20  # looks that means are taken over
FEW = 5  # ... and rates
NO_FAILURES = frozenset({"client_gone", "ok"})  # outcomes of requests that are no failures


class MeshLook(Struct):
    """The workers as they are now, and the sums over them."""

    looks: Sequence[WorkerLook]
    waiting: int = 0
    blocks: int = 0
    held_blocks: int = 0
    cached_blocks: int | None = None  # None: not known


Look = Callable[[Iterable[WorkerCard], Callable[[WorkerId], int | None], frozenset[WorkerId]], MeshLook]


def local_look(router: LocalRouter) -> Look:
    """Return how to look at the workers through the router of this process, which knows the load of all routers."""
    state, fleet = router.state, router.state.fleet

    def look(
        cards: Iterable[WorkerCard], number_of: Callable[[WorkerId], int | None], lapsed: frozenset[WorkerId]
    ) -> MeshLook:
        fresh = set(fleet.warm_up.unsettled(time.monotonic()))
        found = MeshLook([], waiting=state.waiting, cached_blocks=0)
        looks: list[WorkerLook] = []
        for card in cards:
            number = number_of(card.worker_id)
            if number is None:
                continue
            requests = queued = held = cached = 0
            index = fleet.pools[card.model].index if card.model in fleet.pools else None
            for rank in range(card.dp_size):
                holder = Holder(card.worker_id, rank)
                slot = fleet.slots.get(holder)
                if slot is None or index is None:
                    continue
                total = slot.load.total
                requests += total.requests + (len(slot.load.prefilling) if total.requests == 0 else 0)
                queued += int(total.queued_tokens)
                held += total.held_blocks
                cached += index.blocks_of(holder)
            state_name = worker_state(card, router, fresh, lapsed)
            looks.append(WorkerLook(number, state_name, requests, queued, held, cached))
            found.blocks += card.total_blocks * card.dp_size
            found.held_blocks += held
            found.cached_blocks = (found.cached_blocks or 0) + cached
        found.looks = looks
        return found

    return look


def worker_state(card: WorkerCard, router: LocalRouter, fresh: set[WorkerId], lapsed: frozenset[WorkerId]) -> str:
    """Return the health of a worker in one word."""
    if card.worker_id in lapsed:
        return "lapsed"
    if card.worker_id in router.state.fleet.avoided_until:
        return "suspect"
    match router.kv_feed.status_of(card):
        case "broken":
            return "unfollowed"
        case "recovering":
            return "recovering"
    return "new" if card.worker_id in fresh else "ok"


def distant_look(in_flight: Callable[[], Mapping[WorkerId, int]]) -> Look:
    """Return how to look at the workers where no router is in this process: only its own requests are known."""

    def look(
        cards: Iterable[WorkerCard], number_of: Callable[[WorkerId], int | None], lapsed: frozenset[WorkerId]
    ) -> MeshLook:
        counts, looks, blocks = in_flight(), list[WorkerLook](), 0
        for card in cards:
            if (number := number_of(card.worker_id)) is None:
                continue
            state = "lapsed" if card.worker_id in lapsed else "ok"
            looks.append(WorkerLook(number, state, counts.get(card.worker_id, 0), 0, 0, 0))
            blocks += card.total_blocks * card.dp_size
        return MeshLook(looks, blocks=blocks)

    return look


class _Counts(Struct, frozen=True):
    """The counters of this frontend at one time."""

    at_s: float
    requests: float
    failures: float
    input_tokens: float
    cached_tokens: float
    first_tokens: int  # requests that have had theirs
    ttft_s: float  # of all of them together
    answers: int
    itl_s: float


class CounterWatch:
    """Turns the counters of this frontend into rates."""

    def __init__(self) -> None:
        self._counts: deque[_Counts] = deque(maxlen=WINDOW)
        self._tokens: deque[int] = deque(maxlen=WINDOW)

    def forget(self) -> None:
        """Forget the earlier looks: what comes after a long pause is no rate."""
        self._counts.clear()
        self._tokens.clear()

    def totals(self, seen: MeshLook, inflight: int, tokens: int, unseen: int) -> MeshTotals:
        """Return the figures now. Rates are of the last two seconds, means of the last ten."""
        now = read_counts()
        self._counts.append(now)
        self._tokens.append(tokens)
        first, recent = self._counts[0], self._counts[-min(len(self._counts), FEW)]
        blocks, cached = max(1, seen.blocks), seen.cached_blocks
        span_s, prompts = now.at_s - recent.at_s, now.input_tokens - first.input_tokens
        new_tokens = sum(list(self._tokens)[-FEW + 1 :])
        return MeshTotals(
            inflight=inflight,
            waiting=seen.waiting,
            requests_per_s=rate(now.requests - recent.requests, span_s),
            failures_per_s=rate(now.failures - recent.failures, span_s),
            tokens_per_s=rate(new_tokens, span_s),
            kv_share=round(seen.held_blocks / blocks, 4),
            cached_share=None if cached is None else round(min(1.0, cached / blocks), 4),
            hit_share=round(min(1.0, (now.cached_tokens - first.cached_tokens) / prompts), 4) if prompts > 0 else None,
            ttft_s=mean(now.ttft_s - first.ttft_s, now.first_tokens - first.first_tokens),
            itl_s=mean(now.itl_s - first.itl_s, now.answers - first.answers),
            unseen=unseen,
        )


def rate(count: float, span_s: float) -> float:
    return round(count / span_s, 2) if span_s > 0 else 0.0


def mean(total: float, count: int) -> float | None:
    return round(total / count, 5) if count > 0 else None


def read_counts() -> _Counts:
    """Return the sums over all endpoints."""
    requests = failures = 0.0
    for values, tally in metrics.REQUESTS.children():
        requests += tally.value
        failures += tally.value if values[-1] not in NO_FAILURES else 0.0
    ttft, itl = summed(metrics.TTFT.children()), summed(metrics.ITL.children())
    return _Counts(
        at_s=time.monotonic(),
        requests=requests,
        failures=failures,
        input_tokens=summed(metrics.INPUT_TOKENS.children())[1],
        cached_tokens=counted(metrics.CACHED_TOKENS.children()),
        first_tokens=ttft[0],
        ttft_s=ttft[1],
        answers=itl[0],
        itl_s=itl[1],
    )


def counted(children: Iterable[tuple[Sequence[str], Tally]]) -> float:
    return sum([tally.value for _, tally in children])


def summed(children: Iterable[tuple[Sequence[str], Distribution]]) -> tuple[int, float]:
    """Return the number and the sum of all observed values."""
    found = [child for _, child in children]
    return sum([sum(child.counts) for child in found]), sum([child.total for child in found])
