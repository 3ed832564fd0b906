"""The responses that this frontend stores and runs in the background."""

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import Struct

from kvmesh.frontend.bodies import decode_body, refuse
from kvmesh.frontend.callers import caller_of, sent_key
from kvmesh.frontend.responses import metrics
from kvmesh.frontend.responses.background import BackgroundRuns
from kvmesh.frontend.responses.item_ids import response_of
from kvmesh.frontend.responses.parse import Storage
from kvmesh.frontend.responses.records import conversation_of, items_with
from kvmesh.frontend.responses.store import PreviousResponseError, ResponseStore, StorageError, StoredResponse
from kvmesh.mesh.http.request import Request
from kvmesh.protocol.errors import InvalidRequestError, MeshError

log = logging.getLogger(__name__)

MAX_REFERENCES = 1024  # of one request: each may be a read of the store
MAX_REFERENCED_BYTES = 16 << 20
TURN_BYTES = 1 << 18  # of stored JSON that is read in one turn of the event loop: a millisecond
BEAT_S = 1.0
SWEEP_BEATS = 10
CANCEL_S = 5.0  # for another frontend to notice that its response is to be cancelled
POLL_S = 0.2
CLOSE_S = 5.0  # for what was cut off to be stored


class _GlancedItem(Struct):
    id: Any = None
    type: Any = None
    role: Any = None


class _Glance(Struct):
    """The fields that are looked at before a body is read."""

    previous_response_id: str | None = None
    input: str | list[_GlancedItem] = ""

    def references(self) -> list[str]:
        """Return the ids of the stored items that the input refers to."""
        if isinstance(self.input, str):
            return []
        kinds = ("item_reference", None)
        return [item.id for item in self.input if item.type in kinds and item.role is None and isinstance(item.id, str)]


_glance = msgspec.json.Decoder(_Glance)


def by_response(ids: Sequence[str]) -> dict[str, set[str]]:
    """Return the ids of items by the response that each id names. Raise InvalidRequestError if an id comes twice, or
    if there are too many."""
    if len(ids) > MAX_REFERENCES:
        refuse("input", f"it refers to {len(ids)} stored items, and at most {MAX_REFERENCES} are allowed")
    grouped: dict[str, set[str]] = {}
    for item_id in ids:
        wanted = grouped.setdefault(response_of(item_id) or "", set())
        if item_id in wanted:
            duplicate = f"Duplicate item found with id {item_id[:200]!r}"
            raise InvalidRequestError(duplicate, hint="remove one of the two from your input", param="input")
        wanted.add(item_id)
    grouped.pop("", None)  # ids that were not made here
    return grouped


async def read_in_turns(chain: Sequence[StoredResponse]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return the items of a conversation, by response. Other requests go on while a long one is read."""
    found: list[tuple[str, list[dict[str, Any]]]] = []
    turn_bytes = 0
    for record in chain:
        turn_bytes += len(record.input) + len(record.response)
        if turn_bytes > TURN_BYTES:
            turn_bytes = 0
            await asyncio.sleep(0)
        found += conversation_of([record])
    return found


class KeptResponses:
    """Stores responses and runs background ones, each for the API key that asked for it."""

    def __init__(self, store: ResponseStore, max_background: int, *, is_keyed: bool) -> None:
        """Begin; `is_keyed`: every request has a valid API key. Otherwise all share one space."""
        self.store = store
        self.runs = BackgroundRuns(max_background)
        self._is_keyed = is_keyed

    def owner(self, request: Request) -> str:
        """Return what stands for the API key of a request."""
        caller = caller_of(request)
        if caller is not None and caller.owner:
            return caller.owner
        key = sent_key(request) if self._is_keyed else None
        return hashlib.sha256(b"responses of " + key.encode()).hexdigest() if key else ""

    async def storage_for(self, request: Request) -> Storage:
        """Return the conversation that the body wants to continue, and the stored items that it refers to."""
        try:
            glance = decode_body(request.body, _glance)
        except InvalidRequestError:  # whoever reads the body says what is wrong with it
            return Storage()
        previous, references = glance.previous_response_id, glance.references()
        if previous is None and not references:
            return Storage()
        owner = self.owner(request)
        try:
            earlier = [] if previous is None else await read_in_turns(await self.store.chain(owner, previous))
            return Storage(earlier, await self._referenced(owner, references))
        except PreviousResponseError as error:
            metrics.MISSES.inc()
            return Storage(failure=error)
        except MeshError as error:
            return Storage(failure=error)

    async def _referenced(self, owner: str, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return the stored items with these ids, as far as there are any. Raise InvalidRequestError, StorageError."""
        found: dict[str, dict[str, Any]] = {}
        size_bytes = 0
        for response_id, wanted in by_response(ids).items():
            if (record := await self.store.reuse(owner, response_id)) is None:
                continue
            found |= items_with(wanted, record)
            size_bytes += len(record.response) + len(record.input)
            if size_bytes > MAX_REFERENCED_BYTES:
                limit = f"more than {MAX_REFERENCED_BYTES >> 20} MiB"
                refuse("input", f"the responses that it refers to have {limit}; send previous_response_id")
        if len(found) < len(ids):
            metrics.MISSES.inc()
        return found

    async def keep(self, record: StoredResponse, *, is_update: bool = False) -> None:
        """Store a response. The client has its answer whether or not this succeeds."""
        try:
            await self.store.put(record, is_update=is_update)
        except StorageError as error:
            metrics.STORE_FAILURES.inc()
            log.error("the response %s is not stored: %s", record.id, error)

    async def find(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return a response as it is now."""
        if (run := self.runs.find((owner, response_id))) is not None:
            return run.record
        return await self.store.get(owner, response_id)

    async def cancel(self, record: StoredResponse) -> StoredResponse:
        """End a background response, wherever it runs; return how it ended."""
        if (run := self.runs.find((record.owner, record.id))) is not None:
            await run.cancel()
            return run.record
        if record.is_unfinished:
            await self.store.ask_to_cancel(record.owner, record.id)
            with suppress(TimeoutError):
                async with asyncio.timeout(CANCEL_S):
                    record = await self.wait_for_end(record)
        return record

    async def wait_for_end(self, record: StoredResponse) -> StoredResponse:
        """Return a response once it has ended, wherever it runs."""
        while record.is_unfinished:
            await asyncio.sleep(POLL_S)
            if (found := await self.find(record.owner, record.id)) is None:
                return record
            record = found
        return record

    async def run(self) -> None:
        """Keep the store in order until this is cancelled."""
        beat = 0
        while True:
            await asyncio.sleep(BEAT_S)
            beat += 1
            try:
                await self.beat()
                if beat % SWEEP_BEATS == 0:
                    await self.store.sweep()
            except StorageError as error:
                log.error("%s", error)

    async def beat(self) -> None:
        """Say what is running here, and cancel what other frontends were asked to cancel."""
        for key in await self.store.beat(list(self.runs)):
            if (run := self.runs.find(key)) is not None:
                await run.cancel()

    async def close(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_S):
                await self.runs.wait()
        except TimeoutError:
            log.warning("stopped with %d background responses that are not stored", len(self.runs))
        await self.store.close()
