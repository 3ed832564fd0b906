"""Notice that the peer of a connection, or its host, is gone although the connection stands."""

import asyncio
import socket
from typing import Protocol

from kvmesh.mesh.plane.frames import Frame, Ping
from kvmesh.mesh.plane.pulse import CALM, HASTY, Act, Pulse
from kvmesh.mesh.silence import wire_of

WIRE_CHECK_S = 0.5  # while streams are open and what was sent may be on its way
CUT_CHECKS = 2  # a wire that is found cut so often in a row is given up
SILENT_CHECKS = 3  # ... or silent: where a host has no neighbour entry left, the kernel counts no packet as sent again
SUSPECT_S = 2.0  # time to answer for a peer that is thought to be gone


class Watched(Protocol):
    """The connection, as its watch sees it."""

    loop: asyncio.AbstractEventLoop
    is_paused: bool  # nothing is read now

    def is_busy(self) -> bool:
        """Say whether streams are open, so that a dead peer must be noticed."""

    def is_hasty(self) -> bool:
        """Say whether a dead peer must be noticed soon, because a call could continue elsewhere."""

    def write(self, frame: Frame) -> None: ...

    def abort(self, reason: str) -> None: ...


class PeerWatch:
    """Watch the peer of one connection while streams are open."""

    def __init__(self, link: Watched) -> None:
        self._link = link
        self.pulse = Pulse()
        self.connection: socket.socket | None = None
        self.was_silent = False  # the connection was given up because the peer, or its host, gave no answer
        self._next_look: asyncio.TimerHandle | None = None
        self._limits = CALM
        self._wire_check: asyncio.TimerHandle | None = None
        self._has_sent = False  # since the wire was checked
        self._cut_checks = 0  # how often in a row the wire was found cut
        self._silent_checks = 0  # ... or silent
        self._answers = 0
        self._is_closed = False

    def on_pong(self) -> None:
        """Take an answer to a question for a sign of life."""
        self._answers += 1
        self.pulse.answered()

    def on_stream(self) -> None:
        """Notice from now on a peer that falls silent. Call it for every stream that opens."""
        if self._next_look is None:
            self.pulse.begin(self._link.loop.time())
        elif self._limits is HASTY or not self._link.is_hasty():
            return
        else:
            self._next_look.cancel()
        self._plan_look()

    def note_sent(self) -> None:
        """Notice packets that get no answer. Where nothing is sent, the kernel probes the connection."""
        self._has_sent = True
        if self._wire_check is None and self._link.is_busy():
            self._wire_check = self._link.loop.call_later(WIRE_CHECK_S, self._check_wire)

    def suspect(self, reason: str) -> None:
        """Ask a peer that may be gone, and hang up if it does not answer soon, though no call is hasty."""
        if not self._is_closed:
            self._link.write(Ping())
            self._link.loop.call_later(SUSPECT_S, self._give_up_suspect, reason, self._answers)

    def close(self) -> None:
        """End the watch. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed, self.connection = True, None
        del self._link  # a cycle would keep what the connection holds until the garbage collector comes
        for timer in (self._next_look, self._wire_check):
            if timer is not None:
                timer.cancel()

    def _plan_look(self) -> None:
        self._limits = HASTY if self._link.is_hasty() else CALM
        self._next_look = self._link.loop.call_later(self._limits.tick_s, self._look)

    def _look(self) -> None:
        """Ask the peer for a sign of life if it is time to, and give it up when it has been silent for too long."""
        self._next_look = None
        if self._is_closed or not self._link.is_busy():
            return
        now_s = self._link.loop.time()
        if self._link.is_paused:  # what the peer answers waits unread
            self.pulse.begin(now_s)
        match self.pulse.look(self._limits, now_s):
            case Act.ASK:
                self._link.write(Ping())
            case Act.GIVE_UP:
                silent_s = self.pulse.silent_s
                self._give_up(
                    f"the peer has been silent for {silent_s:.1f} s" if silent_s else "the peer hears nothing"
                )
                return
        self._plan_look()

    def _check_wire(self) -> None:
        """Hang up if packets get no answer. A peer that hangs or does not read answers by its kernel."""
        self._wire_check = None
        if self.connection is None or not self._link.is_busy():
            self._cut_checks = self._silent_checks = 0
            return
        wire = wire_of(self.connection)
        self._cut_checks = self._cut_checks + 1 if wire.is_cut else 0
        self._silent_checks = self._silent_checks + 1 if wire.is_silent else 0
        if self._cut_checks >= CUT_CHECKS or self._silent_checks >= SILENT_CHECKS:
            self._give_up("the peer's host does not answer")
        elif wire.is_waiting or self._has_sent:
            self._has_sent = False
            self._wire_check = self._link.loop.call_later(WIRE_CHECK_S, self._check_wire)

    def _give_up_suspect(self, reason: str, answers: int) -> None:
        if self._answers == answers and not (self._is_closed or self._link.is_paused):
            self._give_up(f"{reason}, and it does not answer")

    def _give_up(self, reason: str) -> None:
        self.was_silent = True
        self._link.abort(reason)
