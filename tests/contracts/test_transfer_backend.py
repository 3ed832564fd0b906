"""Test the contract of every KV transfer backend. The peer is a real process, and the bytes really move."""

import asyncio
import base64
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest
import pytest_asyncio

from kvmesh.kvcache.transfer.backend import TransferBackend
from kvmesh.kvcache.transfer.nixl import why_unavailable
from kvmesh.kvcache.transfer.offers import plan_spans
from kvmesh.protocol.errors import TransferError
from kvmesh.protocol.messages import KvLayout, Ticket, decode
from tests.support.kv_peer import LAYOUT, open_with_region
from tests.support.patience import PATIENCE_S

BACKENDS = [
    "shm",
    pytest.param("nixl", marks=pytest.mark.skipif(bool(why_unavailable()), reason=f"NIXL: {why_unavailable()}")),
]


class Peer:
    """A kv_peer process. Tests share it, because a start with NIXL takes seconds."""

    def __init__(self, backend: str) -> None:
        command = [sys.executable, "-m", "tests.support.kv_peer", backend]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self._offered: list[Ticket] = []

    async def say(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        return (await asyncio.wait_for(asyncio.to_thread(self.process.stdout.readline), PATIENCE_S)).strip()

    async def offer(self, *blocks: int) -> Ticket:
        self._offered.append(decode(base64.b64decode(await self.say("offer " + " ".join(map(str, blocks)))), Ticket))
        return self._offered[-1]

    async def release(self, ticket: Ticket) -> bool:
        return {"True": True, "False": False}[await self.say(f"release {ticket.offer_id} {ticket.nonce}")]

    async def release_all(self) -> None:
        while self._offered:
            await self.release(self._offered.pop())

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def end(self) -> None:
        with self.process:  # closes its pipes and waits
            self.process.kill()


@pytest.fixture(scope="module")
def peers() -> Iterator[dict[str, Peer]]:
    running: dict[str, Peer] = {}
    yield running
    for peer in running.values():
        peer.end()


@pytest_asyncio.fixture(params=BACKENDS)
async def pair(
    request: pytest.FixtureRequest, peers: dict[str, Peer]
) -> AsyncIterator[tuple[TransferBackend, np.ndarray, Peer]]:
    name = request.param
    if name not in peers or not peers[name].is_alive():
        peers[name] = Peer(name)
    backend, cache = await open_with_region(name, "reader")
    yield backend, cache, peers[name]
    if peers[name].is_alive():
        await peers[name].release_all()
    await backend.close()


def content(block: int) -> int:
    """Return the bytes with which kv_peer fills a block."""
    return (block + 1) % 251


async def test_offered_blocks_arrive_in_order(pair: tuple[TransferBackend, np.ndarray, Peer]) -> None:
    backend, cache, peer = pair
    ticket = await peer.offer(5, 6, 7, 40, 2)
    moved = await backend.fetch(ticket, 0, [10, 11, 3, 4, 60])
    assert moved == 5 * LAYOUT.block_bytes
    for remote, local in zip([5, 6, 7, 40, 2], [10, 11, 3, 4, 60], strict=True):
        assert set(cache[local]) == {content(remote)}
    assert set(cache[12]) == {0}, "a block beside was touched"


async def test_blocks_that_are_here_already_are_skipped(pair: tuple[TransferBackend, np.ndarray, Peer]) -> None:
    backend, cache, peer = pair
    ticket = await peer.offer(5, 6, 7)
    assert await backend.fetch(ticket, 2, [1]) == LAYOUT.block_bytes
    assert set(cache[1]) == {content(7)}
    assert await backend.fetch(ticket, 3, []) == 0


async def test_many_fetches_run_at_once(pair: tuple[TransferBackend, np.ndarray, Peer]) -> None:
    backend, cache, peer = pair
    tickets = [await peer.offer(i, i + 20) for i in range(16)]
    await asyncio.gather(*(backend.fetch(t, 0, [2 * i, 2 * i + 1]) for i, t in enumerate(tickets)))
    for i in range(16):
        assert set(cache[2 * i]) == {content(i)}
        assert set(cache[2 * i + 1]) == {content(i + 20)}


async def test_a_released_offer_cannot_be_fetched(pair: tuple[TransferBackend, np.ndarray, Peer]) -> None:
    backend, _, peer = pair
    ticket = await peer.offer(5)
    assert await peer.release(ticket)
    assert not await peer.release(ticket)
    await peer.offer(9)  # takes the freed slot with a nonce of its own
    with pytest.raises(TransferError, match="ended before it was fetched"):
        await backend.fetch(ticket, 0, [1])


async def test_a_dead_peer_is_an_error_and_not_a_hang(pair: tuple[TransferBackend, np.ndarray, Peer]) -> None:
    backend, _, peer = pair
    ticket = await peer.offer(5)
    peer.end()
    with pytest.raises(TransferError):
        await asyncio.wait_for(backend.fetch(ticket, 0, [1]), PATIENCE_S)


async def test_a_cancelled_fetch_lets_go_of_the_blocks(pair: tuple[TransferBackend, np.ndarray, Peer]) -> None:
    backend, cache, peer = pair
    ticket = await peer.offer(*range(32))
    fetch = asyncio.create_task(backend.fetch(ticket, 0, list(range(32))))
    await asyncio.sleep(0)
    fetch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetch
    cache[:] = 0
    await backend.fetch(await peer.offer(3), 0, [63])  # the backend still works
    assert not cache[:63].any(), "the cancelled fetch still wrote"


async def test_another_layout_is_refused(pair: tuple[TransferBackend, np.ndarray, Peer]) -> None:
    _, _, peer = pair
    ticket = await peer.offer(5)
    other = KvLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_size=8, dtype="float32")
    backend, _ = await open_with_region(ticket.backend, "other", other)
    with pytest.raises(TransferError, match="same --block-size"):
        await backend.fetch(ticket, 0, [1])
    await backend.close()


async def test_an_idle_backend_costs_no_cpu(pair: tuple[TransferBackend, np.ndarray, Peer]) -> None:
    import time

    backend, _, peer = pair
    ticket = await peer.offer(5)
    await backend.fetch(ticket, 0, [1])
    before = time.process_time()
    await asyncio.sleep(0.5)
    assert time.process_time() - before < 0.15, "polling would take half a second"


def test_neighbours_at_both_ends_are_copied_as_one() -> None:
    size = LAYOUT.block_bytes
    spans = plan_spans([3, 4, 5, 9, 10], [7, 8, 1, 2, 3], LAYOUT)
    assert spans.tolist() == [[3 * size, 7 * size, 2 * size], [5 * size, size, size], [9 * size, 2 * size, 2 * size]]
    assert plan_spans([], [], LAYOUT).shape == (0, 3)


@pytest.mark.parametrize("block_id", [-1, 1 << 32, (1 << 64) // LAYOUT.block_bytes, 1 << 70])
def test_blocks_that_cannot_be_are_refused(block_id: int) -> None:
    """Their place in bytes would be somewhere else, if it were computed in 64 bits."""
    with pytest.raises(TransferError, match="blocks that cannot be"):
        plan_spans([1, block_id], [1, 2], LAYOUT)


@pytest.mark.long
@pytest.mark.skipif(bool(why_unavailable()), reason=f"NIXL: {why_unavailable()}")
def test_over_tcp_nothing_writes_into_blocks_whose_fetch_was_cancelled() -> None:
    """Releasing a NIXL transfer does not stop UCX: a cancelled fetch must wait for it."""
    env = {**os.environ, "UCX_TLS": "tcp", "KV_PEER_LAYERS": "4096"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.kv_cancel"], env=env, capture_output=True, text=True, timeout=60
    )
    *tries, again = done.stdout.splitlines()
    assert again == "again True", done.stderr
    assert [int(line.split()[1]) for line in tries] == [0, 0, 0]
    assert max(float(line.split()[0]) for line in tries) > 0.005, "no fetch was caught in the middle"
