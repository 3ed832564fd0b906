"""Cancel fetches in the middle, use the blocks for something else, and see whether anybody still writes there.

A process of its own, since UCX reads its environment once: run it with UCX_TLS=tcp and KV_PEER_LAYERS=4096.
Prints a line for each try: seconds until the cancelled fetch had ended, bytes written after that.
"""

import asyncio
import base64
import sys
import time

from kvmesh.protocol.messages import Ticket, decode
from tests.support.kv_peer import NUM_BLOCKS, open_with_region


async def main() -> None:
    peer = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.kv_peer", "nixl", stdin=-1, stdout=-1
    )
    assert peer.stdin is not None
    assert peer.stdout is not None
    blocks = list(range(NUM_BLOCKS))
    peer.stdin.write(f"offer {' '.join(map(str, blocks))}\n".encode())
    ticket = decode(base64.b64decode(await peer.stdout.readline()), Ticket)
    backend, cache = await open_with_region("nixl", "reader")
    await backend.fetch(ticket, 0, blocks)
    backend.offer([0], 4)  # from now on the reader's own thread makes progress too
    for delay_s in (0.002, 0.01, 0.03):
        fetch = asyncio.create_task(backend.fetch(ticket, 0, blocks))
        await asyncio.sleep(delay_s)
        started = time.perf_counter()
        fetch.cancel()
        await asyncio.wait([fetch])
        took_s = time.perf_counter() - started
        cache[:] = 222
        await asyncio.sleep(0.5)
        print(took_s, int((cache != 222).sum()), flush=True)
    await backend.fetch(ticket, 0, blocks)
    print("again", bool((cache[:, 0] == [(i + 1) % 251 for i in blocks]).all()), flush=True)
    peer.kill()
    await peer.wait()
    await backend.close()


asyncio.run(main())
