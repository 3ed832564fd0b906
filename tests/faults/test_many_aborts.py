"""Clients that leave by the thousands leave no memory behind in any process of the mesh."""

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.faults.conftest import in_flight
from tests.support.held import held_by
from tests.support.mesh import Mesh, running_mesh, until

AT_ONCE = 32
LIMITS = {"max_tokens": 500, "ignore_eos": True, "stream": True}


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Mesh]:
    flags = ["--engine", "mock", "--kv-transfer", "shm", "--offer-lease-s", "2", "--log-level", "warning"]
    with running_mesh(tmp_path, *flags) as mesh:
        until(lambda: mesh.workers_seen() == 3, what="all workers")
        yield mesh


async def abort(mesh: Mesh, rng: random.Random) -> None:
    """Send a request and leave after up to 30 ms: while it is placed, prefilled, handed over or streamed."""
    prompt = [rng.randrange(10, 2000) for _ in range(rng.choice((5, 70, 300)))]
    fields = {"model": "tiny", "prompt": prompt, "kvmesh": {"disaggregate": rng.random() < 0.5}, **LIMITS}
    body = json.dumps(fields).encode()
    host, _, port = urlsplit(mesh.url).netloc.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json"
    writer.write(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    try:
        await asyncio.wait_for(reader.read(rng.choice((1, 4096, 65536))), rng.random() * 0.03)
    except TimeoutError:
        pass
    writer.close()


async def abort_many(mesh: Mesh, count: int, rng: random.Random) -> None:
    left = count

    async def client() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await abort(mesh, rng)

    await asyncio.gather(*[client() for _ in range(AT_ONCE)])


@pytest.mark.parametrize(
    ("aborts", "most_mib"),
    [
        # heaps still grow to their usual size: a frontend's is level after about 6,000 aborts
        pytest.param(3000, 32.0, marks=pytest.mark.long),
        pytest.param(100_000, 8.0, marks=[pytest.mark.weekly, pytest.mark.timeout(3600)]),
    ],
)
def test_memory_is_flat_after_aborts(mesh: Mesh, aborts: int, most_mib: float) -> None:
    """A process may hold `most_mib` more at the end than after the first third."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    processes = {"frontend": mesh.find_frontend().pid, **{name: mesh.pid(name) for name in mesh.workers()}}
    asyncio.run(abort_many(mesh, aborts // 3, rng))
    until(lambda: not in_flight(mesh), what="everything to be free")
    before = {name: held_by(pid) for name, pid in processes.items()}
    asyncio.run(abort_many(mesh, aborts - aborts // 3, rng))
    until(lambda: not in_flight(mesh), what="everything to be free again")
    after = {name: held_by(pid) for name, pid in processes.items()}
    for name, then in before.items():
        print(name, then, after[name])
        assert after[name].private_mib <= then.private_mib + most_mib, name
        assert after[name].threads <= then.threads + 2, name
        assert after[name].fds <= then.fds + 8, name
