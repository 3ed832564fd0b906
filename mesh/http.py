"""What the HTTP servers of the mesh have in common: a listener, bodies, and failures in one shape, OpenAI's."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from protocol.errors import ConfigError, InvalidRequestError, MeshError, OverloadedError

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class BodyTooLargeError(InvalidRequestError):
    code = "body_too_large"


class NotFoundError(InvalidRequestError):
    code = "not_found"


class MethodNotAllowedError(InvalidRequestError):
    code = "method_not_allowed"


# --- failures -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HttpFailure:
    """How one kind of failure looks to an HTTP client."""

    status: int
    type: str
    code: str | None
    retry_after_s: int | None = None


_INVALID = "invalid_request_error"
_INTERNAL = HttpFailure(500, "server_error", "internal")
_BY_CODE = {
    "invalid_request": HttpFailure(400, _INVALID, None),
    "context_length": HttpFailure(400, _INVALID, "context_length_exceeded"),
    "model_not_found": HttpFailure(404, _INVALID, "model_not_found"),
    "not_found": HttpFailure(404, _INVALID, "not_found"),
    "method_not_allowed": HttpFailure(405, _INVALID, "method_not_allowed"),
    "body_too_large": HttpFailure(413, _INVALID, "body_too_large"),
    "overloaded": HttpFailure(429, "rate_limit_error", "overloaded", retry_after_s=1),
    "no_worker": HttpFailure(503, "server_error", "no_worker", retry_after_s=2),
    "unreachable": HttpFailure(503, "server_error", "no_worker", retry_after_s=2),
    "draining": HttpFailure(503, "server_error", "draining", retry_after_s=2),
    "cancelled": HttpFailure(503, "server_error", "cancelled", retry_after_s=2),  # the worker shuts down
    "deadline_exceeded": HttpFailure(504, "server_error", "deadline_exceeded"),
    "peer_lost": HttpFailure(502, "server_error", "peer_lost"),
    "engine": HttpFailure(502, "server_error", "engine"),
    "transfer": HttpFailure(502, "server_error", "transfer"),
}
CODES = frozenset(_BY_CODE)  # of errors that are a client's business


def http_failure(code: str) -> HttpFailure:
    """`code` is that of a MeshError; one that is not a client's business becomes a 500."""
    return _BY_CODE.get(code, _INTERNAL)


def retry_after_s(error: MeshError) -> int | None:
    """When to come back, in whole seconds: what the error says, else what is usual for its kind; None: do not."""
    told = error.retry_after_s if isinstance(error, OverloadedError) else None
    return http_failure(error.code).retry_after_s if told is None else told


def error_body(error: MeshError) -> bytes:
    """OpenAI's error object as JSON."""
    failure = http_failure(error.code)
    content: dict[str, Any] = {
        "message": str(error),
        "type": failure.type,
        "param": error.param if isinstance(error, InvalidRequestError) else None,
        "code": failure.code,
    }
    return msgspec.json.encode({"error": content})


@web.middleware
async def reply_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The one place where a failure that no handler has answered for becomes a reply."""
    try:
        return await handler(request)
    except MeshError as error:
        return error_reply(error)
    except web.HTTPException as error:
        allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
        return error_reply(_of_http(request, error), allow)
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return error_reply(MeshError("the server failed", hint="see its log"))


def _of_http(request: web.Request, error: web.HTTPException) -> MeshError:
    """aiohttp's own refusals in our words."""
    match error:
        case web.HTTPMethodNotAllowed():
            return MethodNotAllowedError(f"{request.path} does not take {request.method}")
        case web.HTTPNotFound():
            return NotFoundError(f"there is no {request.path} here", hint="see docs/api.md")
    return InvalidRequestError(f"bad request: {error.reason}")


# --- replies and bodies -------------------------------------------------------------------------------


def json_reply(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def error_reply(error: MeshError, headers: Mapping[str, str] | None = None) -> web.Response:
    failure = http_failure(error.code)
    merged = dict(headers or {})
    if (seconds := retry_after_s(error)) is not None:
        merged["Retry-After"] = str(seconds)
    if failure.status >= 500:
        log.warning("replied %d: %s", failure.status, error)
    return web.Response(status=failure.status, body=error_body(error), content_type="application/json", headers=merged)


async def live(request: web.Request) -> web.Response:
    """Whether the process runs at all."""
    return json_reply({"status": "live"})


async def show_metrics(request: web.Request) -> web.Response:
    return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})


async def read_body(request: web.Request) -> bytes:
    """Raises BodyTooLargeError, without reading on, and InvalidRequestError."""
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise BodyTooLargeError(
            f"the request body is larger than {request.client_max_size} bytes", hint="send less"
        ) from error
    except web.RequestPayloadError as error:
        raise InvalidRequestError(f"the request body cannot be read: {error}") from error


# --- listening ----------------------------------------------------------------------------------------


@asynccontextmanager
async def listening(app: web.Application, host: str, port: int, *, advertise_host: str = "") -> AsyncIterator[str]:
    """Serve as long as the block runs; gives the URL. A client that leaves cancels its handler.

    Port 0 takes a free one. Raises ConfigError if the address cannot be had.
    """
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port, backlog=1024)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror}", hint="choose another port, or --host"
            ) from error
        shown = advertise_host or host
        yield f"http://{f'[{shown}]' if ':' in shown else shown}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
