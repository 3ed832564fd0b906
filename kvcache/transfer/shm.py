"""Transfer KV through shared memory, where NIXL cannot load. One host, one user, CPU memory only.

The KV cache lies in a memfd; a peer maps /proc/<pid>/fd/<fd> read-only. No file is left behind: the memory is freed
with the last process that maps it, also after `kill -9`.

    u64 generation | u64 slots [NUM_SLOTS] | KV blocks
"""

import asyncio
import ctypes
import mmap
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from kvmesh.kvcache.memory import KvRegion
from kvmesh.kvcache.transfer.offers import NUM_SLOTS, Offerer, Offers, Spans, check_fetch, has_ended, plan_spans
from kvmesh.protocol.errors import ConfigError, TransferError
from kvmesh.protocol.ids import WorkerId, new_generation
from kvmesh.protocol.messages import Ticket, decode, encode

_HEADER_BYTES = 8 * (1 + NUM_SLOTS)
Map = np.ndarray[Any, np.dtype[np.uint8]]  # the memory of a peer; unmapped when no reference is left


class _ShmPeer(msgspec.Struct, frozen=True):
    pid: int
    fd: int
    num_bytes: int
    generation: int


class ShmBackend:
    name = "shm"

    def __init__(self) -> None:
        self._fd = -1
        self._map: mmap.mmap | None = None
        self._generation = new_generation()
        self._region: KvRegion | None = None
        self._offers: Offers | None = None
        self._peers: dict[_ShmPeer, Map] = {}
        self._lock = threading.Lock()

    def allocate(self, num_bytes: int) -> memoryview | None:
        total = _HEADER_BYTES + num_bytes
        self._fd = os.memfd_create("kvmesh-kv", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, total)
        self._map = mmap.mmap(self._fd, total)
        whole = memoryview(self._map)
        whole[:_HEADER_BYTES].cast("Q")[0] = self._generation
        return whole[_HEADER_BYTES:]

    async def register(self, region: KvRegion, worker_id: WorkerId, address: str) -> None:
        if self._map is None or region.device != "cpu":
            raise ConfigError(
                f"the shm transfer moves CPU memory that it allocated, the KV cache is on {region.device}",
                hint="set --kv-transfer nixl",
            )
        self._region = region
        peer = encode(_ShmPeer(os.getpid(), self._fd, len(self._map), self._generation))
        slots = memoryview(self._map)[:_HEADER_BYTES].cast("Q")[1:]
        self._offers = Offers(Offerer(worker_id, address, self.name, peer, region.layout), slots)

    def offer(self, block_ids: Sequence[int], num_tokens: int) -> Ticket:
        assert self._offers is not None, "register first"
        return self._offers.open(block_ids, num_tokens)

    def release(self, offer_id: int, nonce: int) -> bool:
        return self._offers is not None and self._offers.close(offer_id, nonce)

    async def fetch(self, ticket: Ticket, skip: int, into: Sequence[int]) -> int:
        assert self._region is not None, "register first"
        layout = self._region.layout
        spans = plan_spans(check_fetch(ticket, skip, into, self.name, layout), into, layout)
        copying = asyncio.ensure_future(asyncio.to_thread(self._copy, ticket, spans))
        try:
            return await asyncio.shield(copying)
        except asyncio.CancelledError:
            await asyncio.wait([copying])  # a memcpy cannot be stopped: keep the blocks until it ends
            copying.exception()  # the caller has left: nobody gets the error
            raise

    def _copy(self, ticket: Ticket, spans: Spans) -> int:
        assert self._region is not None
        memory = self._map_of(ticket)
        source = memory.ctypes.data + _HEADER_BYTES
        if (spans[:, 0] + spans[:, 2] > len(memory) - _HEADER_BYTES).any():
            raise TransferError(f"{ticket.worker_id} offers blocks beyond its KV cache")
        for begin, into, size in spans.tolist():
            ctypes.memmove(self._region.address + into, source + begin, size)  # releases the GIL
        words = memory[:_HEADER_BYTES].view(np.uint64)
        if not 0 <= ticket.slot < NUM_SLOTS or has_ended(ticket, int(words[1 + ticket.slot])):
            raise TransferError(f"the KV offer of {ticket.worker_id} ended before it was fetched")
        return int(spans[:, 2].sum())

    def _map_of(self, ticket: Ticket) -> Map:
        peer = decode(ticket.peer, _ShmPeer)
        with self._lock:  # copies run in several threads
            if (known := self._peers.get(peer)) is None:
                self._forget_dead_peers()
                known = self._peers[peer] = _map(peer, ticket.worker_id)
            return known

    def _forget_dead_peers(self) -> None:
        """Unmap dead peers: a map keeps the whole KV cache of a process in memory after the process has died."""
        for peer in list(self._peers):
            if not _is_there(peer):
                del self._peers[peer]

    async def close(self) -> None:
        self._peers.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._map is not None:  # peers may have it mapped for long; their pulls find no nonce in it any more
            self._map.madvise(mmap.MADV_REMOVE)


def _open(peer: _ShmPeer) -> int:
    """Open the peer's memory; return a descriptor. Raises OSError if the process is gone, or is another user's."""
    return os.open(f"/proc/{peer.pid}/fd/{peer.fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)


def _is_there(peer: _ShmPeer) -> bool:
    """Return whether a process still has this memory: after a sleep its descriptor may lead to something else."""
    try:
        fd = _open(peer)
        try:
            return os.pread(fd, 8, 0) == peer.generation.to_bytes(8, sys.byteorder)
        finally:
            os.close(fd)
    except OSError:
        return False


def _map(peer: _ShmPeer, worker_id: WorkerId) -> Map:
    try:
        fd = _open(peer)
        try:
            memory = np.frombuffer(mmap.mmap(fd, peer.num_bytes, prot=mmap.PROT_READ), np.uint8)
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        raise TransferError(
            f"the KV memory of {worker_id} cannot be mapped: {error}",
            hint="shm works between processes of one user on one host; else use --kv-transfer nixl",
        ) from error
    if len(memory) < _HEADER_BYTES or int(memory[:8].view(np.uint64)[0]) != peer.generation:
        raise TransferError(f"process {peer.pid} is not the one that made the KV offer of {worker_id}")
    return memory
