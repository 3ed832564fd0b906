"""Run `main(stop)` to an exit code: event loop, signals, errors. Called once, from `__main__.py`."""

import asyncio
import ctypes
import gc
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from kvmesh.mesh.starting import SIGNALS, end_on_signals, interrupt_on_sigint
from kvmesh.protocol.errors import ConfigError, ExpiredError, MeshError

log = logging.getLogger(__name__)

T = TypeVar("T")

Main = Callable[[asyncio.Event], Awaitable[int | None]]

PARENT_PID = "KVMESH_PARENT_PID"

LINGER_S = 5.0  # of a process whose main has ended, for what other threads still do
EXIT_FAILED = 1
EXIT_BAD_SETTINGS = 2  # a supervisor does not start it again
_PR_SET_PDEATHSIG = 1
# Cycles are searched for after so many objects were made and not freed. With the default of 700, which a handful of
# requests reaches, the search took 9 % of a frontend's CPU.
GC_THRESHOLDS = (25_000, 20, 20)


def run(main: Main) -> int:
    """Run `main(stop)` on a new event loop until it ends; return the exit code for `sys.exit`.

    The first SIGINT or SIGTERM sets `stop`, the second cancels `main`, the third ends the process at once. An expected
    failure (MeshError) is one line on stderr, any other a traceback. Tasks that `main` leaves behind are cancelled and
    awaited.
    """
    gc.set_threshold(*GC_THRESHOLDS)
    end_on_signals()  # until the event loop takes them
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_until_done(main))
    except Exception as error:
        return _report(error)


def run_command(name: str, main: Callable[[list[str]], int], argv: list[str]) -> int:
    """Run a command of `kvmesh` and return its exit code. An expected failure is one line on stderr.

    So is Ctrl-C. A reader that closes standard output, such as `head`, ends the command in silence.
    """
    interrupt_on_sigint()
    prog = f"kvmesh {name}".rstrip()
    try:
        try:
            code = int(main(argv))
        except SystemExit:  # after --help
            sys.stdout.flush()
            raise
        sys.stdout.flush()
        return code
    except MeshError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return EXIT_BAD_SETTINGS
    except KeyboardInterrupt:
        print(f"{prog}: stopped by SIGINT", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more at exit
        return 128 + signal.SIGPIPE


def settle() -> None:
    """Exempt all objects in memory from the search for cycles. Call it after loading something large that stays."""
    gc.collect()
    gc.freeze()


def on_hangup() -> asyncio.Event:
    """Return an event that each SIGHUP sets; without this call a SIGHUP ends the process. Call it on the event loop."""
    hangup = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hangup.set)
    return hangup


async def unless_stopped(
    work: Coroutine[Any, Any, T], stop: asyncio.Event, on_stop: Callable[[], object] = lambda: None
) -> T | None:
    """Return the result of `work`; None if `stop` was set first. Then `on_stop` is called and `work` cancelled."""
    working = asyncio.create_task(work, name="work")
    stopping = asyncio.create_task(stop.wait(), name="wait for the stop")
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        on_stop()
        return None
    finally:
        working.cancel()
        stopping.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


def watch_parent(stop: asyncio.Event) -> None:
    """Set `stop` when the process named by KVMESH_PARENT_PID ends: a killed supervisor leaves no orphans.

    Does nothing where that variable is not set. Call it on the event loop.
    """
    pid = os.environ.get(PARENT_PID, "")
    if not pid.isdigit():
        return
    try:
        pidfd = os.pidfd_open(int(pid))
    except ProcessLookupError:
        _parent_gone(stop)
    except (AttributeError, OSError):  # not Linux >= 5.3, or a sandbox that knows no pidfd
        _die_with_parent(int(pid), stop)
    else:
        asyncio.get_running_loop().add_reader(pidfd, _on_pidfd, pidfd, stop)


def _on_pidfd(pidfd: int, stop: asyncio.Event) -> None:
    asyncio.get_running_loop().remove_reader(pidfd)
    os.close(pidfd)
    _parent_gone(stop)


def _parent_gone(stop: asyncio.Event) -> None:
    log.warning("the process that started this one is gone, stopping")
    stop.set()


def _die_with_parent(pid: int, stop: asyncio.Event) -> None:
    """Have the kernel send SIGTERM when the parent ends (to be exact: the thread that started this process)."""
    _signal_at_end_of_parent(signal.SIGTERM)
    if os.getppid() != pid:  # it ended before we asked
        _parent_gone(stop)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends (to be exact: the thread that started this process)."""
    _signal_at_end_of_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(EXIT_FAILED)


def _signal_at_end_of_parent(number: signal.Signals) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)


class _Signals:
    """Counts SIGINT and SIGTERM: each further signal ends the process less politely."""

    def __init__(self, stop: asyncio.Event, main: asyncio.Task[int]) -> None:
        self._stop = stop
        self._main = main
        self.count = 0
        self.exit_code = 0

    def on_signal(self, number: signal.Signals) -> None:
        self.count += 1
        self.exit_code = 128 + number
        if self.count == 1:
            log.info("%s: stopping", number.name)
            self._stop.set()
        elif self.count == 2:
            log.warning("%s again: stopping at once", number.name)
            self._main.cancel()
        else:
            os._exit(self.exit_code)


async def _until_done(main: Main) -> int:
    stop = asyncio.Event()
    task = asyncio.current_task()
    assert task is not None
    signals = _Signals(stop, task)
    loop = asyncio.get_running_loop()
    for number in SIGNALS:  # they stay until the loop is closed
        loop.add_signal_handler(number, signals.on_signal, number)
    try:
        code = await main(stop) or 0
    except asyncio.CancelledError:
        if signals.count < 2:
            raise
        code = signals.exit_code
    if stop.is_set():
        log.info("stopped")  # the last line of a service's log
        threading.Thread(target=_end_anyway, args=(code,), name="end of the process", daemon=True).start()
    return code


def _end_anyway(code: int) -> None:
    """End the process if it still runs a while after it has stopped: the interpreter waits for every other thread."""
    time.sleep(LINGER_S)
    alive = [thread.name for thread in threading.enumerate() if not thread.daemon]
    log.warning("the process ends without its threads, which do not end: %s", ", ".join(alive))
    sys.stdout.flush()
    logging.shutdown()
    os._exit(code)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        from kvmesh.mesh.event_loop import ServiceLoop
    except ImportError:  # uvloop is not installed
        return None
    return ServiceLoop


def _report(error: Exception) -> int:
    """Print on stderr why `main` failed: one line for an expected failure, else a traceback. Return the exit code."""
    expected = _mesh_errors(error)
    for text in dict.fromkeys(str(one) for one in expected):  # several tasks may have met the same
        print(f"error: {text}", file=sys.stderr)
    if not expected:
        traceback.print_exception(error)
        return EXIT_FAILED
    is_lasting = all(isinstance(one, ConfigError) and not isinstance(one, ExpiredError) for one in expected)
    return EXIT_BAD_SETTINGS if is_lasting else EXIT_FAILED


def _mesh_errors(error: Exception) -> list[MeshError]:
    """Return the error, or the leaves of its group, if all are MeshErrors; else []."""
    if isinstance(error, MeshError):
        return [error]
    if not isinstance(error, ExceptionGroup):
        return []
    expected, other = error.split(MeshError)
    return [] if other is not None or expected is None else list(_leaves(expected))


def _leaves(group: ExceptionGroup[MeshError]) -> list[MeshError]:
    leaves: list[MeshError] = []
    for error in group.exceptions:
        leaves += _leaves(error) if isinstance(error, ExceptionGroup) else [error]
    return leaves
