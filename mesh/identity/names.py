"""Name the members of a mesh. Pure: a certificate's fields in, an identity out.

The subject alternative name of a member's certificate is the URI spiffe://kvmesh/<namespace>/<role>/<name>.
"""

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvmesh.protocol.errors import IdentityError

SCHEME = "spiffe://kvmesh/"
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,126}[A-Za-z0-9])?")


class MeshRole(StrEnum):
    """Name what a member of the mesh does. The rights of each role are in mesh/identity/rights.py."""

    FRONTEND = "frontend"
    ROUTER = "router"
    WORKER = "worker"
    PLANNER = "planner"
    GATEWAY = "gateway"  # asks a router or an endpoint picker for placements
    OPERATOR = "operator"  # people and their commands: explain, doctor, kvmesh up
    OBSERVER = "observer"  # reads metrics: Prometheus


@dataclass(frozen=True, slots=True)
class Identity:
    """A member of a mesh. All members of one mesh have the same namespace."""

    namespace: str
    role: MeshRole
    name: str

    @property
    def uri(self) -> str:
        return f"{SCHEME}{self.namespace}/{self.role}/{self.name}"

    def __str__(self) -> str:
        return f"{self.role} {self.name} of {self.namespace}"

    def stands_for(self, name: str) -> bool:
        """Tell if a card called `name` may be this member's: the same name, or this name, a dash and more.

        So the copies of one deployment, and the workers of one process, can share a certificate. A member called like
        its role stands for every service of the role.
        """
        return name == self.name or name.startswith(f"{self.name}-") or self.name == self.role.value


def identity_of_uri(uri: str) -> Identity:
    """Read a member's URI. Raises IdentityError."""
    parts = uri.removeprefix(SCHEME).split("/") if uri.startswith(SCHEME) else []
    if len(parts) != 3 or not all(_NAME.fullmatch(part) for part in parts):
        raise IdentityError(
            f"{uri[:200]!r} names no member of a mesh",
            hint=f"expected {SCHEME}<namespace>/<role>/<name>; `kvmesh certs issue` writes such certificates",
        )
    namespace, role, name = parts
    try:
        return Identity(namespace, MeshRole(role), name)
    except ValueError:
        known = ", ".join(MeshRole)
        raise IdentityError(f"there is no role {role[:80]!r}", hint=f"a member is one of: {known}") from None


def check_name(name: str, what: str) -> None:
    """Raise IdentityError if `name` cannot stand in a member's URI."""
    if not _NAME.fullmatch(name):
        raise IdentityError(
            f"{name[:200]!r} cannot be a {what}",
            hint="take up to 128 letters, digits, dots, dashes and underscores, with a letter or digit at both ends",
        )


def identity_of(certificate: Mapping[str, Any]) -> Identity:
    """Return the member that a verified certificate names, from what `getpeercert` returns. Raises IdentityError."""
    uris = [value for kind, value in certificate.get("subjectAltName", ()) if kind == "URI"]
    if len(uris) != 1:
        raise IdentityError(
            f"the certificate has {len(uris)} URIs as alternative names, not one",
            hint="`kvmesh certs issue` writes certificates of members",
        )
    return identity_of_uri(uris[0])


def expiry_of(certificate: Mapping[str, Any]) -> float:
    """Return until when a certificate counts, in seconds since the epoch. Raises IdentityError."""
    try:
        return float(ssl.cert_time_to_seconds(certificate["notAfter"]))
    except (KeyError, ValueError) as error:
        raise IdentityError(f"the certificate does not say when it expires: {error}") from None
