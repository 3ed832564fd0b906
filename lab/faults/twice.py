"""Start a second `kvmesh up` in the run directory of another: it has to be refused, and the first has to go on."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import aiohttp

from kvmesh.lab.faults.room import die_with_parent
from kvmesh.lab.faults.servers import free_port
from kvmesh.planner.config import CONTROL_FILE

READY_S = 90.0
REFUSED_S = 30.0
ENDS_S = 60.0
POLL_S = 0.2


async def start_twice(folder: Path) -> list[str]:
    """Return a line for each promise that was broken."""
    await asyncio.to_thread(folder.mkdir)
    port = free_port()
    first = await _up(folder, port, "first")
    second: asyncio.subprocess.Process | None = None
    try:
        if problem := await _until(lambda: _serves(port), first, READY_S):
            return [f"`kvmesh up` alone: {problem}"]
        second = await _up(folder, free_port(), "second")
        found = await _refused(folder, second)
        if problem := await _until(lambda: _lists_workers(folder / "run"), first, REFUSED_S):
            found.append(f"the control socket of the first mesh after a second one: {problem}")
        if problem := await _until(lambda: _serves(port), first, REFUSED_S):
            found.append(f"the first mesh after a second one: {problem}")
        return [*found, *await _ends(first)]
    finally:
        for process in (first, second):
            if process is not None and process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()


async def _up(folder: Path, port: int, name: str) -> asyncio.subprocess.Process:
    flags = ["--engine", "mock", "--prefill", "0", "--decode", "0", "--aggregated", "1", "--port", str(port)]
    with (folder / f"{name}.log").open("wb") as log:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "kvmesh", "up", *flags, "--run-dir", str(folder / "run"),
            stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            preexec_fn=die_with_parent,
        )  # fmt: skip


async def _refused(folder: Path, second: asyncio.subprocess.Process) -> list[str]:
    """Return how the end of the second mesh differs from a clear refusal."""
    run_dir = str(folder / "run")
    try:
        code = await asyncio.wait_for(second.wait(), REFUSED_S)
    except TimeoutError:
        second.send_signal(signal.SIGTERM)
        with suppress(TimeoutError):
            await asyncio.wait_for(second.wait(), ENDS_S)
        return [f"a second `kvmesh up` runs in {run_dir}"]
    said = (folder / "second.log").read_text(errors="replace")
    if code == 0 or run_dir not in said or "Traceback" in said:
        return [f"a second `kvmesh up` in {run_dir} ended with code {code}: {said[-300:]!r}"]
    return []


async def _ends(first: asyncio.subprocess.Process) -> list[str]:
    first.send_signal(signal.SIGTERM)
    try:
        code = await asyncio.wait_for(first.wait(), ENDS_S)
    except TimeoutError:
        return [f"the first mesh does not end within {ENDS_S:.0f} s of a SIGTERM"]
    return [f"the first mesh ended with code {code} after a SIGTERM"] if code else []


async def _until(tried: Callable[[], object], process: asyncio.subprocess.Process, limit_s: float) -> str:
    """Wait until `tried` returns "", and return what it says after `limit_s`."""
    ends_s = time.monotonic() + limit_s
    while problem := str(await tried()):  # type: ignore[misc]
        if process.returncode is not None:
            return f"it ended with code {process.returncode}"
        if time.monotonic() > ends_s:
            return problem
        await asyncio.sleep(POLL_S)
    return ""


async def _serves(port: int) -> str:
    body = {"model": "tiny", "prompt": [20, 21, 22], "max_tokens": 2}
    return await _status(aiohttp.TCPConnector(), "POST", f"http://127.0.0.1:{port}/v1/completions", body)


async def _lists_workers(run_dir: Path) -> str:
    return await _status(
        aiohttp.UnixConnector(str(run_dir / "control" / CONTROL_FILE)), "GET", "http://up/workers", None
    )


async def _status(connector: aiohttp.BaseConnector, method: str, url: str, body: object) -> str:
    """Return "" for an answer with status 200, else what came."""
    timeout = aiohttp.ClientTimeout(total=10)
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as http,
            http.request(method, url, json=body) as response,
        ):
            return "" if response.status == 200 else f"status {response.status}"
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return repr(error)
