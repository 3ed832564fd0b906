"""Start killable children, send them jobs, and kill those that pass their limit.

The time of a job is CPU time of its child, from when the child begins it. So neither a busy machine nor a job that
waits behind another one counts as expensive work.
"""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from typing import cast

import msgspec

from kvmesh.mesh.jobs.frames import (
    FORK,
    HEADER_BYTES,
    KILL,
    MAX_FRAME_BYTES,
    Broken,
    Ended,
    Forked,
    Ready,
    Setup,
    framed,
    report_decoder,
)
from kvmesh.mesh.jobs.zygote import OUT_OF_MEMORY
from kvmesh.protocol.errors import EngineError

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.1  # at the CPU time of a child that is at work
WALL_FACTOR = 10  # a job also ends after so many times its limit by the clock: it may hang without computing
START_TIMEOUT_S = 120.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_NO_THREAD_DATA = 127  # exit code where the C library has no memory for the data of a thread
_KILLED_BY_MEMORY = frozenset({OUT_OF_MEMORY, _NO_THREAD_DATA, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS})


class JobError(Exception):
    """A job did not end. The child that ran it is gone."""


class JobTooLongError(JobError):
    """A job passed its limit of time."""


class JobTooLargeError(JobError):
    """A job passed the limit of memory."""


class JobLostError(JobError):
    """The process of a job, or the zygote, ended for a reason of its own, as when the kernel kills it."""


class CannotPrepareError(EngineError):
    """The zygote cannot prepare what its children need, as where a library is not installed."""


class Child(asyncio.Protocol):
    """A child process. It answers its jobs in order."""

    def __init__(self, limit_s: float, kill: Callable[[int], None]) -> None:
        self._limit_s = limit_s
        self._kill = kill
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._answers: deque[asyncio.Future[bytes]] = deque()
        self._failure: JobError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._watched: asyncio.Future[bytes] | None = None  # the job whose time is being taken
        self._began_cpu_s = self._began_s = 0.0
        self._is_over = False  # at the last look that job had passed its limit
        self.pid = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_alive(self) -> bool:
        return self._failure is None

    def send(self, job: bytes) -> "asyncio.Future[bytes]":
        """Begin a job; the future gets its answer. The future raises JobError if the child ends first."""
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        if self._failure is not None or self._transport is None:
            answer.set_exception(self._failure or JobError("the child has not begun"))
            return answer
        self._answers.append(answer)
        self._transport.write(framed(job))
        if self._timer is None:
            self._look()
        return answer

    def close(self) -> None:
        """End the child. Jobs without an answer fail."""
        self._fail(JobError("the process was ended"))

    # --- what happens to it -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none of asyncio's classes

    def data_received(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= HEADER_BYTES:
            end = HEADER_BYTES + int.from_bytes(self._received[:HEADER_BYTES], "little")
            if len(self._received) < end:
                return
            body = bytes(self._received[HEADER_BYTES:end])
            del self._received[:end]
            answer = self._answers.popleft()
            if not answer.done():  # its caller may have given up
                answer.set_result(body)

    def on_end(self, status: int | None) -> None:
        """The process has ended. None: so has the zygote."""
        if status in _KILLED_BY_MEMORY:
            self._fail(JobTooLargeError("the process ran out of memory"))
        else:
            self._fail(JobLostError("the zygote has ended" if status is None else f"it ended with {status}"))

    def _fail(self, failure: JobError) -> None:
        if self._failure is not None:
            return
        self._failure = failure
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()
        self._kill(self.pid)
        answers, self._answers = self._answers, deque()
        for answer in answers:
            if not answer.done():
                answer.set_exception(failure)
        self.ended.set_result(None)

    # --- its time -----------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Kill the child if its job has taken too long. Look again while it has one.

        A process that stood still may look while the answer lies unread and the child works on the next job. So the
        child is killed at the look after the one that found the job over its limit.
        """
        self._timer = None
        if not self._answers:
            self._watched = None
            return
        loop = asyncio.get_running_loop()
        cpu_s, now = _cpu_s(self.pid), loop.time()
        if self._watched is not self._answers[0]:
            self._watched, self._began_cpu_s, self._began_s = self._answers[0], cpu_s, now
            self._is_over = False
        elif self._is_over:
            self._fail(JobTooLongError(f"the job took longer than {self._limit_s:g} s"))
            return
        else:
            took_cpu_s, took_s = cpu_s - self._began_cpu_s, now - self._began_s
            self._is_over = took_cpu_s >= self._limit_s or took_s >= self._limit_s * WALL_FACTOR
        self._timer = loop.call_later(LOOK_EVERY_S, self._look)

    def set_limit(self, limit_s: float) -> None:
        """Set the limit for jobs from now on."""
        self._limit_s = limit_s


class Children:
    """Forks children from a zygote, which starts with the first of them."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._starting: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None
        self._forks: deque[tuple[Child, asyncio.Future[None]]] = deque()  # in the order of the commands
        self._children: dict[int, Child] = {}
        self._is_closed = False

    def prepare(self) -> None:
        """Begin to start the zygote, unless it runs."""
        if self._starting is None and not self._is_closed:
            self._starting = asyncio.create_task(self._start(), name="start the zygote of killable processes")

    async def open(self, limit_s: float) -> Child:
        """Return a new child, whose jobs may take `limit_s` each. Raise EngineError if there can be none."""
        self.prepare()
        if self._starting is None:
            raise EngineError("the engine is stopping")
        await asyncio.shield(self._starting)
        if self._control is None:
            raise EngineError("the process that guides are compiled in has ended; try again")
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        child, forked = Child(limit_s, self._kill), asyncio.get_running_loop().create_future()
        with theirs:
            socket.send_fds(self._control, [FORK], [theirs.fileno()])
        self._forks.append((child, forked))
        await asyncio.get_running_loop().create_unix_connection(lambda: child, sock=ours)
        await asyncio.shield(forked)
        return child

    def close(self) -> None:
        """End all children now, and start no more."""
        self._is_closed = True
        if self._starting is not None:
            self._starting.cancel()
        for child in list(self._children.values()):
            child.close()
        self._end_zygote("the engine is stopping")

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            ours.setblocking(False)
            self._control, self._ready = ours, loop.create_future()
            descriptor = theirs.fileno()
            self._process = subprocess.Popen(  # noqa: ASYNC220 - one of the loop would have to be awaited at its end
                (sys.executable, "-P", "-m", "kvmesh.mesh.jobs.zygote", str(descriptor)),
                pass_fds=(descriptor,),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        ours.send(msgspec.msgpack.encode(self._setup))
        loop.add_reader(ours, self._read)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._ready
        except BaseException:
            self._end_zygote("the process did not start")
            raise

    def _read(self) -> None:
        assert self._control is not None
        try:
            packet = self._control.recv(MAX_FRAME_BYTES)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            log.warning("the process that guides are compiled in has ended")
            self._end_zygote("it has ended")
            return
        assert self._ready is not None
        match report_decoder.decode(packet):
            case Ready() if not self._ready.done():
                self._ready.set_result(None)
            case Broken(reason) if not self._ready.done():
                self._ready.set_exception(CannotPrepareError(f"guides cannot be compiled: {reason}"))
            case Forked(pid):
                self._on_fork(pid)
            case Ended(pid, status) if (child := self._children.pop(pid, None)) is not None:
                child.on_end(status)

    def _on_fork(self, pid: int) -> None:
        child, forked = self._forks.popleft()
        child.pid = pid
        self._children[pid] = child
        if not child.is_alive:  # it was closed before its number was known
            self._kill(pid)
        if not forked.done():
            forked.set_result(None)

    def _kill(self, pid: int) -> None:
        if self._control is not None and pid in self._children:
            self._control.send(KILL + str(pid).encode())

    def _end_zygote(self, why: str) -> None:
        control, self._control = self._control, None
        self._starting = None
        if control is not None:
            asyncio.get_running_loop().remove_reader(control)
            control.close()
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
        waiting = [forked for _, forked in self._forks] + ([] if self._ready is None else [self._ready])
        for future in waiting:
            if not future.done():
                future.set_exception(EngineError(f"guides cannot be compiled: {why}"))
                future.exception()  # its caller may have left
        children = [*self._children.values(), *[child for child, _ in self._forks]]
        self._children, self._forks = {}, deque()
        for child in children:
            child.on_end(None)


def _cpu_s(pid: int) -> float:
    """Return the CPU time that a process has used; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
