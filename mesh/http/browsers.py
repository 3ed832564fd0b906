"""Refuse what web pages of strangers make a browser send to a port that asks for no key. Pure.

Two rules, because a browser sends requests of two kinds for such a page:

- DNS rebinding: the page's own name suddenly leads to this port. The `Host` header then holds that name, which the
  attacker has registered in public DNS. So the names that nobody can register there are served: IP addresses, names of
  one label (compose services, hosts of a local network), and names below `RESERVED`. The operator allows others.
- A request to another origin: `Origin` or `Sec-Fetch-Site` says so, and no script can change them. Such a request is
  served for the pages of `--cors-origins` alone.

Programs that are no browsers send neither header, and need no setting.
"""

import re
import socket
from collections.abc import Iterable, Sequence
from typing import Annotated

from msgspec import Meta

from kvmesh.mesh.http.cors import Cors
from kvmesh.mesh.http.errors import ForbiddenError, UnsupportedTypeError
from kvmesh.protocol.errors import ConfigError

AllowedHosts = Annotated[  # the type of a setting
    str,
    Meta(
        description="further names for this HTTP port while it asks for no key: llm.example.com,*.example.com; *: all. "
        "IP addresses, own names, names without a dot and those of a cluster need not be here"
    ),
]
Headers = Sequence[tuple[str, str]]
ANY = "*"
# Top-level names that public DNS does not have: RFC 6761, ICANN's .internal, and the service names of Kubernetes.
RESERVED = (".localhost", ".internal", ".svc", ".svc.cluster.local")
MOST_KNOWN = 256
_READ = frozenset({"host", "origin", "sec-fetch-site"})
_PATTERN = re.compile(r"(?:\*\.)?[a-z0-9_](?:[a-z0-9_.-]*[a-z0-9_])?")
_DEFAULT_PORTS = {"http://": ":80", "https://": ":443"}
_FROM_HERE = ("same-origin", "none")  # none: a person has typed the address


class BrowserPolicy:
    """Decides by the head of a request whether it is served."""

    def __init__(self, allowed: str, own_names: Iterable[str], cors: Cors | None, *, checks_host: bool = True) -> None:
        """Take `allowed` as an `AllowedHosts`, the names of this host, and the pages of other origins that may call.

        Raise ConfigError for a bad name in `allowed`.
        """
        exact, self._suffixes = _read_allowed(allowed)
        self._exact = exact | {name.lower() for name in own_names}
        self._checks_host = checks_host and ANY not in exact
        self._cors = cors
        self._known: set[str] = set()  # values of Host that are allowed: clients send few different ones

    def check(self, method: str, headers: Headers) -> None:
        """Raise ForbiddenError or UnsupportedTypeError. The names in `headers` are in lower case."""
        origin = site = None
        for name, value in headers:
            if name in _READ:
                if name == "origin":
                    origin = value
                elif name == "sec-fetch-site":
                    site = value
                elif value not in self._known and self._checks_host:
                    self._check_host(value)
        if origin is not None or site is not None:
            self._check_page(method, dict(headers), origin, site)

    def _check_host(self, value: str) -> None:
        name = _name_of(value)
        if not (name in self._exact or is_unregistrable(name) or name.endswith(self._suffixes)):
            raise ForbiddenError(
                f"the Host header is {value[:200]!r}, and clients without an API key may not use that name here",
                hint=f"if the name is yours, add {name[:200]} to --allowed-hosts, or ask for keys",
            )
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        self._known.add(value)

    def _check_page(self, method: str, fields: dict[str, str], origin: str | None, site: str | None) -> None:
        if not self._is_allowed(fields.get("host", ""), origin, site) and not _is_visit(method, fields, origin):
            raise ForbiddenError(
                f"a web page of {origin or 'another origin'!r} may not use this port",
                hint="add its origin to the frontend's --cors-origins, if the page is yours",
            )
        if origin is not None and _has_body(fields) and not _is_json(given := fields.get("content-type", "")):
            raise UnsupportedTypeError(
                f"a web page has sent a body of the type {given[:100]!r}", hint="send content-type: application/json"
            )

    def _is_allowed(self, host: str, origin: str | None, site: str | None) -> bool:
        if origin is not None and self._cors is not None and self._cors.allows(origin):
            return True
        if site is not None:
            return site in _FROM_HERE
        return origin is not None and _authority_of(origin) == _without_default_port(origin, host.lower())


def policy_of(allowed: str, addresses: Iterable[str], cors: Cors | None, *, is_tls: bool) -> BrowserPolicy | None:
    """Return the policy of an open port at `addresses`; None if all pages may call. Raise ConfigError.

    With TLS a browser itself compares the name that leads here with the certificate.
    """
    if cors is not None and cors.allows(ANY):
        return None
    return BrowserPolicy(allowed, own_names(*addresses), cors, checks_host=not is_tls)


def own_names(*addresses: str) -> list[str]:
    """Return the names of this host, as it knows them without asking anybody, and those that settings give it."""
    host = socket.gethostname()
    return [host, f"{host}.local", *addresses]


def is_unregistrable(name: str) -> bool:
    """Return whether nobody can have this name, in lower case and without a port, in public DNS."""
    last = name[name.rfind(".") + 1 :]
    is_address = name.startswith("[") or last.isdigit()  # no top-level domain is a number
    return is_address or "." not in name or name.endswith(RESERVED)


def _name_of(host: str) -> str:
    """Return the name in a Host header, in lower case, without its port and the dot of the root."""
    if host.startswith("["):
        return host.lower()
    return host.partition(":")[0].lower().removesuffix(".")


def _read_allowed(text: str) -> tuple[set[str], tuple[str, ...]]:
    """Return the whole names, and the ends of names (`.example.com`) that are allowed. Raise ConfigError."""
    exact: set[str] = set()
    suffixes: list[str] = []
    for name in filter(None, (part.strip().lower() for part in text.split(","))):
        if name != ANY and not _PATTERN.fullmatch(name):
            raise ConfigError(
                f"{name!r} in --allowed-hosts is no name of a host",
                hint="write llm.example.com, *.example.com or *, without scheme and port",
            )
        if name.startswith("*."):
            suffixes.append(name[1:])
        else:
            exact.add(name)
    return exact, tuple(suffixes)


def _is_visit(method: str, fields: dict[str, str], origin: str | None) -> bool:
    """Return whether a person has followed a link to a page here, as to the live page: the other page reads nothing."""
    is_visit = fields.get("sec-fetch-mode") == "navigate" and fields.get("sec-fetch-dest") == "document"
    return is_visit and origin is None and method in ("GET", "HEAD")


def _has_body(fields: dict[str, str]) -> bool:
    return "transfer-encoding" in fields or fields.get("content-length", "0").strip("0") != ""


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _authority_of(origin: str) -> str:
    """Return host and port of an origin, as browsers write it; "" is no origin with a host, as `null`."""
    return origin.partition("://")[2].lower()


def _without_default_port(origin: str, host: str) -> str:
    for scheme, port in _DEFAULT_PORTS.items():
        if origin.startswith(scheme):
            return host.removesuffix(port)
    return host
