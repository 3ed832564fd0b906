"""Serve a few pages on a thread, openly or to members of the mesh: they answer while the event loop is busy."""

import socket
import ssl
import threading
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client.exposition import ThreadingWSGIServer

from kvmesh.mesh.http.door import PLAIN_REFUSAL, Door
from kvmesh.mesh.identity.credentials import HANDSHAKE_S, ShownIdentity, member_of
from kvmesh.mesh.identity.metrics import HANDSHAKES
from kvmesh.protocol.errors import IdentityError

MEMBER = "kvmesh.member"  # in the environment of a request: who asks
READ_S = 10.0  # for a client to send a request, or to read the answer
MOST_CLIENTS = 64  # at a time


class PageServer(ThreadingWSGIServer):
    """Answers each client on a thread of its own."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.door: Door | None = None
        self._room = threading.BoundedSemaphore(MOST_CLIENTS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(READ_S)
        if self.door is None:
            super().finish_request(request, client_address)
            return
        if (secured := self._secured(request, self.door)) is not None:
            with secured:
                super().finish_request(secured, client_address)

    def _secured(self, request: socket.socket, door: Door) -> ssl.SSLSocket | None:
        """Return the connection after its handshake; None if it is not that of a member or a probe."""
        request.settimeout(HANDSHAKE_S)
        try:
            if request.recv(1, socket.MSG_PEEK) != b"\x16":
                HANDSHAKES.labels("plain").inc()
                request.sendall(PLAIN_REFUSAL)
                return None
            context = door.credentials.server_context(with_probes=door.answers_probes)
            secured = context.wrap_socket(request, server_side=True)
        except OSError:
            HANDSHAKES.labels("failed").inc()
            return None
        HANDSHAKES.labels("ok").inc()
        secured.settimeout(READ_S)
        return secured

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that leaves or is too slow."""


class PageServerV6(PageServer):
    address_family = socket.AF_INET6


class QuietHandler(WSGIRequestHandler):
    """Answers without a log line for each request, and names the member that asks."""

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def get_environ(self) -> dict[str, Any]:
        environ: dict[str, Any] = super().get_environ()
        environ[MEMBER] = _member(self.connection)
        return environ


def _member(connection: Any) -> ShownIdentity | None:
    if not isinstance(connection, ssl.SSLSocket):
        return None
    try:
        return member_of(connection)
    except IdentityError:
        return None


def server_class(host: str) -> type[WSGIServer]:
    return PageServerV6 if ":" in host else PageServer
