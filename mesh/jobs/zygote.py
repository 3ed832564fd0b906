"""The program that killable children are forked from: `python -P -m kvmesh.mesh.jobs.zygote <descriptor>`.

The zygote prepares once what all children need and then only forks. It has a single thread, so a fork is safe, which it
would not be in a process with an event loop, torch or NIXL. Children die with the zygote, the zygote with its parent.
"""

import gc
import importlib
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType

import msgspec

from kvmesh.mesh.jobs.frames import (
    FORK,
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    Broken,
    Ended,
    Forked,
    Ready,
    Report,
    Setup,
    framed,
)
from kvmesh.mesh.lifecycle import die_with

Handler = Callable[[bytes], bytes]
OUT_OF_MEMORY = 9  # exit code of a child that Python refused memory
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def main(descriptor: int) -> int:
    """Fork children on command until the parent closes its end."""
    die_with(os.getppid())
    for number in (signal.SIGINT, signal.SIGTERM):  # those go to whole groups; this one ends with its parent
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=descriptor)
    setup = msgspec.msgpack.decode(control.recv(MAX_FRAME_BYTES), type=Setup)
    try:
        module, _, function = setup.target.partition(":")
        make: Callable[[], Handler] = getattr(importlib.import_module(module), function)(setup.argument)
    except Exception as error:
        _report(control, Broken(f"{type(error).__name__}: {error}"[:1000]))
        return 1
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page of the zygote
    _Forks(control, setup, make).serve()
    return 0


class _Forks:
    """Forks, kills and reaps children. A child is killed only before it is reaped: its number cannot be another's."""

    def __init__(self, control: socket.socket, setup: Setup, make: Callable[[], Handler]) -> None:
        self._control = control
        self._setup = setup
        self._make = make
        self._alive: set[int] = set()

    def serve(self) -> None:
        signal.signal(signal.SIGCHLD, self._reap)
        _report(self._control, Ready())
        while True:
            try:
                command, descriptors, _, _ = socket.recv_fds(self._control, 64, 1)
            except ConnectionError:
                return
            if not command:
                return
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
            if command == FORK:
                self._fork(descriptors[0])
            elif (pid := int(command[4:])) in self._alive:
                os.kill(pid, signal.SIGKILL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])

    def _fork(self, descriptor: int) -> None:
        zygote = os.getpid()
        pid = os.fork()
        if not pid:
            self._control.close()
            _run(zygote, descriptor, self._setup, self._make)
        os.close(descriptor)
        self._alive.add(pid)
        _report(self._control, Forked(pid))

    def _reap(self, signal_number: int, frame: FrameType | None) -> None:
        while self._alive:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:  # this call has interrupted another one, which just reaped the last child
                return
            if not pid:
                return
            self._alive.discard(pid)
            _report(self._control, Ended(pid, os.waitstatus_to_exitcode(status)))


def _report(control: socket.socket, report: Report) -> None:
    try:
        control.send(msgspec.msgpack.encode(report))
    except OSError:  # the parent is gone, and so are we soon
        os._exit(1)


def _run(zygote: int, descriptor: int, setup: Setup, make: Callable[[], Handler]) -> None:
    """Be a child: answer frames until the other end closes. Never returns."""
    try:
        die_with(zygote)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # what dies of a limit dies noisily
        most_bytes = mapped_bytes() + setup.memory_bytes + setup.stack_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        threading.stack_size(setup.stack_bytes)  # of threads yet to begin, so the jobs get one
        threading.Thread(target=_answer, args=(descriptor, make), daemon=True).start()
        while True:
            signal.pause()
    finally:
        os._exit(1)


def _answer(descriptor: int, make: Callable[[], Handler]) -> None:
    code = 1
    try:
        handle = make()
        with socket.socket(fileno=descriptor) as connection, connection.makefile("rb") as requests:
            while header := requests.read(HEADER_BYTES):
                body = requests.read(int.from_bytes(header, "little"))
                connection.sendall(framed(handle(body)))
        code = 0
    except MemoryError:
        code = OUT_OF_MEMORY
    finally:
        os._exit(code)


def mapped_bytes() -> int:
    """Return the size of this process's address space."""
    return _statm(0)


def resident_bytes() -> int:
    """Return how much memory of this process is in RAM."""
    return _statm(1)


def _statm(column: int) -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[column]) * _PAGE_BYTES


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
