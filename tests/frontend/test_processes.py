"""Several processes share one port: those of one frontend, and of no other."""

import socket
import subprocess
import sys

import pytest

from kvmesh.frontend.processes import reserved_port
from kvmesh.protocol.errors import ConfigError

HOLD = """
import sys
from kvmesh.frontend.processes import reserved_port
with reserved_port("127.0.0.1", 0) as port:
    print(port, flush=True)
    sys.stdin.read()
"""


def test_a_port_that_another_frontends_processes_share_is_refused() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        port = int(other.stdout.readline())
        refusal = pytest.raises(ConfigError, match=f"another frontend answer on 127.0.0.1:{port} already")
        with refusal, reserved_port("127.0.0.1", port):
            pass
        other.kill()
        other.wait()
    with reserved_port("127.0.0.1", port) as again:  # a frontend that was killed leaves no claim
        assert again == port


def test_the_processes_themselves_may_listen_on_the_port() -> None:
    with reserved_port("127.0.0.1", 0) as port:
        listeners = []
        for _ in range(2):
            listener = socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(("127.0.0.1", port))
            listener.listen()
            listeners.append(listener)
        for listener in listeners:
            listener.close()
