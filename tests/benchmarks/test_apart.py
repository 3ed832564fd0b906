"""Work in a process of its own ends with the process that wants its result."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from kvmesh.commands.bench.apart import apart, run_apart
from kvmesh.protocol.errors import ConfigError, EngineError
from tests.support.patience import PATIENCE_S
from tests.support.scripted_server import ServerScript, scripted_server

BENCH = [
    sys.executable,
    "-m",
    "kvmesh",
    "bench",
    "serve",
    "--rate",
    "5",
    "--duration-s",
    "300",
    "--isl",
    "20",
    "--osl",
    "4",
]


def note_and_sleep(note: str) -> None:
    Path(note).write_text(str(os.getpid()))
    time.sleep(300)


def refuse(what: str) -> None:
    raise ConfigError(f"no {what}", hint="take another")


def end_at_once() -> None:
    os._exit(3)


def until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_result_comes_from_another_process() -> None:
    assert run_apart(os.getpid) != os.getpid()


async def test_the_loop_runs_on_while_work_is_apart() -> None:
    assert await asyncio.gather(apart(max, 1, 2), asyncio.sleep(0, "here")) == [2, "here"]


def test_a_failure_is_raised_with_its_own_traceback() -> None:
    with pytest.raises(ConfigError, match="no engine; take another") as raised:
        run_apart(refuse, "engine")
    assert any("in refuse" in note for note in raised.value.__notes__)


def test_a_process_that_ends_without_a_result_is_an_error() -> None:
    with pytest.raises(EngineError, match="end_at_once has ended without a result"):
        run_apart(end_at_once)


async def test_cancelling_kills_the_process(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    working = asyncio.create_task(apart(note_and_sleep, str(note)))
    async with asyncio.timeout(PATIENCE_S):
        while not (note.exists() and note.read_text()):
            await asyncio.sleep(0.01)
    working.cancel()
    await asyncio.wait([working])
    assert not is_running(int(note.read_text()))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_benchmark_that_is_ended_takes_its_load_along(number: signal.Signals, tmp_path: Path) -> None:
    script = ServerScript()
    async with scripted_server(script) as url:
        with (tmp_path / "log").open("wb") as log:
            bench = subprocess.Popen([*BENCH, "--endpoints", url], stdout=log, stderr=log)
        try:
            async with asyncio.timeout(PATIENCE_S):
                while len(script.bodies) < 12:  # those of the check, and some of the load
                    assert bench.poll() is None, (tmp_path / "log").read_text()
                    await asyncio.sleep(0.05)
            load = [child.pid for child in psutil.Process(bench.pid).children(recursive=True)]
            assert load
            bench.send_signal(number)
            await asyncio.to_thread(bench.wait, PATIENCE_S)
            assert bench.returncode == (128 + number if number == signal.SIGTERM else -number)
            await asyncio.to_thread(until, lambda: not any(is_running(pid) for pid in load))
        finally:
            bench.kill()
            bench.wait()
