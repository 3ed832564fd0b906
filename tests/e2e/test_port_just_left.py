"""A service can be started again on the ports that it has just left, while connections to them still end."""

import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from tests.support.mesh import until
from tests.support.patience import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.long]
REQUEST = b"GET /metrics HTTP/1.1\r\nHost: mesh\r\n\r\n"
SERVICES = {
    "frontend": ["kvmesh.frontend", "--port", "{0}"],
    "frontends": ["kvmesh.frontend", "--processes", "2", "--port", "{0}"],
    "router": ["kvmesh.router", "--port", "{0}", "--http-port", "{1}", "--metrics-port", "{2}", "--gossip-port", "{3}"],
    "worker": [
        *("kvmesh.workers", "--engine", "mock", "--kv-transfer", "shm", "--role", "aggregated", "--model", "tiny"),
        *("--model-path", str(CHECKPOINT_DIR), "--port", "{0}", "--metrics-port", "{1}"),
    ],
}


def free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def connect(port: int) -> socket.socket | None:
    try:
        return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
    except ConnectionRefusedError:
        return None


def start(service: str, ports: Sequence[int], folder: Path) -> subprocess.Popen[bytes]:
    argv = [part.format(*ports) for part in SERVICES[service]]
    argv += ["--discovery", f"file:{folder}", "--log-level", "warning", "--drain-timeout-s", "0"]
    return subprocess.Popen([sys.executable, "-m", *argv])


def connections_to(process: subprocess.Popen[bytes], ports: Sequence[int]) -> list[socket.socket]:
    """Return a few open connections to each port, once all answer."""
    for port in ports:
        until(lambda port=port: process.poll() is not None or connect(port) is not None, what=f"port {port}")
        assert process.poll() is None, "it could not start"
    opened = [one for port in ports for _ in range(4) if (one := connect(port)) is not None]
    for connection in opened:
        connection.sendall(REQUEST)
    return opened


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("frontend", "frontend"),
        ("frontend", "frontends"),
        ("frontends", "frontend"),
        ("frontends", "frontends"),
        ("router", "router"),
        ("worker", "worker"),
    ],
)
def test_a_port_just_left_can_be_used_again(before: str, after: str, how: signal.Signals, tmp_path: Path) -> None:
    ports = free_ports(sum(f"{{{number}}}" in SERVICES[before] for number in range(4)))
    first = start(before, ports, tmp_path / "first")
    opened = connections_to(first, ports)
    first.send_signal(how)
    first.wait(PATIENCE_S)
    again = start(after, ports, tmp_path / "again")
    try:
        opened += connections_to(again, ports)
    finally:
        again.terminate()
        again.wait(PATIENCE_S)
        for connection in opened:
            connection.close()
