"""A crew whose processes are rows of a table: they put up cards in memory, and answer `control` over a real plane."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count

from kvmesh.cluster.crew import Crew, WorkerStakes
from kvmesh.cluster.notices import KEPT
from kvmesh.mesh.discovery import Put, Registration
from kvmesh.mesh.discovery.memory import MemoryDiscovery
from kvmesh.mesh.plane.server import Call, PlaneServer
from kvmesh.mesh.supervisor import ProcessSpec
from kvmesh.protocol.errors import EngineError, InvalidRequestError, MeshError
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import Control, ControlReply, KeptCard, Role, WorkerCard, decode, encode
from kvmesh.router.down import DownWorkers
from tests.support.patience import PATIENCE_S


class FakeSupervisor:
    """`specs`: how each would be started the next time."""

    def __init__(self) -> None:
        self.specs: dict[str, ProcessSpec] = {}
        self.failures: dict[str, Callable[[MeshError], None]] = {}
        self.stopped: list[str] = []
        self.may_end = asyncio.Event()  # who is stopped has finished its streams
        self.may_end.set()
        self._pids = count(100)
        self._running: dict[str, int] = {}

    def start(
        self, spec: ProcessSpec, on_failure: Callable[[MeshError], None] | None = None, on_down: object = None
    ) -> None:
        self.specs[spec.name] = spec
        self._running[spec.name] = next(self._pids)
        if on_failure is not None:
            self.failures[spec.name] = on_failure

    def respecify(self, spec: ProcessSpec) -> None:
        self.specs[spec.name] = spec

    def pid(self, name: str) -> int | None:
        return self._running.get(name)

    async def settled_pid(self, name: str) -> int | None:
        return self.pid(name)

    def pids(self) -> dict[str, int]:
        return dict(self._running)

    async def stop(self, names: Sequence[str], timeout_s: float) -> None:
        self.stopped += names
        await self.may_end.wait()
        for name in names:
            self._running.pop(name, None)

    def end(self, name: str) -> None:
        """Its process ends, and will be started again."""
        self._running.pop(name)

    def revive(self, name: str) -> None:
        self._running[name] = next(self._pids)

    def lose(self, name: str, failure: MeshError) -> None:
        """It is given up."""
        self._running.pop(name)
        self.failures[name](failure)


class FakeHost:
    """Crew, workers and what they meet in. `refuses`: workers that will not change their role."""

    def __init__(self) -> None:
        self.supervisor = FakeSupervisor()
        self.discovery = MemoryDiscovery()
        self.loads: dict[str, float] = {}
        self.cached: dict[str, float] = {}  # blocks
        self.refuses: set[str] = set()
        self.flips_s: asyncio.Event | None = None  # set it to let flips come to an end
        self.told: list[str] = []
        self.seen_down = DownWorkers()  # as a frontend sees them
        self._kept: tuple[str, ...] = ()
        self._cards: dict[str, Registration] = {}
        self._numbers = count()
        self._server = PlaneServer({"control": self._control}, max_calls=64)
        self._address = ""
        self._following: asyncio.Future[list[BaseException | None]] | None = None
        self.crew = Crew(
            self.supervisor,  # type: ignore[arg-type]
            lambda role, name: ProcessSpec(name, [role.value]),
            1.0,
            self.told.append,
            self._load,
        )

    async def start(self, prefill: int, decode: int, aggregated: int = 0) -> None:
        self._address = await self._server.start("127.0.0.1", 0)
        self._following = asyncio.gather(
            self.crew.follow(self.discovery),
            self.crew.notices.run(self.discovery),
            self.seen_down.run(self.discovery),
            self._follow_kept(),
            return_exceptions=True,
        )
        for role, number in ((Role.PREFILL, prefill), (Role.DECODE, decode), (Role.AGGREGATED, aggregated)):
            for i in range(number):
                name = f"{role.value}-{i}"
                self.crew.adopt(name, role)
                self.supervisor.start(ProcessSpec(name, [role.value]))
        await self.all_ready()
        self.crew.is_complete = True

    async def all_ready(self) -> None:
        """Everybody that runs and is not being stopped has joined, and the crew has heard of it."""
        for name, spec in self.supervisor.specs.items():
            if name in self.supervisor.pids() and name not in self._cards:
                await self._join(name, Role(spec.argv[0]))
        await self.heard()

    async def heard(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    async def _follow_kept(self) -> None:
        async for change in self.discovery.watch(KEPT):
            assert isinstance(change, Put)
            self._kept = decode(change.value, KeptCard).workers

    async def kept(self) -> list[str]:
        """Return the workers that come back if they end, as a frontend sees them."""
        await self.heard()
        return list(self._kept)

    async def until_ended(self, name: str) -> None:
        """A worker that is drained is gone."""
        async with asyncio.timeout(PATIENCE_S):
            while any(report.name == name for report in self.crew.reports()):
                await asyncio.sleep(0.001)

    async def crash(self, name: str) -> bool:
        """End a worker again and again. Return whether the mesh serves without it."""
        self.supervisor.end(name)
        await self._cards.pop(name).withdraw()
        goes_on = self.crew.on_down(name, EngineError(f"{name} does not run:\nout of memory"), 30.0)
        await self.heard()
        return goes_on

    async def _join(self, name: str, role: Role) -> None:
        worker_id = WorkerId(f"{name}-{next(self._numbers)}")
        card = WorkerCard(
            worker_id=worker_id, name=name, role=role, model="m", model_path="", address=self._address, block_size=16,
            total_blocks=8, context_tokens=64, pid=self.supervisor.pid(name) or 0,
        )  # fmt: skip
        self._cards[name] = await self.discovery.put(f"workers/{worker_id}", encode(card))

    async def _load(self, card: WorkerCard) -> WorkerStakes:
        return WorkerStakes(self.loads.get(card.name, 0.0), self.cached.get(card.name, 0.0))

    async def _control(self, call: Call) -> None:
        """Change the role of the worker whose flip the crew has reported last."""
        request = decode(call.body, Control)
        role = Role(request.arguments["role"])
        name = next(r.name for r in self.crew.reports() if r.state == "flipping" and r.name in self._cards)
        if name in self.refuses:
            raise InvalidRequestError(f"the engine of {name} cannot change its role")
        await self._cards.pop(name).withdraw()
        if self.flips_s is not None:
            await self.flips_s.wait()
        await self._join(name, role)
        await call.send(ControlReply(detail=f"now {role.value}"))

    async def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
            with suppress(asyncio.CancelledError):
                await self._following
        await self.crew.close()
        await self._server.close()
        await self.discovery.close()

    def roles(self) -> dict[str, Role]:
        return {report.name: report.role for report in self.crew.reports() if report.state != "draining"}
