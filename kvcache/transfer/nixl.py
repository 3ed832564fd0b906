"""Transfer KV over NIXL (UCX): RDMA between hosts, CUDA IPC or GPUDirect on GPUs, shared memory or TCP.

NIXL calls block: with cross-memory attach, `transfer` itself is the copy. NIXL's own progress thread uses a whole core.
So the agent lives on one thread of ours, which sleeps while there is no work. While offers stand, that thread also
makes progress for peers that read from us; UCX needs that while it connects, and over TCP.
"""

import asyncio
import contextlib
import importlib
import importlib.util
import logging
import math
import os
import queue
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from importlib import metadata
from typing import Any, Literal

import msgspec
import numpy as np

from kvmesh.kvcache.memory import KvRegion
from kvmesh.kvcache.transfer.offers import NUM_SLOTS, Offerer, Offers, Spans, check_fetch, has_ended, plan_spans
from kvmesh.mesh.address import split_address
from kvmesh.mesh.silence import break_cut_connections
from kvmesh.protocol.errors import ConfigError, TransferError
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import Ticket, decode, encode

log = logging.getLogger(__name__)

_FETCH_POLL_S = 0.00005  # while we read from a peer
_OFFER_POLL_S = 0.0005  # while peers may read from us
_LINGER_S = 10.0  # after the last offer has ended: a read that was given up still has to end at the peer
_LINGER_POLL_S = 0.01
_END_S = 2.0
_MAX_PEERS = 256
_PROBE_S = 0.3  # time to answer for a peer whose last transfer has failed
_LOOK_S = 0.2  # a transfer that takes longer has its connections checked, and again after as long
# A try to connect holds up the transfers of all peers. So a peer that took no connection is left alone, twice as long
# after each try.
_REST_S, _MOST_REST_S = 0.5, 8.0

Steps = Generator[None, None, int]  # a fetch on the agent's thread: yields while it waits for the network


class NixlPeer(msgspec.Struct, frozen=True):
    """The data that a peer needs to read a worker's memory: NIXL metadata, the places of blocks and slots."""

    agent: str
    metadata: bytes
    blocks_address: int
    num_blocks: int
    memory: str  # "DRAM" or "VRAM"
    device: int
    slots_address: int


def ignored_settings() -> list[str]:
    """Return the settings of UCX that are set, but empty. Files of compose make some of an unset variable."""
    return sorted(name for name, value in os.environ.items() if name.startswith("UCX_") and not value.strip())


def _api_module() -> str:
    """Return the module that has NIXL's API.

    The package `nixl` picks the build for torch's CUDA. Where torch has none, `nixl` imports all of torch, for a second
    of CPU time, to find that out. An engine without torch does not need it.
    """
    if "torch" not in sys.modules and importlib.util.find_spec("nixl_cu12"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            if metadata.version("torch").endswith("+cpu"):
                return "nixl_cu12._api"
    return "nixl._api"


def import_nixl() -> Any:
    """Import the NIXL API, and keep it from logging to stdout, which is for our own output."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    for name in ignored_settings():
        log.warning("%s is set, but empty: UCX would find no transport at all. It is ignored", name)
        del os.environ[name]
    api = importlib.import_module(_api_module())
    nixl_log = logging.getLogger("nixl")
    nixl_log.handlers.clear()
    nixl_log.propagate = True
    nixl_log.setLevel(logging.WARNING)
    return api


def why_unavailable() -> str:
    """Return "" if NIXL loads and has UCX on this host, else the reason."""
    try:
        api = import_nixl()
        plugins = api.nixl_agent("kvmesh-probe", api.nixl_agent_config(backends=[])).get_plugin_list()
    except Exception as error:  # the package runs native code on import: any error is the reason
        return f"{type(error).__name__}: {error}"
    return "" if "UCX" in plugins else f"it has no UCX plugin, only {plugins}"


class NixlBackend:
    name = "nixl"

    def __init__(self) -> None:
        self._region: KvRegion | None = None
        self._agent: _AgentThread | None = None
        self._offers: Offers | None = None
        self._failed: set[WorkerId] = set()  # peers whose last transfer has failed

    def allocate(self, num_bytes: int) -> memoryview | None:
        return None

    async def register(self, region: KvRegion, worker_id: WorkerId, address: str) -> None:
        slots = np.zeros(NUM_SLOTS, dtype=np.uint64)
        self._region = region
        self._agent = _AgentThread(worker_id, region, slots, self._has_offers)
        peer = await asyncio.wrap_future(self._agent.started)
        offerer = Offerer(worker_id, address, self.name, peer, region.layout)
        self._offers = Offers(offerer, slots.data.cast("B").cast("Q"))

    def _has_offers(self) -> bool:
        return self._offers is not None and len(self._offers) > 0

    def offer(self, block_ids: Sequence[int], num_tokens: int) -> Ticket:
        assert self._offers is not None and self._agent is not None, "register first"
        ticket = self._offers.open(block_ids, num_tokens)
        self._agent.wake()
        return ticket

    def release(self, offer_id: int, nonce: int) -> bool:
        return self._offers is not None and self._offers.close(offer_id, nonce)

    async def fetch(self, ticket: Ticket, skip: int, into: Sequence[int]) -> int:
        assert self._region is not None and self._agent is not None, "register first"
        layout = self._region.layout
        spans = plan_spans(check_fetch(ticket, skip, into, self.name, layout), into, layout)
        if ticket.worker_id in self._failed:
            await probe(ticket.address)
        job = _Fetch(ticket, spans)
        self._agent.submit(job)
        done = asyncio.wrap_future(job.result)
        checks = _check_wire(split_address(ticket.address)[0], done)
        try:
            num_bytes = await asyncio.shield(done)
        except asyncio.CancelledError:
            job.aborted = True
            await asyncio.wait([done])  # until NIXL no longer uses the blocks
            done.exception()  # the caller has left: nobody gets the error
            raise
        except TransferError:
            if len(self._failed) < _MAX_PEERS:
                self._failed.add(ticket.worker_id)
            raise
        finally:
            checks.cancel()
        self._failed.discard(ticket.worker_id)
        return num_bytes

    async def close(self) -> None:
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.submit(None)
            await asyncio.to_thread(agent.join)


def _check_wire(host: str, done: asyncio.Future[int]) -> asyncio.TimerHandle:
    """Break connections to a host that are cut or get no answer, until a fetch is done. NIXL would wait for minutes."""
    loop = asyncio.get_running_loop()

    def check() -> None:
        if not done.done():
            loop.run_in_executor(None, break_cut_connections, host)
            loop.call_later(_LOOK_S, check)

    return loop.call_later(_LOOK_S, check)


async def probe(address: str) -> None:
    """Raise TransferError if a peer's host does not let us connect soon. UCX would try for much longer."""
    host, port = split_address(address)
    try:
        async with asyncio.timeout(_PROBE_S):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError) as error:
        raise TransferError(f"{address} cannot be reached: {str(error) or 'no answer'}") from error
    writer.close()


class _Fetch:
    def __init__(self, ticket: Ticket, spans: Spans) -> None:
        self.ticket = ticket
        self.spans = spans
        self.aborted = False  # set by the event loop, read by the agent's thread
        self.result: Future[int] = Future()
        self.result.set_running_or_notify_cancel()


class _AgentThread(threading.Thread):
    """Owns the NIXL agent. The commands are a _Fetch to run, "" to look again (an offer stands) and None to end."""

    def __init__(
        self, worker_id: WorkerId, region: KvRegion, slots: np.ndarray[Any, Any], has_offers: Callable[[], bool]
    ) -> None:
        super().__init__(name="nixl", daemon=True)
        self.started: Future[bytes] = Future()
        self._worker_id = worker_id
        self._region = region
        self._slots = slots
        self._has_offers = has_offers
        self._commands: queue.SimpleQueue[_Fetch | Literal[""] | None] = queue.SimpleQueue()
        self._ended = False
        self._linger_until = 0.0  # infinite while an offer stands
        self._running: list[tuple[_Fetch, Steps]] = []
        self._peers: OrderedDict[WorkerId, str] = OrderedDict()  # worker -> NIXL agent name
        self._resting: dict[WorkerId, tuple[float, float]] = {}  # took no connection: how long to rest, until when
        self._scratch = np.zeros(NUM_SLOTS, dtype=np.uint64)  # remote slots are read into it
        self._scratch_free = list(range(NUM_SLOTS))
        self._device = 0 if region.device == "cpu" else int(region.device.partition(":")[2] or 0)
        self._memory = "DRAM" if region.device == "cpu" else "VRAM"
        self._agent: Any = None
        self.start()

    def submit(self, command: _Fetch | None) -> None:
        self._commands.put(command)
        if self._ended:  # the thread takes no more commands
            self._refuse_the_rest()

    def wake(self) -> None:
        self._commands.put("")

    def run(self) -> None:
        try:
            self.started.set_result(self._open())
        except Exception as error:
            reason = ConfigError(f"NIXL did not start: {error}", hint="see `kvmesh doctor`")
            self.started.set_exception(reason)
            return
        try:
            while self._serve_commands():
                self._step_fetches()
                self._make_progress_for_peers()
            self._end_fetches()
        finally:
            self._ended = True
            self._refuse_the_rest()
            self._close()

    def _poll_s(self) -> float | None:
        """Return after how long something has to be polled; None if nothing has to be.

        Over TCP our side takes part in what peers read. A peer that has given a read up releases the offer at once, and
        its blocks stay held until the read has ended: so we take part for some time after the last offer.
        """
        if self._running:
            return _FETCH_POLL_S
        if self._has_offers():
            self._linger_until = math.inf
            return _OFFER_POLL_S
        if self._linger_until == math.inf:
            self._linger_until = time.monotonic() + _LINGER_S
        return _LINGER_POLL_S if time.monotonic() < self._linger_until else None

    def _make_progress_for_peers(self) -> None:
        if self._has_offers() or time.monotonic() < self._linger_until:
            try:
                self._agent.get_new_notifs()
            except Exception as error:  # a peer that left; peers that still read from us will find out
                log.warning("NIXL could not make progress: %s", _describe(error))

    def _end_fetches(self) -> None:
        """Give running fetches a moment to end, because until then NIXL may write into the KV cache."""
        give_up = time.monotonic() + _END_S
        for job, _ in self._running:
            job.aborted = True
        while self._running and time.monotonic() < give_up:
            self._step_fetches()
            time.sleep(_FETCH_POLL_S)

    def _refuse_the_rest(self) -> None:
        jobs = [job for job, _ in self._running]
        self._running = []
        while not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, _Fetch):
                jobs.append(command)
        for job in jobs:
            job.result.set_exception(TransferError("the KV transfer of this worker has ended"))

    def _open(self) -> bytes:
        api = import_nixl()
        self._agent = api.nixl_agent(
            str(self._worker_id), api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        )
        region = self._region
        self._registered = [
            self._agent.register_memory([(region.address, region.num_bytes, self._device, "")], self._memory),
            self._agent.register_memory([(self._slots.ctypes.data, self._slots.nbytes, 0, "")], "DRAM"),
            self._agent.register_memory([(self._scratch.ctypes.data, self._scratch.nbytes, 0, "")], "DRAM"),
        ]
        peer = NixlPeer(
            agent=str(self._worker_id),
            metadata=self._agent.get_agent_metadata(),
            blocks_address=region.address,
            num_blocks=region.num_blocks,
            memory=self._memory,
            device=self._device,
            slots_address=self._slots.ctypes.data,
        )
        return encode(peer)

    def _close(self) -> None:
        for name in self._peers.values():
            self._forget_agent(name)
        for registered in self._registered:
            try:
                self._agent.deregister_memory(registered)
            except Exception as error:
                log.warning("NIXL kept registered memory: %s", error)
        self._agent = None

    def _serve_commands(self) -> bool:
        """Take the waiting commands; sleep while nothing has to be polled. Return False for the end."""
        timeout = self._poll_s()
        while True:
            try:
                command = self._commands.get(timeout=timeout)
            except queue.Empty:
                return True
            timeout = 0
            if command is None:
                return False
            if isinstance(command, _Fetch):
                self._running.append((command, self._fetch(command)))

    def _step_fetches(self) -> None:
        still_running: list[tuple[_Fetch, Steps]] = []
        for job, steps in self._running:
            try:
                next(steps)
                still_running.append((job, steps))
            except StopIteration as done:
                job.result.set_result(done.value)
            except TransferError as error:
                job.result.set_exception(error)
            except Exception as error:  # an error of NIXL: the peer is gone, or its memory is
                self._forget_agent(self._peers.pop(job.ticket.worker_id, ""))
                job.result.set_exception(
                    TransferError(f"NIXL could not read from {job.ticket.worker_id}: {_describe(error)}")
                )
        self._running = still_running

    def _fetch(self, job: _Fetch) -> Steps:
        if job.aborted:
            raise TransferError("given up by the caller")
        peer = decode(job.ticket.peer, NixlPeer)
        name = self._connect(job.ticket.worker_id, peer)
        cache_bytes = peer.num_blocks * job.ticket.layout.block_bytes
        begins, into, sizes = job.spans.astype(np.uint64).T
        if (begins + sizes > cache_bytes).any():
            raise TransferError(f"{job.ticket.worker_id} offers blocks beyond its KV cache")
        if len(sizes):
            local = np.stack([into + self._region.address, sizes, np.full_like(sizes, self._device)], 1)
            remote = np.stack([begins + peer.blocks_address, sizes, np.full_like(sizes, peer.device)], 1)
            yield from self._read(job, name, local, self._memory, remote, peer.memory)
        yield from self._check_offer(job, name, peer)
        return int(sizes.sum())

    def _check_offer(self, job: _Fetch, name: str, peer: NixlPeer) -> Generator[None, None, None]:
        """Read the offer's slot after the blocks: the nonce proves that the blocks were not reused meanwhile."""
        if not self._scratch_free:
            raise TransferError("too many KV transfers at once", hint="lower --max-num-seqs")
        here = self._scratch_free.pop()
        try:
            self._scratch[here] = 0
            local = np.array([(self._scratch.ctypes.data + 8 * here, 8, 0)], dtype=np.uint64)
            remote = np.array([(peer.slots_address + 8 * job.ticket.slot, 8, 0)], dtype=np.uint64)
            yield from self._read(job, name, local, "DRAM", remote, "DRAM")
            if has_ended(job.ticket, int(self._scratch[here])):
                raise TransferError(f"the KV offer of {job.ticket.worker_id} ended before it was fetched")
        finally:
            self._scratch_free.append(here)

    def _read(
        self,
        job: _Fetch,
        name: str,
        local: np.ndarray[Any, Any],
        local_memory: str,
        remote: np.ndarray[Any, Any],
        remote_memory: str,
    ) -> Generator[None, None, None]:
        agent = self._agent
        handle = agent.initialize_xfer(
            "READ", agent.get_xfer_descs(local, local_memory), agent.get_xfer_descs(remote, remote_memory), name
        )
        try:
            # Wait also when the caller has given up: to release a transfer does not stop UCX. Over TCP it continues
            # to write into our blocks while the transfer is in progress.
            state = agent.transfer(handle)
            while state == "PROC":
                yield
                state = agent.check_xfer_state(handle)
        finally:
            self._release(handle)
        if job.aborted:
            raise TransferError("given up by the caller")
        if state != "DONE":
            raise TransferError(f"NIXL reports {state} for a read from {job.ticket.worker_id}")

    def _release(self, handle: Any) -> None:
        try:
            self._agent.release_xfer_handle(handle)
        except Exception as error:
            log.warning("NIXL does not release a transfer: %s", _describe(error))

    def _connect(self, worker_id: WorkerId, peer: NixlPeer) -> str:
        if (name := self._peers.get(worker_id)) is not None:
            self._peers.move_to_end(worker_id)
            return name
        rest_s, until_s = self._resting.get(worker_id, (_REST_S, 0.0))
        if (began_s := time.monotonic()) < until_s:
            raise TransferError(f"{worker_id} took no connection for KV a moment ago")
        try:
            name = self._agent.add_remote_agent(peer.metadata)  # connects, and returns when that has ended
        except Exception:
            if (ended_s := time.monotonic()) - began_s > _LOOK_S:  # a peer that refuses costs nothing
                if len(self._resting) >= _MAX_PEERS:
                    self._resting.clear()
                self._resting[worker_id] = (min(2 * rest_s, _MOST_REST_S), ended_s + rest_s)
            raise
        self._resting.pop(worker_id, None)
        name = name.decode() if isinstance(name, bytes) else str(name)
        self._peers[worker_id] = name
        if len(self._peers) > _MAX_PEERS:
            self._forget_agent(self._peers.popitem(last=False)[1])
        return name

    def _forget_agent(self, name: str) -> None:
        if not name:
            return
        try:
            self._agent.remove_remote_agent(name)
        except Exception as error:
            log.debug("NIXL did not forget %s: %s", name, _describe(error))


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
