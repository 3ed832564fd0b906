"""A peer whose process stands still answers late: its calls are not lost, however much of them is unread."""

import asyncio
import signal
import socket
import subprocess
import sys

import pytest

from kvmesh.mesh.plane import peer_watch as watch_module
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.mesh.plane.server import Call, PlaneServer
from kvmesh.mesh.silence import Wire, wire_of
from kvmesh.protocol.messages import ModelFilePart, ModelFileRequest
from tests.support.patience import PATIENCE_S

STALL_S = 3.0  # longer than a host may be silent
SERVER = """
import asyncio
from kvmesh.mesh.plane.server import Call, PlaneServer
from kvmesh.protocol.messages import ModelFilePart
async def count(call: Call):
    await call.send(ModelFilePart(data=b"%d" % len(call.body)))
async def main():
    print(await PlaneServer({"count": count}).start("127.0.0.1"), flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.parametrize("body_bytes", [10_000, 1 << 20])
async def test_a_stopped_peer_answers_when_it_goes_on(body_bytes: int) -> None:
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as server:
        client = PlaneClient()
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            body = ModelFileRequest(sha256="x" * body_bytes)
            await client.ask(address, "count", body, ModelFilePart, PATIENCE_S)
            server.send_signal(signal.SIGSTOP)
            asyncio.get_running_loop().call_later(STALL_S, server.send_signal, signal.SIGCONT)
            answer = await client.ask(address, "count", body, ModelFilePart, PATIENCE_S)
            assert int(answer.data) > body_bytes
        finally:
            await client.close()
            server.kill()


async def test_a_quiet_connection_with_an_open_call_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frontend has an open call to each worker, for its load: 1,000 checks a second were half of what it did idle."""
    checks, go_on = 0, asyncio.Event()

    def counted(connection: socket.socket) -> Wire:
        nonlocal checks
        checks += 1
        return wire_of(connection)

    async def hold(call: Call) -> None:
        await go_on.wait()
        await call.send(ModelFilePart(data=b""))

    monkeypatch.setattr(watch_module, "WIRE_CHECK_S", 0.02)
    monkeypatch.setattr(watch_module, "wire_of", counted)
    server, client = PlaneServer({"hold": hold}), PlaneClient()
    address = await server.start("127.0.0.1")
    held = asyncio.create_task(client.ask(address, "hold", ModelFileRequest(sha256=""), ModelFilePart, PATIENCE_S))
    await asyncio.sleep(0.3)
    assert checks > 0, "what was sent is watched until it is acknowledged"
    before = checks
    await asyncio.sleep(0.5)
    assert checks == before
    go_on.set()
    await held
    await client.close()
    await server.close()
