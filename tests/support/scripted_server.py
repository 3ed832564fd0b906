"""An OpenAI-compatible server whose answers follow a script: stalls, errors, early ends, several tokens in an event."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class ServerScript:
    """The behaviour of the server. Prompts count as their words."""

    status: int = 200
    stalls_before_first_s: float = 0.0
    tokens_per_event: int = 1
    has_usage: bool = True
    cuts_after: int | None = None  # events, then the connection breaks
    fails_after: int | None = None  # events, then an event says that it failed
    hangs_after: int | None = None  # events, then nothing comes any more
    obeys_length: bool = True
    closes_kept: bool = False  # ends each connection after its answer, without saying so
    streams: bool = True
    models: tuple[str, ...] = ("tiny",)
    template_tokens: int = 10
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def events(self, body: dict[str, Any]) -> list[bytes]:
        """Return the events of an answer, without [DONE]."""
        tokens = body["max_tokens"] if self.obeys_length else 1
        events = []
        for first in range(0, tokens, self.tokens_per_event):
            count = min(self.tokens_per_event, tokens - first)
            reason = "length" if first + count == tokens else None
            events.append(chunk(" word" * count, reason))
        if not self.streams:
            events = [chunk(" word" * tokens, "length")]
        if self.has_usage:
            text = body.get("prompt") or " ".join(message["content"] for message in body["messages"])
            usage = {"prompt_tokens": len(text.split()) + self.template_tokens, "completion_tokens": tokens}
            events.append(event({"choices": [], "usage": usage}))
        return events


def chunk(text: str, finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}]})


def event(said: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(said)}\n\n".encode()


@asynccontextmanager
async def scripted_server(script: ServerScript) -> AsyncIterator[str]:
    """Serve and return the URL."""
    tasks: set[asyncio.Task[Any]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            while await _answer(script, reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _answer(script: ServerScript, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Answer one request. Return whether the connection goes on."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    lengths = [line.split(":")[1] for line in head.split("\r\n") if line.startswith("content-length")]
    body = json.loads(await reader.readexactly(int(lengths[0]))) if lengths else {}
    if head.startswith("get"):
        path = head.split()[1]
        models = {"object": "list", "data": [{"id": name} for name in script.models]}
        _plain(writer, 200 if path == "/v1/models" else 404, models if path == "/v1/models" else {})
        return True
    script.bodies.append(body)
    if script.status != 200:
        _plain(writer, script.status, {"error": {"message": "it is full"}})
        return True
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    await writer.drain()
    await asyncio.sleep(script.stalls_before_first_s)
    for number, part in enumerate(script.events(body)):
        if script.cuts_after == number:
            writer.transport.abort()
            return False
        if script.hangs_after == number:
            await asyncio.Event().wait()
        if script.fails_after == number:
            part = event({"error": {"message": "it broke", "code": 500}})
        _chunk(writer, part)
        await writer.drain()
        await asyncio.sleep(0)
        if script.fails_after == number:
            break
    _chunk(writer, b"data: [DONE]\n\n")
    writer.write(b"0\r\n\r\n")
    await writer.drain()
    return not script.closes_kept


def _plain(writer: asyncio.StreamWriter, status: int, said: object) -> None:
    body = json.dumps(said).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
