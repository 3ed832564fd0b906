"""A running frontend that plays a script, and what tests of the Messages API ask of it."""

import json
from typing import Any

import aiohttp
import anthropic

from kvmesh.frontend.http import FrontendApi
from kvmesh.frontend.models import ModelRegistry
from kvmesh.protocol.messages import Delta, FinishReason, unpack_tokens
from tests.frontend import tiny
from tests.support.generator import ScriptedGenerator

BACKEND = tiny.byte_level()
END = BACKEND.token_to_id("<|im_end|>")
TEMPLATE = (  # writes whatever a message may hold
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "What it is like outside.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 2000, "messages": [{"role": "user", "content": "hi"}]}


def ids(text: str) -> tuple[int, ...]:
    return tuple(BACKEND.encode(text, add_special_tokens=False).ids)


def words(*texts: str) -> list[Delta]:
    """A script: one delta per text, then the end."""
    return [*[Delta(ids(text)) for text in texts], Delta((END,), FinishReason.STOP, stop_token=END)]


def calling(city: str, name: str = "weather") -> str:
    """A call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'city': city}})}\n</tool_call>"


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
        self.admission = api.admission
        self.models = models
        self.generator = generator
        self._session = session

    def client(self) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self.url, api_key="none", max_retries=0)

    def sync_client(self) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url, api_key="none", max_retries=0)

    async def post(self, body: Any, path: str = "/v1/messages", **headers: str) -> tuple[int, Any, Any]:
        """Post a body; return (status, headers, JSON or text)."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self._session.post(self.url + path, data=data, headers=names) as reply:
            text = await reply.text()
            is_json = reply.content_type == "application/json"
            return reply.status, reply.headers, json.loads(text) if is_json else text

    async def events(self, body: dict[str, Any], **headers: str) -> list[dict[str, Any]]:
        status, reply_headers, text = await self.post(body | {"stream": True}, **headers)
        assert status == 200, text
        assert reply_headers["Content-Type"] == "text/event-stream"
        return read_events(text)

    def prompt(self) -> str:
        """Return what the model read of the last request."""
        return BACKEND.decode(unpack_tokens(self.generator.requests[-1].prompt), skip_special_tokens=False)


def read_events(text: str) -> list[dict[str, Any]]:
    """The objects of a stream, whose types are its events' names."""
    assert text.endswith("\n\n")
    found = []
    for event in text[:-2].split("\n\n"):
        name, data = event.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        found.append(value)
    return found


def put_together(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer that a stream tells. Checks that blocks come one after the other, and each in its order."""
    first, *middle, last = events
    assert (first["type"], last["type"]) == ("message_start", "message_stop")
    message: dict[str, Any] = first["message"]
    blocks: list[dict[str, Any]] = message["content"]
    arguments: list[str] = []
    is_open = False
    for event in middle:
        match event:
            case {"type": "content_block_start", "index": index, "content_block": block}:
                assert (index, is_open) == (len(blocks), False)
                blocks.append(block)
                arguments.append("")
                is_open = True
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                assert (index, is_open) == (len(blocks) - 1, True)
                match delta["type"]:
                    case "text_delta":
                        blocks[-1]["text"] += delta["text"]
                    case "thinking_delta":
                        blocks[-1]["thinking"] += delta["thinking"]
                    case "signature_delta":
                        blocks[-1]["signature"] = delta["signature"]
                    case "input_json_delta":
                        arguments[-1] += delta["partial_json"]
            case {"type": "content_block_stop", "index": index}:
                assert (index, is_open) == (len(blocks) - 1, True)
                is_open = False
                if arguments[-1]:
                    blocks[-1]["input"] = json.loads(arguments[-1])
            case {"type": "message_delta", "delta": delta, "usage": usage}:
                assert not is_open
                message |= delta | {"usage": message["usage"] | usage}
            case _:
                raise AssertionError(f"unexpected: {event}")
    return message
