"""Workers that play a script, behind a router and a request plane that remember what was done to them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from protocol.errors import DeadlineExceededError, MeshError, NoWorkerError
from protocol.ids import RequestId, WorkerId
from protocol.messages import (
    Delta,
    FinishReason,
    GenerateRequest,
    KvLayout,
    Placed,
    ReleaseOffer,
    Role,
    RouteRequest,
    Target,
    Ticket,
    unpack_tokens,
)
from workers.mock_engine.executor import mock_token

VOCAB = 2048
LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=16, dtype="float32")

Step = int | Delta | MeshError | asyncio.Event
"""That many right tokens, this delta, this failure, or wait for this event."""


def answer(prompt: Sequence[int], count: int) -> list[int]:
    """What the workers say."""
    return [mock_token(prompt, i, VOCAB) for i in range(count)]


class FakeWorker:
    """One script per call; the last is played again and again. Without a script it answers to the end."""

    def __init__(self, name: str, role: Role, *scripts: Sequence[Step]) -> None:
        self.target = Target(worker_id=WorkerId(f"{name}-id"), name=name, address=f"{name}:1")
        self.role = role
        self.scripts = list(scripts)
        self.requests: list[GenerateRequest] = []
        self.reached = asyncio.Event()  # an event in a script is being waited for
        self.cancelled = 0  # calls that the caller left before their end

    def ticket(self, request: GenerateRequest) -> Ticket:
        number = len(self.requests)
        return Ticket(
            offer_id=number,
            worker_id=self.target.worker_id,
            address=self.target.address,
            backend="fake",
            nonce=1000 + number,
            slot=0,
            peer=b"",
            layout=LAYOUT,
            block_ids=(0,),
            num_tokens=len(request.prompt) // 4 + len(request.generated),
        )

    async def play(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        self.requests.append(request)
        script = [10**6]
        if self.scripts:
            script = list(self.scripts[0] if len(self.scripts) == 1 else self.scripts.pop(0))
        said = list(request.generated)
        for step in script:
            match step:
                case int():
                    for _ in range(step):
                        delta = self._next(request, said)
                        yield delta
                        if delta.finish_reason or delta.ticket:
                            return
                case Delta():
                    said += step.token_ids
                    yield step
                case asyncio.Event():
                    self.reached.set()
                    await step.wait()
                case _:
                    raise step

    def _next(self, request: GenerateRequest, said: list[int]) -> Delta:
        first = len(said) == len(request.generated)
        said.append(mock_token(unpack_tokens(request.prompt), len(said), VOCAB))
        cached = 7 if first else None
        if len(said) >= request.stop.max_tokens:
            return Delta((said[-1],), FinishReason.LENGTH, cached_tokens=cached)
        ticket = self.ticket(request) if request.offer_kv else None
        return Delta((said[-1],), cached_tokens=cached, ticket=ticket)


class FakeMesh:
    """Implements router.client.Router and what the dispatcher uses of mesh.plane.client.PlaneClient."""

    def __init__(self, *workers: FakeWorker) -> None:
        self.workers = list(workers)
        self.routed: list[RouteRequest] = []
        self.booked: set[RequestId] = set()
        self.prefill_done = 0
        self.open_calls = 0
        self.released: list[tuple[str, ReleaseOffer]] = []
        self.release_fails: MeshError | None = None
        self.route_problem: MeshError | None = None

    @asynccontextmanager
    async def book(self, request: RouteRequest, timeout_s: float) -> AsyncIterator["_FakeBooking"]:
        self.routed.append(request)
        if self.route_problem is not None:
            raise self.route_problem
        allowed = [w for w in self.workers if w.target.worker_id not in request.exclude]
        decoders = [w for w in allowed if w.role is not Role.PREFILL and request.pin in (None, w.target.name)]
        prefillers = [w for w in allowed if w.role is Role.PREFILL]
        if not decoders:
            raise NoWorkerError("no worker is ready")
        prefill = prefillers[0].target if prefillers else None
        assert request.request_id not in self.booked, "booked twice"
        self.booked.add(request.request_id)
        try:
            yield _FakeBooking(self, Placed(decode=decoders[0].target, prefill=prefill, reason="a script"))
        finally:
            self.booked.remove(request.request_id)

    @asynccontextmanager
    async def open(self, address: str, method: str, body: object, timeout_s: float) -> AsyncIterator["_FakeStream"]:
        assert method == "generate"
        assert isinstance(body, GenerateRequest)
        if timeout_s <= 0:
            raise DeadlineExceededError("no time is left")
        worker = next(w for w in self.workers if w.target.address == address)
        stream = _FakeStream(worker.play(body))
        self.open_calls += 1
        try:
            yield stream
        finally:
            self.open_calls -= 1
            if not stream.ended:
                worker.cancelled += 1

    async def tell(self, address: str, method: str, body: object, timeout_s: float) -> None:
        assert method == "release"
        assert isinstance(body, ReleaseOffer)
        self.released.append((address, body))
        if self.release_fails is not None:
            raise self.release_fails

    @property
    def offered(self) -> list[tuple[str, ReleaseOffer]]:
        """Every ticket that left a worker, as the release that must follow it."""
        prefillers = [w for w in self.workers if w.role is Role.PREFILL]
        return [
            (w.target.address, ReleaseOffer(offer_id=n, nonce=1000 + n))
            for w in prefillers
            for n, request in enumerate(w.requests, 1)
        ]


class _FakeBooking:
    def __init__(self, mesh: FakeMesh, placed: Placed) -> None:
        self._mesh = mesh
        self.placed = placed

    def prefill_done(self) -> None:
        self._mesh.prefill_done += 1


class _FakeStream:
    def __init__(self, deltas: AsyncIterator[Delta]) -> None:
        self._deltas = deltas
        self.ended = False

    async def messages(self, kind: type[Delta]) -> AsyncIterator[Delta]:
        try:
            async for delta in self._deltas:
                self.ended = delta.finish_reason is not None or delta.ticket is not None
                yield delta
        except MeshError:
            self.ended = True
            raise
        self.ended = True
