"""Run a real etcd and a real NATS server for a mesh, and take them away."""

import asyncio
import os
import shutil
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kvmesh.lab.faults.room import die_with_parent
from kvmesh.protocol.errors import EngineError

UNTIL_S = 20.0
POLL_S = 0.02
QUOTA_BYTES = 16 << 20  # of etcd: small, so that it can be filled
FILL_BYTES = 1 << 20
SBIN = "/usr/sbin:/usr/local/sbin:/usr/local/bin"


def program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=SBIN)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class _Server:
    """One server process. It listens at the same port and finds its data again after `start`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder / name
        self.folder.mkdir()
        self.port = free_port()
        self._log = folder / f"{name}.log"
        self._process: asyncio.subprocess.Process | None = None

    def command(self) -> Sequence[str]:
        raise NotImplementedError

    async def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self.command(), stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                preexec_fn=die_with_parent,
            )  # fmt: skip
        await self.until_answers()

    async def until_answers(self) -> None:
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + UNTIL_S
        while not await self._answers():
            if loop.time() > ends_s:
                raise EngineError(f"{self.folder.name} does not answer after {UNTIL_S:.0f} s", hint=f"see {self._log}")
            await asyncio.sleep(POLL_S)

    async def _answers(self) -> bool:
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection("127.0.0.1", self.port), 1.0)
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def kill(self) -> None:
        """End it as if its machine had lost power."""
        self.signal(signal.SIGKILL)
        if self._process is not None:
            await self._process.wait()

    async def lose_data(self) -> None:
        """Start it again without anything that it knew."""
        await self.kill()
        await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)
        self.folder.mkdir()
        await self.start()


class EtcdProgram(_Server):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "etcd")
        self._peer_port = free_port()

    @property
    def url(self) -> str:
        return f"etcd:127.0.0.1:{self.port}/mesh"

    def command(self) -> Sequence[str]:
        client, peer = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{self._peer_port}"
        return (
            *(program("etcd") or "etcd", "--data-dir", str(self.folder / "data"), "--log-level", "error"),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"default={peer}", "--unsafe-no-fsync", f"--quota-backend-bytes={QUOTA_BYTES}"),
        )

    async def fill(self) -> bool:
        """Write until etcd takes no more. Return whether that worked."""
        for number in range(2 * QUOTA_BYTES // FILL_BYTES):
            if not await self._ctl("put", f"filler/{number}", stdin=b"x" * (FILL_BYTES - 1000)):
                return True
        return False

    async def empty_again(self) -> None:
        """Free the room, and have etcd take writes again."""
        await self._ctl("del", "--prefix", "filler/")
        shown = await self._output("get", "nothing", "-w", "fields")
        if '"Revision" : ' in shown:
            await self._ctl("compact", shown.split('"Revision" : ')[1].split()[0])
        await self._ctl("defrag")
        await self._ctl("alarm", "disarm")

    async def _ctl(self, *arguments: str, stdin: bytes = b"") -> bool:
        return (await self._run(arguments, stdin))[0] == 0

    async def _output(self, *arguments: str) -> str:
        return (await self._run(arguments, b""))[1]

    async def _run(self, arguments: Sequence[str], stdin: bytes) -> tuple[int, str]:
        process = await asyncio.create_subprocess_exec(
            program("etcdctl") or "etcdctl",
            "--endpoints",
            f"127.0.0.1:{self.port}",
            *arguments,
            stdin=asyncio.subprocess.PIPE if stdin else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, "ETCDCTL_API": "3"},
        )
        out, _ = await process.communicate(stdin or None)
        return process.returncode or 0, out.decode(errors="replace")


class NatsProgram(_Server):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "nats")

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def command(self) -> Sequence[str]:
        return (program("nats-server") or "nats-server", "-a", "127.0.0.1", "-p", str(self.port), "-js", "-sd",
            str(self.folder))  # fmt: skip
