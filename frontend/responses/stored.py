"""The responses that are stored: retrieve one, whole or as a stream, list its input items, cancel it, delete it."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from kvmesh.frontend.bodies import refuse
from kvmesh.frontend.endpoint import SSE_HEADERS, Endpoint, Services, identified
from kvmesh.frontend.operation import OWN_FAILURES, Operation
from kvmesh.frontend.responses import metrics
from kvmesh.frontend.responses.background import split_events
from kvmesh.frontend.responses.create import send_events
from kvmesh.frontend.responses.shapes import DeletedResponse, Event, ItemList, Response
from kvmesh.frontend.responses.state import KeptResponses
from kvmesh.frontend.responses.store import StoredResponse
from kvmesh.mesh.http.errors import NotFoundError
from kvmesh.mesh.http.request import Reply, ReplyStream, Request, json_reply
from kvmesh.protocol.errors import InvalidRequestError

MAX_PAGE, USUAL_PAGE = 100, 20
_items_decoder = msgspec.json.Decoder(list[dict[str, Any]])


async def retrieve(services: Services, request: Request) -> Reply | ReplyStream:
    """Show a response as it is now, or the events of a background one. Raise NotFoundError, InvalidRequestError."""
    kept, record = await _found(services, request)
    query = request.query
    after = _number(query, "starting_after", -1, least=0)
    if not _flag(query, "stream"):
        return Reply(record.response)
    run = kept.runs.find((record.owner, record.id))
    if run is not None and run.log is not None:
        return await send_events(request, run.log, {}, after)
    may_have_events = record.is_background and record.is_stream
    if may_have_events:
        record = await kept.wait_for_end(record)  # it runs at another frontend
    if not record.events:
        refuse("stream", "only a background response that was created with stream true can be streamed again")
    reply = request.open_stream(SSE_HEADERS)
    reply.end(b"".join(split_events(record.events)[after + 1 :]))
    return reply


async def delete(services: Services, request: Request) -> Reply:
    """Raise NotFoundError."""
    kept, record = await _found(services, request)
    if record.is_unfinished:
        await kept.cancel(record)
    await kept.store.delete(record.owner, record.id)
    return json_reply(DeletedResponse(record.id))


async def cancel(services: Services, request: Request) -> Reply:
    """End a background response; show it as it is if it has ended already. Raise NotFoundError,
    InvalidRequestError."""
    kept, record = await _found(services, request)
    if not record.is_background:
        raise InvalidRequestError("Cannot cancel a synchronous response.", hint="only background responses run on")
    return Reply((await kept.cancel(record)).response)


async def list_input_items(services: Services, request: Request) -> Reply:
    """Show a page of the items that the request brought. Raise NotFoundError, InvalidRequestError."""
    _, record = await _found(services, request)
    items = _items_decoder.decode(record.input)
    return json_reply(page_of(items, request.query))


def page_of(items: Sequence[dict[str, Any]], query: dict[str, str]) -> dict[str, Any]:
    """Return the page of the items that the query asks for, as an `ItemList`. Raise InvalidRequestError."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        refuse("order", f"{order[:20]!r} is neither 'asc' nor 'desc'")
    limit = _number(query, "limit", USUAL_PAGE, least=1, most=MAX_PAGE)
    ordered = list(items) if order == "asc" else list(reversed(items))
    ids = [item["id"] for item in ordered]
    first = _place(ids, query, "after") + 1 if "after" in query else 0
    end = _place(ids, query, "before") if "before" in query else len(ordered)
    page = ordered[first:end][:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": first + len(page) < end,
    }


def _place(ids: Sequence[str], query: dict[str, str], name: str) -> int:
    if (wanted := query[name]) not in ids:
        refuse(name, f"{wanted[:80]!r} is none of the input items")
    return ids.index(wanted)


async def _found(services: Services, request: Request) -> tuple[KeptResponses, StoredResponse]:
    """Return the response that the path names. Raise NotFoundError, also for a response of another API key."""
    response_id = request.params["response_id"]
    kept = services.parts.find(KeptResponses)
    if kept is None:
        raise NotFoundError("no responses are stored here", hint="start the frontend with --responses-store")
    record = await kept.find(kept.owner(request), response_id)
    if record is None:
        metrics.MISSES.inc()
        _not_found(response_id)
    return kept, record


def _not_found(response_id: str) -> NoReturn:
    raise NotFoundError(f"Response with id {response_id[:80]!r} not found.")


# --- the query ----------------------------------------------------------------------------------------


def _flag(query: dict[str, str], name: str) -> bool:
    text = query.get(name, "false")
    if text.lower() not in ("true", "false"):
        refuse(name, f"{text[:20]!r} is neither 'true' nor 'false'")
    return text.lower() == "true"


def _number(query: dict[str, str], name: str, usual: int, *, least: int, most: int = 2**53) -> int:
    if (text := query.get(name)) is None:
        return usual
    is_number = text.isascii() and text.isdigit() and len(text) < 17
    if not is_number or not least <= int(text) <= most:
        refuse(name, f"{text[:20]!r} is not a whole number from {least} to {most}")
    return int(text)


_SWITCH: Mapping[str, Any] = {"type": "boolean", "default": False}
_ID: Mapping[str, Any] = {"type": "string"}
_STREAM_QUERY: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "stream": ("send the events of a background response that was created as a stream", _SWITCH),
    "starting_after": ("begin after the event with this number", {"type": "integer", "minimum": 0}),
}
_PAGE_QUERY: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "limit": ("items in a page", {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": USUAL_PAGE}),
    "order": ("oldest or newest first", {"type": "string", "enum": ["asc", "desc"], "default": "desc"}),
    "after": ("begin after the item with this id", _ID),
    "before": ("end before the item with this id", _ID),
}
_PATH = "/v1/responses/{response_id}"
ENDPOINTS = (
    Endpoint(
        method="GET",
        path=_PATH,
        handler=identified(retrieve, "get"),
        operation=Operation(
            summary="A stored response",
            query=_STREAM_QUERY,
            reply=Response,
            events=(Event,),
            failures=OWN_FAILURES,
        ),
    ),
    Endpoint(
        method="DELETE",
        path=_PATH,
        handler=identified(delete, "del"),
        operation=Operation(summary="Delete a stored response", reply=DeletedResponse, failures=OWN_FAILURES),
    ),
    Endpoint(
        method="POST",
        path=_PATH + "/cancel",
        handler=identified(cancel, "cancel"),
        operation=Operation(summary="Cancel a background response", reply=Response, failures=OWN_FAILURES),
    ),
    Endpoint(
        method="GET",
        path=_PATH + "/input_items",
        handler=identified(list_input_items, "get"),
        operation=Operation(
            summary="The input items of a stored response", query=_PAGE_QUERY, reply=ItemList, failures=OWN_FAILURES
        ),
    ),
)
