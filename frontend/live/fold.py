"""Fold the messages of the live page's feed into the mesh as it is now, as the page does it. Pure.

`kvmesh top` reads the feed with it. Messages come from another process, so each is checked field by field.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from kvmesh.frontend.live.picture import (
    MAX_DECISIONS,
    MAX_EVENTS,
    MAX_STEPS,
    MAX_STREAMS,
    MAX_WORKERS,
    VERSION,
    MeshTotals,
    WorkerLook,
)
from kvmesh.protocol.errors import WireError
from kvmesh.protocol.messages import UNREADABLE
from kvmesh.protocol.version import NEIGHBOURS

_Text = Annotated[str, Meta(max_length=1000)]


class ShownWorker(Struct):
    """A worker of the feed, with its load."""

    n: int
    name: _Text
    role: _Text
    model: _Text
    blocks: int
    seqs: int
    look: WorkerLook | None = None


class ShownStream(Struct):
    """A request of the feed."""

    id: _Text
    model: _Text
    at: float
    isl: int
    osl: int
    most: int
    phase: _Text
    cached: int = 0
    prefill: _Text = ""
    decode: _Text = ""
    outcome: _Text = ""


class ShownDecision(Struct):
    """A decision of the feed, in one sentence."""

    at: float
    why: _Text


class ShownEvent(Struct):
    """An event of the feed."""

    seq: int
    at: float
    kind: _Text
    who: _Text
    text: _Text


class ShownStep(Struct):
    """A step of the planner."""

    at: float
    prefill: tuple[int, int, int, int]  # ready, starting, draining, ordered
    decode: tuple[int, int, int, int]
    rps: float | None = None
    forecast: float | None = None
    why: Annotated[tuple[_Text, ...], Meta(max_length=64)] = ()
    applied: bool = False
    error: _Text = ""


class ShownPlanner(Struct):
    """The planner, with its new steps."""

    name: _Text = ""
    connector: _Text = ""
    problem: _Text = ""
    steps: Annotated[tuple[ShownStep, ...], Meta(max_length=1000)] = ()


class FeedMessage(Struct):
    """A message of the feed: the whole picture, or what has changed."""

    t: float
    v: int = VERSION
    about: dict[str, _Text] = {}
    workers: Annotated[tuple[ShownWorker, ...], Meta(max_length=100_000)] = ()
    gone: tuple[int, ...] = ()
    loads: Annotated[tuple[WorkerLook, ...], Meta(max_length=100_000)] = ()
    totals: MeshTotals | None = None
    streams: tuple[ShownStream, ...] = ()
    decisions: tuple[ShownDecision, ...] = ()
    flows: tuple[tuple[_Text, _Text, int, int], ...] = ()
    events: tuple[ShownEvent, ...] = ()
    planner: ShownPlanner | None = None


_decoder = msgspec.json.Decoder(FeedMessage)


def read_message(data: bytes) -> FeedMessage:
    """Return a message of the feed. Raise WireError."""
    try:
        message = _decoder.decode(data)
    except UNREADABLE as error:
        raise WireError(f"the feed of the live page cannot be read: {error}", hint=NEIGHBOURS) from error
    if message.v != VERSION:
        raise WireError(f"the feed has version {message.v}, expected was {VERSION}", hint=NEIGHBOURS)
    return message


class ShownMesh:
    """The mesh as a viewer knows it."""

    def __init__(self) -> None:
        self.about: Mapping[str, Any] = {}
        self.workers: dict[int, ShownWorker] = {}
        self.totals = MeshTotals()
        self.streams: dict[str, ShownStream] = {}
        self.decisions: list[ShownDecision] = []
        self.events: list[ShownEvent] = []
        self.flows: tuple[tuple[str, str, int, int], ...] = ()
        self.planner = ShownPlanner()

    def take(self, kind: str, message: FeedMessage) -> None:
        """Take in a message: `whole` replaces all that is known, `change` adds to it."""
        if kind == "whole":
            self.__init__()  # type: ignore[misc]
            self.about = message.about
        for worker in message.workers[:MAX_WORKERS]:
            known = self.workers.get(worker.n)
            worker.look = None if known is None else known.look
            self.workers[worker.n] = worker
        for number in message.gone:
            self.workers.pop(number, None)
        for look in message.loads:
            if (loaded := self.workers.get(look.n)) is not None:
                loaded.look = look
        self.totals = message.totals or self.totals
        self.flows = message.flows
        for stream in message.streams:
            self.streams.pop(stream.id, None)
            self.streams[stream.id] = stream
        self._forget_streams()
        newest = self.events[-1].seq if self.events else 0
        self.decisions = [*self.decisions, *message.decisions][-MAX_DECISIONS:]
        self.events = [*self.events, *(event for event in message.events if event.seq > newest)][-MAX_EVENTS:]
        if message.planner is not None:
            earlier = self.planner.steps if self.planner.name == message.planner.name else ()
            self.planner = message.planner
            self.planner.steps = (*earlier, *message.planner.steps)[-MAX_STEPS:]

    def _forget_streams(self) -> None:
        spare = len(self.streams) - MAX_STREAMS
        if spare > 0:
            oldest = sorted(self.streams, key=lambda name: not self.streams[name].outcome)
            for name in oldest[:spare]:
                del self.streams[name]

    def listed(self) -> list[ShownStream]:
        """Return the requests: those in flight first, the newest of each first."""
        return sorted(self.streams.values(), key=lambda stream: (bool(stream.outcome), -stream.at))
