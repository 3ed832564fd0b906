"""Workers that play a script, behind a router and a request plane that remember what was done to them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec

from kvmesh.mesh.plane.client import Consumer
from kvmesh.protocol.errors import DeadlineExceededError, MeshError, NoWorkerError, OtherWeightsError, UnreachableError
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.messages import (
    CandidateReport,
    Delta,
    Embedding,
    EmbedRequest,
    Explanation,
    FinishReason,
    GenerateRequest,
    KvLayout,
    Placed,
    ReleaseOffer,
    Role,
    RouteRequest,
    Target,
    Ticket,
    WorkerIdentity,
    decode,
    encode,
    unpack_tokens,
)
from kvmesh.workers.engines.mock.executor import mock_token

VOCAB = 2048
LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=16, dtype="float32")

Step = int | Delta | MeshError | asyncio.Event
"""That many right tokens, this delta, this failure, or wait for this event."""


def answer(prompt: Sequence[int], count: int) -> list[int]:
    """Return the tokens that the workers answer with."""
    return [mock_token(prompt, i, VOCAB) for i in range(count)]


class FakeWorker:
    """One script per call; the last is played again and again. Without a script it answers to the end."""

    def __init__(
        self,
        name: str,
        role: Role,
        *scripts: Sequence[Step],
        overlap_blocks: int = 0,
        retokenizes: bool = False,
        content: str = "",
    ) -> None:
        worker_id = WorkerId(f"{name}-id")
        self.target = Target(
            worker_id=worker_id,
            name=name,
            address=f"{name}:1",
            overlap_blocks=overlap_blocks,
            retokenizes=retokenizes,
            content=content,
        )
        self.role = role
        self.scripts = list(scripts)
        self.requests: list[GenerateRequest] = []
        self.reached = asyncio.Event()  # an event in a script is being waited for
        self.cancelled = 0  # calls that the caller left before their end
        self.embeddings: list[bytes | MeshError] = []  # answers, the last again and again
        self.embed_requests: list[EmbedRequest] = []
        self.lives = True  # although a connection breaks; otherwise its process has ended

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
    """Implements kvmesh.router.client.Router and what the dispatcher uses of kvmesh.mesh.plane.client.PlaneClient."""

    def __init__(self, *workers: FakeWorker) -> None:
        self.workers = list(workers)
        self.routed: list[RouteRequest] = []
        self.previewed: list[RouteRequest] = []
        self.booked: set[RequestId] = set()
        self.reused: list[int | None] = []  # what each booking was told with its first token
        self.progress: list[int] = []  # tokens of answers, as bookings were told
        self.finished: list[int] = []
        self.has_room: asyncio.Event | None = None  # requests wait in the router's queue for it
        self.open_calls = 0
        self.released: list[tuple[str, ReleaseOffer]] = []
        self.release_fails: MeshError | None = None
        self.route_problem: MeshError | None = None

    @asynccontextmanager
    async def book(self, request: RouteRequest, timeout_s: float) -> AsyncIterator["_FakeBooking"]:
        self.routed.append(request)
        if self.has_room is not None:
            await self.has_room.wait()
        placed = self._place(request)
        assert request.request_id not in self.booked, "booked twice"
        self.booked.add(request.request_id)
        try:
            yield _FakeBooking(self, placed)
        finally:
            self.booked.remove(request.request_id)

    def check(self, request: RouteRequest, timeout_s: float) -> None:
        pass

    async def preview(self, request: RouteRequest, timeout_s: float) -> Placed:
        self.previewed.append(request)
        return self._place(request)

    def _place(self, request: RouteRequest) -> Placed:
        if self.route_problem is not None:
            raise self.route_problem
        allowed = [w for w in self.workers if w.target.worker_id not in request.exclude]
        decoders = [w for w in allowed if w.role is not Role.PREFILL and request.pin in (None, w.target.name)]
        prefillers = [w for w in allowed if w.role is Role.PREFILL]
        if not decoders:
            raise NoWorkerError("no worker is ready")
        decoders = [w for w in decoders if not request.content or w.target.content in ("", request.content)]
        if not decoders:
            raise OtherWeightsError("none has these weights")
        prefill = prefillers[0].target if prefillers else None
        explanation = explanation_of(decoders[0].target.name) if request.explain else None
        return Placed(decode=decoders[0].target, prefill=prefill, reason="a script", explanation=explanation)

    @asynccontextmanager
    async def open(
        self, address: str, method: str, body: object, timeout_s: float, *, hasty: bool = False
    ) -> AsyncIterator["_FakeStream"]:
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

    async def ask(
        self, address: str, method: str, body: object, reply: type[object], timeout_s: float, *, hasty: bool = False
    ) -> Embedding | WorkerIdentity:
        worker = next(w for w in self.workers if w.target.address == address)
        if method == "identify":
            if not worker.lives:
                raise UnreachableError("refused") from ConnectionRefusedError()
            return WorkerIdentity(worker_id=worker.target.worker_id)
        assert (method, reply) == ("embed", Embedding)
        assert isinstance(body, EmbedRequest)
        worker.embed_requests.append(body)
        said = worker.embeddings.pop(0) if len(worker.embeddings) > 1 else worker.embeddings[0]
        if isinstance(said, MeshError):
            raise said
        return Embedding(vector=said)

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


def explanation_of(worker: str) -> Explanation:
    """An explanation by which that worker was chosen."""
    candidate = CandidateReport(
        leg="whole", worker=worker, dp_rank=0, overlap_blocks=(1, 1, 1, 1), queued_tokens=0, held_blocks=2,
        requests=1, capacity=1.0, cost=1.5, terms={"compute": 1.5}, note="chosen",
    )  # fmt: skip
    return Explanation(
        policy="kv", why=f"{worker} it is", recompute_price=1.0, busy_share=0.5, asked_before=2.0,
        candidates=(candidate,),
    )  # fmt: skip


class _FakeBooking:
    def __init__(self, mesh: FakeMesh, placed: Placed) -> None:
        self._mesh = mesh
        self.placed = placed

    def prefill_done(self, reused_tokens: int | None = None) -> None:
        self._mesh.reused.append(reused_tokens)

    def progress(self, osl_tokens: int) -> None:
        self._mesh.progress.append(osl_tokens)

    def finished(self, osl_tokens: int) -> None:
        self._mesh.finished.append(osl_tokens)


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

    async def feed(self, kind: type[Delta], consumer: Consumer[Delta]) -> None:
        async for delta in self.messages(kind):
            while consumer.is_full:
                await consumer.until_ready()
            if (shortcut := consumer.shortcut) is None:
                consumer.take(delta)
            else:
                shortcut.bind(lambda raw, passed: consumer.take(decode(raw, Delta)), 100)
                shortcut(msgspec.Raw(encode(delta)))
                shortcut.release()
            if consumer.is_done:
                return
