"""Tests of the rule that tells a cut connection from one whose peer hangs. tests/hosts cuts real ones."""

import errno
import select
import socket
import time
from contextlib import ExitStack

import pytest

from kvmesh.mesh.silence import PROBE_S, break_cut_connections, probe_when_silent, received_bytes, wire_of

HOSTS = ("127.0.0.2", "127.0.0.3")
pytestmark = pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the options are Linux's")


def test_connections_to_a_host_are_probed_and_healthy_ones_stay() -> None:
    with socket.create_server(("127.0.0.2", 0)) as one, socket.create_server(("127.0.0.3", 0)) as other:
        near, far = socket.create_connection(one.getsockname()), socket.create_connection(other.getsockname())
        with near, far, socket.socket(socket.AF_INET, socket.SOCK_DGRAM):
            assert break_cut_connections("127.0.0.2") == 0
            assert near.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == PROBE_S
            assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
            assert far.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0
            near.sendall(b"still open")
            assert one.accept()[0].recv(20) == b"still open"


def test_a_connection_that_gets_no_answer_fails_soon() -> None:
    with ExitStack() as kept:
        full, other = (kept.enter_context(socket.create_server((host, 0), backlog=0)) for host in HOSTS)
        connecting = []
        for server in (full, full, full, other, other, other):  # two fill its queue, and the third is not answered
            connecting.append(kept.enter_context(socket.socket()))
            connecting[-1].setblocking(False)
            assert connecting[-1].connect_ex(server.getsockname()) == errno.EINPROGRESS
        assert break_cut_connections(HOSTS[0]) > 0
        began_s = time.monotonic()
        assert select.select([], [connecting[2]], [], 10.0)[1]
        assert connecting[2].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ETIMEDOUT
        assert time.monotonic() - began_s < 5.0
        assert select.select([], [connecting[5]], [], 0.0)[1] == [], "connections to other hosts are left alone"


def test_a_peer_that_does_not_read_is_not_cut() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        reader, _ = server.accept()
        probe_when_silent(sender)
        sender.setblocking(False)
        sent = 0
        with pytest.raises(BlockingIOError):
            while True:
                sent += sender.send(b"x" * 65536)
        for _ in range(8):
            time.sleep(0.25)
            assert not wire_of(sender).is_cut
        got = 0
        reader.settimeout(5)
        while got < sent:
            got += len(reader.recv(1 << 20))
        assert got == sent
        reader.close()


def test_bytes_received_from_a_host_are_counted_over_its_connections() -> None:
    with socket.create_server(("127.0.0.2", 0)) as server, socket.create_connection(server.getsockname()) as receiver:
        sender, _ = server.accept()
        with sender:
            before_bytes = received_bytes("127.0.0.2")
            sender.sendall(b"x" * 100_000)
            left = 100_000
            while left:
                left -= len(receiver.recv(left))
            assert received_bytes("127.0.0.2") - before_bytes == 100_000
            assert received_bytes("127.0.0.77") == 0
