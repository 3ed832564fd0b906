"""Send the picture of the mesh to those who look at it. While nobody does, nothing is computed and no timer runs."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from kvmesh.frontend.live.looking import CounterWatch, Look, distant_look
from kvmesh.frontend.live.picture import Picture, Row, Sighting, WorkerLook
from kvmesh.frontend.live.planners import PlannerFollower
from kvmesh.frontend.live.streams import RequestWatch
from kvmesh.frontend.timeline import Timelines
from kvmesh.frontend.whatif.recent import RecentRequests
from kvmesh.mesh.http.request import ReplyStream
from kvmesh.protocol.errors import OverloadedError
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import PlannerStep, WorkerCard
from kvmesh.router.feeds import WorkerFeed

log = logging.getLogger(__name__)

EVERY_S = 0.5  # between two messages
MAX_VIEWERS = 16  # of one frontend; more are refused
SLOW_MESSAGES = 20  # a viewer that has not read for so many is dropped
FAILURES_S = 5.0  # between two events for failures of one worker
MAX_FAILED = 1000  # workers
UNWELL = {
    "lapsed": "its lease has ended; it gets work for as long as it answers at its address",
    "suspect": "it has failed a request; others are preferred for a moment",
    "unfollowed": "its KV events cannot be followed, so its cache counts as empty",
}


class Dispatches(Protocol):
    """The part of the dispatcher that lets its requests be followed."""

    wants_reasons: Callable[[], bool] | None


class Viewer:
    """One page, or one `kvmesh top`, that looks."""

    def __init__(self, stream: ReplyStream) -> None:
        self.stream = stream
        self.ended = asyncio.Event()
        self.full_for = 0  # messages for which it has not read
        self.has_whole = False


class LiveHub:
    """Builds each message once, for all viewers together."""

    def __init__(
        self,
        picture: Picture,
        workers: WorkerFeed,
        dispatcher: Dispatches,
        timelines: Timelines,
        inflight: Callable[[], int],
        stop: asyncio.Event,
    ) -> None:
        """Show the workers and the requests that `dispatcher` runs, until `stop`. `inflight` counts the requests."""
        self._picture = picture
        self._workers = workers
        self._stop = stop
        self._dispatcher = dispatcher
        self._timelines = timelines
        self._inflight = inflight
        self._cards: dict[WorkerId, WorkerCard] = {}
        self._states: dict[int, str] = {}  # of workers that are not well
        self._failed_s: dict[str, float] = {}  # when a failure of a worker was told last
        self._counters = CounterWatch()
        self._viewers: set[Viewer] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._requests: RequestWatch | None = None
        self._stopping: set[asyncio.Task[None]] = set()
        self.look: Look = distant_look(self.in_flight_by_worker)
        self.planners: PlannerFollower | None = None
        self.recent: RecentRequests | None = None  # what-if questions are about them
        self._forget: Callable[[], None] | None = None
        workers.listen(self._join, self._leave)

    @property
    def num_viewers(self) -> int:
        return len(self._viewers)

    @property
    def is_at_rest(self) -> bool:
        """Return whether nothing runs: nobody looks."""
        return self._timer is None and self._requests is None

    def in_flight_by_worker(self) -> Mapping[WorkerId, int]:
        """Return how many of the followed requests each worker decodes."""
        return {} if self._requests is None else self._requests.by_worker()

    def failed(self, worker: str, reason: str) -> None:
        """Note that a worker has failed a request. Of several within FAILURES_S the first is told."""
        now = time.monotonic()
        if worker not in self._failed_s and len(self._failed_s) >= MAX_FAILED:
            self._failed_s.clear()
        if now - self._failed_s.get(worker, -FAILURES_S) >= FAILURES_S:
            self._failed_s[worker] = now
            self._picture.note(time.time(), "failed", worker, f"has failed requests: {reason}")

    # --- viewers -----------------------------------------------------------------------------------------------

    async def show(self, stream: ReplyStream) -> None:
        """Send messages to a viewer until it leaves, is dropped, or the frontend stops."""
        viewer = Viewer(stream)
        self._viewers.add(viewer)
        try:
            if self._timer is None:
                self._begin()
            self._send(viewer, b"")
            await until_either(viewer.ended, self._stop)
        finally:
            self._viewers.discard(viewer)
            if not self._viewers:
                self._rest()

    def check(self) -> None:
        """Raise OverloadedError if no further viewer is taken."""
        if self._stop.is_set() or len(self._viewers) >= MAX_VIEWERS:
            raise OverloadedError(
                f"{len(self._viewers)} viewers look already", hint="close a page that nobody reads", retry_after_s=5
            )

    async def close(self) -> None:
        """Stop following planners."""
        if self._stopping:
            await asyncio.wait(self._stopping)
        if self.planners is not None:
            await self.planners.stop()

    # --- messages ----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin to compute: the first viewer has come."""
        self._picture.rest()
        self._requests = RequestWatch(self._timelines)
        self._forget = None if self.recent is None else self.recent.watch()
        self._dispatcher.wants_reasons = self._requests.wants_reasons
        self._counters.forget()
        if self.planners is not None:
            self.planners.start()
        self._picture.advance(self._see())
        self._plan()

    def _rest(self) -> None:
        """Compute nothing any more: the last viewer has left."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._dispatcher.wants_reasons = None
        if self._requests is not None:
            self._requests.close()
            self._requests = None
        if self._forget is not None:
            self._forget()
            self._forget = None
        self._picture.rest()
        if self.planners is not None:
            stopping = asyncio.create_task(self.planners.stop(), name="live page: stop following planners")
            self._stopping.add(stopping)
            stopping.add_done_callback(self._stopping.discard)

    def _plan(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(EVERY_S, self._tick)

    def _tick(self) -> None:
        self._plan()
        try:
            message = self._event("change", self._picture.advance(self._see()))
        except Exception:  # a page must not stay blank for ever because of one message
            log.exception("a message of the live page cannot be made")
            return
        for viewer in list(self._viewers):
            self._send(viewer, message)

    def _send(self, viewer: Viewer, message: bytes) -> None:
        """Send a message. A viewer that does not read misses some: it then gets the whole picture, or is dropped."""
        if viewer.ended.is_set():
            return
        if not viewer.stream.is_full:
            if not viewer.has_whole:
                message = self._whole()
            viewer.full_for, viewer.has_whole = 0, True
            viewer.stream.write(message)
            return
        viewer.full_for += 1
        viewer.has_whole = False
        if viewer.full_for >= SLOW_MESSAGES:
            viewer.stream.abort()
            viewer.ended.set()

    def _whole(self) -> bytes:
        return self._event("whole", self._picture.whole(time.time()) | {"every_s": EVERY_S})

    def _event(self, name: str, message: Row) -> bytes:
        return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(message))

    def _see(self) -> Sighting:
        """Look at everything."""
        requests = self._requests
        assert requests is not None
        requests.num_workers = len(self._cards)
        lapsed = self._workers.lapsed()
        mesh = self.look(self._cards.values(), self._picture.number_of, lapsed)
        taken, inflight = requests.take(), self._inflight()
        at_s = time.time()
        self._note_health(at_s, mesh.looks)
        return Sighting(
            at_s=at_s,
            looks=mesh.looks,
            totals=self._counters.totals(mesh, inflight, taken.tokens, max(0, inflight - requests.num_listed)),
            streams=taken.streams,
            decisions=taken.decisions,
            flows=taken.flows,
            planner=None if self.planners is None else self.planners.take(),
        )

    def _note_health(self, at_s: float, looks: Sequence[WorkerLook]) -> None:
        """Tell of workers that are not well any more, and of those that are again."""
        found = {look.n: look.state for look in looks if look.state in UNWELL}
        for number, state in found.items():
            if self._states.get(number) != state:
                self._picture.note(at_s, state, self._picture.name_of(number), UNWELL[state])
        for number in self._states.keys() - found.keys():
            if name := self._picture.name_of(number):
                self._picture.note(at_s, "well", name, "this worker is well again")
        self._states = found

    # --- workers and planners ----------------------------------------------------------------------------------

    def _join(self, card: WorkerCard) -> None:
        self._cards[card.worker_id] = card
        self._picture.join(card, time.time())

    def _leave(self, worker_id: WorkerId) -> None:
        self._cards.pop(worker_id, None)
        self._picture.leave(worker_id, time.time(), self._workers.loss)

    def planned(self, step: PlannerStep) -> None:
        """Note a step of the planner that has changed something, or could not."""
        done = f"could not be done: {step.error}" if step.error else "; ".join(step.reasons)
        text = f"{step.prefill.ordered} prefill and {step.decode.ordered} decode workers are ordered: {done}"
        self._picture.note(step.ts_s, "planner", "planner", text)


async def until_either(*events: asyncio.Event) -> None:
    """Wait until one of the events is set."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
