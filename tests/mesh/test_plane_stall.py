"""A peer whose process stands still answers late: its calls are not lost, however much of them is unread."""

import asyncio
import signal
import subprocess
import sys

import pytest

from mesh.plane.client import PlaneClient
from protocol.messages import ModelFilePart, ModelFileRequest
from tests.support.patience import PATIENCE_S

STALL_S = 3.0  # longer than a host may be silent
SERVER = """
import asyncio
from mesh.plane.server import Call, PlaneServer
from protocol.messages import ModelFilePart
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
