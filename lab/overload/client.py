"""Send planned requests from a process of its own, at their times, whatever becomes of those before."""

import asyncio
import gc
import itertools
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

import msgspec
import uvloop
from msgspec import Struct

from kvmesh.commands.bench.apart import run_apart
from kvmesh.lab.bench.load import ClientConnection, TimedAnswer, events_of
from kvmesh.lab.overload.shapes import PlannedRequest, WrittenRequest, written

ANSWER_S = 120.0  # a client without a deadline gives up then
GRACE_S = 2.0  # for the server's own error at a deadline
AGAIN_S = 0.1  # a client of a closed loop waits so long after a refusal
READY = 64  # connections that are opened before the clock starts


class LoadAnswer(Struct, frozen=True):
    """Report how one request ended. Times count from the start of the run; `sent_s` is when it was to be sent."""

    at_s: float
    late_s: float  # after its time that it was really sent
    status: int  # 0: none
    first_s: float  # from `at_s` to the first token; 0: there was none
    end_s: float  # from `at_s` to the end
    tokens: int
    is_whole: bool
    deadline_s: float
    left: bool  # its client left


class LoadResult(Struct, frozen=True):
    answers: list[LoadAnswer]
    cpu_share: float  # of one core, that the sending process took


class ClosedLoop(Struct, frozen=True):
    """So many clients for so long, each of which sends its next request when the answer to the last is there."""

    clients: int
    seconds: float


def send(
    urls: Sequence[str], requests: Sequence[PlannedRequest], model: str, loop: ClosedLoop | None = None
) -> LoadResult:
    """Send requests from a process of its own, dealt out to the servers, at their times or in a closed loop."""
    done = run_apart(_run, list(urls), [written(one, model) for one in requests], loop)
    return msgspec.msgpack.decode(done, type=LoadResult)


def _run(urls: list[str], requests: list[WrittenRequest], loop: ClosedLoop | None) -> bytes:
    gc.freeze()
    gc.disable()
    before, began = time.process_time(), time.monotonic()
    answers = uvloop.run(_drive(urls, requests, loop))
    share = (time.process_time() - before) / (time.monotonic() - began)
    return msgspec.msgpack.encode(LoadResult(answers, share))


async def _drive(urls: list[str], requests: list[WrittenRequest], loop: ClosedLoop | None) -> list[LoadAnswer]:
    sender = _Sender(urls)
    await sender.open(READY)
    sender.began_s = time.perf_counter() + 0.2
    try:
        if loop is not None:
            return await sender.closed_loop(requests, loop)
        return await asyncio.gather(*[sender.at_its_time(i, request) for i, request in enumerate(requests)])
    finally:
        sender.close()


class _Sender:
    def __init__(self, urls: list[str]) -> None:
        self._places = [(parts.hostname or "127.0.0.1", parts.port or 80) for parts in map(urlsplit, urls)]
        self._idle: list[list[ClientConnection]] = [[] for _ in urls]
        self._loop = asyncio.get_running_loop()
        self.began_s = 0.0

    async def open(self, count: int) -> None:
        for number in range(count * len(self._places)):
            server = number % len(self._places)
            self._idle[server].append(await self._connect(server))

    async def closed_loop(self, requests: list[WrittenRequest], loop: ClosedLoop) -> list[LoadAnswer]:
        todo = itertools.cycle(enumerate(requests))
        answers: list[LoadAnswer] = []

        async def client() -> None:
            number, request = next(todo)
            while (now := time.perf_counter() - self.began_s) < loop.seconds:
                answers.append(await self._ask(number, request, now))
                if answers[-1].is_whole:
                    number, request = next(todo)
                else:  # refused: the same again, for others may be shorter than most, but not at once
                    await asyncio.sleep(AGAIN_S)

        await asyncio.gather(*[client() for _ in range(loop.clients)])
        return answers

    async def at_its_time(self, number: int, request: WrittenRequest) -> LoadAnswer:
        await asyncio.sleep(self.began_s + request.planned.at_s - time.perf_counter())
        return await self._ask(number, request, request.planned.at_s)

    async def _ask(self, number: int, request: WrittenRequest, at_s: float) -> LoadAnswer:
        server, planned = number % len(self._places), request.planned
        due_s, answer = self.began_s + at_s, TimedAnswer()
        late_s = time.perf_counter() - due_s
        left = False
        try:
            idle = self._idle[server]
            connection = idle.pop() if idle else await self._connect(server)
            limit_s = planned.leaves_s or (planned.deadline_s or ANSWER_S) + GRACE_S
            async with asyncio.timeout(limit_s):
                await connection.ask(_bytes_of(self._places[server], request), answer)
            if not connection.closed:
                idle.append(connection)
        except TimeoutError:
            connection.close()
            left = bool(planned.leaves_s)
        except OSError:
            pass
        end_s = time.perf_counter() - due_s
        tokens, is_whole = _judged(answer)
        first_s = answer.first_token_s - due_s if answer.first_token_s else 0.0
        return LoadAnswer(at_s, late_s, answer.status, first_s, end_s, tokens, is_whole, planned.deadline_s, left)

    async def _connect(self, server: int) -> ClientConnection:
        host, port = self._places[server]
        _, connection = await self._loop.create_connection(lambda: ClientConnection(True, self._loop), host, port)
        return connection

    def close(self) -> None:
        for connections in self._idle:
            for connection in connections:
                connection.close()


def _bytes_of(place: tuple[str, int], request: WrittenRequest) -> bytes:
    head = f"POST {request.path} HTTP/1.1\r\nHost: {place[0]}:{place[1]}\r\nContent-Type: application/json\r\n"
    if request.planned.deadline_s:
        head += f"x-request-timeout-s: {request.planned.deadline_s:g}\r\n"
    return f"{head}Content-Length: {len(request.body)}\r\n\r\n".encode() + request.body


def _judged(answer: TimedAnswer) -> tuple[int, bool]:
    """Return the number of tokens of a whole answer, and whether the answer is whole."""
    if answer.status != 200 or answer.broken:
        return 0, False
    try:
        events = events_of(b"".join(answer.body))
    except (msgspec.DecodeError, ValueError):
        return 0, False
    return sum(event.usage.completion_tokens for event in events if event.usage), True
