"""Serve gateways over gRPC: `ExternalProcessor.Process` for each request, and the health service."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from kvmesh.frontend.errors import outcome
from kvmesh.frontend.picker.asking import reader_of
from kvmesh.frontend.picker.budget import BodyBudget
from kvmesh.frontend.picker.metrics import PICK_SECONDS, REQUESTS, STREAMS, UNSEEN
from kvmesh.frontend.picker.picking import Keeper, Pick, Picker
from kvmesh.frontend.picker.stream import Asked, ExtProcStream
from kvmesh.frontend.picker.wire import (
    BodyMode,
    Heard,
    RequestHead,
    health_answer,
    more_time_answer,
    read,
    read_health_check,
    refusal_answer,
)
from kvmesh.mesh.address import cannot_listen
from kvmesh.mesh.http.connection import refusal
from kvmesh.protocol.errors import ConfigError, MeshError, OverloadedError, WireError
from kvmesh.protocol.ids import new_request_id
from kvmesh.router.local import LocalBooking

log = logging.getLogger(__name__)

EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH = "grpc.health.v1.Health"
LIVENESS = "liveness"
MORE_TIME_AFTER_S = 0.05  # Envoy waits 0.2 s for an answer where nothing else is set
MORE_TIME_S = 5.0  # beyond the longest wait in the queue
MESSAGE_BYTES = 1 << 20  # of a message beside the body in it
OPTIONS = (
    ("grpc.so_reuseport", 0),  # a port in use is an error
    ("grpc.keepalive_time_ms", 30_000),  # a gateway that is gone without a word
    ("grpc.keepalive_timeout_ms", 10_000),
)


class PickerServer:
    """Answers gateways with a picker. `is_ready`: whether it is told to have requests sent here."""

    def __init__(
        self,
        picker: Picker,
        keeper: Keeper,
        budget: BodyBudget,
        is_ready: Callable[[], bool],
        *,
        max_streams: int,
        max_body_bytes: int,
    ) -> None:
        self._picker = picker
        self._keeper = keeper
        self._budget = budget
        self._is_ready = is_ready
        self._max_streams = max_streams
        self._max_body_bytes = max_body_bytes
        self._open = 0
        self._is_draining = False
        self._has_warned = False
        self._server = grpc.aio.server(
            options=[*OPTIONS, ("grpc.max_receive_message_length", max_body_bytes + MESSAGE_BYTES)]
        )
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    EXT_PROC, {"Process": grpc.stream_stream_rpc_method_handler(self.process)}
                ),
                grpc.method_handlers_generic_handler(
                    HEALTH, {"Check": grpc.unary_unary_rpc_method_handler(self.check)}
                ),
            )
        )

    async def start(self, host: str, port: int, credentials: Any = None) -> int:
        """Listen, with TLS if there are credentials; return the port. Raise ConfigError."""
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if credentials is None:
                bound = self._server.add_insecure_port(address)
            else:
                bound = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise cannot_listen(host, port, OSError(0, "the address cannot be used")) from error
        await self._server.start()
        return int(bound)

    async def drain(self, timeout_s: float) -> None:
        """Take no new requests; those that are open have `timeout_s` to end."""
        self._is_draining = True
        await self._server.stop(timeout_s)

    async def check(self, data: bytes, context: Any) -> bytes:
        """Answer a health check."""
        try:
            service = read_health_check(data)
        except WireError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise
        if service not in ("", LIVENESS, "readiness", EXT_PROC):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {service[:80]!r}")
        return health_answer(is_serving=service == LIVENESS or (self._is_ready() and not self._is_draining))

    async def process(self, _: object, context: Any) -> None:
        """Serve one request of a gateway."""
        self._open += 1
        STREAMS.inc()
        call = _Call(self._picker, self._keeper, context, ExtProcStream(self._max_body_bytes, self._budget))
        try:
            await call.run(is_full=self._open > self._max_streams)
        except WireError as error:
            log.warning("a gateway was refused: %s", error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            self._open -= 1
            STREAMS.inc(-1)
            call.let_go()
            if call.was_unseen:
                self._on_unseen()

    def _on_unseen(self) -> None:
        UNSEEN.inc()
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "a gateway does not show the ends of answers, so their load is let go too early; "
                "set response_body_mode to FULL_DUPLEX_STREAMED, see docs/gateway.md"
            )


class _Call:
    """Carries one stream of a gateway: reads messages, has an endpoint picked, writes the answers."""

    def __init__(self, picker: Picker, keeper: Keeper, context: Any, stream: ExtProcStream) -> None:
        self._picker = picker
        self._keeper = keeper
        self._context = context
        self._stream = stream
        self._head: RequestHead | None = None
        self._booking: LocalBooking | None = None
        self._reading: asyncio.Task[Any] | None = None  # never cancelled: a message would be lost

    @property
    def was_unseen(self) -> bool:
        """Return whether Envoy ended the stream after the pick, before the answer."""
        head = self._head
        return (
            self._booking is not None
            and head is not None
            and head.request_mode is BodyMode.FULL_DUPLEX_STREAMED
            and head.response_mode is BodyMode.NONE
        )

    async def run(self, *, is_full: bool) -> None:
        """Serve the stream to its end. Raise WireError; other failures are answers."""
        try:
            while (heard := await self._next()) is not None:
                if isinstance(heard, RequestHead):
                    self._head = heard
                    if is_full:
                        raise OverloadedError("too many requests are open at the endpoint picker")
                reads_body = isinstance(heard, RequestHead) and reader_of(heard) is not None
                await self._write(self._stream.hear(heard, reads_body))
                del heard  # it may be a large body, and the answer may take long
                if self._stream.asked is not None and not await self._steer():
                    return
                self._note()
        except WireError:
            raise
        except grpc.aio.BaseError as error:  # what it sends cannot be taken, so it cannot be told either
            log.info("a gateway broke off a stream: %s", error)
        except Exception as error:
            await self._refuse(as_failure(error))

    def let_go(self) -> None:
        """End the booking and the reading, and let the body go."""
        self._stream.forget_body()
        if self._reading is not None:
            self._reading.cancel()
        if (booking := self._booking) is not None:
            stream = self._stream
            self._keeper.discard(booking)
            if stream.events:  # without the last of them the gap between tokens would seem longer than it was
                booking.progress(stream.events)
            booking.end(ok=stream.status < 500 and (stream.has_ended or not stream.sees_answer))

    async def _next(self) -> Heard | None:
        """Return the next message; None at the end."""
        reading, self._reading = self._reading, None
        data = await (self._context.read() if reading is None else reading)
        return None if data is grpc.aio.EOF else read(data)

    async def _write(self, answers: list[bytes]) -> None:
        for answer in answers:
            await self._context.write(answer)

    async def _steer(self) -> bool:
        """Have an endpoint picked, and send the request there. False: the gateway has left meanwhile."""
        began = asyncio.get_running_loop().time()
        assert self._stream.asked is not None
        pick = await self._picked(self._stream.asked)
        if pick is None:
            REQUESTS.labels("client_gone").inc()
            return False
        self._booking = pick.booking
        if pick.booking is not None:
            self._keeper.add(pick.booking, self._stream)
        PICK_SECONDS.observe(asyncio.get_running_loop().time() - began)
        REQUESTS.labels("ok").inc()
        await self._write(self._stream.steered(pick.steering, pick.body))
        return True

    async def _picked(self, asked: Asked) -> Pick | None:
        """Return the pick, None if the gateway ends the stream first: its client has left."""
        picking = asyncio.create_task(self._picker.pick(asked), name="pick an endpoint")
        self._reading = reading = asyncio.create_task(_read(self._context), name="read what a gateway says")
        is_taken = False
        try:
            await asyncio.wait({picking, reading}, timeout=MORE_TIME_AFTER_S, return_when=asyncio.FIRST_COMPLETED)
            if not picking.done() and not reading.done():
                await self._write([more_time_answer(self._picker.wait_s + MORE_TIME_S)])
                await asyncio.wait({picking, reading}, return_when=asyncio.FIRST_COMPLETED)
            if not picking.done() and reading.result() is grpc.aio.EOF:
                return None
            pick = await picking
            is_taken = True
            return pick
        finally:
            if not is_taken:
                picking.cancel()
                picking.add_done_callback(_end_booking)

    async def _refuse(self, error: MeshError) -> None:
        REQUESTS.labels(outcome(error)).inc()
        reader = None if self._head is None else reader_of(self._head)
        shown_id = (self._head and self._head.header("x-request-id")) or new_request_id("pick")
        reply = refusal(error, None if reader is None else reader.error_body(error, shown_id))
        headers = {"content-type": reply.content_type, **reply.headers}
        await self._write([refusal_answer(reply.status, headers, reply.body, f"kvmesh_picker_{error.code}")])

    def _note(self) -> None:
        """Tell the booking how far the answer is."""
        booking, stream = self._booking, self._stream
        if booking is not None and stream.has_begun:
            booking.prefill_done()


async def _read(context: Any) -> Any:
    return await context.read()


def _end_booking(picking: "asyncio.Task[Pick]") -> None:
    """End the booking of a pick that nobody waits for any more."""
    if not picking.cancelled() and picking.exception() is None and (booking := picking.result().booking) is not None:
        booking.end(ok=False)


def as_failure(error: Exception) -> MeshError:
    if isinstance(error, MeshError):
        return error
    log.error("a request of a gateway failed", exc_info=error)
    return MeshError("the endpoint picker failed", hint="see its log")


def tls_credentials(cert: str, key: str, client_ca: str) -> Any:
    """Return the credentials of a server; None without a certificate. Raise ConfigError.

    With `client_ca`, only callers with a certificate that it has signed are served.
    """
    if not cert:
        if client_ca:
            raise ConfigError("--ext-proc-client-ca is of no use without --ext-proc-tls-cert", hint="give both")
        return None
    certificate = _pem("--ext-proc-tls-cert", cert)
    pair = (_pem("--ext-proc-tls-key", key or cert), certificate)
    if not client_ca:
        return grpc.ssl_server_credentials([pair])
    return grpc.ssl_server_credentials([pair], _pem("--ext-proc-client-ca", client_ca), require_client_auth=True)


def _pem(flag: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} cannot be read: {error}", hint="give a PEM file") from error
