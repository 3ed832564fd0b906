"""Keep processes running: start them, restart them when they die, stop them in order and leave none behind."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from kvmesh.mesh.lifecycle import EXIT_BAD_SETTINGS, PARENT_PID
from kvmesh.protocol.errors import ConfigError, EngineError, MeshError

log = logging.getLogger(__name__)

STABLE_S = 20.0  # a process that ran this long is restarted at once
MAX_QUICK_EXITS = 5
MOST_PAUSE_S = 1.0  # between quick exits: a worker that is killed again and again is soon back each time
DOWN_S = 30.0  # first pause of a process that keeps ending while the others go on; doubled each time
MOST_DOWN_S = 600.0


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    name: str
    argv: Sequence[str]  # after the Python executable, e.g. ["-m", "kvmesh.workers", ...]; "-P" is added
    env: Mapping[str, str] = field(default_factory=dict)


def restart_delay_s(run_times_s: Sequence[float]) -> float | None:
    """Return the wait before the next start, after these runs (oldest first). None: give up."""
    quick_exits = 0
    for run_time_s in reversed(run_times_s):
        if run_time_s >= STABLE_S:
            break
        quick_exits += 1
    if quick_exits >= MAX_QUICK_EXITS:
        return None
    return 0.0 if quick_exits <= 1 else MOST_PAUSE_S


def down_delay_s(times_down: int) -> float:
    """Return the pause of a process that was given up `times_down` times in a row, before it is tried again."""
    return min(DOWN_S * 2.0 ** min(times_down - 1, 16), MOST_DOWN_S)


# Called with the failure and the seconds until the next try. Returns True if the other processes go on meanwhile.
OnDown = Callable[[MeshError, float], bool]


class Supervisor:
    """Runs processes of this Python. Each writes to a log file of its own; without `log_dir`, to our own output."""

    def __init__(self, log_dir: Path | None, tell: Callable[[str], None] = lambda line: None) -> None:
        self._log_dir = log_dir
        self._tell = tell
        self._specs: dict[str, ProcessSpec] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._starting: dict[str, asyncio.Event] = {}  # set when their pid is known
        self._ending: set[str] = set()  # they got a SIGTERM; a second one would cancel their work
        self.failed = asyncio.Event()
        self.failure: MeshError | None = None

    def start(
        self,
        spec: ProcessSpec,
        on_failure: Callable[[MeshError], None] | None = None,
        on_down: OnDown | None = None,
    ) -> None:
        """Keep a process running. If that is given up, call `on_failure`; without `on_failure`, set `failed`.

        A process for which `on_down` returns True is never given up: it is tried again after longer and longer pauses.
        """
        self._specs[spec.name] = spec
        keep = self._keep(spec.name, on_failure or self.fail, on_down)
        self._keepers[spec.name] = asyncio.create_task(keep, name=f"keep {spec.name}")

    def respecify(self, spec: ProcessSpec) -> None:
        """Use `spec` from the next restart of the process on."""
        if spec.name in self._specs:
            self._specs[spec.name] = spec

    def pid(self, name: str) -> int | None:
        process = self._running.get(name)
        return None if process is None else process.pid

    async def settled_pid(self, name: str) -> int | None:
        """Return the pid of a process. Wait if the process is being started, so that what it says is not a stranger's.

        On a busy machine a process can be ready before the event loop that started it has heard of its pid.
        """
        if (starting := self._starting.get(name)) is not None:
            await starting.wait()
        return self.pid(name)

    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self._running.items()}

    def log_file(self, name: str) -> Path | None:
        return None if self._log_dir is None else self._log_dir / f"{name}.log"

    def log_tail(self, name: str, lines: int = 15) -> str:
        if (file := self.log_file(name)) is None:
            return "(see above)"
        try:
            return "\n".join(file.read_text(errors="replace").splitlines()[-lines:])
        except OSError:
            return "(no log)"

    async def stop(self, names: Sequence[str], timeout_s: float) -> None:
        """Send SIGTERM, and after `timeout_s` SIGKILL. Return when the processes are gone."""
        keepers = [self._keepers.pop(name) for name in names if name in self._keepers]
        for keeper in keepers:
            keeper.cancel()
        if keepers:
            await asyncio.wait(keepers)
        await asyncio.gather(*(self._end(name, timeout_s) for name in names))
        for name in names:
            if name not in self._keepers:
                self._specs.pop(name, None)

    async def stop_all(self, timeout_s: float) -> None:
        await self.stop(list(self._keepers | self._running), timeout_s)

    async def kill_all(self) -> None:
        """Send SIGKILL to all, without waiting for a polite end."""
        keepers, self._keepers = list(self._keepers.values()), {}
        for keeper in keepers:
            keeper.cancel()
        if keepers:
            await asyncio.wait(keepers)
        processes = list(self._running.values())
        for process in processes:
            with suppress(ProcessLookupError):
                process.kill()
        await asyncio.gather(*(process.wait() for process in processes))
        self._running.clear()

    async def _end(self, name: str, timeout_s: float) -> None:
        process = self._running.get(name)
        if process is None:
            return
        if name not in self._ending:
            self._ending.add(name)
            with suppress(ProcessLookupError):
                process.terminate()
        try:
            await asyncio.wait_for(process.wait(), timeout_s)
        except TimeoutError:
            self._tell(f"{name} does not end: killed")
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        self._ending.discard(name)
        if self._running.get(name) is process:
            del self._running[name]

    def fail(self, failure: MeshError) -> None:
        """Record that a needed process does not run, and set `failed`."""
        self.failure = failure
        self.failed.set()

    async def _keep(self, name: str, give_up: Callable[[MeshError], None], on_down: OnDown | None) -> None:
        """Run one process, and restart it until that is given up. `stop` cancels this and ends the process."""
        clock = asyncio.get_running_loop().time
        run_times_s: list[float] = []
        times_down = 0
        while True:
            started = clock()
            try:
                await self._spawn(self._specs[name])
            except OSError as error:
                delay, ended = None, "no process"
                failure: MeshError = EngineError(f"{name} cannot be started: {error}")
            else:
                code = await self._running[name].wait()
                self._running.pop(name, None)
                run_times_s = [*run_times_s[-MAX_QUICK_EXITS:], clock() - started]
                times_down = 0 if run_times_s[-1] >= STABLE_S else times_down
                delay, ended = restart_delay_s(run_times_s), describe_exit(code)
                if code == EXIT_BAD_SETTINGS:
                    delay = None
                kind = ConfigError if code == EXIT_BAD_SETTINGS else EngineError
                failure = kind(f"{name} does not run:\n{self.log_tail(name)}")
            if delay is None:
                times_down += 1
                delay = down_delay_s(times_down)
                if on_down is None or not on_down(failure, delay):
                    give_up(failure)
                    return
            else:
                self._tell(f"{name} ended with {ended}, starting it again")
            await asyncio.sleep(delay)

    async def _spawn(self, spec: ProcessSpec) -> None:
        """Start a process and put it among the running ones. Raise OSError if it cannot be started."""
        known = self._starting[spec.name] = asyncio.Event()
        try:
            with self._output_of(spec.name) as output:
                self._running[spec.name] = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-P",  # no module of the working directory
                    *spec.argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, **spec.env, PARENT_PID: str(os.getpid())},
                    start_new_session=True,  # a Ctrl-C in the terminal is for us alone: we stop the processes in order
                )
        finally:
            del self._starting[spec.name]
            known.set()

    @contextmanager
    def _output_of(self, name: str) -> Iterator[IO[bytes] | None]:
        if (file := self.log_file(name)) is None:
            yield None
            return
        file.parent.mkdir(parents=True, exist_ok=True)  # the run directory may have been removed
        with file.open("ab") as output:
            yield output


def describe_exit(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
