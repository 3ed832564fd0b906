"""Clients that wait for their answers, without deadlines, are all answered with the default settings."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.support.mesh import running_mesh
from tests.support.patience import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.long]
CLIENTS, REQUESTS, ISL_TOKENS, VOCAB = 256, 1024, 2000, 2000


async def closed_loop(url: str) -> Counter[int]:
    """Let CLIENTS clients send REQUESTS requests one after the other; return how often each status came."""
    statuses: Counter[int] = Counter()
    numbers: Iterator[int] = iter(range(REQUESTS))

    async def client(session: aiohttp.ClientSession) -> None:
        for number in numbers:
            prompt = [3 + (number * 7919 + place * (number % 13 + 1)) % VOCAB for place in range(ISL_TOKENS)]
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 16, "ignore_eos": True}
            async with session.post(f"{url}/v1/completions", json=body) as reply:
                await reply.read()
                statuses[reply.status] += 1

    timeout = aiohttp.ClientTimeout(total=4 * PATIENCE_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        await asyncio.gather(*[client(session) for _ in range(CLIENTS)])
    return statuses


def test_a_closed_loop_without_deadlines_is_answered_completely(tmp_path: Path) -> None:
    """The workers are four times as fast as by default, to save time; requests still wait for seconds."""
    flags = ["--engine", "mock", "--prefill", "0", "--decode", "0", "--aggregated", "2", "--mock-speedup", "4"]
    with running_mesh(tmp_path, *flags) as mesh:
        assert asyncio.run(closed_loop(mesh.url)) == {200: REQUESTS}
