"""Serve the live page: files that everybody may load, and the feed, which is behind the API key where one is set."""

from collections.abc import Sequence
from functools import partial
from importlib.resources import files

from kvmesh.frontend.callers import check_whole_mesh
from kvmesh.frontend.home import home
from kvmesh.frontend.live.hub import LiveHub
from kvmesh.frontend.whatif.runner import NoAnswer, WhatIfRunner
from kvmesh.mesh.http.request import Reply, ReplyStream, Request, json_reply
from kvmesh.mesh.http.server import Route
from kvmesh.protocol.errors import InvalidRequestError, OverloadedError

EVENTS = "/ui/events"
WHAT_IF = "/ui/whatif"
BUILT = {  # file in frontend/live/built, by path
    "/ui": ("index.html", "text/html; charset=utf-8"),
    "/ui/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/ui/app.css": ("app.css", "text/css; charset=utf-8"),
}
SAFE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
FEED_HEADERS = {"content-type": "text/event-stream", "cache-control": "no-store", "x-accel-buffering": "no"}


def routes(hub: LiveHub, what_if: WhatIfRunner | None = None) -> Sequence[Route]:
    """Return the routes of the live page; without `what_if` it asks no such questions."""
    pages = [Route("GET", path, partial(show_file, *found), is_open=True) for path, found in BUILT.items()]
    asked = [] if what_if is None else [Route("GET", WHAT_IF, partial(show_answer, what_if))]
    return [home("/ui"), *pages, Route("GET", EVENTS, partial(show_events, hub)), *asked]


async def show_file(name: str, content_type: str, request: Request) -> Reply:
    body = files("kvmesh.frontend").joinpath("live", "built", name).read_bytes()
    return Reply(body, content_type=content_type, headers=SAFE_HEADERS)


async def show_answer(what_if: WhatIfRunner, request: Request) -> Reply:
    """Answer the panel of what-if questions. What cannot be answered is no error of the page: it shows the reason."""
    check_whole_mesh(request)
    try:
        return await what_if.handle(request)
    except (InvalidRequestError, OverloadedError) as error:
        return json_reply(NoAnswer(error.message, error.hint))


async def show_events(hub: LiveHub, request: Request) -> ReplyStream:
    """Send what happens for as long as the viewer looks. Raise ForbiddenError, OverloadedError."""
    check_whole_mesh(request)
    hub.check()
    stream = request.open_stream(FEED_HEADERS)
    if request.method != "HEAD":
        await hub.show(stream)
    stream.end()
    return stream
