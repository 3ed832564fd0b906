"""The seam where responses are kept: what a stored response is, and what every store can do."""

import hashlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from kvmesh.protocol.errors import InvalidRequestError, MeshError

MAX_CHAIN = 4096  # responses of one conversation
MAX_CHAIN_BYTES = 16 << 20  # as much as a body may have
UNFINISHED = ("queued", "in_progress")
ABANDONED = "the frontend that ran it has stopped"


class StorageError(MeshError):
    """A store cannot keep a response, for example because the disk is full."""

    code = "storage"


class PreviousResponseError(InvalidRequestError):
    """A conversation cannot be continued from the response that the client names."""

    code = "previous_response_not_found"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint, param="previous_response_id")


class StoredResponse(Struct, frozen=True, kw_only=True):
    """A response with all that its API shows of it later."""

    id: str
    owner: str  # names the API key; another key cannot see it
    status: str
    response: bytes  # the JSON object that the client got
    input: bytes  # the JSON list of its input items
    previous: str | None = None
    is_background: bool = False
    is_stream: bool = False  # a background response with events
    events: bytes = b""  # the stream of a background response that is complete

    @property
    def is_unfinished(self) -> bool:
        return self.status in UNFINISHED


def abandoned(record: StoredResponse) -> StoredResponse:
    """Return the response as failed: whoever ran it is gone."""
    shown: dict[str, Any] = msgspec.json.decode(record.response)
    shown |= {"status": "failed", "error": {"code": "server_error", "message": ABANDONED}}
    return msgspec.structs.replace(record, status="failed", response=msgspec.json.encode(shown))


def name_of(owner: str, response_id: str) -> str:
    """Return the name of a response in a store. A client's id is never a part of a path, and no key can name a
    response of another."""
    return hashlib.sha256(f"{owner}\0{response_id}".encode(errors="surrogatepass")).hexdigest()


class ResponseStore(Protocol):
    """Keeps responses within limits. Every store passes tests/contracts/test_response_store.py.

    Methods raise StorageError if the store fails.
    """

    async def put(self, record: StoredResponse, *, is_update: bool = False) -> None:
        """Keep a response, or what is new of it. Once this returns, every reader of the store sees it.

        An update of a response that was deleted does nothing.
        """
        ...

    async def get(self, owner: str, response_id: str) -> StoredResponse | None: ...

    async def reuse(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return a response, and count it as used."""
        ...

    async def chain(self, owner: str, response_id: str) -> list[StoredResponse]:
        """Return the responses of a conversation, oldest first, and count all of them as used.

        Raise PreviousResponseError if one of them is missing or not complete.
        """
        ...

    async def delete(self, owner: str, response_id: str) -> bool:
        """Return whether there was such a response."""
        ...

    async def ask_to_cancel(self, owner: str, response_id: str) -> None:
        """Ask whoever runs a background response to cancel it; `beat` reports that there."""
        ...

    async def beat(self, running: Collection[tuple[str, str]]) -> Sequence[tuple[str, str]]:
        """Say that these (owner, id) are still running; return those of them that somebody wants cancelled."""
        ...

    async def sweep(self) -> None:
        """Remove what is too old or too much."""
        ...

    async def close(self) -> None: ...


def walk_back(get: Callable[[str], StoredResponse | None], response_id: str) -> list[StoredResponse]:
    """Return a conversation, oldest response first, where `get` finds a response by its id. Raise
    PreviousResponseError."""
    found: list[StoredResponse] = []
    wanted: str | None = response_id
    size_bytes = 0
    while wanted is not None:
        record = get(wanted)
        if record is None:
            raise _missing(response_id, wanted)
        found.append(_finished(record))
        size_bytes += len(record.input) + len(record.response)
        if len(found) > MAX_CHAIN or size_bytes > MAX_CHAIN_BYTES:
            raise PreviousResponseError(
                f"the conversation that ends with {response_id!r} is longer than {MAX_CHAIN} responses or "
                f"{MAX_CHAIN_BYTES >> 20} MiB",
                hint="begin a new one",
            )
        wanted = record.previous
    return found[::-1]


def _missing(asked: str, missing: str) -> PreviousResponseError:
    if asked == missing:
        return PreviousResponseError(f"Previous response with id {asked[:80]!r} not found.")
    return PreviousResponseError(
        f"Previous response with id {asked[:80]!r} not found: it continues {missing[:80]!r}, which is gone",
        hint="send the whole conversation as input",
    )


def _finished(record: StoredResponse) -> StoredResponse:
    if record.status not in ("completed", "incomplete"):
        raise PreviousResponseError(
            f"the response {record.id[:80]!r} is {record.status}", hint="continue from one that is completed"
        )
    return record
