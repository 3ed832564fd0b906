"""Test the run from main(stop) to an exit code, in real processes with real signals."""

import asyncio
import gc
import os
import select
import signal
import socket
import ssl
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvmesh.mesh import lifecycle
from kvmesh.protocol.errors import ConfigError, ExpiredError, PeerLostError
from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
HEAD = """
import asyncio, os, sys
from kvmesh.mesh.lifecycle import run, watch_parent
def say(text): print(text, flush=True)
"""


@contextmanager
def service(body: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """Run a process with `body`, which defines `main`; it prints "up" when it listens for signals."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"{HEAD}\n{body}\nsys.exit(run(main))"],
        cwd=ROOT,
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def await_line(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline().strip() == line


WAITS = """
async def main(stop):
    say("up")
    await stop.wait()
    say("stopping")
    %s
"""


@pytest.mark.parametrize("where", ["asyncio.to_thread(time.sleep, 600)", "asyncio.sleep(0)"])
def test_a_thread_that_does_not_end_does_not_hold_the_process(where: str) -> None:
    body = WAITS % (
        "import threading, time, mesh.lifecycle\n"
        "    mesh.lifecycle.LINGER_S = 0.1\n"
        "    threading.Thread(target=time.sleep, args=(600,)).start()\n"
        f"    task = asyncio.ensure_future({where})\n"
        "    await asyncio.sleep(0)\n"
        "    return 7"
    )
    with service(body) as process:
        await_line(process, "up")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 7


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_main_finish(number: signal.Signals) -> None:
    with service(WAITS % "return 7") as process:
        await_line(process, "up")
        process.send_signal(number)
        await_line(process, "stopping")
        assert process.wait(PATIENCE_S) == 7


def test_the_last_line_of_the_log_is_stopped() -> None:
    body = "from kvmesh.mesh.telemetry import setup_logging\nsetup_logging('x')\n" + WAITS % "return 0"
    with service(body) as process:
        await_line(process, "up")
        process.terminate()
        _, log = process.communicate(timeout=PATIENCE_S)
    assert log.splitlines()[-1].endswith(" INFO    x mesh.lifecycle: stopped")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_cancels_main(number: signal.Signals, code: int) -> None:
    stuck = "\n    try: await asyncio.sleep(60)\n    finally: say('cleaned up')"
    with service(WAITS % stuck) as process:
        await_line(process, "up")
        process.send_signal(number)
        await_line(process, "stopping")
        process.send_signal(number)
        await_line(process, "cleaned up")
        assert process.wait(PATIENCE_S) == code


def test_a_third_signal_ends_a_main_that_resists_cancellation() -> None:
    stubborn = """
    while True:
        try: await asyncio.sleep(60)
        except asyncio.CancelledError: say("no")
"""
    with service(WAITS % stubborn) as process:
        await_line(process, "up")
        process.terminate()
        await_line(process, "stopping")
        process.terminate()
        await_line(process, "no")
        process.terminate()
        assert process.wait(PATIENCE_S) == 143


SUPERVISOR = """
import os, subprocess, sys
os.environ["KVMESH_PARENT_PID"] = str(os.getpid())
subprocess.run([sys.executable, "-c", sys.argv[1]])
"""


@pytest.mark.parametrize("kernel", ["", "del os.pidfd_open"], ids=["pidfd", "prctl"])
def test_the_end_of_the_supervisor_stops_the_service(kernel: str) -> None:
    main = WAITS.replace('say("up")', 'watch_parent(stop); say("up")') % "return 0"
    code = f"{HEAD}\n{kernel}\n{main}\nsys.exit(run(main))"
    command = [sys.executable, "-c", SUPERVISOR, code]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as supervisor:
        await_line(supervisor, "up")
        supervisor.kill()
        await_line(supervisor, "stopping")  # said by the service, into the pipe it inherited


async def test_a_parent_that_is_gone_already_stops_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = await asyncio.create_subprocess_exec("true")
    await parent.wait()
    monkeypatch.setenv("KVMESH_PARENT_PID", str(parent.pid))
    stop = asyncio.Event()
    lifecycle.watch_parent(stop)
    assert stop.is_set()


async def test_without_a_parent_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVMESH_PARENT_PID", raising=False)
    stop = asyncio.Event()
    lifecycle.watch_parent(stop)
    assert not stop.is_set()


def test_no_exit_code_means_0() -> None:
    async def main(stop: asyncio.Event) -> None: ...

    assert lifecycle.run(main) == 0


def test_an_expected_failure_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    async def main(stop: asyncio.Event) -> None:
        raise ConfigError("port 80 is taken", hint="choose another")

    assert lifecycle.run(main) == 2
    assert capsys.readouterr().err == "error: port 80 is taken; choose another\n"


def test_bad_settings_have_an_exit_code_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    async def main(stop: asyncio.Event) -> None:
        raise PeerLostError("the peer is gone")

    assert lifecycle.run(main) == 1
    assert capsys.readouterr().err == "error: the peer is gone\n"


def test_a_group_of_expected_failures_is_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    async def main(stop: asyncio.Event) -> None:
        inner = ExceptionGroup("inner", [PeerLostError("b")])
        raise ExceptionGroup("outer", [ConfigError("a"), inner])

    assert lifecycle.run(main) == 1
    assert capsys.readouterr().err == "error: a\nerror: b\n"


def test_what_several_tasks_have_met_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    async def main(stop: asyncio.Event) -> None:
        raise ExceptionGroup("tasks", [ConfigError("a"), ConfigError("b"), ConfigError("a")])

    assert lifecycle.run(main) == 2
    assert capsys.readouterr().err == "error: a\nerror: b\n"


@pytest.mark.parametrize("error", [KeyError("k"), ExceptionGroup("g", [ConfigError("a"), KeyError("k")])])
def test_a_bug_shows_its_traceback(capsys: pytest.CaptureFixture[str], error: Exception) -> None:
    async def main(stop: asyncio.Event) -> None:
        raise error

    assert lifecycle.run(main) == 1
    assert "Traceback" in capsys.readouterr().err


def test_tasks_left_behind_are_cancelled_and_awaited() -> None:
    ended = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    async def main(stop: asyncio.Event) -> None:
        task = asyncio.create_task(forever())
        await asyncio.sleep(0)
        assert not task.done()

    assert lifecycle.run(main) == 0
    assert ended == [True]


def test_a_cancelled_main_without_a_signal_is_a_bug() -> None:
    async def main(stop: asyncio.Event) -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        lifecycle.run(main)


def test_an_expired_certificate_is_no_lasting_problem(capsys: pytest.CaptureFixture[str]) -> None:
    async def main(stop: asyncio.Event) -> None:
        raise ExpiredError("it has expired")

    assert lifecycle.run(main) == lifecycle.EXIT_FAILED, "its supervisor starts it again"
    assert "it has expired" in capsys.readouterr().err


RESETS = struct.pack("ii", 1, 0)  # SO_LINGER: closing the socket resets the connection


def test_a_connection_reset_at_its_start_is_closed_once() -> None:
    async def main(stop: asyncio.Event) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            ours = socket.create_connection(server.getsockname())
            theirs, _ = server.accept()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESETS)
        theirs.close()
        assert select.select([ours], [], [], PATIENCE_S)[0], "the reset has arrived"
        number = ours.fileno()
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        with pytest.raises(ConnectionError):
            await asyncio.get_running_loop().create_connection(
                asyncio.Protocol, sock=ours, ssl=tls, server_hostname="localhost"
            )
        reused = os.eventfd(0)  # ZMQ opens one for each of its sockets
        assert reused == number
        del ours
        for _ in range(3):  # turns in which the loop forgets the connection
            await asyncio.sleep(0)
        gc.collect()
        os.close(reused)  # raises OSError if it was closed already

    assert lifecycle.run(main) == 0
