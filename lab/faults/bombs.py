"""Send guides that take minutes or gigabytes to compile, as a hostile client would. Each has to be refused soon."""

import asyncio
import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aiohttp

from kvmesh.lab.faults.traffic import MODEL

BOMBS = 5  # of one fault
REFUSED_S = 40.0  # in which a bomb has an answer, on a machine that has much else to do
PATTERNS = 60


def bomb(draw: random.Random) -> Mapping[str, Any]:
    """Return a schema that no worker can compile: a large product of numbers, or of patterns."""
    if draw.random() < 0.5:
        factors = [draw.randrange(5_000_001, 9_999_999, 2) for _ in range(3)]
        return {"type": "integer", "allOf": [{"multipleOf": factor} for factor in factors]}
    names = [f"^.*{draw.choice('abcd')}.{{{number}}}b.*$" for number in range(10, 10 + PATTERNS)]
    return {"type": "object", "properties": {"x": {"allOf": [{"type": "string", "pattern": one} for one in names]}}}


async def send_bombs(urls: Sequence[str], seed: str, clock: Callable[[], float]) -> list[str]:
    """Send some at once; return a line for each that was taken, or had no answer in time."""
    draw = random.Random(seed)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=REFUSED_S)) as http:
        sent = [_send(http, draw.choice(list(urls)), bomb(draw), clock) for _ in range(BOMBS)]
        return [line for line in await asyncio.gather(*sent) if line]


async def _send(http: aiohttp.ClientSession, url: str, schema: Mapping[str, Any], clock: Callable[[], float]) -> str:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 4,
        "response_format": {"type": "json_schema", "json_schema": {"name": "bomb", "strict": True, "schema": schema}},
    }
    shown, began_s = json.dumps(schema)[:80], clock()
    try:
        async with http.post(f"{url}/v1/chat/completions", json=body) as response:
            text = (await response.read()).decode(errors="replace")
    except TimeoutError:
        return f"a guide like {shown} had no answer after {clock() - began_s:.0f} s"
    except (aiohttp.ClientError, OSError):
        return ""  # another fault has taken the frontend
    if response.status in (200, 500):
        return f"a guide like {shown} had status {response.status} after {clock() - began_s:.0f} s: {text[:200]}"
    return ""
