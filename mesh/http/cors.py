"""Say which web pages may call a service: the CORS protocol (https://fetch.spec.whatwg.org/#http-cors-protocol). Pure.

A browser sends a page's request to another origin only after a preflight (an OPTIONS request) has allowed the request,
and lets the page read the reply only if the reply names the page's origin.
"""

import re
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

from kvmesh.mesh.http.request import Request
from kvmesh.protocol.errors import ConfigError

ANY = "*"
PREFLIGHT_MAX_AGE_S = 7200  # the most that Chromium keeps
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:\[[0-9a-f:.]+\]|[^\s/?#@:\[\]*,]+)(?::[0-9]{1,5})?")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_PREFLIGHT_VARY = "Origin, Access-Control-Request-Method, Access-Control-Request-Headers"


class Cors:
    """The origins whose pages may call, and the headers of replies that their scripts may read."""

    def __init__(self, origins: Iterable[str], exposed: Sequence[str] = ()) -> None:
        """Allow `origins`, as `read_origins` returns them."""
        self._origins = frozenset(origins)
        self._exposed = {"access-control-expose-headers": ", ".join(exposed)} if exposed else {}

    def allows(self, origin: str) -> bool:
        """Return whether the pages of `origin` may call; of `*`: whether all pages may."""
        return ANY in self._origins or origin in self._origins

    def headers(self, request: Request) -> dict[str, str]:
        """Return the headers that the reply to `request` needs."""
        vary = {} if ANY in self._origins else {"vary": "Origin"}
        allowed = self._allowed(request)
        return allowed | self._exposed | vary if allowed else vary

    def preflight_headers(self, request: Request, methods: Sequence[str]) -> dict[str, str]:
        """Return the headers of the reply to an OPTIONS request for a path that takes `methods`.

        Any method and any header are allowed, because the reply to the request itself says better what is wrong.
        """
        asked = request.header("access-control-request-method")
        allowed = self._allowed(request)
        if asked is None or not allowed:
            return self.headers(request)
        allowed["access-control-allow-methods"] = ", ".join(sorted({*methods, asked}))
        if names := request.header("access-control-request-headers"):
            allowed["access-control-allow-headers"] = names
        if request.header("access-control-request-private-network") == "true":
            allowed["access-control-allow-private-network"] = "true"
        return allowed | {"access-control-max-age": str(PREFLIGHT_MAX_AGE_S), "vary": _PREFLIGHT_VARY}

    def _allowed(self, request: Request) -> dict[str, str]:
        """Return the headers that allow the page of `request`; none if it is not allowed, or if no page asks.

        Client certificates and cookies may come from the origins that were named, and never from all origins.
        """
        origin = request.header("origin")
        if origin is None:
            return {}
        if ANY in self._origins:
            return {"access-control-allow-origin": ANY}
        if origin in self._origins:
            return {"access-control-allow-origin": origin, "access-control-allow-credentials": "true"}
        return {}


def is_preflight(request: Request) -> bool:
    return request.method == "OPTIONS" and request.header("access-control-request-method") is not None


def read_origins(text: str) -> list[str]:
    """Return the origins in a list with commas, as browsers write them. Raise ConfigError."""
    return [_read_origin(part.strip()) for part in text.split(",") if part.strip()]


def _read_origin(text: str) -> str:
    if text == ANY:
        return text
    origin = text.lower().removesuffix("/")
    if not _ORIGIN.fullmatch(origin):
        raise ConfigError(
            f"{text!r} is no origin of web pages", hint="write scheme, host and port, as https://app.example:8443, or *"
        )
    return origin.removesuffix(_DEFAULT_PORTS.get(urlsplit(origin).scheme, "\n"))
