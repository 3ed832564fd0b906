"""Send the requests of a point from a process of their own.

An open loop sends each request at its time, whatever became of those before; its waits count from that time, so that a
slow server cannot hide behind requests that were never sent. The process measures itself: its CPU, and by how much it
sent too late.
"""

import asyncio
import gc
import time
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
import psutil
import uvloop
from msgspec import Struct

from kvmesh.commands.bench.apart import run_apart
from kvmesh.commands.bench.client import EndpointClient
from kvmesh.commands.bench.reading import StreamReading
from kvmesh.commands.bench.results import GeneratorLoad, RequestOutcome
from kvmesh.commands.bench.workload import BenchSession, BenchTurn
from kvmesh.mesh.http.files import make_room_for_files

PROBE_S = 0.05  # between looks at the sender's own loop
READY = 64  # connections that are opened before the clock starts
SPARE_FILES = 64
BEGINS_S = 0.1  # from the set-up to the first request


class SendingPlan(Struct, frozen=True, kw_only=True):
    url: str
    api: Literal["chat", "completions"]
    api_key: str
    common: dict[str, object]  # fields of every body
    sessions: list[BenchSession]
    clients: int  # 0: an open loop
    think_s: float
    timeout_s: float


class SendingResult(Struct, frozen=True, kw_only=True):
    outcomes: list[RequestOutcome]
    duration_s: float
    generator: GeneratorLoad


def send(plan: SendingPlan) -> SendingResult:
    """Send from a new process, in which no garbage is collected."""
    return msgspec.msgpack.decode(run_apart(_run, msgspec.msgpack.encode(plan)), type=SendingResult)


def _run(encoded: bytes) -> bytes:
    plan = msgspec.msgpack.decode(encoded, type=SendingPlan)
    make_room_for_files((plan.clients or len(plan.sessions)) + SPARE_FILES)
    gc.freeze()
    gc.disable()
    return msgspec.msgpack.encode(uvloop.run(drive(plan)))


async def drive(plan: SendingPlan) -> SendingResult:
    """Send the plan's requests on this loop."""
    path = "/v1/chat/completions" if plan.api == "chat" else "/v1/completions"
    client = EndpointClient(plan.url, path, plan.api_key)
    sender = _SessionSender(plan, client)
    bodies = [sender.body([], session.turns[0]) for session in plan.sessions]
    await client.open(min(plan.clients or READY, len(bodies)))
    probe = asyncio.create_task(sender.watch_loop(), name="watch the loop")
    machine, cpu_s = psutil.cpu_times(), time.process_time()
    sender.began_s = time.perf_counter() + BEGINS_S
    try:
        if plan.clients:
            await sender.closed_loop(bodies)
        else:
            await sender.open_loop(bodies)
    finally:
        probe.cancel()
        client.close()
    duration_s = time.perf_counter() - sender.began_s
    used_s = time.process_time() - cpu_s
    return SendingResult(
        outcomes=sender.outcomes,
        duration_s=duration_s,
        generator=generator_load(
            used_s, duration_s + BEGINS_S, sender.lags_s, sender.loop_lags_s, busy_share(machine, psutil.cpu_times())
        ),
    )


def generator_load(
    cpu_s: float, wall_s: float, lags_s: Sequence[float], loop_lags_s: Sequence[float], machine_share: float
) -> GeneratorLoad:
    lags, loop_lags = sorted(lags_s), sorted(loop_lags_s)
    return GeneratorLoad(
        cpu_share=cpu_s / max(1e-9, wall_s),
        cpu_s=cpu_s,
        lag_p50_s=_rank(lags, 0.5),
        lag_p99_s=_rank(lags, 0.99),
        lag_max_s=_rank(lags, 1.0),
        loop_lag_p99_s=_rank(loop_lags, 0.99),
        machine_cpu_share=machine_share,
    )


def _rank(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def busy_share(before: "psutil._ntuples.scputimes", after: "psutil._ntuples.scputimes") -> float:
    """Return the share of all cores that was busy between two looks."""
    total = sum(after[:8]) - sum(before[:8])
    idle = after.idle + after.iowait - before.idle - before.iowait
    return 1 - idle / total if total > 0 else 0.0


class _SessionSender:
    """Sends conversations and records how their requests ended."""

    def __init__(self, plan: SendingPlan, client: EndpointClient) -> None:
        self._plan = plan
        self._client = client
        self.began_s = 0.0
        self.outcomes: list[RequestOutcome] = []
        self.lags_s: list[float] = []
        self.loop_lags_s: list[float] = []

    def body(self, history: list[tuple[str, str]], turn: BenchTurn) -> bytes:
        """Return the body of a turn that continues `history`: what was asked and answered before."""
        fields = dict(self._plan.common)
        fields["max_tokens"] = turn.osl_tokens
        if self._plan.api == "completions":
            fields["prompt"] = "\n".join([*(text for pair in history for text in pair), turn.text])
        else:
            said = [
                {"role": role, "content": text}
                for pair in history
                for role, text in zip(("user", "assistant"), pair, strict=True)
            ]
            fields["messages"] = [*said, {"role": "user", "content": turn.text}]
        return msgspec.json.encode(fields)

    async def open_loop(self, bodies: Sequence[bytes]) -> None:
        async with asyncio.TaskGroup() as running:
            for session, body in zip(self._plan.sessions, bodies, strict=True):
                due_s = self.began_s + session.at_s
                if (wait_s := due_s - time.perf_counter()) > 0:
                    await asyncio.sleep(wait_s)
                running.create_task(self._converse(session, body, due_s), name="conversation")

    async def closed_loop(self, bodies: Sequence[bytes]) -> None:
        await asyncio.sleep(max(0.0, self.began_s - time.perf_counter()))
        todo = iter(zip(self._plan.sessions, bodies, strict=True))
        async with asyncio.TaskGroup() as clients:
            for _ in range(min(self._plan.clients, len(bodies))):
                clients.create_task(self._work(todo), name="client")

    async def _work(self, todo: Iterator[tuple[BenchSession, bytes]]) -> None:
        for session, body in todo:
            await self._converse(session, body, time.perf_counter())

    async def _converse(self, session: BenchSession, body: bytes, due_s: float) -> None:
        """Ask all turns; a conversation ends where an answer fails."""
        history: list[tuple[str, str]] = []
        for number, turn in enumerate(session.turns):
            is_last = number + 1 == len(session.turns)
            if number:
                await asyncio.sleep(self._plan.think_s)
                due_s = time.perf_counter()
                body = self.body(history, turn)
            reading = StreamReading(keeps_text=not is_last)
            sent_s = await self._client.ask(body, reading, self._plan.timeout_s)
            self._record(turn, reading, due_s, sent_s)
            if reading.failure:
                return
            history.append((turn.text, "".join(reading.texts)))

    def _record(self, turn: BenchTurn, reading: StreamReading, due_s: float, sent_s: float) -> None:
        self.lags_s.append(max(0.0, sent_s - due_s))
        began_s = self.began_s
        counted = reading.completion_tokens
        self.outcomes.append(
            RequestOutcome(
                due_s=min(due_s, sent_s) - began_s,
                sent_s=sent_s - began_s,
                end_s=time.perf_counter() - began_s,
                first_s=reading.first_s and reading.first_s - began_s,
                last_s=reading.last_s and reading.last_s - began_s,
                gaps_s=tuple(reading.gaps_s),
                events=reading.events,
                tokens=reading.events if counted is None else counted,
                asked_tokens=turn.osl_tokens,
                prompt_tokens=reading.prompt_tokens,
                cached_tokens=reading.cached_tokens,
                has_usage=counted is not None,
                failure=reading.failure,
                detail=reading.detail,
            )
        )

    async def watch_loop(self) -> None:
        """Note by how much a timer fires late. Runs until it is cancelled."""
        while True:
            due_s = time.perf_counter() + PROBE_S
            await asyncio.sleep(PROBE_S)
            self.loop_lags_s.append(max(0.0, time.perf_counter() - due_s))
