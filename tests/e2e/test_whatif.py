"""A mesh of real processes remembers what its clients saw, and tells it over HTTP as its log does."""

import asyncio
import statistics
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from kvmesh.commands.whatif.command import main
from tests.support import mesh_tls
from tests.support.mesh import Mesh, running_mesh

FLAGS = ("--engine", "mock", "--kv-transfer", "shm", "--mock-speedup", "0.5", "--prefill", "1", "--decode", "2")
REQUESTS, EVERY_S = 100, 0.2


async def ask(http: aiohttp.ClientSession, number: int) -> float:
    """Send one request, long enough for a prefill worker, and return its TTFT."""
    await asyncio.sleep(number * EVERY_S)
    shared = [100 + number % 4] * 64
    prompt = shared + [100 + (number * 7919 + i * 31) % 1800 for i in range(100 + number * 37 % 500)]
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 20 + number % 30, "ignore_eos": True, "stream": True}
    began, first = time.perf_counter(), 0.0
    async with http.post("/v1/completions", json=body) as reply:
        assert reply.status == 200
        async for part in reply.content:
            if part.startswith(b"data: {") and not first:
                first = time.perf_counter() - began
    return first


async def load(mesh: Mesh) -> list[float]:
    async with aiohttp.ClientSession(mesh.url) as http:
        return list(await asyncio.gather(*(ask(http, number) for number in range(REQUESTS))))


@pytest.mark.long
@pytest.mark.skipif(mesh_tls.IS_ON, reason="a frontend of a closed mesh answers it behind API keys alone")
def test_what_was_measured_is_what_clients_saw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "access.jsonl"
    with running_mesh(tmp_path / "run", *FLAGS, "--access-log-file", str(log)) as mesh:
        seen = asyncio.run(load(mesh))
        with mesh.http as http:
            asked = http.get("/kvmesh/whatif", params={"step_tokens": 512})
            assert asked.status_code == 200, asked.text
    found: dict[str, Any] = asked.json()
    assert found["fleet"] == {"prefill": 1, "decode": 2, "aggregated": 0}
    assert (found["requests"], found["judged"], found["failed"], found["left_out"]) == (REQUESTS, 50, 0, 0)
    assert found["measured"]["ttft_p50_s"] <= statistics.median(seen[50:]) + 0.01
    assert found["measured"]["ttft_p50_s"] > 0.5 * statistics.median(seen[50:])
    assert found["is_known"] == (found["error"] <= 0.2)
    names = ["prefill +1", "decode +1", "decode -1"] if found["is_known"] else []
    assert [one["case"]["name"] for one in found["answers"]] == names
    code = main(["--access-log", str(log), "--json", "--slo-ttft-s", "2", "--slo-itl-s", "0.1"])
    logged = msgspec.json.decode(capsys.readouterr().out)
    assert code == (0 if logged["is_known"] else 3)
    assert logged["measured"] == found["measured"]
    assert logged["fleet"] == found["fleet"]
