"""Serve members of the mesh alone: each request is checked against the table of rights."""

import time
from typing import Protocol

from kvmesh.mesh.http.errors import ForbiddenError
from kvmesh.mesh.http.request import Reply, ReplyStream, Request
from kvmesh.mesh.identity import rights
from kvmesh.mesh.identity.credentials import Credentials, ShownIdentity

PROBED = ("/health", "/live")
_TEXT = "text/plain"
_WHY = b"this port takes members of its mesh alone, over TLS: use https and a certificate of `kvmesh certs issue`\n"
PLAIN_REFUSAL = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    % len(_WHY)
) + _WHY


class NamedRoute(Protocol):
    """The part of a route that the table of rights knows."""

    @property
    def path(self) -> str: ...


class Door:
    """Decides which requests of a port are answered."""

    def __init__(self, credentials: Credentials, *, answers_probes: bool = False) -> None:
        """Take `answers_probes`: /health and /live also answer clients without a certificate, with ok or not."""
        self.credentials = credentials
        self.answers_probes = answers_probes

    def check(self, request: Request, route: NamedRoute | None) -> None:
        """Raise ForbiddenError if the request may not be answered. A path without a route is nobody's."""
        path = route.path if route is not None else ""
        if request.member is None:
            if request.method not in ("GET", "HEAD") or path not in PROBED:
                raise ForbiddenError("this is for members of the mesh", hint="show a certificate of its CA")
            return
        check_member(request.member, self.credentials, request.method, path or "such a path")


def door_of(credentials: Credentials | None, *, answers_probes: bool = False) -> Door | None:
    """Return the door of a service's port; None where the mesh is open."""
    return None if credentials is None else Door(credentials, answers_probes=answers_probes)


def check_member(member: ShownIdentity, credentials: Credentials, method: str, path: str) -> None:
    """Raise ForbiddenError if a member may not ask for a route of this process."""
    own = credentials.identity
    if not rights.may_request(member.identity.role, own.role, method, path):
        refused = rights.refusal(member.identity, own, f"{method} {path}")
        raise ForbiddenError(refused.message, hint=refused.hint)
    if member.expires_at_s < time.time():
        raise ForbiddenError(
            f"the certificate of {member.identity} has expired during this connection",
            hint="renew it with `kvmesh certs rotate`, and connect again",
        )


def bare(reply: Reply | ReplyStream) -> Reply:
    """Return what a client without a certificate may know of an answer: whether all is well."""
    return Reply(b"ok\n" if reply.status == 200 else b"not ok\n", reply.status, _TEXT)
