"""A request through the dispatcher to a prefill and a decode worker whose engines meet by a bootstrap."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest_asyncio

from kvmesh.frontend.dispatch import Dispatcher
from kvmesh.frontend.generator import Hints, Trace
from kvmesh.protocol.ids import RequestId, new_worker_id
from kvmesh.protocol.messages import (
    Delta,
    GenerateRequest,
    ReleaseOffer,
    Role,
    SamplingParams,
    StopConditions,
    pack_tokens,
)
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.engines.sglang.engine import SglangEngine
from tests.support.deltas import deltas_of
from tests.support.fake_mesh import FakeMesh, FakeWorker
from tests.support.fake_sglang import FakeSglang
from tests.support.patience import PATIENCE_S
from tests.support.toy_model import next_token

PROMPT = list(range(100, 140))


class EngineWorker(FakeWorker):
    """A worker that asks its engine."""

    def __init__(self, name: str, role: Role, engine: SglangEngine) -> None:
        super().__init__(name, role)
        self.engine = engine

    async def play(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        self.requests.append(request)
        async with aclosing(self.engine.generate(request)) as deltas:
            async for delta in deltas:
                if delta.ticket is not None:  # a worker sends it and goes on, before anybody can leave
                    assert [late async for late in deltas] == []
                yield delta


class Mesh(FakeMesh):
    """Releases reach the engine."""

    async def tell(self, address: str, method: str, body: object, timeout_s: float) -> None:
        await super().tell(address, method, body, timeout_s)
        assert isinstance(body, ReleaseOffer)
        worker = next(w for w in self.workers if w.target.address == address)
        assert isinstance(worker, EngineWorker)
        worker.engine.release(body.offer_id, body.nonce)


@pytest_asyncio.fixture
async def mesh() -> AsyncIterator[tuple[Mesh, FakeSglang]]:
    fake = FakeSglang()
    workers: list[EngineWorker] = []
    for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
        engine = SglangEngine(WorkerConfig(model_path="/models/toy", role=role), "m", fake.package)
        await engine.start(new_worker_id(name), f"{name}:1")
        workers.append(EngineWorker(name, role, engine))
    yield Mesh(*workers), fake
    for worker in workers:
        await worker.engine.stop()


async def test_both_halves_get_the_request_together(mesh: tuple[Mesh, FakeSglang]) -> None:
    workers, fake = mesh
    prefill, decode = fake.engines
    prefill.gate.clear()  # the prompt is still being computed when the decode worker is asked
    dispatcher, trace = Dispatcher(workers, workers, lambda model: 16), Trace()  # type: ignore[arg-type]
    request = GenerateRequest(
        request_id=RequestId("r"),
        model="m",
        prompt=pack_tokens(PROMPT),
        sampling=SamplingParams(temperature=0),
        stop=StopConditions(max_tokens=10, ignore_eos=True),
    )
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    said: list[int] = []

    async def run() -> None:
        async with aclosing(deltas_of(dispatcher, request, Hints(), trace, deadline)) as deltas:
            async for delta in deltas:
                said.extend(delta.token_ids)

    answer = asyncio.create_task(run())
    async with asyncio.timeout(PATIENCE_S):
        while not (prefill.requests.running and decode.requests.running):  # either may be asked first
            await asyncio.sleep(0.001)
        assert len(prefill.requests.running) == 1
        assert said == []
        prefill.gate.set()
        await answer
    await dispatcher.close()
    sequence = list(PROMPT)
    for _ in range(10):
        sequence.append(next_token(sequence))
    assert said == sequence[len(PROMPT) :]
    assert (trace.prefill_worker, trace.decode_worker, trace.transfer) == ("p0", "d0", "sglang-nixl")
    assert [release.offer_id for _, release in workers.released] == [1]
