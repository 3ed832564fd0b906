"""Killable children: they answer, and a child that passes a limit ends alone."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvmesh.mesh.jobs import children as children_module
from kvmesh.mesh.jobs.children import Child, Children, JobError, JobLostError, JobTooLargeError, JobTooLongError
from kvmesh.mesh.jobs.frames import Setup
from kvmesh.protocol.errors import EngineError

HANDLERS = "tests.mesh.jobs.handlers:prepare"
LIMIT_S = 0.2
# In a process of its own, because it waits for any child. The second signal arrives as the first call has reaped.
TWO_SIGNALS_AT_ONCE = """
import os, signal, socket
from kvmesh.mesh.jobs import zygote
from kvmesh.mesh.jobs.frames import Setup

ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
forks = zygote._Forks(theirs, Setup("", b"", 0, 0), lambda: bytes)
if not (pid := os.fork()):
    os._exit(3)
os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
waitpid = os.waitpid

def interrupted(*args):
    found, os.waitpid = waitpid(*args), waitpid
    forks._reap(signal.SIGCHLD, None)
    return found

forks._alive.add(pid)
os.waitpid = interrupted
forks._reap(signal.SIGCHLD, None)
assert not forks._alive
ended = zygote.msgspec.msgpack.decode(ours.recv(100))
assert ended[1:] == [pid, 3], ended
"""


@pytest.fixture
async def children() -> AsyncIterator[Children]:
    made = Children(Setup(HANDLERS, b"hello ", 64 << 20, 16 << 20))
    yield made
    made.close()


async def test_a_child_answers_its_jobs_in_order(children: Children) -> None:
    child = await children.open(LIMIT_S)
    answers = [child.send(b"echo %d" % n) for n in range(100)]
    assert await asyncio.gather(*answers) == [b"hello %d" % n for n in range(100)]


async def test_a_job_that_takes_too_long_is_killed_and_the_other_children_go_on(children: Children) -> None:
    spinning, other = await children.open(LIMIT_S), await children.open(LIMIT_S)
    with pytest.raises(JobTooLongError, match=r"took longer than 0\.2 s"):
        await spinning.send(b"spin")
    assert not spinning.is_alive
    assert await other.send(b"echo x") == b"hello x"


@pytest.mark.parametrize("job", [b"eat", b"abort"])
async def test_a_job_that_takes_too_much_memory_is_killed(children: Children, job: bytes) -> None:
    child = await children.open(LIMIT_S)
    with pytest.raises(JobTooLargeError):
        await child.send(job)
    assert await (await children.open(LIMIT_S)).send(b"echo x") == b"hello x"


def test_a_signal_that_interrupts_the_reaping_of_the_last_child_does_no_harm() -> None:
    done = subprocess.run([sys.executable, "-c", TWO_SIGNALS_AT_ONCE], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


async def test_the_jobs_behind_a_killed_one_fail_with_it(children: Children) -> None:
    child = await children.open(LIMIT_S)
    answers = await asyncio.gather(child.send(b"exit"), child.send(b"echo x"), return_exceptions=True)
    assert all(type(answer) is JobLostError for answer in answers)
    with pytest.raises(JobError):
        await child.send(b"echo x")


async def test_waiting_behind_another_job_is_not_time_of_a_job(children: Children) -> None:
    child = await children.open(0.4)
    answers = [child.send(b"burn 0.25") for _ in range(4)]
    assert await asyncio.gather(*answers) == [b"burnt"] * 4


async def test_an_answer_that_lies_unread_is_not_too_late(children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our process stands still in a look: meanwhile the child ends one job and works on the next."""
    cpu_s, readings = children_module._cpu_s, list[float]()

    def stand_still(pid: int) -> float:
        while len(readings) == 1 and cpu_s(pid) < readings[0] + 0.45:
            time.sleep(0.01)
        readings.append(cpu_s(pid))
        return readings[-1]

    child = await children.open(0.4)
    monkeypatch.setattr(children_module, "_cpu_s", stand_still)
    answers = [child.send(b"burn 0.25") for _ in range(2)]
    assert await asyncio.gather(*answers) == [b"burnt"] * 2


async def test_a_closed_child_ends(children: Children) -> None:
    child = await children.open(LIMIT_S)
    job = child.send(b"spin")
    child.close()
    with pytest.raises(JobError):
        await job
    await until_gone(child.pid)


async def test_a_zygote_that_ends_is_started_again(children: Children) -> None:
    child = await children.open(LIMIT_S)
    zygote = int(await child.send(b"pid"))
    os.kill(zygote, signal.SIGKILL)
    await child.ended
    await until_gone(child.pid)
    assert await (await children.open(LIMIT_S)).send(b"echo x") == b"hello x"


async def test_what_cannot_be_prepared_says_why() -> None:
    children = Children(Setup(HANDLERS, b"broken", 64 << 20, 16 << 20))
    with pytest.raises(EngineError, match="ValueError: cannot be prepared"):
        await children.open(LIMIT_S)
    children.close()
    with pytest.raises(EngineError, match="stopping"):
        await children.open(LIMIT_S)


async def test_the_children_of_a_killed_process_end_with_it() -> None:
    script = (
        "import asyncio\n"
        "from kvmesh.mesh.jobs.children import Children\n"
        "from kvmesh.mesh.jobs.frames import Setup\n"
        "async def main():\n"
        f"    child = await Children(Setup({HANDLERS!r}, b'', 64 << 20, 16 << 20)).open(60)\n"
        "    print(child.pid, (await child.send(b'pid')).decode(), flush=True)\n"
        "    await child.send(b'spin')\n"
        "asyncio.run(main())\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=env)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert len(pids) == 2
    for pid in pids:
        await until_gone(pid)


async def until_gone(pid: int) -> None:
    until = time.monotonic() + 20
    with suppress(ProcessLookupError):
        while time.monotonic() < until:
            os.kill(pid, 0)
            await asyncio.sleep(0.01)
        pytest.fail(f"process {pid} still runs")


def test_a_child_that_has_not_begun_takes_no_job() -> None:
    async def send() -> None:
        with pytest.raises(JobError):
            await Child(LIMIT_S, lambda pid: None).send(b"x")

    asyncio.run(send())
