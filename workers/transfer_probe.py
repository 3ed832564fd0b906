"""Measure how fast memory of a peer can be read, over the backend that moves KV, and beside the KV cache.

Each side takes a region of its own for the time of the probe: no block of the KV cache is touched, and an engine that
moves KV itself is measured too. The memory is the CPU's, also where the KV cache is on a GPU.
"""

import asyncio
import os
import socket
import time
from pathlib import Path

import msgspec
import numpy as np

from kvmesh.kvcache.memory import KvRegion
from kvmesh.kvcache.transfer.backend import TransferBackend, open_backend
from kvmesh.mesh.address import split_address
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.mesh.plane.server import Call
from kvmesh.mesh.silence import received_bytes
from kvmesh.protocol.errors import InvalidRequestError, OverloadedError, TransferError
from kvmesh.protocol.ids import WorkerId, new_worker_id
from kvmesh.protocol.messages import KvLayout, PeerProbe, ProbeOffer, ProbeOfferRequest, ProbePeer, decode

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=128, block_size=64, dtype="float32")  # blocks of 64 KiB
BACKENDS = ("nixl", "shm")
HOLD_S = 20.0
TRANSFER_S = 10.0
RDMA_DEVICES = Path("/sys/class/infiniband")


class ProbeOffers:
    """Lets one peer at a time read from memory that is made for it."""

    def __init__(self) -> None:
        self._is_busy = False

    async def answer(self, call: Call) -> None:
        """Offer memory until the caller has left."""
        request = decode(call.body, ProbeOfferRequest)
        if self._is_busy:
            raise OverloadedError("another peer is being measured here", hint="ask again", retry_after_s=1)
        self._is_busy = True
        try:
            backend = await open_region(request.transfer, request.num_bytes)
            try:
                blocks = range(request.num_bytes // LAYOUT.block_bytes)
                await call.send(ProbeOffer(ticket=backend.offer(blocks, 0)))
                await asyncio.sleep(HOLD_S)
            finally:
                await backend.close()
        finally:
            self._is_busy = False


async def open_region(transfer: str, num_bytes: int) -> TransferBackend:
    """Return a backend with memory of its own. Raises MeshError."""
    if transfer not in BACKENDS:
        raise InvalidRequestError(
            f"memory cannot be read over {transfer[:16]!r}", hint=f"ask for {' or '.join(BACKENDS)}"
        )
    backend = open_backend(transfer)
    try:
        memory = backend.allocate(num_bytes)
        owner = np.zeros(num_bytes, np.uint8) if memory is None else np.frombuffer(memory, np.uint8)
        region = KvRegion(owner.ctypes.data, num_bytes // LAYOUT.block_bytes, LAYOUT, "cpu", owner)
        # The offer ends with its call, so the address at which it would be released is not needed.
        await backend.register(region, new_worker_id("probe"), "127.0.0.1:1")
    except BaseException:
        await backend.close()
        raise
    return backend


async def probe_transfer(plane: PlaneClient, request: ProbePeer, found: PeerProbe) -> PeerProbe:
    """Read from a peer's memory twice, and report on the second time: the first one connects. Raises MeshError."""
    asked = ProbeOfferRequest(transfer=request.transfer, num_bytes=request.num_bytes)
    async with plane.open(request.address, "probe_offer", asked, HOLD_S) as stream:
        if (raw := await stream.next()) is None:
            raise TransferError(f"{request.address} offered nothing to read")
        told = decode(raw, ProbeOffer).ticket
        # The ticket's address is where the peer is looked for when it is silent.
        ticket = msgspec.structs.replace(told, address=request.address, worker_id=WorkerId(told.worker_id[:64]))
        backend = await open_region(request.transfer, request.num_bytes)
        try:
            into = range(request.num_bytes // LAYOUT.block_bytes)
            host = await address_of(request.address)
            async with asyncio.timeout(TRANSFER_S):
                await backend.fetch(ticket, 0, into)
                before_bytes, started_s = received_bytes(host), time.perf_counter()
                num_bytes = await backend.fetch(ticket, 0, into)
                duration_s = time.perf_counter() - started_s
            tcp_bytes = received_bytes(host) - before_bytes
        except TimeoutError:
            raise TransferError(f"{request.num_bytes} bytes did not come in {TRANSFER_S:.0f} s") from None
        finally:
            await backend.close()
    return msgspec.structs.replace(
        found,
        num_bytes=num_bytes,
        duration_s=duration_s,
        tcp_bytes=max(0, tcp_bytes),
        rdma_devices=rdma_devices(),
        ucx=ucx_settings(),
    )


async def address_of(address: str) -> str:
    """Return the IP address of host:port. Raises TransferError."""
    host, port = split_address(address)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise TransferError(f"{host} has no address: {error}") from error
    return str(found[0][4][0])


def rdma_devices() -> tuple[str, ...]:
    try:
        return tuple(sorted(device.name[:64] for device in RDMA_DEVICES.iterdir()))[:64]
    except OSError:
        return ()


def ucx_settings() -> tuple[str, ...]:
    """Return the settings of UCX in the environment, as NAME=value."""
    found = (f"{name}={value}"[:256] for name, value in sorted(os.environ.items()) if name.startswith("UCX_"))
    return tuple(found)[:64]
