"""Ends vLLM's processes when their worker is gone. Run as a program of its own, it outlives a SIGKILL of the worker.

vLLM's engine process does not notice that nobody is left to talk to: it would keep its memory, also a GPU's, for ever.
It reads lines `pid start-time` from its standard input; when that ends, whatever of these still runs is killed.
Beyond the standard library it uses nothing, so that it is small and starts at once.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


class Guard:
    """The worker's end of it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", __file__], stdin=subprocess.PIPE, start_new_session=True, text=True
        )

    def watch(self, pids: Iterable[int]) -> None:
        assert self._process.stdin is not None
        for pid in pids:
            if started := start_time(pid):
                self._process.stdin.write(f"{pid} {started}\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """Kill the watched processes that are still there. Blocks until that is done; a second call does nothing."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


def start_time(pid: int) -> str:
    """Return when a process began, in clock ticks since boot; "" if it is gone.

    It tells the process from a later one of the same number.
    """
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except OSError:
        return ""
    return after_name.split()[19]


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the end of the input is what counts
    watched = [line.split() for line in sys.stdin]
    for pid, started in watched:
        if start_time(int(pid)) == started:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


if __name__ == "__main__":
    main()
