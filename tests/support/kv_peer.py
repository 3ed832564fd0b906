"""A process that holds KV blocks and offers them, as a prefill worker does. Driven over stdin/stdout.

Block i of its cache is filled with byte (i + 1) % 251. Lines in: `offer <ids>`, `release <id> <nonce>`, `exit`.
Lines out: base64 of a msgpack ticket, or `ok`.
"""

import asyncio
import base64
import os
import sys

import numpy as np

from kvmesh.kvcache.memory import KvRegion
from kvmesh.kvcache.transfer.backend import TransferBackend, open_backend
from kvmesh.protocol.ids import WorkerId, new_worker_id
from kvmesh.protocol.messages import KvLayout, encode

NUM_LAYERS = int(os.environ.get("KV_PEER_LAYERS", "2"))  # 512 bytes a block each
LAYOUT = KvLayout(num_layers=NUM_LAYERS, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")
NUM_BLOCKS = 64


async def open_with_region(name: str, worker: str, layout: KvLayout = LAYOUT) -> tuple[TransferBackend, np.ndarray]:
    """A registered backend and its KV cache as uint8 [NUM_BLOCKS, block_bytes]."""
    backend = open_backend(name)
    num_bytes = NUM_BLOCKS * layout.block_bytes
    memory = backend.allocate(num_bytes)
    cache = np.zeros(num_bytes, np.uint8) if memory is None else np.frombuffer(memory, np.uint8)
    region = KvRegion(cache.ctypes.data, NUM_BLOCKS, layout, "cpu", cache)
    await backend.register(region, WorkerId(new_worker_id(worker)), "127.0.0.1:1")
    return backend, cache.reshape(NUM_BLOCKS, layout.block_bytes)


async def serve(name: str) -> None:
    backend, cache = await open_with_region(name, "peer")
    cache[:] = ((np.arange(NUM_BLOCKS) + 1) % 251).astype(np.uint8)[:, None]
    while line := await asyncio.to_thread(sys.stdin.readline):
        command, *words = line.split()
        match command:
            case "offer":
                ids = [int(word) for word in words]
                print(base64.b64encode(encode(backend.offer(ids, 4 * len(ids)))).decode(), flush=True)
            case "release":
                print(backend.release(int(words[0]), int(words[1])), flush=True)
            case _:
                break
    await backend.close()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
