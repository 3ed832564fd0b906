"""A running frontend that plays a script, and what tests ask of it."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
from msgspec.structs import replace

from kvmesh.frontend.http import FrontendApi, HttpSettings
from kvmesh.frontend.models import ModelRegistry
from kvmesh.mesh.http.cors import Cors
from kvmesh.mesh.http.request import AccessLog
from kvmesh.mesh.http.server import Guard, listening
from kvmesh.protocol.messages import Delta, Feature, FinishReason, TokenLogprob, WorkerCard
from tests.frontend import tiny
from tests.support.generator import ScriptedGenerator
from tests.support.patience import PATIENCE_S

BACKEND = tiny.byte_level()
END = BACKEND.token_to_id("<|im_end|>")
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "hi"}
TEMPLATE = (  # of a model that thinks and calls tools as Qwen does
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}\n<tool_call></tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if effort is defined %}[{{ effort }}]{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def ids(text: str) -> tuple[int, ...]:
    return tuple(BACKEND.encode(text, add_special_tokens=False).ids)


def words(*texts: str) -> list[Delta]:
    """A script: one delta per text, then the end."""
    return [*[Delta(ids(text)) for text in texts], Delta((END,), FinishReason.STOP, stop_token=END)]


class Served:
    """A running application, a client session for it and the script it plays."""

    def __init__(
        self,
        url: str,
        api: FrontendApi,
        session: aiohttp.ClientSession,
        models: ModelRegistry,
        generator: ScriptedGenerator,
    ) -> None:
        self.url = url
        self.port = int(url.rpartition(":")[2])
        self.admission = api.admission
        self.app = api.app
        self.timelines = api.timelines
        self.session = session
        self.models = models
        self.generator = generator

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any, Any]:
        """Post a body; return (status, headers, JSON or text)."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.post(self.url + path, data=data, headers=names) as reply:
            text = await reply.text()
            is_json = reply.content_type == "application/json"
            return reply.status, reply.headers, json.loads(text) if is_json else text

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as reply:
            text = await reply.text()
            return reply.status, json.loads(text) if reply.content_type == "application/json" else text

    async def events(self, path: str, body: dict[str, Any], **headers: str) -> list[Any]:
        status, reply_headers, text = await self.post(path, body | {"stream": True}, **headers)
        assert status == 200, text
        assert reply_headers["Content-Type"] == "text/event-stream"
        return read_events(text)

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0)


def read_events(text: str) -> list[Any]:
    assert text.endswith("\n\n")
    datas = [event.removeprefix("data: ") for event in text[:-2].split("\n\n")]
    return [data if data == "[DONE]" else json.loads(data) for data in datas]


def scored(tokens: Sequence[int], logprob: float = -0.5) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(token, logprob) for token in tokens)


@asynccontextmanager
async def serving(
    card: WorkerCard,
    settings: HttpSettings | None = None,
    *,
    access_log: AccessLog | None = None,
    guard: Guard | None = None,
    cors: Cors | None = None,
) -> AsyncIterator[Served]:
    generator, models = ScriptedGenerator(words("Once", " upon", " a time")), ModelRegistry()
    models.add(card)
    await models.get(card.model)  # so that no test's deadline has to include its loading
    api = FrontendApi(settings or HttpSettings(max_body_bytes=256 * 1024), models, generator)
    api.app.access_log, api.app.guard, api.app.cors = access_log, guard, cors
    if access_log is not None:
        api.timelines.log()
    async with (
        listening(api.app, "127.0.0.1", 0) as url,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE_S)) as session,
    ):
        yield Served(url, api, session, models, generator)


def able_card(folder: Path, **fields: Any) -> WorkerCard:
    """Return the card of a worker that can do everything; its model thinks and calls tools."""
    card = tiny.card("w", path=folder, context_tokens=4096)
    known = {"features": tuple(Feature), "tool_parser": "hermes", "reasoning_parser": "qwen3"}
    return replace(card, **(known | fields))
