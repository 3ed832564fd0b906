"""Measure a worker behind an OpenAI-compatible API that takes token ids on /v1/completions: ours, vLLM, or another."""

import time
from collections.abc import Sequence
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from kvmesh.profiler.grid import WorkerLimits
from kvmesh.profiler.measure import Timeline
from kvmesh.protocol.errors import ConfigError, EngineError, MeshError, UnreachableError, WireError
from kvmesh.protocol.messages import UNREADABLE
from kvmesh.workers.engines.attached.http import ServerHttp
from kvmesh.workers.engines.attached.kinds import OPENAI, kind_of
from kvmesh.workers.engines.attached.probe import read_cache_config, read_models
from kvmesh.workers.engines.attached.server import AttachedServer

ASK_TIMEOUT_S = 10.0


class Known(Struct, frozen=True, kw_only=True):
    """Facts about the server that the caller gives; 0: ask the server."""

    context_tokens: int = 0
    total_kv_tokens: int = 0
    max_num_seqs: int = 0


class _Choice(Struct):
    text: str = ""
    finish_reason: str | None = None


class StreamUsage(Struct):
    prompt_tokens: int
    completion_tokens: int = 0


class _Error(Struct):
    message: str = ""


class _StreamEvent(Struct):
    choices: list[_Choice] = []
    usage: StreamUsage | None = None
    error: _Error | None = None


_event_decoder = msgspec.json.Decoder(_StreamEvent)


class MeasuredServer:
    """A `MeasuredWorker`. Use it on one event loop."""

    def __init__(self, url: str, model: str, known: Known, api_key: str = "") -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model  # "": the server's only one; known after `limits`
        self.engine = "openai"  # known after `limits`
        self._counts_tokens = False  # known after `limits`
        self._known = known
        self._http = ServerHttp(self.url, api_key)

    async def limits(self) -> WorkerLimits:
        """Return the limits. Raise ConfigError if neither the server nor the caller says one, UnreachableError."""
        server = await self._server()
        self.model = server.model
        self.engine = "" if server.kind is OPENAI else server.kind.name
        self._counts_tokens = server.kind.counts_stream_tokens
        total = self._known.total_kv_tokens
        if not total and (config := read_cache_config(await self._metrics())) is not None:
            total = config[0] * config[1]
        return WorkerLimits(
            context_tokens=self._given("--context-tokens", self._known.context_tokens or server.context_tokens or 0),
            total_kv_tokens=self._given("--total-kv-tokens", total),
            max_num_seqs=self._given("--max-num-seqs", self._known.max_num_seqs),
        )

    async def answer(self, prompt: Sequence[int], max_tokens: int) -> Timeline:
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": self._stream_options(),
        }
        times_s: list[float] = []
        counts: list[int | None] = []  # tokens until then, if the server counts them
        usage = None
        sent_s = time.perf_counter()
        async for events in self._http.events("/v1/completions", body):
            now_s = time.perf_counter()
            said = [_read(event) for event in events if event != b"[DONE]"]
            usage = next((event.usage for event in reversed(said) if event.usage is not None), usage)
            if any(event.choices for event in said):
                times_s.append(now_s)
                counts.append(usage.completion_tokens if usage is not None else None)
        return timeline_of(sent_s, times_s, counts, usage, max_tokens)

    async def close(self) -> None:
        await self._http.close()

    async def _server(self) -> AttachedServer:
        status, body = await self._http.get("/v1/models", ASK_TIMEOUT_S)
        if status != 200:
            raise UnreachableError(f"{self.url}/v1/models answered {status}", hint="is an OpenAI API there?")
        return read_models(body, self.model, kind_of)

    async def _metrics(self) -> str:
        """Return the /metrics page; "" if the server has none."""
        try:
            status, body = await self._http.get("/metrics", ASK_TIMEOUT_S)
        except MeshError:
            return ""
        return body.decode(errors="replace") if status == 200 else ""

    def _given(self, flag: str, value: int) -> int:
        if value < 1:
            raise ConfigError(f"{self.url} does not tell what {flag} says", hint=f"add {flag}")
        return value

    def _stream_options(self) -> dict[str, bool]:
        """Return options of the stream. vLLM counts tokens in every event; other servers refuse unknown options."""
        return {"include_usage": True} | ({"continuous_usage_stats": True} if self._counts_tokens else {})


def check_url(url: str) -> None:
    """Raises ConfigError."""
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise ConfigError(f"{url!r} is no URL of a server", hint="give one like http://127.0.0.1:8000")


def timeline_of(
    sent_s: float, times_s: Sequence[float], counts: Sequence[int | None], usage: StreamUsage | None, max_tokens: int
) -> Timeline:
    """Return when the tokens came. If the server counts tokens only at the end, all events bring equally many.

    Raise EngineError if the answer is not what was asked for.
    """
    if usage is None or not times_s:
        raise EngineError("a stream ended without tokens or without usage", hint="the server must do include_usage")
    if usage.completion_tokens != max_tokens:
        raise EngineError(
            f"the server answered {usage.completion_tokens} tokens instead of {max_tokens}",
            hint="it must obey ignore_eos, and prompt and answer must fit its context",
        )
    if counts[0] is None or counts[-1] != max_tokens:
        each = max_tokens / len(times_s)
        tokens = [each * (i + 1) for i in range(len(times_s))]
    else:
        tokens = [float(count or 0) for count in counts]
    # An event that only ends the stream brings no token.
    kept = [i for i, count in enumerate(tokens) if count > (tokens[i - 1] if i else 0)]
    return Timeline(
        sent_s=sent_s,
        at_s=[times_s[i] for i in kept],
        tokens=[tokens[i] for i in kept],
        prompt_tokens=usage.prompt_tokens,
    )


def _read(event: bytes) -> _StreamEvent:
    try:
        read = _event_decoder.decode(event)
    except UNREADABLE as error:
        raise WireError(f"an event of the stream cannot be read: {error}") from error
    if read.error is not None:
        raise EngineError(f"the server gave up: {read.error.message[:300]}", hint="see its log")
    return read
