"""Find out whether a client that has ended its sending side still reads (docs/decisions/0018-half-close.md).

TCP shows the end of the client's sending side alike for `shutdown(SHUT_WR)` and for `close()`. The two differ as soon
as the server sends something: a client that has closed answers with a reset, and the system then marks the socket.
"""

import asyncio
import fcntl
import select
import termios
from array import array
from collections.abc import Callable

AT_ONCE_S = 0.05  # after its request: a client that ends its sending side so soon means to read the reply
PROBE_AFTER_S = 2.0  # ... and is asked after this time whether it does
FIRST_LOOK_S = 0.002
LONGEST_LOOK_S = 1.0


class HalfClosed:
    """Watches a connection whose client has ended its sending side, until `stop`."""

    __slots__ = ("_delay_s", "_file", "_leave", "_loop", "_probe", "_probe_at", "_timer")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        file: int,
        probe: Callable[[], object],
        leave: Callable[[], None],
        probe_in_s: float,
    ) -> None:
        """Call `probe` once, in `probe_in_s`, to send something; call `leave` when the client has closed.

        `file` is the number of the socket.
        """
        self._loop = loop
        self._file = file
        self._probe = probe
        self._leave = leave
        self._probe_at = loop.time() + probe_in_s
        self._delay_s = FIRST_LOOK_S
        self._timer = loop.call_soon(self._look)

    def stop(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        if has_hung_up(self._file):
            self._leave()
            return
        if self._loop.time() >= self._probe_at:
            self._probe()
            self._probe_at, self._delay_s = float("inf"), FIRST_LOOK_S
        self._timer = self._loop.call_later(self._delay_s, self._look)
        self._delay_s = min(2 * self._delay_s, LONGEST_LOOK_S)


def has_input(file: int) -> bool:
    """Return whether bytes of the peer of a socket wait to be read."""
    waiting = array("i", [0])
    try:
        fcntl.ioctl(file, termios.FIONREAD, waiting)
    except OSError:  # the connection is gone
        return False
    return waiting[0] > 0


def has_hung_up(file: int) -> bool:
    """Return whether the peer of a socket has reset it, or has closed it where the system shows that at once.

    An event loop does not report it: it watches a socket no more once the peer's sending side has ended.
    """
    poll = select.poll()
    poll.register(file, 0)
    return bool(poll.poll(0))
