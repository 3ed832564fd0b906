"""Hold the picture of the mesh that viewers see, and say how it differs from the one before. Pure.

The first message to a viewer is the whole picture, each further one what has changed since. All lists have limits.
Texts that come from the mesh are cut, and the page shows them as text and never as HTML.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import WorkerCard
from kvmesh.router.findings import writable

Row = Mapping[str, Any]  # one JSON object

VERSION = 1  # of the messages: the page asks people to load it again when it meets another one
MAX_TEXT_CHARS = 400
MAX_NAME_CHARS = 80
MAX_WORKERS = 5000
MAX_STREAMS = 80  # that a viewer sees at a time, those that have ended included
MAX_DECISIONS = 40
MAX_EVENTS = 200
MAX_STEPS = 120  # of a planner
HISTORY_S = 2.0  # between two points of the curves
MAX_HISTORY = 300  # points: ten minutes


class WorkerLook(Struct, frozen=True, array_like=True):
    """The changing part of a worker. It travels as a list, because there may be a thousand of them."""

    n: int  # the number of the worker in this feed
    state: str  # ok, new, suspect, lapsed, recovering or unfollowed
    requests: int
    queued_tokens: int
    held_blocks: int  # by requests in flight
    cached_blocks: int  # that the router's index knows of


class MeshTotals(Struct, frozen=True, kw_only=True):
    """The figures of the whole mesh. None: not known."""

    inflight: int = 0
    waiting: int = 0  # in the router's queue
    requests_per_s: float = 0.0
    failures_per_s: float = 0.0
    tokens_per_s: float = 0.0
    kv_share: float = 0.0  # of all KV blocks, held by requests in flight
    cached_share: float | None = None
    hit_share: float | None = None  # of the prompt tokens of the requests that ended
    ttft_s: float | None = None
    itl_s: float | None = None
    unseen: int = 0  # requests in flight that are counted and not listed


class Sighting(Struct, kw_only=True):
    """Hold what was observed for one message."""

    at_s: float  # wall clock
    looks: Sequence[WorkerLook] = ()
    totals: MeshTotals = MeshTotals()
    streams: Sequence[Row] = ()  # new and changed ones, each with an `id`
    decisions: Sequence[Row] = ()
    flows: Sequence[tuple[str, str, int, int]] = ()  # pulls that ended: from, to, how many, bytes
    planner: Row | None = None  # None: nothing new


class Picture:
    """The state that every viewer of one frontend shares."""

    def __init__(self, about: Row) -> None:
        """Begin with an empty mesh. `about` says who shows it, and where the figures come from."""
        self._about = about
        self._numbers: dict[WorkerId, int] = {}
        self._workers: dict[int, Row] = {}
        self._next_number = 1
        self._joined: dict[int, None] = {}  # since the last message
        self._gone: list[int] = []
        self._looks: dict[int, WorkerLook] = {}
        self._totals = MeshTotals()
        self._streams: dict[str, Row] = {}
        self._decisions: deque[Row] = deque(maxlen=MAX_DECISIONS)
        self._events: deque[Row] = deque(maxlen=MAX_EVENTS)
        self._last_event = 0  # a viewer that has just come gets some events twice, and tells them by their numbers
        self._new_events: deque[Row] = deque(maxlen=MAX_EVENTS)
        self._history: deque[Sequence[float | None]] = deque(maxlen=MAX_HISTORY)
        self._planner: dict[str, Any] = {}
        self._names: Counter[str] = Counter()  # of the workers that are there
        self._lost_names: dict[str, None] = {}  # of workers that left: they may return

    # --- what happens whether somebody looks or not ------------------------------------------------------------

    def join(self, card: WorkerCard, at_s: float) -> None:
        """Add a worker, or replace its card."""
        number = self._numbers.get(card.worker_id)
        is_new = number is None
        if number is None:
            if len(self._numbers) >= MAX_WORKERS:
                return
            number = self._numbers[card.worker_id] = self._next_number
            self._next_number += 1
        self._workers[number] = worker_row(number, card)
        self._joined[number] = None
        if is_new:
            name = cut(card.name, MAX_NAME_CHARS)
            returns = name in self._lost_names or self._names[name] > 0  # its successor may come before it is lost
            self._lost_names.pop(name, None)
            self._names[name] += 1
            text = f"this {card.role.value} worker has {'come back' if returns else 'joined the mesh'}"
            self.note(at_s, "returned" if returns else "joined", name, text)

    def leave(self, worker_id: WorkerId, at_s: float, why: str = "") -> None:
        """Remove a worker. `why` is "" if it has withdrawn by itself. An unknown worker is no error."""
        number = self._numbers.pop(worker_id, None)
        if number is None:
            return
        name = str(self._workers.pop(number)["name"])
        self._names[name] -= 1
        if not self._names[name]:
            del self._names[name]
        self._looks.pop(number, None)
        self._joined.pop(number, None)
        self._gone.append(number)
        del self._gone[:-MAX_WORKERS]
        self._lost_names[name] = None
        while len(self._lost_names) > MAX_EVENTS:
            del self._lost_names[next(iter(self._lost_names))]
        self.note(at_s, "died" if why else "left", name, why or "it has left the mesh in good order")

    def note(self, at_s: float, kind: str, who: str, text: str) -> None:
        """Add an event to the feed of events."""
        self._last_event += 1
        row = {
            "seq": self._last_event,
            "at": round(at_s, 3),
            "kind": kind,
            "who": cut(who, MAX_NAME_CHARS),
            "text": cut(text, MAX_TEXT_CHARS),
        }
        self._events.append(row)
        self._new_events.append(row)

    def name_of(self, number: int) -> str:
        """Return the name of a worker, "" if it has left."""
        return str(self._workers.get(number, {}).get("name", ""))

    def number_of(self, worker_id: WorkerId) -> int | None:
        return self._numbers.get(worker_id)

    # --- messages ----------------------------------------------------------------------------------------------

    def whole(self, at_s: float) -> dict[str, Any]:
        """Return the first message to a viewer."""
        return {
            "v": VERSION,
            "t": round(at_s, 3),
            "about": self._about,
            "workers": list(self._workers.values()),
            "loads": list(self._looks.values()),
            "totals": self._totals,
            "history": list(self._history),
            "streams": list(self._streams.values()),
            "decisions": list(self._decisions),
            "events": list(self._events),
            "planner": self._planner,
        }

    def advance(self, seen: Sighting) -> dict[str, Any]:
        """Take in what was observed. Return the message with what has changed."""
        found: dict[str, Any] = {"t": round(seen.at_s, 3)}
        if self._joined:
            found["workers"] = [self._workers[number] for number in self._joined]
        if self._gone:
            found["gone"] = self._gone
        self._joined, self._gone = {}, []
        if changed := self._changed(seen.looks):
            found["loads"] = changed
        if seen.totals != self._totals:
            found["totals"] = self._totals = seen.totals
        if seen.streams:
            self._take_streams(seen.streams)
            found["streams"] = seen.streams
        if seen.decisions:
            self._decisions.extend(seen.decisions)
            found["decisions"] = seen.decisions
        if seen.flows:
            found["flows"] = seen.flows
        if self._new_events:
            found["events"] = list(self._new_events)
            self._new_events.clear()
        if seen.planner is not None:
            found["planner"] = self._take_planner(seen.planner)
        if (point := self._point(seen)) is not None:
            found["history"] = [point]
        return found

    def rest(self) -> None:
        """Forget what is of the moment: nobody looks any more."""
        self._streams.clear()
        self._new_events.clear()
        self._joined, self._gone = {}, []

    def _changed(self, looks: Iterable[WorkerLook]) -> list[WorkerLook]:
        before = self._looks
        changed = [look for look in looks if before.get(look.n) != look]
        for look in changed:
            before[look.n] = look
        return changed

    def _take_streams(self, streams: Sequence[Row]) -> None:
        for row in streams:
            self._streams.pop(row["id"], None)
            self._streams[row["id"]] = row
        spare = len(self._streams) - MAX_STREAMS
        if spare > 0:
            oldest = sorted(self._streams, key=lambda name: not self._streams[name].get("outcome"))
            for name in oldest[:spare]:  # those that have ended go first, the oldest of them before the others
                del self._streams[name]

    def _take_planner(self, row: Row) -> Row:
        steps = [*self._planner.get("steps", ()), *row.get("steps", ())][-MAX_STEPS:]
        if row.get("name") != self._planner.get("name"):
            steps = list(row.get("steps", ()))[-MAX_STEPS:]
        self._planner = {**row, "steps": steps}
        return row

    def _point(self, seen: Sighting) -> Sequence[float | None] | None:
        """Return a point of the curves if it is time for one."""
        last = self._history[-1][0] if self._history else None
        if last is not None and 0 <= seen.at_s - last < HISTORY_S:
            return None
        totals = seen.totals
        point = (
            round(seen.at_s, 1),
            totals.kv_share,
            totals.hit_share,
            totals.requests_per_s,
            totals.tokens_per_s,
            totals.inflight,
            totals.waiting,
            totals.cached_share,
        )
        self._history.append(point)
        return point


def worker_row(number: int, card: WorkerCard) -> Row:
    """Return the part of a worker that does not change while it runs."""
    return {
        "n": number,
        "id": cut(card.worker_id, MAX_NAME_CHARS),
        "name": cut(card.name, MAX_NAME_CHARS),
        "role": card.role.value,
        "model": cut(card.model, MAX_NAME_CHARS),
        "blocks": card.total_blocks * card.dp_size,
        "block_tokens": card.block_size,
        "seqs": card.max_num_seqs * card.dp_size,
        "ranks": card.dp_size,
        "host": cut(card.address.rpartition(":")[0], MAX_NAME_CHARS),
        "transfer": cut(card.transfer, MAX_NAME_CHARS),
        "release": cut(card.release, MAX_NAME_CHARS),
    }


def cut(text: str, most: int) -> str:
    """Return a text that JSON can hold, with at most `most` characters."""
    return writable(text if len(text) <= most else text[: most - 1] + "…")
