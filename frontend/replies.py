"""Whole HTTP replies: JSON, and failures in OpenAI's shape."""

import logging
from collections.abc import Mapping

import msgspec
from aiohttp import web

from frontend.errors import error_body, http_failure, retry_after_s
from protocol.errors import MeshError

log = logging.getLogger(__name__)


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
