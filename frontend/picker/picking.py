"""Pick the endpoint of a request: read it, place it with the router's core, name the workers in headers."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from kvmesh.frontend.hints import DP_RANK_HEADER, PREFILL_HEADER, PREFILLER_HEADER, STEERING, WORKER_HEADER
from kvmesh.frontend.models import ModelRegistry
from kvmesh.frontend.picker.asking import (
    REWRITE_HEADER,
    BodyReading,
    hints_of,
    model_name,
    read_prompt,
    reader_of,
    renamed,
)
from kvmesh.frontend.picker.endpoints import EndpointFeed
from kvmesh.frontend.picker.metrics import UNREAD
from kvmesh.frontend.picker.stream import Asked, ExtProcStream
from kvmesh.frontend.picker.wire import Steering
from kvmesh.frontend.route_requests import route_request, sequence_hashes_of
from kvmesh.protocol.errors import DeadlineExceededError, NoWorkerError, OverloadedError
from kvmesh.protocol.ids import RequestId, new_request_id
from kvmesh.protocol.messages import Placed, RouteRequest
from kvmesh.router.local import LocalBooking, LocalRouter

ID_PREFIX = "pick"


@dataclass(frozen=True, slots=True)
class Pick:
    """A place for a request. `booking` counts as load until it is ended; None: the request computes nothing."""

    steering: Steering
    booking: LocalBooking | None = None
    body: bytes | None = None  # in place of the request's own


class Picker:
    """Picks endpoints. A request waits `wait_s` at most for a worker that has room."""

    def __init__(
        self,
        router: LocalRouter,
        models: ModelRegistry,
        endpoints: EndpointFeed,
        reading: BodyReading,
        objectives: Mapping[str, int],
        wait_s: float,
    ) -> None:
        self._router = router
        self._models = models
        self._endpoints = endpoints
        self._reading = reading
        self._objectives = objectives
        self.wait_s = wait_s

    async def pick(self, asked: Asked) -> Pick:
        """Return where a request goes. Raise InvalidRequestError, NoWorkerError, OverloadedError."""
        head = asked.head
        if asked.body is None:
            endpoint = self._endpoints.any(head.subset)
            return Pick(Steering(endpoint, {}, sorted(STEERING)))
        route, body = await self._read(asked, asked.body)
        booking = await self._place(route)
        try:
            return Pick(self._steering(booking.placed, body), booking, body)
        except BaseException:
            booking.end(ok=False)
            raise

    async def _read(self, asked: Asked, body: bytes) -> tuple[RouteRequest, bytes | None]:
        """Return what the router is asked, and the body where it has changed."""
        head, reader = asked.head, reader_of(asked.head)
        assert reader is not None, "the body is read for these paths alone"
        plain, rewritten = await self._reading.plain(body, head), None
        name = model_name(plain)
        if (other := head.header(REWRITE_HEADER)) and other != name:
            name, plain = other, renamed(plain, other)
            rewritten = plain
        model = await self._models.get(name)
        prompt, problem = await read_prompt(reader, plain, model)
        if problem is not None:
            UNREAD.inc()
        hashes = await sequence_hashes_of(prompt.tokens, model.block_size, model.lora, prompt.salt)
        route = route_request(
            RequestId(new_request_id(ID_PREFIX)),
            model.base,
            model.lora,
            prompt.isl_tokens,
            hashes,
            hints_of(prompt.hints, head, self._objectives),
            among=None if head.subset is None else self._endpoints.workers_at(head.subset),
        )
        return route, rewritten

    async def _place(self, route: RouteRequest) -> LocalBooking:
        """Place a request. One of a priority below 0 does not wait. Raise OverloadedError where none had room."""
        wait_s = self.wait_s if route.priority >= 0 else 0.0
        try:
            return await self._router.place(route, wait_s)
        except DeadlineExceededError as error:
            raise OverloadedError(error.message, hint="try again later") from error

    def _steering(self, placed: Placed, body: bytes | None) -> Steering:
        """Return the endpoint of the worker that decodes, and the headers that name the workers."""
        decode, prefill = placed.decode, placed.prefill
        endpoint = self._endpoints.of(decode.worker_id)
        if endpoint is None:
            raise NoWorkerError(f"worker {decode.worker_id} has left", hint="try again")
        headers = {WORKER_HEADER: str(decode.worker_id)}
        if decode.dp_rank:
            headers[DP_RANK_HEADER] = str(decode.dp_rank)
        if prefill is not None:
            headers[PREFILL_HEADER] = str(prefill.worker_id)
            if (prefiller := self._endpoints.of(prefill.worker_id)) is not None:
                headers[PREFILLER_HEADER] = prefiller
        removed = STEERING - headers.keys()
        if body is not None:
            headers["content-length"] = str(len(body))
            removed |= {"content-encoding"}
        return Steering(endpoint, headers, sorted(removed))


class Keeper:
    """Keeps the bookings of open requests: a long answer may say nothing for longer than a booking's lease."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._open: dict[LocalBooking, ExtProcStream] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, booking: LocalBooking, stream: ExtProcStream) -> None:
        self._open[booking] = stream
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._report)

    def discard(self, booking: LocalBooking) -> None:
        self._open.pop(booking, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _report(self) -> None:
        self._timer = None
        for booking, stream in self._open.items():
            booking.progress(stream.events or None)
        if self._open:
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._report)
