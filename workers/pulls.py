"""KV pulls beside an engine's steps: each brings the prompt's blocks, or is given up and the prompt computed here."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvcache.transfer.backend import TransferBackend
from protocol.errors import MeshError, TransferError
from protocol.ids import RequestId
from protocol.messages import PullReport
from workers.engine import PeerAnswers
from workers.metrics import PULL_BYTES, PULL_SECONDS, PULLS
from workers.pull_pace import ANSWER_S, ASK_AGAIN_S, PullPace
from workers.scheduler import KvPull, Scheduler

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Running:
    pull: KvPull
    started: float  # time.perf_counter
    task: asyncio.Task[int]
    tokens: int  # that it is to bring
    timer: asyncio.TimerHandle
    watch: asyncio.Task[None] | None = None
    given_up: bool = False

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
    ) -> None:
        """Pulls of n tokens take `least_s(n)` seconds at least, if it is given. The peers of late pulls are asked."""
        self._transfer = transfer
        self._scheduler = scheduler
        self._pace = PullPace(timeout_s)
        self._peer_answers = peer_answers
        self._wake = wake  # the scheduler has something new to plan
        self._least_s = least_s
        self._waited_for: dict[RequestId, _Running] = {}
        self._running: set[_Running] = set()  # those given up included
        self._reports: dict[RequestId, PullReport] = {}

    def start(self, pull: KvPull) -> None:
        loop = asyncio.get_running_loop()
        request_id = pull.sequence.request_id
        task = loop.create_task(self._fetch(pull), name=f"pull {request_id}")
        tokens = self._missing_tokens(pull)
        limit_s = self._pace.limit_s(tokens)
        timer = loop.call_later(limit_s, self._on_timeout, request_id, limit_s)
        running = _Running(pull, time.perf_counter(), task, tokens, timer)
        if self._peer_answers is not None and pull.sequence.request.ticket is not None:
            address = pull.sequence.request.ticket.address
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
            running.timer.cancel()
            if running.watch is not None:
                running.watch.cancel()
            if not running.given_up:  # it is cancelled already; twice, and it would not wait for the transfer
                running.task.cancel()
        if self._running:
            await asyncio.wait([running.task for running in self._running])

    async def _fetch(self, pull: KvPull) -> int:
        ticket = pull.sequence.request.ticket
        assert ticket is not None
        if self._transfer is None:
            raise TransferError("this worker has no KV transfer", hint="start it with --kv-transfer")
        if self._least_s is None:
            return await self._transfer.fetch(ticket, pull.skip, pull.into)
        due_s = time.monotonic() + self._least_s(self._missing_tokens(pull))
        num_bytes = await self._transfer.fetch(ticket, pull.skip, pull.into)
        if (rest_s := due_s - time.monotonic()) > 0:
            await asyncio.sleep(rest_s)
        return num_bytes

    def _missing_tokens(self, pull: KvPull) -> int:
        ticket = pull.sequence.request.ticket
        return 0 if ticket is None else ticket.num_tokens - pull.skip * self._scheduler.pool.block_size

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
        if (running := self._waited_for.get(request_id)) is not None:
            self._give_up(running, f"the pull took longer than {limit_s:.3g} s")

    def _give_up(self, running: _Running, reason: str) -> None:
        running.given_up = True
        self._scheduler.pull_given_up(running.pull)
        self._end(running, 0, reason)
        running.task.cancel()

    def _on_done(self, running: _Running, task: asyncio.Task[int]) -> None:
        self._running.discard(running)
        problem = _problem(running, task)
        if running.given_up:
            self._scheduler.pull_let_go(running.pull)
            self._wake()
            return
        self._scheduler.pull_ended(running.pull.sequence, arrived=not problem)
        self._end(running, 0 if problem else task.result(), problem)

    def _end(self, running: _Running, num_bytes: int, problem: str) -> None:
        """End one pull: the request continues or is gone, and nobody waits for the pull any more."""
        running.timer.cancel()
        if running.watch is not None and running.watch is not asyncio.current_task():
            running.watch.cancel()
        del self._waited_for[running.request_id]
        duration_s = time.perf_counter() - running.started
        if not problem:
            self._pace.note(running.tokens, duration_s)
        backend = self._transfer.name if self._transfer is not None else "none"
        PULLS.labels(backend, "failed" if problem else "ok").inc()
        PULL_BYTES.labels(backend).inc(num_bytes)
        PULL_SECONDS.labels(backend).observe(duration_s)
        num_blocks = 0 if problem else len(running.pull.into)
        self._reports[running.request_id] = PullReport(backend, num_bytes, num_blocks, duration_s, problem)
        if problem and not running.pull.sequence.aborted:
            log.warning("request %s computes its prompt itself: %s", running.request_id, problem)
        self._wake()


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
