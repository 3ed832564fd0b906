"""A running frontend that plays a script, and what tests of the Responses API ask of it."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
from msgspec.structs import replace
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from kvmesh.frontend.http import FrontendApi, HttpSettings
from kvmesh.frontend.models import ModelRegistry
from kvmesh.frontend.parts import SharedParts
from kvmesh.frontend.responses.state import KeptResponses
from kvmesh.mesh.http.server import listening
from kvmesh.protocol.messages import Delta, Feature, FinishReason, unpack_tokens
from tests.frontend import tiny
from tests.support.generator import ScriptedGenerator
from tests.support.patience import PATIENCE_S

BACKEND = tiny.byte_level()
END = BACKEND.token_to_id("<|im_end|>")
TEMPLATE = (  # writes whatever a message may hold
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ reasoning_effort or '' }}{% endif %}"
)
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "What it is like outside.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
ASKED: dict[str, Any] = {"model": "tiny", "input": "hi"}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def ids(text: str) -> tuple[int, ...]:
    return tuple(BACKEND.encode(text, add_special_tokens=False).ids)


def words(*texts: str, reason: FinishReason = FinishReason.STOP) -> list[Delta]:
    """A script: one delta per text, then the end."""
    last = Delta((END,), reason, stop_token=END) if reason is FinishReason.STOP else Delta((), reason)
    return [*[Delta(ids(text)) for text in texts], last]


def calling(city: str) -> str:
    """A call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': 'weather', 'arguments': {'city': city}})}\n</tool_call>"


class Served:
    """A running application, and the script it plays."""

    def __init__(
        self,
        url: str,
        api: FrontendApi,
        session: aiohttp.ClientSession,
        models: ModelRegistry,
        generator: ScriptedGenerator,
    ) -> None:
        self.url = url
        self.app = api.app
        self.admission = api.admission
        self.models = models
        self.generator = generator
        self._session = session

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0)

    def sync_client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0)

    async def post(self, body: Any, path: str = "/v1/responses", **headers: str) -> tuple[int, Any, Any]:
        """Post a body; return (status, headers, JSON or text)."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.ask("POST", path, data, names)

    async def ask(self, method: str, path: str, data: bytes = b"", headers: Any = None) -> tuple[int, Any, Any]:
        """Send any request; return (status, headers, JSON or text)."""
        async with self._session.request(method, self.url + path, data=data, headers=headers) as reply:
            text = await reply.text()
            is_json = reply.content_type == "application/json"
            return reply.status, reply.headers, json.loads(text) if is_json else text

    async def whole(self, **fields: Any) -> dict[str, Any]:
        status, _, body = await self.post(ASKED | fields)
        assert status == 200, body
        return checked(body)

    async def events(self, **fields: Any) -> list[dict[str, Any]]:
        status, headers, text = await self.post(ASKED | fields | {"stream": True})
        assert status == 200, text
        assert headers["Content-Type"] == "text/event-stream"
        return read_events(text)

    def prompt(self) -> str:
        """Return what the model read of the last request."""
        return BACKEND.decode(unpack_tokens(self.generator.requests[-1].prompt), skip_special_tokens=False)


@asynccontextmanager
async def serving(thinking_model: Path, responses: KeptResponses | None = None) -> AsyncIterator[Served]:
    generator, models = ScriptedGenerator(words("Once", " upon", " a time")), ModelRegistry()
    card = tiny.card("w", path=thinking_model, context_tokens=8192)
    models.add(
        replace(card, tool_parser="hermes", reasoning_parser="qwen3", features=(Feature.GUIDED, Feature.LOGPROBS))
    )
    parts = SharedParts() if responses is None else SharedParts(responses)
    api = FrontendApi(HttpSettings(max_body_bytes=256 * 1024, max_inflight=4), models, generator, parts=parts)
    async with (
        listening(api.app, "127.0.0.1", 0) as url,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE_S)) as session,
    ):
        yield Served(url, api, session, models, generator)


def checked(response: dict[str, Any]) -> dict[str, Any]:
    """The response, if it is one to the official client."""
    Response.model_validate(response)
    return response


def read_events(text: str) -> list[dict[str, Any]]:
    """The objects of a stream: named as their types say, numbered, and each one that the official client knows."""
    assert text.endswith("\n\n")
    found = []
    for number, event in enumerate(text[:-2].split("\n\n")):
        name, data = event.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        assert value["sequence_number"] == number
        assert EVENT.validate_python(value).type == value["type"]
        found.append(value)
    return found


def put_together(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that a stream tells. Checks that they come one after the other, and that what is added, bit by bit,
    is what is said when it is done."""
    items: list[dict[str, Any]] = []
    item: dict[str, Any] = {}  # that is open
    text, logprobs = "", []  # type: str, list[Any]
    for event in events:
        if "item_id" in event:
            assert (event["item_id"], event["output_index"]) == (item["id"], len(items))
            assert event.get("content_index", 0) == 0
        match event:
            case {"type": "response.output_item.added", "item": added, "output_index": index}:
                assert (item, index, added["status"]) == ({}, len(items), "in_progress")
                item, text, logprobs = added, "", []
                assert (added.get("content", []), added.get("arguments", "")) == ([], "")
            case {"type": "response.content_part.added", "part": part}:
                assert (part["text"], item["content"]) == ("", [])
            case {"delta": delta}:
                assert delta or event.get("logprobs")
                text += delta
                logprobs += event.get("logprobs", [])
            case {"type": "response.output_text.done" | "response.reasoning_text.done"}:
                assert (event["text"], event.get("logprobs", [])) == (text, logprobs)
            case {"type": "response.function_call_arguments.done"}:
                assert event["arguments"] == text
            case {"type": "response.content_part.done", "part": part}:
                assert (part["text"], part.get("logprobs", [])) == (text, logprobs)
            case {"type": "response.output_item.done", "item": done, "output_index": index}:
                assert (done["id"], index) == (item["id"], len(items))
                assert text == (done["arguments"] if done["type"] == "function_call" else done["content"][0]["text"])
                items.append(done)
                item = {}
            case _:
                assert "response" in event, event
    assert item == {}
    return items
