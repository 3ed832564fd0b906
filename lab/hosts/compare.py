"""Compare what every router believes of the caches with what they hold: `python -m kvmesh.lab.hosts.compare URL`.

It runs on a host of the mesh. A router gives its whole index (`GET /snapshot`), a worker the digest of its cache. Both
are taken again if the cache has changed in between. One JSON list is printed.
"""

import asyncio
import sys

import aiohttp
import msgspec

from kvmesh.mesh.discovery import Put, open_discovery
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.protocol.events import Digest
from kvmesh.protocol.messages import KvDigest, RouterCard, WorkerCard, decode_card
from kvmesh.router.index import Holder, PrefixIndex

CALL_TIMEOUT_S = 5.0
QUIET_S = 1.0  # without another card, all cards have come
TRIES = 5


class CacheView(msgspec.Struct, frozen=True, kw_only=True):
    """Hold what one router believes of one worker's cache, and what that worker holds."""

    router: str
    worker: str
    transport: str  # of the worker's KV events: "zmq" or "nats"
    blocks: int  # that the worker holds
    believed_blocks: int
    is_equal: bool


def transport_of(kv_events: str) -> str:
    return "nats" if kv_events.startswith("nats:") else "zmq" if kv_events else "none"


def believed(index: bytes, worker: WorkerCard) -> Digest:
    """Return the digest of a worker's blocks in a router's index. Raises WireError if the index cannot be read."""
    read = PrefixIndex()
    read.load(index)
    return read.digest(Holder(worker.worker_id, 0))


async def cards_of(url: str) -> tuple[list[WorkerCard], list[RouterCard]]:
    """Return the cards that discovery shows."""
    workers, routers = list[WorkerCard](), list[RouterCard]()
    discovery = open_discovery(url)
    try:
        changes = discovery.watch("")
        while True:
            change = await asyncio.wait_for(anext(changes), QUIET_S)
            if isinstance(change, Put) and change.key.startswith("workers/"):
                workers.append(decode_card(change.value, WorkerCard))
            elif isinstance(change, Put) and change.key.startswith("routers/"):
                routers.append(decode_card(change.value, RouterCard))
    except (TimeoutError, StopAsyncIteration):
        return workers, routers
    finally:
        await discovery.close()


async def compare(url: str) -> list[CacheView]:
    workers, routers = await cards_of(url)
    plane = PlaneClient()
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(CALL_TIMEOUT_S)) as http:
            return [
                await compare_one(router, worker, plane, http)
                for router in routers
                for worker in workers
                if router.http_url and worker.kv_events
            ]
    finally:
        await plane.close()


async def compare_one(
    router: RouterCard, worker: WorkerCard, plane: PlaneClient, http: aiohttp.ClientSession
) -> CacheView:
    for _ in range(TRIES):
        before = await plane.ask(worker.address, "kv_digest", None, KvDigest, CALL_TIMEOUT_S)
        async with http.get(f"{router.http_url}/snapshot", params={"model": worker.model}) as answer:
            answer.raise_for_status()
            ours = believed(await answer.read(), worker)
        after = await plane.ask(worker.address, "kv_digest", None, KvDigest, CALL_TIMEOUT_S)
        if before == after:
            break
    return CacheView(
        router=router.name,
        worker=worker.name,
        transport=transport_of(worker.kv_events),
        blocks=after.blocks,
        believed_blocks=ours.blocks,
        is_equal=(ours.blocks, ours.value) == (after.blocks, after.value),
    )


def main(argv: list[str]) -> int:
    views = asyncio.run(compare(argv[0]))
    print(msgspec.json.encode(views).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
