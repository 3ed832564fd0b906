"""Load for a chat API over HTTP: as many requests at once as there are connections, each sends its next one when the
answer to the last is complete.

On uvloop and bare protocols, so that little of the machine goes to the client. Requests are bytes before the clock
starts, and answers are judged after it has stopped.
"""

import asyncio
import gc
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools
import msgspec
import psutil
import uvloop

TIMEOUT_S = 180.0  # of a phase: what is not answered then has failed
_SAYS_SOMETHING = re.compile(rb'"(?:content|text|finish_reason)": ?"[^"]')  # not: the chunk with the role
_END_OF_EVENT = b"\n\n"


@dataclass(frozen=True, slots=True)
class ClientLoad:
    """Describe a load. `bodies` are JSON; the first `warmup` of them are sent before the clock starts."""

    url: str
    bodies: Sequence[bytes]
    warmup: int
    concurrency: int
    stream: bool
    output_tokens: int  # that each answer must have
    pid: int | None = None  # whose CPU time counts, with all its descendants
    more_pids: tuple[int, ...] = ()  # the same
    alone: Mapping[str, int] = field(default_factory=dict)  # of these, pids whose own CPU time is reported too, by name
    with_pids: tuple[int, ...] = ()  # what else belongs to the measurement, with all descendants
    timeout_s: float = TIMEOUT_S


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    requests: int  # after the warm-up; failures too
    cpu_s: float  # of the server's processes
    wall_s: float
    others_s: float  # CPU that the rest of the machine used meanwhile
    ttft_s: list[float]  # sent -> the read with the first token; streams only
    gaps_s: list[float]  # between reads of one stream that held the end of an event, from the first token on
    failures: list[str]  # one for each request that failed, also in the warm-up
    alone_s: dict[str, float] = field(default_factory=dict)  # CPU of ClientLoad.alone's processes alone


@dataclass(frozen=True, slots=True)
class ClientWaits:
    """Hold the waits of one client, in the order of its requests; None: the request failed."""

    ttft_s: list[float | None]
    itl_s: list[float | None]  # (end of the stream - first token) / (tokens - 1)
    failures: list[str]


@dataclass(slots=True)
class TimedAnswer:
    """Hold the answer to one request, and its times (s, one clock)."""

    sent_s: float = 0.0
    status: int = 0
    body: list[bytes] = field(default_factory=list)
    first_token_s: float = 0.0  # 0: none
    last_event_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    broken: str = ""  # why it is not complete


def run_load(load: ClientLoad) -> LoadOutcome:
    """Send a load. It needs a process of its own, because it turns the garbage collector off."""
    gc.freeze()
    gc.disable()
    outcome: LoadOutcome = uvloop.run(drive(load))
    return outcome


async def drive(load: ClientLoad) -> LoadOutcome:
    requests = [request_bytes(load.url, body) for body in load.bodies]
    slots = [ClientSlot(load) for _ in range(min(load.concurrency, len(requests)))]
    warmup = await answers_to(requests[: load.warmup], slots, load.timeout_s)
    before, started = used_cpu(load), time.perf_counter()
    answers = await answers_to(requests[load.warmup :], slots, load.timeout_s)
    wall_s, after = time.perf_counter() - started, used_cpu(load)
    for slot in slots:
        slot.close()
    judged = [failure_of(answer, load.stream, load.output_tokens) for answer in [*warmup, *answers]]
    return LoadOutcome(
        requests=len(answers),
        cpu_s=after.server_s - before.server_s,
        wall_s=wall_s,
        others_s=after.others_s - before.others_s,
        ttft_s=[answer.first_token_s - answer.sent_s for answer in answers if answer.first_token_s],
        gaps_s=[gap for answer in answers for gap in answer.gaps_s],
        failures=[failure for failure in judged if failure],
        alone_s={name: after.alone_s[name] - before.alone_s[name] for name in load.alone},
    )


def run_in_turn(loads: Sequence[ClientLoad]) -> list[ClientWaits]:
    """Send one request at a time, each to every server before the next. It needs a process of its own, as `run_load`.

    What else the machine does then hits all servers alike. They take turns at being the first. `bodies` are as many
    for each; how much of a load goes at once does not count.
    """
    gc.freeze()
    gc.disable()
    waits: list[ClientWaits] = uvloop.run(drive_in_turn(loads))
    return waits


async def drive_in_turn(loads: Sequence[ClientLoad]) -> list[ClientWaits]:
    slots = [ClientSlot(load) for load in loads]
    requests = [[request_bytes(load.url, body) for body in load.bodies] for load in loads]
    answers: list[list[TimedAnswer]] = [[] for _ in loads]
    for number in range(len(loads[0].bodies)):
        for turn in range(len(loads)):
            at = (number + turn) % len(loads)
            answers[at] += await answers_to([requests[at][number]], [slots[at]], loads[at].timeout_s)
    for slot in slots:
        slot.close()
    return [waits_of(load, of_one) for load, of_one in zip(loads, answers, strict=True)]


def waits_of(load: ClientLoad, answers: Sequence[TimedAnswer]) -> ClientWaits:
    judged = [failure_of(answer, load.stream, load.output_tokens) for answer in answers]
    counted = list(zip(answers, judged, strict=True))[load.warmup :]
    return ClientWaits(
        ttft_s=[None if failure else answer.first_token_s - answer.sent_s for answer, failure in counted],
        itl_s=[
            None if failure else (answer.last_event_s - answer.first_token_s) / (load.output_tokens - 1)
            for answer, failure in counted
        ],
        failures=[failure for failure in judged if failure],
    )


async def answers_to(requests: Sequence[bytes], slots: Sequence["ClientSlot"], timeout_s: float) -> list[TimedAnswer]:
    """Send the requests over `slots`. Return one answer per request, also for failures."""
    waiting = iter(requests)
    tasks = [asyncio.create_task(slot.work(waiting)) for slot in slots]
    _, late = await asyncio.wait(tasks, timeout=timeout_s)
    for task in late:
        task.cancel()
    if late:
        await asyncio.wait(late)
    answers = [answer for slot in slots for answer in slot.take_answers()]
    unsent = len(requests) - len(answers)
    return answers + [TimedAnswer(broken=f"not sent within {timeout_s:.0f} s") for _ in range(unsent)]


class ClientSlot:
    """Send one request at a time over one connection that is kept."""

    def __init__(self, load: ClientLoad) -> None:
        parts = urlsplit(load.url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._stream = load.stream
        self._connection: ClientConnection | None = None
        self._answers: list[TimedAnswer] = []

    async def work(self, requests: Iterator[bytes]) -> None:
        """Send requests until none is left. Other slots take from the same iterator."""
        for request in requests:
            answer = TimedAnswer(broken="no answer in time")
            self._answers.append(answer)
            try:
                connection = await self._connected()
            except OSError as error:
                answer.broken = f"no connection: {error}"
                continue
            try:
                await connection.ask(request, answer)
            except asyncio.CancelledError:  # too late; what may still come must not be taken for the next answer
                connection.close()
                raise

    def take_answers(self) -> list[TimedAnswer]:
        taken, self._answers = self._answers, []
        return taken

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    async def _connected(self) -> "ClientConnection":
        if self._connection is None or self._connection.closed:
            loop = asyncio.get_running_loop()
            _, self._connection = await loop.create_connection(
                lambda: ClientConnection(self._stream, loop), self._host, self._port
            )
        return self._connection


class ClientConnection(asyncio.Protocol):
    """HTTP/1.1 with keep-alive; notes when the events of a stream arrive."""

    def __init__(self, stream: bool, loop: asyncio.AbstractEventLoop) -> None:
        self._stream = stream
        self._loop = loop
        self._parser = httptools.HttpResponseParser(self)
        self._answer = TimedAnswer()
        self._done: asyncio.Future[None] | None = None
        self._events = 0  # that ended in the present read
        self._tail = b""  # of the body, where an event's end may have begun
        self.closed = True

    def ask(self, request: bytes, answer: TimedAnswer) -> asyncio.Future[None]:
        """Done when the answer is complete or cannot become so; never fails."""
        self._answer, self._tail = answer, b""
        self._done = self._loop.create_future()
        answer.sent_s = time.perf_counter()
        self._transport.write(request)
        return self._done

    def close(self) -> None:
        self.closed = True
        self._transport.close()

    # --- what asyncio calls ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.closed = False

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._finish("the connection was lost")

    def data_received(self, data: bytes) -> None:
        now, self._events = time.perf_counter(), 0
        answer = self._answer
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._finish(f"not HTTP: {error}")
            self.close()
            return
        if self._events and self._stream:
            note_events(answer, data, now)

    # --- what the parser calls ------------------------------------------------------------------------

    def on_body(self, body: bytes) -> None:
        self._answer.body.append(body)
        text = self._tail + body
        self._events += text.count(_END_OF_EVENT)
        self._tail = b"" if text.endswith(_END_OF_EVENT) else text[-1:]

    def on_message_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()
        if not self._parser.should_keep_alive():
            self.close()
        self._finish("")

    def _finish(self, broken: str) -> None:
        if self._done is not None and not self._done.done():
            self._answer.broken = broken
            self._done.set_result(None)


def note_events(answer: TimedAnswer, read: bytes, now_s: float) -> None:
    """Note the time of a read that ended at least one event of the stream."""
    if answer.first_token_s:
        answer.gaps_s.append(now_s - answer.last_event_s)
    elif _SAYS_SOMETHING.search(read):
        answer.first_token_s = now_s
    answer.last_event_s = now_s


def request_bytes(url: str, body: bytes) -> bytes:
    parts = urlsplit(url)
    head = f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


# --- judging answers --------------------------------------------------------------------------------------


class BodyUsage(msgspec.Struct):
    completion_tokens: int


class BodyChoice(msgspec.Struct):
    finish_reason: str | None = None


class CompletionBody(msgspec.Struct):
    """A whole answer, or one event of a stream. An error has no choices."""

    choices: list[BodyChoice]
    usage: BodyUsage | None = None


_reply_decoder = msgspec.json.Decoder(CompletionBody)


def failure_of(answer: TimedAnswer, stream: bool, output_tokens: int) -> str:
    """Return what is wrong with an answer, "" if nothing. It must have `output_tokens` and end for its length."""
    if answer.broken:
        return answer.broken
    body = b"".join(answer.body)
    if answer.status != 200:
        return f"status {answer.status}: {body[:200].decode(errors='replace')}"
    try:
        replies = events_of(body) if stream else [_reply_decoder.decode(body)]
    except (msgspec.DecodeError, ValueError) as error:
        return f"{error}, in an answer that ends with {body[-100:]!r}"
    tokens = sum(reply.usage.completion_tokens for reply in replies if reply.usage)
    if tokens != output_tokens:
        return f"{tokens} tokens instead of {output_tokens}"
    reasons = [choice.finish_reason for reply in replies for choice in reply.choices if choice.finish_reason]
    return "" if reasons == ["length"] else f"finish reasons {reasons} instead of one for the length"


def events_of(body: bytes) -> list[CompletionBody]:
    """Raises ValueError, or msgspec's DecodeError, for what is not a whole stream."""
    events = [event for event in body.split(_END_OF_EVENT) if not event.startswith(b":")]
    if events[-2:] != [b"data: [DONE]", b""]:
        raise ValueError("no [DONE] at the end")
    if not all(event.startswith(b"data: ") for event in events[:-2]):
        raise ValueError("not an event")
    return [_reply_decoder.decode(event[6:]) for event in events[:-2]]


# --- what processes use -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UsedCpu:
    """CPU seconds so far."""

    server_s: float
    others_s: float  # of all that does not belong to the measurement
    alone_s: dict[str, float]  # of the processes in ClientLoad.alone


def used_cpu(load: ClientLoad) -> UsedCpu:
    server = trees([*([load.pid] if load.pid else []), *load.more_pids])
    ours = server | trees([os.getpid(), *load.with_pids])
    machine = psutil.cpu_times()
    alone_s = {name: cpu_s([psutil.Process(pid)]) for name, pid in load.alone.items()}
    return UsedCpu(cpu_s(server), machine.user + machine.nice + machine.system - cpu_s(ours), alone_s)


def trees(pids: Sequence[int]) -> set[psutil.Process]:
    """Return these processes and all their descendants."""
    roots = [psutil.Process(pid) for pid in pids]
    return {process for root in roots for process in (root, *root.children(recursive=True))}


def cpu_s(processes: Iterable[psutil.Process]) -> float:
    return sum_over(processes, used_s)


def used_s(process: psutil.Process) -> float:
    """Return the CPU time of a process, by the scheduler's clock where the system has it: /proc counts 10 ms."""
    try:
        return time.clock_gettime(~process.pid << 3 | 2)  # what clock_getcpuclockid gives on Linux
    except (OSError, OverflowError):
        return float(sum(process.cpu_times()[:2]))


def rss_mib(processes: Iterable[psutil.Process]) -> float:
    return sum_over(processes, lambda process: process.memory_info().rss / 2**20)


def sum_over(processes: Iterable[psutil.Process], figure: Callable[[psutil.Process], float]) -> float:
    """Return the CPU time of processes, without those that have ended."""
    total = 0.0
    for process in processes:
        try:
            total += figure(process)
        except psutil.NoSuchProcess:
            continue
    return total
