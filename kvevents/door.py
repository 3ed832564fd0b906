"""Close a process's KV events to strangers: CURVE on its ZMQ sockets, and a door that admits known followers.

Publisher and follower each make keys of their own. A publisher's public key stands on the worker's card. A follower's
public key comes by a call of the request plane, whose TLS says who calls, and counts as long as that call stays open
(docs/decisions/0030-closed-events.md). ZMQ asks the door for each connection that proves to have a key (ZAP). A key
that is not known is not refused but kept waiting: its call may be on its way, and a refused ZMQ client never returns.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakSet

import zmq
from zmq.utils import z85

from kvmesh.kvevents.sockets import Frames, LoopSocket, open_socket
from kvmesh.protocol.card_checks import is_event_key
from kvmesh.protocol.errors import InvalidRequestError, OverloadedError

HANDSHAKE_S = 2.0  # a connection that is not admitted by then is cut; an honest one tries again
MAX_FOLLOWERS = 1024
MAX_WAITING = 1024
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"
_CURVE = b"CURVE"
_KEY_BYTES = 32
_DOMAIN = b"kvmesh-events"  # libzmq asks only for sockets with a domain


@dataclass(frozen=True, slots=True)
class KeyPair:
    """The keys of one publisher or follower, in the text form of ZMQ (Z85)."""

    public: str
    secret: str = field(repr=False)


def new_keys() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def close_to_strangers(socket: zmq.Socket[bytes], keys: KeyPair) -> None:
    """Make a socket that will be bound take only connections that its context's door admits."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(1000 * HANDSHAKE_S))


def show_key(socket: zmq.Socket[bytes], keys: KeyPair, peer_key: str) -> None:
    """Make a socket that will be connected prove to have `keys`, and talk to the holder of `peer_key` alone."""
    socket.setsockopt_string(zmq.CURVE_SERVERKEY, peer_key)
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(1000 * HANDSHAKE_S))


class Admissions:
    """Decide which keys are admitted, and which connections wait for theirs. Pure; both are bounded."""

    def __init__(self, max_followers: int = MAX_FOLLOWERS, max_waiting: int = MAX_WAITING) -> None:
        self._max_followers = max_followers
        self._max_waiting = max_waiting
        self._calls: Counter[bytes] = Counter()  # by key: the open calls that vouch for it
        self._waiting: OrderedDict[tuple[bytes, bytes], bytes] = OrderedDict()  # the asking connections, their keys

    @property
    def followers(self) -> int:
        return len(self._calls)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def admit(self, key: bytes) -> list[tuple[bytes, bytes]]:
        """Admit a key, once for each call. Return the connections that have waited for it. Raises OverloadedError."""
        if key not in self._calls and len(self._calls) >= self._max_followers:
            raise OverloadedError(f"{self._max_followers} followers of KV events are here already")
        self._calls[key] += 1
        freed = [asker for asker, its_key in self._waiting.items() if its_key == key]
        for asker in freed:
            del self._waiting[asker]
        return freed

    def dismiss(self, key: bytes) -> None:
        """End one call for a key. After the last one the key opens no further connection."""
        self._calls[key] -= 1
        if self._calls[key] <= 0:
            del self._calls[key]

    def ask(self, asker: tuple[bytes, bytes], key: bytes) -> bool:
        """Return whether a connection with this key may be let in now; else it waits. The oldest one makes room."""
        if key in self._calls:
            return True
        self._waiting[asker] = key
        if len(self._waiting) > self._max_waiting:
            self._waiting.popitem(last=False)
        return False


class _DoorContext(zmq.Context["zmq.Socket[bytes]"]):
    """A context that only its door ends.

    Ending a context waits until its sockets are closed. pyzmq also ends one that is garbage, and where its sockets are
    garbage too, they may be closed only after it: the process would stand still for ever. A forgotten context instead
    keeps its two threads.
    """

    def __del__(self) -> None:
        pass


class EventDoor:
    """The door of all publishers of a process. Must be made on a running event loop.

    It has a ZMQ context of its own, because ZMQ asks one door for each context.
    """

    def __init__(self) -> None:
        self._context = _DoorContext()
        self._sockets: WeakSet[zmq.Socket[bytes]] = WeakSet()
        self.admissions = Admissions()
        zap = self.open_socket(zmq.ROUTER)
        zap.bind(_ZAP_ENDPOINT)
        self._zap = LoopSocket(zap, self._on_ask)

    def open_socket(
        self, kind: int, *, receive: int = 1000, send: int = 1000, max_bytes: int = -1
    ) -> zmq.Socket[bytes]:
        """Open a socket for whose connections this door can be asked. See kvmesh.kvevents.sockets.open_socket."""
        socket = open_socket(kind, receive=receive, send=send, max_bytes=max_bytes, context=self._context)
        self._sockets.add(socket)
        return socket

    @contextmanager
    def admitted(self, key: str) -> Iterator[None]:
        """Admit a follower while the block runs. Raises InvalidRequestError, OverloadedError."""
        if not is_event_key(key):
            raise InvalidRequestError("a follower's key is 40 characters of Z85", hint="see kvevents.door.new_keys")
        raw = z85.decode(key)
        for asker in self.admissions.admit(raw):
            self._let_in(asker)
        try:
            yield
        finally:
            self.admissions.dismiss(raw)

    async def close(self) -> None:
        """Free the context, when all its publishers are closed. A second call does nothing."""
        if not self._zap.closed:
            self._close_sockets()
            await asyncio.to_thread(self._context.term)  # it waits for messages on their way, as long as they linger

    def close_unused(self) -> None:
        """Free the context at once, when nothing has been sent yet."""
        self._close_sockets()
        self._context.term()

    def _close_sockets(self) -> None:
        """Close also what its owner has left open: ending the context would wait for it for ever."""
        self._zap.close()
        for socket in list(self._sockets):
            socket.close(linger=0)

    def _on_ask(self, frames: Frames) -> None:
        """Take `[asker, "", version, request, domain, address, identity, mechanism, key]`, as ZAP has it."""
        if len(frames) != 9 or frames[2] != _ZAP_VERSION or frames[7] != _CURVE or len(frames[8]) != _KEY_BYTES:
            return  # without an answer the connection is cut in time
        asker = (frames[0], frames[3])
        if self.admissions.ask(asker, frames[8]):
            self._let_in(asker)

    def _let_in(self, asker: tuple[bytes, bytes]) -> None:
        """Answer a connection. One that has been cut meanwhile gets nothing."""
        connection, request = asker
        self._zap.send((connection, b"", _ZAP_VERSION, request, b"200", b"", b"", b""))
