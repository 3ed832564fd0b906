"""Relay frames between two devices, each after a time: `python -m kvmesh.lab.hosts.delay ONE OTHER SECONDS`.

It stands in for the kernel's netem, which many kernels lack, and needs no package. It prints "ready" when it relays.
Frames travel with the kernel's own header about segments and checksums, so that devices may leave both to each other.
"""

import socket
import sys
import time
from collections import deque
from collections.abc import Mapping
from selectors import EVENT_READ, DefaultSelector

_SOL_PACKET = 263
_PACKET_VNET_HDR = 15
_PACKET_IGNORE_OUTGOING = 23  # what we send ourselves must not come back to us
_ETH_P_ALL = 3
_MOST_BYTES = 1 << 17  # of a frame that the kernel would still cut into segments
MOST_FRAMES = 20_000  # held in one direction; a frame more is lost, as in a router whose queue is full


class HeldFrames:
    """Frames of one direction, in the order in which they came. Pure: the time is given."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._held: deque[tuple[float, bytes]] = deque()
        self.lost = 0

    def take(self, frame: bytes, now_s: float) -> None:
        if len(self._held) >= MOST_FRAMES:
            self.lost += 1
            return
        self._held.append((now_s + self._delay_s, frame))

    def due(self, now_s: float) -> list[bytes]:
        frames = []
        while self._held and self._held[0][0] <= now_s:
            frames.append(self._held.popleft()[1])
        return frames

    def wait_s(self, now_s: float) -> float | None:
        """Return the time until the next frame is due; None: nothing is held."""
        return max(0.0, self._held[0][0] - now_s) if self._held else None


def why_no_delay() -> str:
    """Return why frames cannot be relayed here; "" if they can."""
    try:
        open_device("lo").close()
    except (OSError, AttributeError) as error:
        return f"no packet sockets: {error}"
    return ""


def open_device(name: str) -> socket.socket:
    device = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    device.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    device.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    device.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
    device.bind((name, _ETH_P_ALL))
    device.setblocking(False)
    return device


def relay(one: socket.socket, other: socket.socket, delay_s: float) -> None:
    """Relay until the process ends."""
    ways: Mapping[socket.socket, tuple[HeldFrames, socket.socket]] = {
        one: (HeldFrames(delay_s), other),
        other: (HeldFrames(delay_s), one),
    }
    with DefaultSelector() as selector:
        for device in ways:
            selector.register(device, EVENT_READ, device)
        while True:
            now_s = time.monotonic()
            waits = [wait_s for held, _ in ways.values() if (wait_s := held.wait_s(now_s)) is not None]
            for key, _ in selector.select(min(waits, default=None)):
                take_all(key.data, ways[key.data][0])
            now_s = time.monotonic()
            for held, target in ways.values():
                for frame in held.due(now_s):
                    send(target, frame)


def take_all(device: socket.socket, held: HeldFrames) -> None:
    while True:
        try:
            frame = device.recv(_MOST_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        held.take(frame, time.monotonic())


def send(device: socket.socket, frame: bytes) -> None:
    try:
        device.send(frame)
    except OSError:  # the device is down or its queue is full: a network loses frames too
        return


def main(argv: list[str]) -> int:
    one, other, delay_s = argv
    devices = open_device(one), open_device(other)
    print("ready", flush=True)
    relay(*devices, float(delay_s))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
