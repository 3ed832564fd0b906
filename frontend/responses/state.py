"""The responses that this frontend stores and runs in the background."""

import asyncio
import hashlib
import logging
from contextlib import suppress

import msgspec
from msgspec import Struct

from frontend.bodies import decode_body
from frontend.responses import metrics
from frontend.responses.background import BackgroundRuns
from frontend.responses.parse import Storage
from frontend.responses.records import conversation_of
from frontend.responses.store import PreviousResponseError, ResponseStore, StorageError, StoredResponse
from frontend.security import sent_key
from mesh.http.request import Request
from protocol.errors import InvalidRequestError, MeshError

log = logging.getLogger(__name__)

BEAT_S = 1.0
SWEEP_BEATS = 10
CANCEL_S = 5.0  # for another frontend to notice that its response is to be cancelled
POLL_S = 0.2
CLOSE_S = 5.0  # for what was cut off to be stored


class _Glance(Struct):
    """The one field that is looked at before a body is read."""

    previous_response_id: str | None = None


_glance = msgspec.json.Decoder(_Glance)


class KeptResponses:
    """Stores responses and runs background ones, each for the API key that asked for it."""

    def __init__(self, store: ResponseStore, max_background: int, *, is_keyed: bool) -> None:
        """Begin; `is_keyed`: every request has a valid API key. Otherwise all share one space."""
        self.store = store
        self.runs = BackgroundRuns(max_background)
        self._is_keyed = is_keyed

    def owner(self, request: Request) -> str:
        """Return what stands for the API key of a request."""
        key = sent_key(request) if self._is_keyed else None
        return hashlib.sha256(b"responses of " + key.encode()).hexdigest() if key else ""

    async def storage_for(self, request: Request) -> Storage:
        """Return the conversation that the body wants to continue."""
        try:
            previous = decode_body(request.body, _glance).previous_response_id
        except InvalidRequestError:  # whoever reads the body says what is wrong with it
            return Storage()
        if previous is None:
            return Storage()
        try:
            return Storage(conversation_of(await self.store.chain(self.owner(request), previous)))
        except PreviousResponseError as error:
            metrics.MISSES.inc()
            return Storage(failure=error)
        except MeshError as error:
            return Storage(failure=error)

    async def keep(self, record: StoredResponse) -> None:
        """Store a response. The client has its answer whether or not this succeeds."""
        try:
            await self.store.put(record)
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
