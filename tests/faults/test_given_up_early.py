"""Calls that are given up in the very turn of the event loop in which they begin: nothing may stay behind."""

import asyncio
from contextlib import aclosing

import msgspec

from kvmesh.kvcache.transfer.shm import ShmBackend
from kvmesh.mesh.plane.frames import Cancel, Hello, Open, encode_frame
from kvmesh.mesh.plane.server import Call, PlaneServer
from kvmesh.protocol.ids import RequestId, new_worker_id
from kvmesh.protocol.messages import Delta, GenerateRequest, SamplingParams, StopConditions, encode, pack_tokens
from kvmesh.workers.engines.mock.executor import MockExecutor
from kvmesh.workers.step_engine import StepEngine, StepEngineConfig
from tests.support.patience import PATIENCE_S


async def open_engine() -> StepEngine:
    config = StepEngineConfig("m", "", 64, 8, 512, offer_lease_s=30, pull_timeout_s=5)
    engine = StepEngine(MockExecutor(block_size=16, speedup=0), ShmBackend(), config)
    await engine.start(new_worker_id("w"), "127.0.0.1:1")
    return engine


async def test_a_pull_cancelled_before_its_start_frees_its_blocks() -> None:
    prefiller, decoder = await open_engine(), await open_engine()
    request = GenerateRequest(
        request_id=RequestId("r"),
        model="m",
        prompt=pack_tokens(range(100, 150)),
        sampling=SamplingParams(temperature=0),
        stop=StopConditions(max_tokens=20, ignore_eos=True),
        offer_kv=True,
    )
    async with aclosing(prefiller.generate(request)) as deltas:
        [first] = [delta async for delta in deltas]
    request = msgspec.structs.replace(request, offer_kv=False, generated=first.token_ids, ticket=first.ticket)

    async def decode() -> list[Delta]:
        return [delta async for delta in decoder.generate(request)]

    for turns in range(6):
        call = asyncio.create_task(decode())
        for _ in range(turns):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        async with asyncio.timeout(PATIENCE_S):
            while decoder.load().used_blocks:
                await asyncio.sleep(0)
        assert (decoder.load().running, decoder.load().waiting) == (0, 0)
    await decoder.stop()
    await prefiller.stop()


async def test_a_call_cancelled_by_its_opening_frame_is_forgotten() -> None:
    started: list[Call] = []

    async def forever(call: Call) -> None:
        started.append(call)
        await asyncio.Event().wait()

    server = PlaneServer({"forever": forever})
    host, _, port = (await server.start("127.0.0.1")).rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    frames = [Hello()]
    for stream in range(10):
        frames += [Open(stream, "forever", 60.0, 8, msgspec.Raw(encode(None))), Cancel(stream)]
    writer.write(b"".join(encode_frame(frame) for frame in frames))
    writer.write(encode_frame(Open(99, "forever", 60.0, 8, msgspec.Raw(encode(None)))))
    async with asyncio.timeout(PATIENCE_S):
        while not started or len(server.tasks) > 1:
            await asyncio.sleep(0)
    [link] = server._links
    assert list(link._calls) == [99]
    writer.close()
    await server.close()
