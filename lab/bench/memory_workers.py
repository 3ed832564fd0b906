"""Start real worker processes and a memory service, kill them, and read what Linux says of their memory."""

import asyncio
import os
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.mesh.discovery import Put, open_discovery
from kvmesh.mesh.lifecycle import PARENT_PID
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.protocol.errors import EngineError
from kvmesh.protocol.ids import new_request_id
from kvmesh.protocol.messages import (
    Control,
    ControlAction,
    ControlReply,
    Delta,
    GenerateRequest,
    SamplingParams,
    StopConditions,
    WorkerCard,
    decode,
    pack_tokens,
)
from kvmesh.workers.memory.client import read_holdings
from kvmesh.workers.memory.messages import Holdings

PATIENCE_S = 300.0
POLL_S = 0.002
NUM_BLOCKS = 16
MAPPED_NAME = "/memfd:kvmesh-weights"
PROMPT = [11, 7, 5, 3, 2, 13, 17, 19]


class BenchedWorker:
    """One worker process."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log_file: Path) -> None:
        self.name = name
        self.process = process
        self.card: WorkerCard | None = None
        self.ready_s = 0.0  # from the start of the process to its card
        self._log_file = log_file
        self._started_s = time.monotonic()

    def on_card(self, card: WorkerCard) -> None:
        if self.card is None:
            self.card, self.ready_s = card, time.monotonic() - self._started_s

    @property
    def log(self) -> str:
        return self._log_file.read_text()

    def weights_address(self) -> int:
        """Return where the weights are mapped, 0 if they are not."""
        maps = Path(f"/proc/{self.process.pid}/maps").read_text()
        found = [line for line in maps.splitlines() if MAPPED_NAME in line]
        return int(found[0].split("-")[0], 16) if found else 0

    def has_image_open(self) -> bool:
        """Return whether the process has a descriptor of an image: a writer has, until it has written."""
        for link in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # it has just been closed
                if os.readlink(link).startswith(MAPPED_NAME):
                    return True
        return False

    def private_bytes(self) -> int:
        """Return the memory that this process alone has written, all of it."""
        return sum_of("Private_Dirty", Path(f"/proc/{self.process.pid}/smaps").read_text())

    async def kill(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


def sum_of(field: str, smaps: str) -> int:
    """Return the sum of one field of all mappings, in bytes."""
    return 1024 * sum(int(kib) for kib in re.findall(rf"^{field}:\s+(\d+) kB$", smaps, re.MULTILINE))


class MemoryBench:
    """The processes of one run, and the ways to them. `folder` has the checkpoint and everything that is written."""

    def __init__(self, folder: Path, dtype: str, limit_gib: float) -> None:
        self.folder = folder
        self.socket = str(folder / "memory.sock")
        self.workers: dict[str, BenchedWorker] = {}
        self.service: asyncio.subprocess.Process | None = None
        self._dtype = dtype
        self._limit_gib = limit_gib
        self._discovery_url = f"file:{folder / 'discovery'}"
        self._discovery = open_discovery(self._discovery_url)
        self._plane = PlaneClient()
        self._following: asyncio.Task[None] | None = None

    async def start_service(self) -> None:
        self.service = await self._spawn(
            "service", ["-m", "kvmesh.workers.memory", "--socket", self.socket, "--limit-gib", str(self._limit_gib)]
        )
        socket = Path(self.socket)
        await self._until(socket.exists, "the memory service")

    async def kill_service(self) -> None:
        if self.service is not None:
            with suppress(ProcessLookupError):
                self.service.kill()
            await self.service.wait()

    def holdings(self) -> Holdings:
        return read_holdings(self.socket)

    async def start(self, name: str, *, tiny: bool = False, is_shared: bool = True) -> BenchedWorker:
        """Start a worker and return at once."""
        if self._following is None:
            self._following = asyncio.create_task(self._follow(), name="follow workers")
        model = CHECKPOINT_DIR if tiny else self.folder / "checkpoint"
        flags = ["--name", name, "--model-path", str(model), "--discovery", self._discovery_url, "--dtype", self._dtype]
        flags += ["--num-blocks", str(NUM_BLOCKS), "--kv-transfer", "shm", "--canary-interval-s", "0"]
        flags += ["--weights-service", self.socket] if is_shared else []
        process = await self._spawn(name, ["-m", "kvmesh.workers", *flags])
        self.workers[name] = BenchedWorker(name, process, self.folder / f"{name}.log")
        return self.workers[name]

    async def until_ready(self, worker: BenchedWorker) -> BenchedWorker:
        await self._until(lambda: worker.card is not None or worker.process.returncode is not None, worker.name)
        if worker.card is None:
            raise EngineError(f"{worker.name} ended before it was ready:\n{worker.log[-2000:]}")
        return worker

    async def ask(self, worker: BenchedWorker) -> list[int]:
        """Return the tokens of a greedy answer."""
        assert worker.card is not None
        request = GenerateRequest(
            request_id=new_request_id("bench"),
            model=worker.card.model,
            prompt=pack_tokens(PROMPT),
            sampling=SamplingParams(temperature=0),
            stop=StopConditions(max_tokens=8, ignore_eos=True),
        )
        tokens: list[int] = []
        async with self._plane.open(worker.card.address, "generate", request, PATIENCE_S) as stream:
            async for delta in stream.messages(Delta):
                tokens += delta.token_ids
        return tokens

    async def control(self, worker: BenchedWorker, action: ControlAction) -> float:
        """Have a worker do something; return how long that took."""
        assert worker.card is not None
        began_s = time.monotonic()
        await self._plane.ask(worker.card.address, "control", Control(action=action), ControlReply, PATIENCE_S)
        return time.monotonic() - began_s

    async def writer_of(self, workers: Sequence[BenchedWorker]) -> BenchedWorker:
        """Return the worker that writes, in the middle of it. Raise EngineError if it has finished already."""

        found: list[BenchedWorker] = []

        def is_writing() -> bool:
            if any(image.state == "ready" for image in self.holdings().images):
                raise EngineError("the writer had finished before it could be killed", hint="run the benchmark again")
            found[:] = [worker for worker in workers if worker.has_image_open()]
            return bool(found)

        await self._until(is_writing, "a writer")
        return found[0]

    async def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
            with suppress(asyncio.CancelledError):
                await self._following
        for worker in self.workers.values():
            await worker.kill()
        await self.kill_service()
        await self._plane.close()
        await self._discovery.close()

    async def _follow(self) -> None:
        async for change in self._discovery.watch("workers/"):
            if isinstance(change, Put):
                card = decode(change.value, WorkerCard)
                if (worker := self.workers.get(card.name)) is not None:
                    worker.on_card(card)

    async def _spawn(self, name: str, argv: Sequence[str]) -> asyncio.subprocess.Process:
        with (self.folder / f"{name}.log").open("wb") as log:
            return await asyncio.create_subprocess_exec(
                sys.executable, "-P", *argv, stdout=log, stderr=log, env={**os.environ, PARENT_PID: str(os.getpid())}
            )

    async def _until(self, is_so: Callable[[], bool], what: str) -> None:
        give_up_s = time.monotonic() + PATIENCE_S
        while not is_so():
            if time.monotonic() > give_up_s:
                raise EngineError(f"{what} did not come within {PATIENCE_S:.0f} s")
            await asyncio.sleep(POLL_S)


@asynccontextmanager
async def memory_bench(folder: Path, dtype: str, limit_gib: float) -> AsyncIterator[MemoryBench]:
    """Yield the means to start processes; all of them are killed at the end."""
    bench = MemoryBench(folder, dtype, limit_gib)
    try:
        yield bench
    finally:
        await bench.close()
