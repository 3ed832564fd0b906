"""Tests of the options that break a connection whose peer's host is silent."""

import socket

import pytest

from mesh.silence import PROBE_S, SILENCE_S, limit_silence_of


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the options are Linux's")
def test_all_connections_to_a_host_get_the_options_and_others_do_not() -> None:
    with socket.create_server(("127.0.0.2", 0)) as one, socket.create_server(("127.0.0.3", 0)) as other:
        near, far = socket.create_connection(one.getsockname()), socket.create_connection(other.getsockname())
        with near, far, socket.socket(socket.AF_INET, socket.SOCK_DGRAM):
            assert limit_silence_of("127.0.0.2") == 1
            assert near.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == SILENCE_S * 1000
            assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == PROBE_S
            assert far.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
            near.sendall(b"still open")
            assert one.accept()[0].recv(20) == b"still open"
