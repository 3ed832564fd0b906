"""End with one line when a signal comes while a program still imports its modules. Imports nothing large itself.

Call `end_on_signals` before the other imports. `mesh.lifecycle.run` takes the signals over when its event loop runs.
"""

import os
import signal
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_started_by: int | None = None


def end_on_signals() -> None:
    """End this process at once on SIGINT and SIGTERM: nothing has begun that would have to be undone.

    A signal that is ignored (`nohup`, a shell's background job) stays so.
    """
    global _started_by
    _started_by = os.getpid()
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def interrupt_on_sigint() -> None:
    """Let SIGINT raise KeyboardInterrupt again, for commands that undo what they have begun."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    if os.getpid() != _started_by:  # a forked process of another library
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return
    os.write(2, f"stopped by {signal.Signals(number).name} while starting\n".encode())
    os._exit(128 + number)
