"""A gateway that asks an endpoint picker as Envoy does, one gRPC stream for each request."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from kvmesh.frontend.picker import wire
from kvmesh.frontend.picker.server import EXT_PROC, HEALTH
from kvmesh.frontend.picker.wire import BodyMode

DUPLEX, BUFFERED, NONE = BodyMode.FULL_DUPLEX_STREAMED, BodyMode.BUFFERED, BodyMode.NONE
CHAT_PATH = "/v1/chat/completions"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Once upon a time there was a little fox"}]}


def said(**fields: object) -> bytes:
    """Return a message of Envoy."""
    data: bytes = wire.message_class("ProcessingRequest")(**fields).SerializeToString()
    return data


def head(
    path: str = CHAT_PATH,
    headers: Mapping[str, str] | None = None,
    *,
    method: str = "POST",
    modes: tuple[BodyMode, BodyMode] = (DUPLEX, DUPLEX),
    has_body: bool = True,
    subset: Sequence[str] | None = None,
) -> bytes:
    pairs = {":method": method, ":path": path, **(headers or {})}
    fields: dict[str, Any] = {
        "request_headers": {
            "headers": {"headers": [{"key": name, "raw_value": value.encode()} for name, value in pairs.items()]},
            "end_of_stream": not has_body,
        },
        "protocol_config": {"request_body_mode": modes[0], "response_body_mode": modes[1]},
    }
    if subset is not None:
        values = [{"string_value": endpoint} for endpoint in subset]
        entry = {"key": wire.SUBSET_KEY, "value": {"list_value": {"values": values}}}
        fields["metadata_context"] = {"filter_metadata": [{"key": wire.SUBSET_NAMESPACE, "value": {"fields": [entry]}}]}
    return said(**fields)


def body_said(data: bytes, *, is_last: bool = True) -> bytes:
    return said(request_body={"body": data, "end_of_stream": is_last})


@dataclass
class Picked:
    """The answers of a picker to one request, taken together."""

    endpoint: str | None = None  # in the header
    metadata: str | None = None  # the same in metadata
    headers: dict[str, str] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    body: bytes = b""  # as it goes on
    status: int = 0  # of a refusal
    refusal: Any = None
    retry_after: str | None = None

    @property
    def worker(self) -> str | None:
        return self.headers.get("x-kvmesh-worker")


def heard(answers: Sequence[Any]) -> Picked:
    """Return what the answers of a picker say together."""
    picked = Picked()
    for answer in answers:
        if answer.HasField("immediate_response"):
            told = answer.immediate_response
            picked.status, picked.refusal = told.status.code, json.loads(told.body)
            set_headers = {one.header.key: one.header.raw_value.decode() for one in told.headers.set_headers}
            picked.retry_after = set_headers.get("retry-after")
            continue
        kind = answer.WhichOneof("response")
        common = getattr(answer, kind).response if kind in ("request_headers", "request_body") else None
        if common is not None:
            for one in common.header_mutation.set_headers:
                picked.headers[one.header.key] = one.header.raw_value.decode()
            picked.removed += common.header_mutation.remove_headers
            picked.body += common.body_mutation.streamed_response.body or common.body_mutation.body
        for namespace in answer.dynamic_metadata.fields:
            [entry] = namespace.value.struct_value.fields
            picked.metadata = entry.value.string_value
    picked.endpoint = picked.headers.pop(wire.ENDPOINT_KEY, None)
    return picked


class Conversation:
    """One request's stream."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.more_time_s = 0

    async def say(self, *messages: bytes) -> None:
        for message in messages:
            await self.stream.write(message)

    async def answer(self) -> Any:
        """Return the next answer; None at the end. Pleas for more time are noted."""
        while (data := await self.stream.read()) is not grpc.aio.EOF:
            answer = wire.message_class("ProcessingResponse").FromString(data)
            if not answer.HasField("override_message_timeout"):
                return answer
            self.more_time_s = answer.override_message_timeout.seconds
        return None

    async def pick(self, body: object = CHAT, path: str = CHAT_PATH, **options: Any) -> Picked:
        """Ask for an endpoint, in full duplex if nothing else is said."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        modes = options.get("modes", (DUPLEX, DUPLEX))
        await self.say(head(path, **options))
        answers = []
        if modes[0] is BUFFERED:
            answers.append(await self.answer())
        await self.say(body_said(data))
        while True:
            answer = await self.answer()
            assert answer is not None, "the picker has ended the stream"
            answers.append(answer)
            if answer.HasField("immediate_response"):
                break
            if answer.WhichOneof("response") == "request_body":
                streamed = answer.request_body.response.body_mutation.streamed_response
                if modes[0] is BUFFERED or streamed.end_of_stream:
                    break
        return heard(answers)

    async def respond(self, *parts: bytes, status: int = 200) -> list[Any]:
        """Show the picker a response, in full duplex; return its answers."""
        header = {"key": ":status", "raw_value": str(status).encode()}
        await self.say(said(response_headers={"headers": {"headers": [header]}}))
        answers = [await self.answer()]
        for number, part in enumerate(parts, 1):
            await self.say(said(response_body={"body": part, "end_of_stream": number == len(parts)}))
            answers.append(await self.answer())
        return answers

    async def end(self) -> None:
        """End the stream as Envoy does when a request is over or its client has left."""
        await self.stream.done_writing()
        while await self.answer() is not None:
            pass


class Gateway:
    """The gateway's connection to a picker."""

    def __init__(self, channel: Any) -> None:
        self._process = channel.stream_stream(f"/{EXT_PROC}/Process")
        self._check = channel.unary_unary(f"/{HEALTH}/Check")

    def open(self) -> Conversation:
        return Conversation(self._process())

    async def pick(self, body: object = CHAT, path: str = CHAT_PATH, **options: Any) -> Picked:
        """Ask for an endpoint, and end the stream."""
        conversation = self.open()
        picked = await conversation.pick(body, path, **options)
        await conversation.end()
        return picked

    async def serve(self, body: object = CHAT, path: str = CHAT_PATH, **options: Any) -> Picked:
        """Ask for an endpoint, show the picker a whole answer, and end the stream."""
        conversation = self.open()
        picked = await conversation.pick(body, path, **options)
        if picked.status:
            return picked
        await conversation.respond(b"data: a\n\n", b"data: [DONE]\n\n")
        await conversation.end()
        return picked

    async def is_serving(self, service: str = "") -> bool:
        asked = wire.message_class("HealthCheckRequest")(service=service).SerializeToString()
        answer = wire.message_class("HealthCheckResponse").FromString(await self._check(asked))
        return bool(answer.status == 1)


@asynccontextmanager
async def connected(port: int, credentials: Any = None) -> AsyncIterator[Gateway]:
    address = f"127.0.0.1:{port}"
    if credentials is None:
        opened = grpc.aio.insecure_channel(address)
    else:
        opened = grpc.aio.secure_channel(address, credentials)
    async with opened as channel:
        yield Gateway(channel)
