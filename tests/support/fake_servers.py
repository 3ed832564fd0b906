"""OpenAI-compatible servers without a model: they speak as vLLM 0.32, llama.cpp and nameless others were heard to.

Tokens are invented from those before them, so that an answer that goes on elsewhere can be checked. `VllmServer` keeps
a prefix cache that it tells of over ZMQ, hands KV over by kv_transfer_params, and dies of what the real one dies of.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler
from tokenizers import Tokenizer

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.kvevents.publisher import KvEventPublisher
from kvmesh.protocol.events import KvEvent, Removed, Stored
from kvmesh.protocol.ids import EngineHash
from tests.support.patience import PATIENCE_S

BLOCK = 16
CONTEXT = 2048
EOS = 2


def next_token(tokens: Sequence[int]) -> int:
    """Return the token that follows `tokens`: a function of the last one and of their number."""
    return (tokens[-1] * 7 + len(tokens) * 13) % 1900 + 50


def answer_to(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@dataclass
class Knobs:
    """The behaviour that a test wants of a server, and what the server saw."""

    bodies: list[dict[str, Any]] = field(default_factory=list)
    connections: set[object] = field(default_factory=set)  # that completions came over
    left: list[int] = field(default_factory=list)  # tokens sent to each caller that went away
    refuse_with: tuple[int, Any] | None = None  # status and body of every answer
    hold_after: int | None = None  # tokens, then it waits until that is None again
    die_after: int | None = None  # tokens, then the connection breaks
    fail_after: int | None = None  # tokens, then an event says that it failed
    stop_after: int | None = None  # tokens, the last of them EOS
    is_healthy: bool = True
    cached_tokens: int | None = None  # what its usage says; a server says nothing unless a flag makes it
    other_requests: int = 0  # of callers outside the mesh, that run now
    api_key: str = ""  # that everything under /v1 wants


class Server:
    """The parts that all fakes share. Subclasses say how they write."""

    owned_by = "someone"
    has_health = True

    def __init__(self, model: str = "tiny", *, port: int = 0) -> None:
        self.model = model
        self.knobs = Knobs()
        self.running_answers = 0
        self.url = ""
        self._port = port
        self._tokenizer: Tokenizer = Tokenizer.from_file(str(CHECKPOINT_DIR / "tokenizer.json"))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        app = web.Application(middlewares=[self.check_key])
        app.add_routes(self.routes())
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self._port)
        await site.start()
        self._port = runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self._port}"
        try:
            yield
        finally:
            self.knobs.hold_after = None
            await runner.cleanup()

    @web.middleware
    async def check_key(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        told = request.headers.get("authorization", "")
        if self.knobs.api_key and request.path.startswith("/v1") and told != f"Bearer {self.knobs.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    def routes(self) -> list[web.RouteDef]:
        routes = [web.get("/v1/models", self.models), web.post("/v1/completions", self.completions)]
        return [*routes, web.get("/health", self.health)] if self.has_health else routes

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.knobs.is_healthy else 503)

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": self.model_cards()})

    def model_cards(self) -> list[dict[str, Any]]:
        return [{"id": self.model, "object": "model", "owned_by": self.owned_by}]

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.knobs.bodies.append(body)
        self.knobs.connections.add(request.transport)
        if self.knobs.refuse_with is not None:
            status, said = self.knobs.refuse_with
            return web.json_response(said, status=status)
        if body["model"] not in self.names():
            return error(404, f"The model `{body['model']}` does not exist.", "model")
        prompt = self.read_prompt(body["prompt"])
        if len(prompt) >= CONTEXT:
            return error(400, f"This model's maximum context length is {CONTEXT} tokens.", "input_tokens")
        self.running_answers += 1
        try:
            if body.get("stream"):
                return await self.stream(request, body, prompt)
            return web.json_response(self.whole(body, prompt))
        finally:
            self.running_answers -= 1

    def names(self) -> list[str]:
        return [card["id"] for card in self.model_cards()]

    def read_prompt(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            ids: list[int] = self._tokenizer.encode(prompt, add_special_tokens=False).ids
            return ids
        return list(prompt)

    def whole(self, body: dict[str, Any], prompt: list[int]) -> dict[str, Any]:
        tokens, reason = self.planned(body, prompt)
        return {
            "choices": [self.choice(body, prompt, tokens, reason, is_first=True)],
            "usage": usage(prompt, tokens, self.knobs.cached_tokens),
        }

    def planned(self, body: dict[str, Any], prompt: list[int]) -> tuple[list[int], str]:
        stop_after = self.knobs.stop_after
        if stop_after is not None and stop_after <= body["max_tokens"]:
            return [*answer_to(prompt, stop_after - 1), EOS], "stop"
        tokens = answer_to(prompt, body["max_tokens"])
        for number, token in enumerate(tokens, 1):
            if token in body.get("stop_token_ids", ()):
                return tokens[:number], "stop"
        return tokens, "length"

    async def stream(self, request: web.Request, body: dict[str, Any], prompt: list[int]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        tokens, reason = self.planned(body, prompt)
        sent = 0
        try:
            for sent, token in enumerate(tokens):
                if self.knobs.die_after == sent:
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                if self.knobs.fail_after == sent:
                    told = {"error": {"message": "it broke", "type": "InternalServerError", "code": 500}}
                    await response.write(event(told))
                    return response
                await asyncio.sleep(0)
                while self.knobs.hold_after is not None and self.knobs.hold_after <= sent:
                    await asyncio.sleep(0.005)
                is_last = sent + 1 == len(tokens)
                choice = self.choice(body, prompt, [token], reason if is_last else None, is_first=not sent)
                await response.write(event({"id": "cmpl-1", "object": "text_completion", "choices": [choice]}))
        except (asyncio.CancelledError, ConnectionResetError):
            self.knobs.left.append(sent)
            raise
        await response.write(
            event({"choices": [], "usage": usage(prompt, tokens, self.knobs.cached_tokens)}) + b"data: [DONE]\n\n"
        )
        return response

    def choice(
        self, body: dict[str, Any], prompt: list[int], tokens: list[int], reason: str | None, *, is_first: bool
    ) -> dict[str, Any]:
        texts = "".join(self.text(token) for token in tokens)
        return {"index": 0, "text": texts, "logprobs": None, "finish_reason": reason}

    def text(self, token: int) -> str:
        """A special token is not part of the text; what is no whole character is written as �."""
        told: str = self._tokenizer.decode([token], skip_special_tokens=True)
        return told


class EmbeddingServer(Server):
    """Vectors instead of answers, as vLLM's with `--runner pooling`: token ids in."""

    owned_by = "vllm"

    def routes(self) -> list[web.RouteDef]:
        others = [route for route in super().routes() if route.path != "/v1/completions"]
        return [*others, web.post("/v1/embeddings", self.embeddings)]

    def model_cards(self) -> list[dict[str, Any]]:
        return [super().model_cards()[0] | {"root": str(CHECKPOINT_DIR), "parent": None, "max_model_len": CONTEXT}]

    async def embeddings(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.knobs.bodies.append(body)
        if self.knobs.refuse_with is not None:
            status, said = self.knobs.refuse_with
            return web.json_response(said, status=status)
        vector = vector_of(self.read_prompt(body["input"]))
        return web.json_response({"object": "list", "data": [{"index": 0, "embedding": vector}]})


def vector_of(tokens: Sequence[int]) -> list[float]:
    """Return a vector that is not of length 1."""
    return [float(sum(tokens)), float(len(tokens)), -1.0]


class OpenAiServer(Server):
    """Texts in, texts out, and nothing else."""

    has_health = False

    def read_prompt(self, prompt: Any) -> list[int]:
        assert isinstance(prompt, str), "this server takes no token ids"
        return super().read_prompt(prompt)


class LlamaCppServer(Server):
    """Token ids in, texts out, no KV events."""

    owned_by = "llamacpp"

    def routes(self) -> list[web.RouteDef]:
        return [*super().routes(), web.get("/props", self.props), web.get("/metrics", self.metrics)]

    def model_cards(self) -> list[dict[str, Any]]:
        return [super().model_cards()[0] | {"meta": {"n_ctx_train": 32768, "vocab_type": 2}}]

    async def props(self, request: web.Request) -> web.Response:
        return web.json_response({"total_slots": 4, "default_generation_settings": {"n_ctx": CONTEXT}})

    async def metrics(self, request: web.Request) -> web.Response:
        processing = self.running_answers + self.knobs.other_requests
        return web.Response(text=f"llamacpp:requests_processing {processing}\nllamacpp:requests_deferred 0\n")


class SglangServer(Server):
    """Token ids in, texts out; prefill and decode servers meet in `rooms`, which those of one test share."""

    owned_by = "sglang"

    def __init__(self, mode: str = "null", rooms: dict[int, "asyncio.Future[list[int]]"] | None = None) -> None:
        super().__init__()
        self._mode = mode
        self._rooms = {} if rooms is None else rooms
        self.info_path = "/server_info"

    def routes(self) -> list[web.RouteDef]:
        return [*super().routes(), web.get(self.info_path, self.server_info)]

    def model_cards(self) -> list[dict[str, Any]]:
        return [super().model_cards()[0] | {"root": str(CHECKPOINT_DIR), "max_model_len": CONTEXT}]

    async def server_info(self, request: web.Request) -> web.Response:
        told = {"disaggregation_mode": self._mode, "disaggregation_transfer_backend": "nixl"}
        return web.json_response(told | {"disaggregation_bootstrap_port": 8998, "tp_size": 1})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        if self._mode == "null":
            return await super().completions(request)
        body = await request.json()
        room = self._rooms.setdefault(body["bootstrap_room"], asyncio.get_running_loop().create_future())
        assert (body["bootstrap_host"], body["bootstrap_port"]) == ("127.0.0.1", 8998)
        if self._mode == "prefill":
            self.knobs.bodies.append(body)
            room.set_result(body["prompt"])
            return web.json_response(self.whole(body, body["prompt"]))
        if await room != body["prompt"]:
            return error(500, "the KV is that of another prompt", None)
        return await super().completions(request)


class VllmServer(Server):
    """Token ids in and out, KV events, KV handover."""

    owned_by = "vllm"

    def __init__(
        self, model: str = "tiny", *, loras: Sequence[str] = (), tells_events: bool = True, max_blocks: int = 1000
    ) -> None:
        super().__init__(model)
        self.loras = loras
        self.cached: dict[bytes, EngineHash] = {}
        self.hit_tokens = 0
        self.pulled: list[dict[str, Any]] = []
        self.can_pull = True
        self.has_connector = True
        self._tells_events = tells_events
        self._max_blocks = max_blocks
        self._publisher: KvEventPublisher | None = None
        self._growth = 0.0  # of the share of blocks in use

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with super().running():
            if self._tells_events:
                self._publisher = KvEventPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
            try:
                yield
            finally:
                if self._publisher is not None:
                    await self._publisher.close()

    def routes(self) -> list[web.RouteDef]:
        return [
            *super().routes(),
            web.get("/metrics", self.metrics),
            web.get("/kv_event_sources", self.event_sources),
        ]

    def model_cards(self) -> list[dict[str, Any]]:
        base = super().model_cards()[0] | {"root": str(CHECKPOINT_DIR), "parent": None, "max_model_len": CONTEXT}
        return [base, *(base | {"id": name, "root": "/" + name, "parent": self.model} for name in self.loras)]

    async def metrics(self, request: web.Request) -> web.Response:
        if self.knobs.other_requests:
            self._growth += 1e-6  # their answers grow
        labels = f'engine="0",model_name="{self.model}"'
        lines = [
            f"vllm:num_requests_running{{{labels}}} {self.running_answers + self.knobs.other_requests:.1f}",
            f"vllm:num_requests_waiting{{{labels}}} 0.0",
            f'vllm:num_requests_waiting_by_reason{{{labels},reason="capacity"}} 5.0',
            f"vllm:kv_cache_usage_perc{{{labels}}} {0.25 + self._growth:.6f}",
            f'vllm:cache_config_info{{block_size="{BLOCK}",engine="0",num_gpu_blocks="{self._max_blocks}"}} 1.0',
            "# TYPE vllm:generation_tokens counter",
            f"vllm:generation_tokens_total{{{labels}}} 42.0",
            "# TYPE process_open_fds gauge",
            "process_open_fds 77.0",
        ]
        return web.Response(text="\n".join(lines) + "\n")

    async def event_sources(self, request: web.Request) -> web.Response:
        if self._publisher is None:
            return web.json_response({})
        source = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self._publisher.endpoint,
            "replay_endpoint": self._publisher.replay_endpoint,
            "buffer_steps": 10_000,
            "topic": "",
        }
        return web.json_response({"0": source})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        params = body.get("kv_transfer_params") or {}
        if params.get("do_remote_prefill"):
            if not isinstance(params.get("remote_block_ids"), list):
                self.knobs.is_healthy = False  # the engine process asserts, and is gone
                return error(500, "EngineCore encountered an issue.", None)
            if not self.can_pull:
                self.knobs.bodies.append(body)
                return error(500, "Internal server error", None)
            self.pulled.append(params)
        return await super().completions(request)

    def whole(self, body: dict[str, Any], prompt: list[int]) -> dict[str, Any]:
        answer = super().whole(body, prompt)
        is_asked = self.has_connector and (body.get("kv_transfer_params") or {}).get("do_remote_decode")
        return answer | {"kv_transfer_params": offer_of(prompt) if is_asked else None}

    def choice(
        self, body: dict[str, Any], prompt: list[int], tokens: list[int], reason: str | None, *, is_first: bool
    ) -> dict[str, Any]:
        if is_first:
            self.cache(prompt, body.get("cache_salt"))
        choice = super().choice(body, prompt, tokens, reason, is_first=is_first)
        choice |= {"stop_reason": None, "prompt_token_ids": prompt if is_first else None}
        if body.get("return_token_ids"):
            choice["token_ids"] = tokens
        if body.get("logprobs") is not None:
            choice["logprobs"] = logprobs(tokens, body["logprobs"], prompt if body.get("echo") and is_first else ())
        return choice

    def cache(self, prompt: list[int], salt: str | None) -> None:
        """Store the full blocks that are not there, and tell of them."""
        names = list(block_names(prompt, salt))[: self._max_blocks]
        known = next((i for i, name in enumerate(names) if name not in self.cached), len(names))
        self.hit_tokens += known * BLOCK
        for name in reversed(names[:known]):  # now they are the youngest, the end of the prompt less than its beginning
            self.cached[name] = self.cached.pop(name)
        if known == len(names):
            return
        self._make_room(len(names) - known)
        new = {name: EngineHash(int.from_bytes(name[:8], "big")) for name in names[known:]}
        self.cached |= dict(reversed(new.items()))
        parent = self.cached[names[known - 1]] if known else None
        tokens = tuple(prompt[known * BLOCK : len(names) * BLOCK])
        self._tell([Stored(tuple(new.values()), parent, tokens, BLOCK, salt=salt)])

    def _make_room(self, count: int) -> None:
        """Make room for `count` more blocks: the oldest prompt goes first, its end before its beginning."""
        gone = list(self.cached)[: max(0, len(self.cached) + count - self._max_blocks)]
        self._tell([Removed((self.cached.pop(name),)) for name in gone])

    def evict(self, prompt: list[int]) -> None:
        gone = [name for name in block_names(prompt, None) if name in self.cached]
        hashes = tuple(self.cached.pop(name) for name in gone)
        self._tell([Removed((one,)) for one in reversed(hashes)])

    def _tell(self, events: Sequence[KvEvent]) -> None:
        if self._publisher is not None and events:
            self._publisher.publish(events)


def block_names(prompt: Sequence[int], salt: str | None) -> Iterator[bytes]:
    """Return a name for each full block, of the block and all before it: vLLM's are sha256 too."""
    name = (salt or "").encode()
    for start in range(0, len(prompt) - BLOCK + 1, BLOCK):
        name = sha256(name + json.dumps(list(prompt[start : start + BLOCK])).encode()).digest()
        yield name


def offer_of(prompt: Sequence[int]) -> dict[str, Any]:
    """Return the offer of vLLM 0.32 with the NixlConnector."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(range(1, 1 + -(-len(prompt) // BLOCK)))],
        "remote_engine_id": "c356e84f-9746-4563-8c3e-1d29fdaede99",
        "remote_request_id": "cmpl-94fe675cbfd62f93-0-b9407613",
        "remote_host": "127.0.0.1",
        "remote_port": 5601,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": len(prompt),
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
    }


def logprobs(tokens: Sequence[int], top: int, echoed: Sequence[int] = ()) -> dict[str, Any]:
    """Return vLLM's logprobs; those of an echoed prompt begin with null."""
    shown = [*echoed, *tokens]
    likeliest: list[Any] = [{f"token_id:{token + i}": -0.5 - i for i in range(max(top, 1))} for token in shown]
    values: list[float | None] = [-0.5] * len(shown)
    if echoed:
        likeliest[0] = values[0] = None
    return {
        "tokens": [f"token_id:{token}" for token in shown],
        "token_logprobs": values,
        "top_logprobs": likeliest,
        "text_offset": [0] * len(shown),
    }


def usage(prompt: Sequence[int], tokens: Sequence[int], cached_tokens: int | None) -> dict[str, Any]:
    details = None if cached_tokens is None else {"cached_tokens": cached_tokens}
    return {"prompt_tokens": len(prompt), "completion_tokens": len(tokens), "prompt_tokens_details": details}


def error(status: int, message: str, param: str | None) -> web.Response:
    kind = {400: "BadRequestError", 404: "NotFoundError"}.get(status, "InternalServerError")
    body = {"error": {"message": message, "type": kind, "param": param, "code": status}}
    return web.json_response(body, status=status)


def event(data: Any) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


@contextmanager
def served(*servers: Server) -> Iterator["Loop"]:
    """The servers run on an event loop in a thread of their own until the block ends."""
    loop = Loop()
    try:
        for server in servers:
            loop.start(server)
        yield loop
    finally:
        loop.close()


class Loop:
    """An event loop in a thread: servers for tests that wait for other processes."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake servers")
        self._thread.start()
        self._running: dict[Server, Any] = {}

    def start(self, server: Server) -> None:
        """Start; one that was stopped starts at the same address."""
        context = server.running()
        self._run(context.__aenter__)
        self._running[server] = context

    def stop(self, server: Server) -> None:
        context = self._running.pop(server)
        self._run(lambda: context.__aexit__(None, None, None))

    def close(self) -> None:
        for server in list(self._running):
            self.stop(server)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, make: Callable[[], Any]) -> None:
        async def call() -> None:
            await make()

        asyncio.run_coroutine_threadsafe(call(), self._loop).result(PATIENCE_S)
