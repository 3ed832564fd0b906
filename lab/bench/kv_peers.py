"""Measure prefixes that come from another worker: TTFT beside computing, and our reads beside bare NIXL's.

The other worker is a process of its own: an engine behind the request plane, as workers have it. Prompts that it has
computed are asked of an engine here, which pulls them, and of one that computes them.
"""

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from multiprocessing.connection import Connection
from random import Random
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvmesh.kvcache.memory import KvRegion
from kvmesh.kvcache.transfer.backend import choose_backend
from kvmesh.kvcache.transfer.nixl import NixlBackend, NixlPeer, import_nixl
from kvmesh.lab.bench.kv_engines import BenchedEngine, KvBenchConfig, running
from kvmesh.lab.bench.kv_judge import Judge
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.mesh.plane.server import Call, PlaneServer
from kvmesh.protocol.errors import EngineError
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import KvLayout, OfferPrefix, PrefixSource, Ticket, decode
from kvmesh.workers.peer_pulls import asking
from kvmesh.workers.prefix_offers import PrefixOffers
from kvmesh.workers.step_engine import StepEngine

PATIENCE_S = 300.0
READ_BLOCKS = 256  # scattered over twice as many
READ_LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=128, block_size=64, dtype="float32")  # 64 KiB a block
SOURCE = WorkerId("source")


class PulledTimes(NamedTuple):
    """Tell how prompts went that were pulled, and how the same ones were computed."""

    pulled_s: float
    computed_s: float
    transfer: str
    blocks: int
    failed: int


# --- TTFT ----------------------------------------------------------------------------------------------------------


async def measure_peer(
    config: KvBenchConfig, plain: BenchedEngine, prompts: Sequence[list[int]], judge: Judge
) -> PulledTimes:
    """Return the median TTFTs of all prompts but the first, whose pull connects."""
    transfer, plane = choose_backend("auto"), PlaneClient()
    times: list[tuple[float, float]] = []
    try:
        with process(_hold, config, transfer, prompts) as told:
            address = await asyncio.to_thread(_hear, told)
            async with running(config, transfer=transfer, ask=asking(plane, PATIENCE_S)) as engine:
                puller = BenchedEngine(engine)
                puller.source = PrefixSource(worker_id=SOURCE, name=SOURCE, address=address, blocks=1 << 20)
                for prompt in prompts:
                    pulled, computed = await puller.ask(prompt), await plain.ask(prompt)
                    times.append((pulled.ttft_s, computed.ttft_s))
                    judge.compare(pulled, computed)
                peers = engine._scheduler.peers
                blocks = 0 if peers is None else peers.counts["pulled_blocks"]
    finally:
        await plane.close()
    medians = [statistics.median([pair[i] for pair in times[1:]]) for i in (0, 1)]
    return PulledTimes(medians[0], medians[1], transfer, blocks, puller.failed)


def _hold(config: KvBenchConfig, transfer: str, prompts: Sequence[list[int]], told: Connection) -> None:
    asyncio.run(_serve(config, transfer, prompts, told))


async def _serve(config: KvBenchConfig, transfer: str, prompts: Sequence[list[int]], told: Connection) -> None:
    """Compute prompts and offer them, until this process is killed."""
    async with holding(config, transfer, len(prompts)) as (engine, address):
        side = BenchedEngine(engine)
        for prompt in prompts:
            await side.ask(prompt)
        told.send(address)
        await asyncio.sleep(2 * PATIENCE_S)


@asynccontextmanager
async def holding(config: KvBenchConfig, transfer: str, prompts: int) -> AsyncIterator[tuple[StepEngine, str]]:
    """Yield an engine with room for so many prompts, and the address where it offers them."""
    engines: list[StepEngine] = []

    async def offer(call: Call) -> None:
        await PrefixOffers(engines[0], PATIENCE_S).answer(call, decode(call.body, OfferPrefix))

    server = PlaneServer({"offer_prefix": offer})
    address = await server.start("127.0.0.1")
    try:
        async with running(config, transfer=transfer, prompts=prompts + 1, place=(SOURCE, address)) as engine:
            engines.append(engine)
            yield engine, address
    finally:
        await server.close()


# --- reads ---------------------------------------------------------------------------------------------------------


async def nixl_read_share(rounds: int) -> float | None:
    """Return the speed of our reads of scattered blocks / that of bare NIXL calls; None where NIXL does not load."""
    if choose_backend("auto") != "nixl":
        return None
    with process(_lend) as told:
        ticket: Ticket = msgspec.msgpack.decode(await asyncio.to_thread(_hear, told), type=Ticket)
        backend, cache = await _opened("reader")
        bare = BareReader(ticket)
        into = _scattered(1)
        ratios: list[float] = []
        try:
            for number in range(rounds + 2):
                took: dict[bool, float] = {}
                cache[:] = bare.cache[:] = 0
                for is_ours in (True, False) if number % 2 else (False, True):
                    began = time.perf_counter()
                    if is_ours:
                        await backend.fetch(ticket, 0, into)
                    else:
                        await asyncio.to_thread(bare.read, into)
                    took[is_ours] = time.perf_counter() - began
                if not np.array_equal(cache, bare.cache) or not cache[list(into)].all():
                    raise EngineError("a read over NIXL brought other bytes", hint="this is a bug: report it")
                ratios.append(took[False] / took[True])
        finally:
            await backend.close()
            bare.close()
    return statistics.median(ratios[2:])  # the first ones connect


async def _opened(name: str) -> tuple[NixlBackend, Any]:
    """Return a backend and its blocks, uint8 [blocks, block bytes]."""
    backend = NixlBackend()
    cache = np.zeros((2 * READ_BLOCKS, READ_LAYOUT.block_bytes), np.uint8)
    region = KvRegion(cache.ctypes.data, len(cache), READ_LAYOUT, "cpu", cache)
    await backend.register(region, WorkerId(name), "127.0.0.1:1")
    return backend, cache


def _scattered(seed: int) -> tuple[int, ...]:
    return tuple(Random(seed).sample(range(2 * READ_BLOCKS), READ_BLOCKS))


def _lend(told: Connection) -> None:
    asyncio.run(_offer(told))


async def _offer(told: Connection) -> None:
    """Let the parent read from memory of this process, until it is killed."""
    backend, cache = await _opened("lender")
    cache[:] = (np.arange(len(cache)) % 251 + 1).astype(np.uint8)[:, None]
    told.send(msgspec.msgpack.encode(backend.offer(_scattered(0), 0)))
    await asyncio.sleep(2 * PATIENCE_S)


class BareReader:
    """Reads the blocks of a ticket with NIXL's own calls, and nothing else."""

    def __init__(self, ticket: Ticket) -> None:
        api = import_nixl()
        self.cache = np.zeros((2 * READ_BLOCKS, READ_LAYOUT.block_bytes), np.uint8)
        self._ticket, self._peer = ticket, decode(ticket.peer, NixlPeer)
        self._agent = api.nixl_agent("bare", api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        whole = [(self.cache.ctypes.data, self.cache.nbytes, 0, "")]
        self._registered = self._agent.register_memory(whole, "DRAM")
        self._name = self._agent.add_remote_agent(self._peer.metadata)

    def read(self, into: Sequence[int]) -> None:
        size = READ_LAYOUT.block_bytes
        local = np.array([(self.cache.ctypes.data + size * block, size, 0) for block in into], dtype=np.uint64)
        blocks = self._ticket.block_ids
        remote = np.array([(self._peer.blocks_address + size * block, size, 0) for block in blocks], dtype=np.uint64)
        agent = self._agent
        here, there = agent.get_xfer_descs(local, "DRAM"), agent.get_xfer_descs(remote, "DRAM")
        handle = agent.initialize_xfer("READ", here, there, self._name)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise EngineError(f"NIXL reports {state} for a read")

    def close(self) -> None:
        self._agent.remove_remote_agent(self._name)
        self._agent.deregister_memory(self._registered)


# --- processes -----------------------------------------------------------------------------------------------------


@contextmanager
def process(work: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """Run `work(*arguments, told)` in a process that is killed at the end; yield our end of `told`."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=work, args=(*arguments, theirs), daemon=True)
    child.start()
    theirs.close()
    try:
        yield ours
    finally:
        child.kill()
        child.join()
        ours.close()


def _hear(told: Connection) -> Any:
    """Return what a process tells. Raise EngineError if it does not."""
    try:
        if told.poll(PATIENCE_S):
            return told.recv()
    except EOFError as error:
        raise EngineError("the other worker of the benchmark has ended") from error
    raise EngineError("the other worker of the benchmark gave no sign of life")
