"""Answer calls. Each call runs in a task of its own, which ends with the call, its deadline or its caller."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping

from kvmesh.mesh.address import cannot_listen, join_address
from kvmesh.mesh.identity import rights
from kvmesh.mesh.identity.credentials import Credentials, ShownIdentity
from kvmesh.mesh.identity.listening import MemberListener, ToldOnce
from kvmesh.mesh.identity.names import Identity
from kvmesh.mesh.identity.reading import SharedBuffer
from kvmesh.mesh.identity.rights import may_call
from kvmesh.mesh.plane.bounds import SERVER_LIMITS, Bounds, PlaneLimits
from kvmesh.mesh.plane.frames import (
    COPIED_BYTES,
    FRAMING,
    MAX_CALL_BYTES,
    MAX_FRAME_BYTES,
    MAX_HELLO_BYTES,
    Batch,
    Cancel,
    Credit,
    Frame,
    FrameReader,
    Hello,
    Open,
    encode_frame,
)
from kvmesh.mesh.plane.link import FAREWELL, Link
from kvmesh.mesh.plane.metrics import REPEATED
from kvmesh.mesh.safeguards import is_off
from kvmesh.protocol.errors import (
    CancelledByPeerError,
    DeadlineExceededError,
    DrainingError,
    IdentityError,
    InvalidRequestError,
    MeshError,
    OverloadedError,
    PeerLostError,
    UnreachableError,
    WireError,
)
from kvmesh.protocol.messages import encode, failure_of
from kvmesh.protocol.version import NEIGHBOURS, VersionError, common_version

log = logging.getLogger(__name__)

_HEEDS_NO_CREDIT, _ENDS_NO_CALL = is_off("credit"), is_off("deadline")
_ENDLESS = 1 << 62

MAX_TIMEOUT_S = 7 * 86400.0
MAX_MESSAGE_BYTES = MAX_FRAME_BYTES // 2
MOST_ALWAYS = 4  # times `max_calls`: calls of all kinds
# What a caller without TLS reads: its first call ends with this error.
_PLAIN = IdentityError(
    "this service takes members of its mesh alone, over TLS", hint="start the caller with --mesh-tls"
)
_PLAIN_REFUSAL = encode_frame(Batch([], [(1, failure_of(_PLAIN)), (FAREWELL, failure_of(_PLAIN))]))
told = ToldOnce()  # members and methods that were refused


class Call:
    """A call, as its handler sees it."""

    def __init__(self, link: "_ServerLink", frame: Open) -> None:
        self._link = link
        self._stream = frame.stream
        self._credit = _ENDLESS if _HEEDS_NO_CREDIT else frame.credit
        self._granted = asyncio.Event()
        self.method = frame.method
        self.body: bytes = bytes(frame.body)  # msgpack
        self.timeout_s = frame.timeout_s

    @property
    def peer(self) -> str:
        return self._link.peer

    @property
    def caller(self) -> Identity:
        """Return who calls, by the certificate. Raises IdentityError in an open mesh, where nobody is known."""
        if self._link.member is None:
            raise IdentityError(
                "the caller has shown no certificate", hint="start all services with --mesh-tls, or none"
            )
        return self._link.member.identity

    async def send(self, message: object) -> None:
        """Send one message of the answer. Wait while the caller or the network is behind.

        Raises PeerLostError if the caller is gone.
        """
        while self._credit <= 0:
            self._granted.clear()
            await self._granted.wait()
        while not self._link.writable:  # calls that waited together do not all write together
            await self._link.until_writable()
        if self._link.closed.is_set():
            raise PeerLostError(f"caller {self.peer} is gone")
        payload = encode(message)
        if len(payload) > MAX_MESSAGE_BYTES:
            raise WireError(f"an answer of {len(payload)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
        self._add(payload)

    def offer(self, message: object) -> bool:
        """Send one message of the answer if that needs no wait and cannot fail. False: it was not sent, use `send`.

        Not to be called while a `send` of this call waits, because it would overtake that message.
        """
        if self._credit <= 0 or not self._link.writable or self._link.closed.is_set():
            return False
        try:
            payload = encode(message)
        except Exception:  # the caller of `offer` serves other calls too
            return False
        if len(payload) > MAX_MESSAGE_BYTES:
            return False
        self._add(payload)
        return True

    def _add(self, payload: bytes) -> None:
        self._credit -= 1
        self._link.add_message(self._stream, payload)

    def grant(self, messages: int) -> None:
        self._credit += messages
        self._granted.set()


Handler = Callable[[Call], Awaitable[None]]


class PlaneServer:
    """Listens on one port. An error of a handler is raised at its caller."""

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        *,
        max_calls: int = 4096,
        always: Collection[str] = (),
        standing: Mapping[str, Handler] | None = None,
        limits: PlaneLimits = SERVER_LIMITS,
        credentials: Credentials | None = None,
    ) -> None:
        """Make a server. The methods in `always` free resources, and are answered also when draining or full.

        So are the `standing` methods. Their calls last as long as the caller wants, and no drain waits for them.
        With `credentials` only members of the mesh can connect, and call what their role may.
        """
        self.credentials = credentials
        self._listener: MemberListener | None = None
        self.standing = frozenset(standing or ())
        self.handlers = {**handlers, **(standing or {})}
        self.always = self.standing.union(always)
        self.max_calls = max_calls
        self.bounds = Bounds(limits)
        self.draining = False
        self._server: asyncio.Server | None = None
        self._links: set[Link] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.standing_tasks: set[asyncio.Task[None]] = set()
        self.address = ""

    async def start(self, host: str, port: int = 0, *, advertise_host: str = "") -> str:
        """Listen; return the host:port that peers should use. Raises ConfigError."""
        if self.credentials is not None:
            self._listener = MemberListener(
                self.credentials, lambda: SharedBuffer(self._accept()), refusal=_PLAIN_REFUSAL
            )
            real_port = await self._listener.start(host, port)
            self.address = join_address(advertise_host or host, real_port)
            return self.address
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(self._accept, host, port)
        except OSError as error:
            raise cannot_listen(host, port, error) from error
        real_port = self._server.sockets[0].getsockname()[1]
        self.address = join_address(advertise_host or host, real_port)
        return self.address

    def _accept(self) -> Link:
        link = _ServerLink(self, self._links.discard)
        self._links.add(link)
        return link

    async def drain(self, timeout_s: float) -> int:
        """Take no new calls and let the running ones finish. Return how many still run after `timeout_s`."""
        self.draining = True
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=timeout_s)
        return len(self.tasks)

    async def close(self) -> None:
        """Stop listening and end the calls that still run."""
        self.draining = True
        if self._server is not None:
            self._server.close()
        if self._listener is not None:
            await self._listener.close()
        tasks = self.tasks | self.standing_tasks
        for task in tasks:
            task.cancel("the service is stopping")
        if tasks:
            await asyncio.wait(tasks)
        links = list(self._links)
        for link in links:
            link.close()
        self.bounds.close(links)
        self._server = None


class _ServerLink(Link):
    def __init__(self, server: PlaneServer, on_closed: Callable[[Link], None]) -> None:
        super().__init__(on_closed, server.bounds, FrameReader(MAX_CALL_BYTES, MAX_HELLO_BYTES))
        self._server = server
        self._calls: dict[int, tuple[Call, asyncio.Task[None]]] = {}
        self._last_stream = 0
        self._refusal: MeshError | None = None  # of all calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.bounds.seat(self, self.loop.time())

    def is_busy(self) -> bool:
        return bool(self._calls)

    def on_lost(self, reason: str) -> None:
        for _, task in self._calls.values():
            task.cancel(reason)

    def on_frame(self, frame: Frame) -> None:
        match frame:
            case Hello():
                self._greet(frame)
            case _ if not self.is_greeted:
                raise WireError("the peer did not say hello")
            case Open():
                self._open(frame)
            case Cancel():
                if known := self._calls.get(frame.stream):
                    known[1].cancel("the caller gave up")
            case Credit():
                if known := self._calls.get(frame.stream):
                    known[0].grant(frame.messages)
            case _:
                raise WireError(f"a caller does not send {type(frame).__name__}")

    def _greet(self, hello: Hello) -> None:
        """Take the versions of a caller. With another framing it is hung up on: it could not read a refusal.

        A caller of another protocol stays connected, and all its calls are refused. It then tries other services, and
        does not connect again and again.
        """
        if hello.framing != FRAMING:
            raise WireError(f"the peer cuts its frames by version {hello.framing}, not {FRAMING}")
        self.is_greeted = True
        self._server.bounds.greeted(self)
        try:
            common_version(hello.versions)
        except VersionError as error:
            log.warning("refusing the calls of %s: %s", self.peer, error)
            self._refusal = UnreachableError(
                f"{self._server.address} refuses this caller: {error.message}", hint=error.hint
            )

    def _open(self, frame: Open) -> None:
        if frame.stream <= self._last_stream:  # callers count up: a frame that comes again must not run a call again
            REPEATED.labels().inc()
            return
        self._last_stream = frame.stream
        if (refusal := self._refuse(frame)) is not None:
            self._end(frame.stream, refusal)
            return
        body_bytes = memoryview(frame.body).nbytes
        if body_bytes > COPIED_BYTES:
            refusal = self._server.bounds.begin_call((self, frame.stream), self.peer_name, body_bytes)
            if refusal is not None:
                self._end(frame.stream, refusal)
                return
        call = Call(self, frame)
        task = asyncio.get_running_loop().create_task(self._answer(call, frame.stream), name=f"call {frame.method}")
        self._calls[frame.stream] = (call, task)
        (self._server.standing_tasks if frame.method in self._server.standing else self._server.tasks).add(task)
        # A callback, because a task that is cancelled before its first step runs no code of its own.
        task.add_done_callback(lambda task: self._forget(frame.stream, task))
        self.watch.on_stream()

    def _forget(self, stream: int, task: asyncio.Task[None]) -> None:
        self._server.tasks.discard(task)
        self._server.standing_tasks.discard(task)
        self._server.bounds.end_call((self, stream))
        del self._calls[stream]
        if not self._calls:
            self.idle_since_s = self.loop.time()

    def _refuse(self, frame: Open) -> MeshError | None:
        if self._refusal is not None:
            return self._refusal
        if not 0 < frame.timeout_s <= MAX_TIMEOUT_S:
            return InvalidRequestError(f"a timeout of {frame.timeout_s} s is not between 0 and {MAX_TIMEOUT_S:.0f}")
        if frame.method not in self._server.handlers:
            return InvalidRequestError(f"no method {frame.method!r}", hint=NEIGHBOURS)
        if self.member is not None and (refusal := self._refuse_member(self.member, frame.method)) is not None:
            return refusal
        if frame.method in self._server.always:
            return self._refuse_always()
        if self._server.draining:
            return DrainingError(f"{self._server.address} is shutting down")
        if len(self._server.tasks) >= self._server.max_calls:
            return OverloadedError(f"{self._server.max_calls} calls run on {self._server.address} already")
        return None

    def _refuse_always(self) -> MeshError | None:
        """Refuse a call that is answered also by a full server, if there are more such calls than any mesh makes."""
        running, most = len(self._server.tasks) + len(self._server.standing_tasks), MOST_ALWAYS * self._server.max_calls
        return None if running < most else OverloadedError(f"{running} calls run on {self._server.address} already")

    def _refuse_member(self, member: ShownIdentity, method: str) -> MeshError | None:
        """Return why a member may not make a call, None if it may."""
        assert self._server.credentials is not None
        own = self._server.credentials.identity
        if not may_call(member.identity.role, own.role, method):
            if told.is_new(f"{member.identity} {method}"):
                log.warning("refusing %s from %s at %s: its role may not call it", method, member.identity, self.peer)
            return rights.refusal(member.identity, own, method)
        if member.expires_at_s < time.time():
            return IdentityError(
                f"the certificate of {member.identity} has expired during this connection",
                hint="renew it with `kvmesh certs rotate`",
            )
        return None

    async def _answer(self, call: Call, stream: int) -> None:
        """Run one call. Its failure becomes an answer here, and nowhere else."""
        failure: MeshError | None = None
        try:
            async with asyncio.timeout(None if _ENDS_NO_CALL else call.timeout_s):
                await self._server.handlers[call.method](call)
        except MeshError as error:
            failure = error
        except TimeoutError:
            failure = DeadlineExceededError(f"{call.method} took longer than the {call.timeout_s:.3g} s left for it")
        except asyncio.CancelledError as error:
            failure = CancelledByPeerError(str(error) or "cancelled")
        except Exception as error:  # a bug met by one call must not end the others
            log.exception("call %s failed", call.method)
            failure = MeshError(f"{type(error).__name__} in {call.method}, see the log of {self._server.address}")
        self._end(stream, failure)

    def _end(self, stream: int, failure: MeshError | None) -> None:
        if not self.closed.is_set():
            self.add_end(stream, failure)
