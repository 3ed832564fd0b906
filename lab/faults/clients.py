"""Be the clients of a run: each sends one request after the other and notes what comes, and when."""

import asyncio
import json
import socket
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp

from kvmesh.lab.faults.oracle import Answered
from kvmesh.lab.faults.traffic import Ask

GIVE_UP_S = 6.0  # after its deadline a request that is not over hangs for certain
BETWEEN_S = 0.02  # two requests of a client
REFUSED_S = 0.1  # before another frontend is tried
READ_BYTES = 1 << 16
SMALL_BYTES = 16384
STALLED_EVENTS = 500  # that a client who stalls reads between two stalls


class Clients:
    """Send requests over all frontends, as many at a time as there are clients."""

    def __init__(self, urls: Sequence[str], next_ask: Callable[[], Ask | None], clock: Callable[[], float]) -> None:
        """Take `next_ask`, which returns None when the run is over, and `clock`, the seconds since the run began."""
        self._urls = urls
        self._next_ask = next_ask
        self._clock = clock
        self.answers: list[Answered] = []
        self.under_way: set[int] = set()
        self._stalling: aiohttp.ClientSession

    async def run(self, count: int) -> None:
        """Return when all clients have had their last answers."""
        async with (
            session(READ_BYTES) as http,
            session(SMALL_BYTES, small_socket) as self._stalling,
            asyncio.TaskGroup() as group,
        ):
            for number in range(count):
                group.create_task(self._be_client(http), name=f"client {number}")

    async def _be_client(self, http: aiohttp.ClientSession) -> None:
        while (ask := self._next_ask()) is not None:
            await self.send(http, ask)
            await asyncio.sleep(BETWEEN_S)

    async def send(self, http: aiohttp.ClientSession, ask: Ask) -> Answered:
        answered = Answered(ask, sent_s=self._clock(), frontend=ask.frontend)
        self.under_way.add(ask.number)
        try:
            async with asyncio.timeout(ask.deadline_s + GIVE_UP_S):
                await self._ask_somewhere(http, answered)
        except TimeoutError:
            answered.is_hung = True
        finally:
            self.under_way.discard(ask.number)
            answered.ended_s = self._clock()
            self.answers.append(answered)
        return answered

    async def _ask_somewhere(self, http: aiohttp.ClientSession, answered: Answered) -> None:
        """Ask a frontend, and the next one if no connection is made: a load balancer in front does the same."""
        ask = answered.ask
        while True:
            try:
                await self._ask(http, answered)
                return
            except aiohttp.ClientConnectorError as error:
                answered.refused += 1
                answered.frontend = (answered.frontend + 1) % len(self._urls)
                if self._clock() - answered.sent_s > ask.deadline_s:
                    answered.broken = f"no frontend takes connections: {error}"
                    return
                if answered.refused >= len(self._urls):
                    await asyncio.sleep(REFUSED_S)
            except (aiohttp.ClientError, OSError) as error:
                answered.broken = f"{type(error).__name__}: {error}"
                return

    async def _ask(self, http: aiohttp.ClientSession, answered: Answered) -> None:
        ask = answered.ask
        headers = {"x-request-timeout-s": str(ask.deadline_s), "x-request-id": f"f{ask.number}"}
        url = self._urls[answered.frontend] + ask.path
        async with (self._stalling if ask.stalls_s else http).post(url, json=ask.body(), headers=headers) as response:
            answered.status = response.status
            if response.content_type != "text/event-stream":
                note_body(answered, await response.read(), self._clock())
                return
            rest = b""
            async for data in response.content.iter_any():
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if line.startswith(b"data: "):
                        note_event(answered, line[6:].strip(), self._clock())
                        if ask.leave_after is not None and answered.events >= ask.leave_after:
                            answered.has_left = True
                            return
                        if (wait_s := pause_after(ask, answered.events)) > 0:
                            await asyncio.sleep(wait_s)


def pause_after(ask: Ask, events: int) -> float:
    """Return how long the client waits before it reads on."""
    return ask.stalls_s if ask.stalls_s and events % STALLED_EVENTS == 1 else ask.pause_s


def session(read_bytes: int, make_socket: Callable[[Any], socket.socket] | None = None) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=make_socket)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=read_bytes)


def small_socket(address: Any) -> socket.socket:
    """Return a socket that takes little before its owner reads."""
    made = socket.socket(address[0], address[1])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BYTES)
    made.setblocking(False)
    return made


def note_body(answered: Answered, body: bytes, now_s: float) -> None:
    """Take an answer that is no stream."""
    try:
        whole = json.loads(body)
    except ValueError:
        answered.broken = f"no JSON: {body[:200]!r}"
        return
    if answered.status != 200 or "error" in whole:
        error = whole.get("error", whole)
        answered.error = error if isinstance(error, dict) else {"message": str(error)}
        return
    note_choices(answered, whole, now_s)
    answered.is_done = True


def note_event(answered: Answered, data: bytes, now_s: float) -> None:
    """Take one event of a stream."""
    if answered.is_done:
        answered.broken = "an event after [DONE]"
        return
    if data == b"[DONE]":
        answered.is_done = True
        return
    try:
        event = json.loads(data)
    except ValueError:
        answered.broken = f"no JSON: {data[:200]!r}"
        return
    if "error" in event:
        answered.error = event["error"]
        return
    note_choices(answered, event, now_s)


def note_choices(answered: Answered, event: dict[str, Any], now_s: float) -> None:
    answered.trace = event.get("kvmesh") or answered.trace
    for choice in event.get("choices", ()):
        index = choice["index"]
        if tokens := tokens_of(choice):
            answered.tokens.setdefault(index, []).extend(tokens)
            answered.note_event(now_s)
        if choice.get("finish_reason"):
            answered.finished[index] = choice["finish_reason"]


def tokens_of(choice: dict[str, Any]) -> list[str]:
    """Return the tokens of a part of a choice, as their logprobs name them."""
    logprobs = choice.get("logprobs")
    if not logprobs:
        return []
    if "content" in logprobs:
        return [one["token"] for one in logprobs["content"] or ()]
    return list(logprobs["tokens"])
