"""Background responses: the ones that run here, with the events of each, whether a client listens or not."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

import msgspec

from kvmesh.frontend.responses.metrics import BACKGROUND
from kvmesh.frontend.responses.store import StoredResponse
from kvmesh.protocol.errors import OverloadedError

Key = tuple[str, str]  # owner, response id


class EventLog:
    """The events of one stream, by their sequence number. Any number of readers follow them as they come."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._is_complete = False
        self._more = asyncio.Event()

    def append(self, stream: bytes) -> None:
        """Add the next events."""
        self._events += split_events(stream)
        self._wake()

    def complete(self) -> None:
        self._is_complete = True
        self._wake()

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()

    def after(self, number: int) -> bytes:
        """Return the events after the one with this number."""
        return b"".join(self._events[max(number + 1, 0) :])

    async def follow(self, number: int) -> AsyncIterator[bytes]:
        """Yield the events after the one with this number, until the stream is complete."""
        position = max(number + 1, 0)
        while True:
            if position < len(self._events):
                fresh, position = b"".join(self._events[position:]), len(self._events)
                yield fresh
            elif self._is_complete:
                return
            else:
                await self._more.wait()


def split_events(stream: bytes) -> list[bytes]:
    """Return the single events of a stream: no event holds an empty line."""
    return [event + b"\n\n" for event in stream.split(b"\n\n")[:-1]]


class BackgroundRun:
    """Holds one background response while it runs here."""

    def __init__(self, record: StoredResponse, *, is_stream: bool) -> None:
        self.record = record  # as it is now
        self.log = EventLog() if is_stream else None
        self.is_cancelled = False
        self.is_ending = False  # it is being stored as it ended
        self.ended = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    @property
    def key(self) -> Key:
        return self.record.owner, self.record.id

    def with_response(self, status: str, response: bytes, last_events: bytes = b"") -> StoredResponse:
        """Return the record of the response with another status. One that has ended has all events."""
        record = msgspec.structs.replace(self.record, status=status, response=response)
        if self.log is None or record.is_unfinished:
            return record
        return msgspec.structs.replace(record, events=self.log.after(-1) + last_events)

    async def cancel(self) -> None:
        """Have it end as cancelled unless it has ended already. Return when it is stored."""
        if not self.is_ending and not self.is_cancelled:
            self.is_cancelled = True
            if self.task is not None:
                self.task.cancel()
        await self.ended.wait()


class BackgroundRuns:
    """The background responses that run here, so many at most."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._runs: dict[Key, BackgroundRun] = {}

    def __iter__(self) -> Iterator[Key]:
        return iter(self._runs)

    def __len__(self) -> int:
        return len(self._runs)

    def find(self, key: Key) -> BackgroundRun | None:
        return self._runs.get(key)

    def add(self, run: BackgroundRun) -> None:
        """Add a run that is about to begin. Raise OverloadedError if there are too many."""
        if len(self._runs) >= self._most:
            raise OverloadedError(
                f"{len(self._runs)} background responses are in progress here", hint="try again later"
            )
        self._runs[run.key] = run
        BACKGROUND.set(len(self._runs))

    def start(self, run: BackgroundRun, work: Coroutine[Any, Any, None]) -> None:
        """Do the work of a run that was added, whoever leaves meanwhile."""
        run.task = asyncio.create_task(work, name=f"background {run.record.id}")
        run.task.add_done_callback(lambda _: self.remove(run))
        if run.is_cancelled:
            run.task.cancel()

    def remove(self, run: BackgroundRun) -> None:
        """Forget a run that has ended, or that could not begin."""
        del self._runs[run.key]
        BACKGROUND.set(len(self._runs))
        if run.log is not None:
            run.log.complete()
        run.ended.set()

    async def wait(self) -> None:
        """Return when none is running any more."""
        for run in list(self._runs.values()):
            await run.ended.wait()
