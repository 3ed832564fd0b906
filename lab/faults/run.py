"""Run one schedule: start a mesh, send requests, carry the faults out, and judge what came of it."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import aiohttp

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.frontend.tokenizer import Tokenizer
from kvmesh.lab.faults.carry_out import Machine
from kvmesh.lab.faults.clients import Clients
from kvmesh.lab.faults.mesh import FaultsMesh
from kvmesh.lab.faults.oracle import Answered, Oracle
from kvmesh.lab.faults.quiet import Remains, in_flight, left_on_machine, shared_memory, sizes, until_quiet
from kvmesh.lab.faults.recovery import stopped_s
from kvmesh.lab.faults.report import FaultsReport, RunRecord, judge_run
from kvmesh.lab.faults.room import PrivateRoom
from kvmesh.lab.faults.schedule import Schedule
from kvmesh.lab.faults.traffic import CHATS, MODEL, REAL_PROMPTS, SHAPES, TOOL, Ask, ask, chat, real_ask
from kvmesh.protocol.errors import EngineError

SETTLED_S = 10.0  # in which the first requests leave nothing behind
WARM_S = 30.0
MOST_REQUESTS = 100_000
Tell = Callable[[str], None]
Watch = Callable[[FaultsMesh, Callable[[], float]], Awaitable[None]]  # given the clock of the run


class FaultsRun:
    """One schedule on one mesh."""

    def __init__(
        self,
        schedule: Schedule,
        folder: Path,
        tell: Tell,
        *,
        without: str = "",
        room: PrivateRoom | None = None,
        watch: Watch | None = None,
    ) -> None:
        """Take `watch`, which runs beside the requests and is cancelled after them."""
        self._watch = watch
        self._schedule = schedule
        self._without = without
        self._tell = tell
        self._began_s = time.monotonic()
        self._shm_before = shared_memory()
        self._has_own_shm = room is not None and room.has_shared_memory
        self.mesh = FaultsMesh(folder, schedule.mesh, schedule.seed, tell, without)
        self.machine = Machine(self.mesh, self.clock, tell, room)
        self._next = 0

    def clock(self) -> float:
        return time.monotonic() - self._began_s

    async def run(self) -> FaultsReport:
        """Return what came of it. Raises MeshError if the mesh cannot run without any fault."""
        schedule = self._schedule
        try:
            await self.mesh.start()
            oracle = Oracle(shown, await self._tokenize_chats())
            oracle.weights = self.machine.weights
            await self._warm_up(oracle)
            before = sizes(self.mesh)
            self.mesh.ended.clear()
            self._began_s = time.monotonic()
            clients = Clients(self.mesh.urls, self._next_ask, self.clock)
            async with asyncio.TaskGroup() as beside:
                watching = beside.create_task(self._watch_mesh(), name="watch")
                async with asyncio.TaskGroup() as group:
                    group.create_task(clients.run(schedule.traffic.clients), name="clients")
                    group.create_task(self.machine.run(schedule), name="faults")
                watching.cancel()
            remains = await until_quiet(self.mesh, before, schedule.quiet_s)
            crashed = unprovoked(self.mesh.ended, self.machine.provoked)
        finally:
            await self.mesh.close()
        remains.leaked += await asyncio.to_thread(
            left_on_machine, [str(self.mesh.folder)], self._shm_before, is_private=self._has_own_shm
        )
        return self._judge(oracle, clients.answers, remains, crashed)

    def _judge(
        self, oracle: Oracle, answers: Sequence[Answered], remains: Remains, crashed: Sequence[str]
    ) -> FaultsReport:
        machine = self.machine
        return judge_run(
            RunRecord(
                schedule=self._schedule,
                judged=[(one, oracle.judge(one, stopped_s(one, machine.happened))) for one in answers],
                happened=sorted(machine.happened, key=lambda one: one.began_s),
                remains=remains,
                skipped=machine.skipped,
                crashed=crashed,
                complaints=machine.complaints,
                without=self._without,
            )
        )

    async def _watch_mesh(self) -> None:
        if self._watch is not None:
            await self._watch(self.mesh, self.clock)

    def _next_ask(self) -> Ask | None:
        """Return the next request, None when the run's time is over."""
        if self.clock() >= self._schedule.seconds or self._next >= MOST_REQUESTS:
            return None
        self._next += 1
        traffic, mesh = self._schedule.traffic, self._schedule.mesh
        return ask(self._schedule.seed, self._next, mesh.frontends, traffic.shapes, traffic.deadline_s, mesh.torch)

    async def _tokenize_chats(self) -> Mapping[tuple[str, bool], list[int]]:
        """Ask the mesh, before the first fault, for the tokens of every chat."""
        tokens = {}
        async with aiohttp.ClientSession() as http:
            for number, tools in itertools.product(range(CHATS), (False, True)):
                messages = list(chat(number))
                body = {"model": MODEL, "messages": messages, **({"tools": [TOOL]} if tools else {})}
                async with http.post(f"{self.mesh.urls[0]}/tokenize", json=body) as response:
                    reply = await response.json()
                if response.status != 200:
                    raise EngineError(f"the mesh does not tokenize: {reply}")
                tokens[messages[-1]["content"], tools] = reply["tokens"]
        return tokens

    async def _warm_up(self, oracle: Oracle) -> None:
        """Send one request of each shape to each frontend: every answer has to be right while there is no fault."""
        shapes = self._schedule.traffic.shapes or tuple(SHAPES)
        asks = [
            ask(self._schedule.seed, -1 - number, 1, [shape], WARM_S)
            for number, shape in enumerate(shapes)
            if SHAPES[shape].mood == "usual"
        ]
        clients = Clients(self.mesh.urls, iter([*asks, *asks, None]).__next__, self.clock)
        async with aiohttp.ClientSession() as http:
            for number in range(REAL_PROMPTS if self.mesh.real_names else 0):
                learned = await clients.send(http, real_ask(number))
                oracle.learned[learned.ask.prompt] = learned.tokens.get(0, [])
            for one in asks:
                judged = oracle.judge(await clients.send(http, one))
                if judged.verdict != "right":
                    raise EngineError(
                        f"without a fault a request of the shape {one.shape} is {judged.verdict}: {judged.why}",
                        hint=f"logs: {self.mesh.logs}",
                    )
        ends_s = self.clock() + SETTLED_S
        while True:
            if not await in_flight(self.mesh) or self.clock() > ends_s:
                return
            await asyncio.sleep(0.1)


def unprovoked(ended: Sequence[str], provoked: Mapping[str, int]) -> list[str]:
    """Return what was said of processes that ended more often than faults made them."""
    allowed = dict(provoked)
    left = []
    for line in ended:
        name = line.partition(" ")[0]
        if allowed.get(name, 0) > 0:
            allowed[name] -= 1
        elif " ended with " in line:
            left.append(line)
    return left


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.load(CHECKPOINT_DIR)


@cache
def shown(token_id: int) -> str:
    """Return a token as the API writes it."""
    return _tokenizer().token_bytes(token_id).decode(errors="replace")
