"""KV pulls beside an engine's steps: each brings the prompt's blocks, or is given up and the prompt computed here."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvmesh.kvcache.transfer.backend import TransferBackend
from kvmesh.kvcache.transfer.offers import check_content
from kvmesh.protocol.errors import MeshError, TransferError
from kvmesh.protocol.ids import RequestId
from kvmesh.protocol.messages import PullReport
from kvmesh.workers.engine import PeerAnswers
from kvmesh.workers.loaded_content import KvContent
from kvmesh.workers.metrics import PEER_PULL_BLOCKS, PEER_PULLS, PULL_BYTES, PULL_SECONDS, PULLS
from kvmesh.workers.peer_pulls import PrefixFetcher
from kvmesh.workers.scheduler import KvPull, PeerLoad, Scheduler

LATE_S = 0.4  # a pull that takes longer than this, and than is usual, has its peer asked
ANSWER_S = 0.8  # time to answer
ASK_AGAIN_S = 0.5
TIMES_USUAL = 4.0  # longer than the pulls so far makes a pull late
TIMES_HOPELESS = 16.0  # ... makes it worth nothing, even from a peer that answers
HOPELESS_S = 2.0  # but no pull is given up earlier for that
FORGET = 0.95  # what a pull leaves of the slowest one before


@dataclass(slots=True)
class PullPace:
    """Track how long pulls take for each token."""

    timeout_s: float
    slowest_token_s: float = 0.0  # of the latest pulls
    pulls: int = 0

    def note(self, tokens: int, took_s: float) -> None:
        """Take a pull that has brought `tokens`."""
        if tokens > 0:
            self.slowest_token_s = max(took_s / tokens, self.slowest_token_s * FORGET)
            self.pulls += 1

    def usual_s(self, tokens: int) -> float:
        return tokens * self.slowest_token_s

    def late_s(self, tokens: int) -> float:
        """Return after how long the peer of a pull is asked."""
        return min(max(LATE_S, TIMES_USUAL * self.usual_s(tokens)), self.timeout_s)

    def limit_s(self, tokens: int) -> float:
        """Return after how long a pull is given up although its peer answers."""
        if not self.pulls:
            return self.timeout_s
        return min(max(HOPELESS_S, TIMES_HOPELESS * self.usual_s(tokens)), self.timeout_s)


log = logging.getLogger(__name__)

GRACE_S = 0.1  # for a late load from a peer: what has come by then is kept


@dataclass(slots=True, eq=False)
class _Running:
    pull: KvPull
    started: float  # time.perf_counter
    tokens: int  # that it is to bring
    task: asyncio.Task[int] | None = None
    timer: asyncio.TimerHandle | None = None
    watch: asyncio.Task[None] | None = None
    given_up: bool = False
    arrived: int = 0  # blocks of a load from a peer that are here
    stops: bool = False  # a load from a peer ends after the piece that is on its way
    is_refused: bool = False  # it offers KV of other weights

    @property
    def request_id(self) -> RequestId:
        return self.pull.sequence.request_id


class Pulls:
    """A pull that takes too long, or whose request was aborted, is given up at once; its blocks are not used again
    before the transfer has ended."""

    def __init__(
        self,
        transfer: TransferBackend | None,
        scheduler: Scheduler,
        timeout_s: float,
        wake: Callable[[], None],
        least_s: Callable[[int], float] | None = None,
        peer_answers: PeerAnswers | None = None,
        fetcher: PrefixFetcher | None = None,
        content: Callable[[], KvContent] = KvContent,
    ) -> None:
        """Pulls of n tokens take `least_s(n)` seconds at least, if it is given. The peers of late pulls are asked.

        `fetcher` brings prefixes from peers. `content` is that of the KV here.
        """
        self._transfer = transfer
        self._scheduler = scheduler
        self._pace = PullPace(timeout_s)
        self._peer_answers = peer_answers
        self._wake = wake  # the scheduler has something new to plan
        self._least_s = least_s
        self._fetcher = fetcher
        self._content = content
        self._waited_for: dict[RequestId, _Running] = {}
        self._running: set[_Running] = set()  # those given up included
        self._reports: dict[RequestId, PullReport] = {}

    def start(self, pull: KvPull) -> None:
        loop = asyncio.get_running_loop()
        request_id = pull.sequence.request_id
        running = _Running(pull, time.perf_counter(), _missing_tokens(pull, self._scheduler.pool.block_size))
        task = running.task = loop.create_task(self._fetch(running), name=f"pull {request_id}")
        limit_s = self._limit_s(running)
        running.timer = loop.call_later(limit_s, self._on_timeout, request_id, limit_s)
        if self._peer_answers is not None and (address := _address_of(pull)):
            running.watch = loop.create_task(self._watch(running, address), name=f"watch pull {request_id}")
        self._waited_for[request_id] = running
        self._running.add(running)
        # A callback, since a task that is cancelled before its first step runs nothing of its own.
        task.add_done_callback(partial(self._on_done, running))

    def abandon(self, request_id: RequestId) -> None:
        """Give the pull of an aborted request up. A request without a pull is no error."""
        if (running := self._waited_for.get(request_id)) is not None:
            self._give_up(running, "cancelled")
        self._reports.pop(request_id, None)

    def take_report(self, request_id: RequestId) -> PullReport | None:
        """Return how the pull of this request ended; once, for its first delta."""
        return self._reports.pop(request_id, None)

    async def close(self) -> None:
        for running in self._running:
            for timer in (running.timer, running.watch):
                if timer is not None:
                    timer.cancel()
            if not running.given_up and running.task is not None:
                running.task.cancel()  # once: twice, and it would not wait for the transfer
        if tasks := [running.task for running in self._running if running.task is not None]:
            await asyncio.wait(tasks)

    async def _fetch(self, running: _Running) -> int:
        if self._transfer is None:
            raise TransferError("this worker has no KV transfer", hint="start it with --kv-transfer")
        due_s = time.monotonic() + (0.0 if self._least_s is None else self._least_s(running.tokens))
        num_bytes = await self._copy(running, self._transfer)
        if (rest_s := due_s - time.monotonic()) > 0:
            await asyncio.sleep(rest_s)
        return num_bytes

    async def _copy(self, running: _Running, transfer: TransferBackend) -> int:
        pull = running.pull
        if isinstance(pull, PeerLoad):
            if self._fetcher is None:
                raise TransferError("this worker pulls from no peers")

            def note(arrived: int) -> bool:
                running.arrived = arrived
                return not running.stops

            return await self._fetcher.fetch(pull, note)
        request = pull.sequence.request
        ticket = request.ticket
        assert ticket is not None, "only a request with a ticket plans a pull"
        try:
            check_content(ticket, self._content().of(request.lora))
        except TransferError:
            running.is_refused = True
            raise
        return await transfer.fetch(ticket, pull.skip, pull.into)

    def _limit_s(self, running: _Running) -> float:
        """Return after how long a pull is given up although its peer answers."""
        limit_s = self._pace.limit_s(running.tokens)
        peers = self._scheduler.peers
        if isinstance(running.pull, PeerLoad) and peers is not None:
            limit_s = min(limit_s, peers.limit_s(len(running.pull.into), self._pace.timeout_s))
        return limit_s

    async def _watch(self, running: _Running, address: str) -> None:
        """Give a late pull up when its peer does not answer on the request plane: it hangs, or cannot be reached."""
        assert self._peer_answers is not None
        wait_s, answers = self._pace.late_s(running.tokens), True
        while answers:
            await asyncio.sleep(wait_s)
            wait_s, answers = ASK_AGAIN_S, await self._peer_answers(address, ANSWER_S)
        if self._waited_for.get(running.request_id) is running:
            self._give_up(running, f"the pull is late, and {address} does not answer")

    def _on_timeout(self, request_id: RequestId, limit_s: float) -> None:
        if (running := self._waited_for.get(request_id)) is None:
            return
        if isinstance(running.pull, PeerLoad) and not running.stops:  # what comes in a moment is kept
            running.stops = True
            loop = asyncio.get_running_loop()
            running.timer = loop.call_later(GRACE_S, self._on_timeout, request_id, limit_s)
            return
        self._give_up(running, f"the pull took longer than {limit_s:.3g} s")

    def _give_up(self, running: _Running, reason: str) -> None:
        running.given_up = True
        if isinstance(running.pull, PeerLoad):
            self._scheduler.load_given_up(running.pull)
        else:
            self._scheduler.pull_given_up(running.pull)
        self._end(running, 0, 0, reason)
        assert running.task is not None
        running.task.cancel()

    def _on_done(self, running: _Running, task: asyncio.Task[int]) -> None:
        self._running.discard(running)
        pull, problem = running.pull, _problem(running, task)
        if running.given_up:
            self._scheduler.pull_let_go(pull)
            self._wake()
            return
        if isinstance(pull, PeerLoad):
            num_blocks = running.arrived
            self._scheduler.load_ended(pull, num_blocks)
        else:
            num_blocks = 0 if problem else len(pull.into)
            self._scheduler.pull_ended(pull.sequence, arrived=not problem)
        self._end(running, 0 if problem else task.result(), num_blocks, problem)

    def _end(self, running: _Running, num_bytes: int, num_blocks: int, problem: str) -> None:
        """End one pull: the request continues or is gone, and nobody waits for the pull any more."""
        for timer in (running.timer, running.watch if running.watch is not asyncio.current_task() else None):
            if timer is not None:
                timer.cancel()
        del self._waited_for[running.request_id]
        duration_s = time.perf_counter() - running.started
        if not problem and num_blocks == len(running.pull.into):
            self._pace.note(running.tokens, duration_s)
        backend = self._transfer.name if self._transfer is not None else "none"
        PULLS.labels(backend, "refused" if running.is_refused else "failed" if problem else "ok").inc()
        PULL_BYTES.labels(backend).inc(num_bytes)
        PULL_SECONDS.labels(backend).observe(duration_s)
        self._reports[running.request_id] = PullReport(backend, num_bytes, num_blocks, duration_s, problem)
        if isinstance(running.pull, PeerLoad):
            self._end_load(running, running.pull, num_blocks, duration_s, problem)
        if problem and not running.pull.sequence.aborted:
            log.warning("request %s computes its prompt itself: %s", running.request_id, problem)
        self._wake()

    def _end_load(self, running: _Running, load: PeerLoad, num_blocks: int, duration_s: float, problem: str) -> None:
        planned = len(load.into)
        outcome = "failed" if problem else "ok" if num_blocks == planned else "part" if num_blocks else "gone"
        PEER_PULLS.labels("late" if running.stops else outcome).inc()
        PEER_PULL_BLOCKS.inc(num_blocks)
        if (peers := self._scheduler.peers) is not None:
            is_late = running.stops or running.given_up
            peers.pull_ended(load.source.worker_id, planned, num_blocks, duration_s, time.monotonic(), is_late=is_late)


def _address_of(pull: KvPull) -> str:
    """Return where the peer of a pull answers."""
    if isinstance(pull, PeerLoad):
        return pull.source.address
    ticket = pull.sequence.request.ticket
    return "" if ticket is None else ticket.address


def _missing_tokens(pull: KvPull, block_size: int) -> int:
    """Return how many tokens a pull is to bring."""
    if isinstance(pull, PeerLoad):
        return len(pull.into) * block_size
    ticket = pull.sequence.request.ticket
    return 0 if ticket is None else ticket.num_tokens - pull.skip * block_size


def _problem(running: _Running, task: asyncio.Task[int]) -> str:
    """Return why a pull brought nothing, "" if it did."""
    if task.cancelled():
        return "cancelled"
    error = task.exception()
    if error is None or isinstance(error, MeshError):
        return str(error or "")
    # A bug met by one pull: the blocks do not have the prompt's KV.
    log.error("the pull of %s failed", running.request_id, exc_info=error)
    return f"{type(error).__name__}: {error}"
