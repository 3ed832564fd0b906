"""Wake the event loop at a given time, to a tenth of a millisecond: the timers of uvloop count whole ones."""

import asyncio
import ctypes
import os
import sys
import time

_CLOCK_MONOTONIC = 1  # the clock of time.monotonic
_TFD_TIMER_ABSTIME = 1
_NANOSECONDS = 1_000_000_000


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class Alarm:
    """Wakes one waiter at a time. On systems other than Linux it is as precise as the loop."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fd = -1
        self._setting = _Itimerspec()
        self._waiter: asyncio.Future[None] | None = None

    async def wait_until(self, due_s: float) -> None:
        """Return at `due_s` of time.monotonic, or at once if that has passed."""
        delay_s = due_s - time.monotonic()
        if delay_s <= 0:
            return
        if self._loop is None and not self._open():
            await asyncio.sleep(delay_s)
            return
        seconds, nanoseconds = divmod(int(due_s * _NANOSECONDS), _NANOSECONDS)
        self._setting.value.seconds, self._setting.value.nanoseconds = seconds, nanoseconds
        self._waiter = asyncio.get_running_loop().create_future()
        if _libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(self._setting), None):
            raise OSError(ctypes.get_errno(), "the timer of the mock engine cannot be set")
        await self._waiter

    def close(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._loop = None

    def _open(self) -> bool:
        if not sys.platform.startswith("linux"):
            return False
        self._fd = _libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            return False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._ring)
        return True

    def _ring(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:  # it was set again before this came
            return
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


_libc = ctypes.CDLL(None, use_errno=True)
