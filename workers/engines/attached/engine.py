"""The engine seam over a server that knows nothing of the mesh: its HTTP API, its KV events, its own KV transfer."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from prometheus_client import REGISTRY, CollectorRegistry

from protocol.errors import (
    ConfigError,
    EngineError,
    InvalidRequestError,
    MeshError,
    PeerLostError,
    TransferError,
    WireError,
)
from protocol.events import Digest, KvEvent
from protocol.ids import WorkerId
from protocol.messages import (
    NO_LAYOUT,
    Delta,
    Embedding,
    EmbedRequest,
    FinishReason,
    GenerateRequest,
    PullReport,
    Role,
    Ticket,
    unpack_tokens,
)
from workers.abilities import check_embedding, check_generation
from workers.config import WorkerConfig
from workers.engine import EngineInfo, EngineLoad
from workers.engine_waits import Waits
from workers.engines.attached.bootstrap import Bootstraps, bootstrap_ticket, transfer_of
from workers.engines.attached.events import Follower
from workers.engines.attached.http import ServerHttp
from workers.engines.attached.metrics import ServerMetrics
from workers.engines.attached.probe import (
    EventSource,
    Flavour,
    Server,
    ServerLoad,
    only_rank,
    read_cache_config,
    read_disaggregation,
    read_event_sources,
    read_load,
    read_models,
    read_props,
    tells_load,
)
from workers.engines.attached.refusals import failure_in_stream
from workers.engines.attached.texts import Texts, read_texts
from workers.engines.attached.tickets import BACKEND, START_HINT, params_of, ticket_of
from workers.engines.attached.translate import (
    Answer,
    Body,
    body_of,
    check_honoured,
    check_length,
    delta_of,
    embedding_body,
    features_of,
    merged,
    prompt_of,
    read_answer,
    read_vector,
)
from workers.vllm_params import ASK_FOR_OFFER

log = logging.getLogger(__name__)

COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
METRICS = "/metrics"
START_S = 25.0  # a server that is not there yet is waited for so long; the supervisor then starts the worker anew
POLL_S = 1.0
ANSWER_S = 5.0  # for a look at the server's health and metrics
PROBE_S = 30.0
LINGER_S = 1.0  # for the end of a stream, after its answer has ended
MAX_MISSES = 3  # looks at its health in a row, until a server counts as gone
API_KEY = "KVMESH_ATTACH_API_KEY"

_DONE = b"[DONE]"


class AttachedEngine:
    """Implements workers.engine.Engine for one server."""

    def __init__(
        self,
        config: WorkerConfig,
        *,
        api_key: str = "",
        poll_s: float = POLL_S,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        """`registry`: has the server's metrics from `start` to `stop`."""
        self._config = config
        self._api_key = api_key
        self._poll_s = poll_s
        self._http: ServerHttp | None = None
        self._follower: Follower | None = None
        self._watch: asyncio.Task[None] | None = None
        self._failure: EngineError | None = None
        self._info: EngineInfo | None = None
        self._texts: Texts | None = None
        self._load = ServerLoad()
        self._registry = registry
        self._metrics: ServerMetrics | None = None
        self._in_flight = 0
        self._waits = Waits()
        self._bootstraps: Bootstraps | None = None
        self._health_path = "/health"
        self._listeners: list[Callable[[Sequence[KvEvent]], object]] = []

    # --- the seam -------------------------------------------------------------------------------------

    async def start(self, worker_id: WorkerId, address: str) -> EngineInfo:
        self._worker_id, self._address = worker_id, address
        self._http = ServerHttp(self._config.attach_url, self._api_key)
        await self._until_healthy()
        self._server = await self._probe()
        folder = model_folder(self._config, self._server)
        if not self._server.returns_token_ids:
            self._texts = await asyncio.to_thread(read_texts, folder)
        self._server = await self._probe_tasks(self._server)
        self._info = info_of(self._config, self._server, folder)
        if self._server.disaggregation is not None and self._info.transfer:
            self._bootstraps = Bootstraps(self._config.role, self._host, self._server.disaggregation)
        elif self._config.role is Role.PREFILL:
            await self._prove_transfer()
        if (source := self._event_source()) is not None:
            self._follower = Follower(worker_id, source, self._info.block_size)
            self._follower.cache.listeners.append(self._announce)
            self._info = replace(self._info, tells_events=True)
        self._metrics = ServerMetrics(self._server.flavour)
        self._registry.register(self._metrics)
        self._watch = asyncio.create_task(self._watch_server(), name=f"watch {self._config.attach_url}")
        log.info("attached to %s, %s server of %s", self._config.attach_url, self._server.flavour, self._server.model)
        return self._info

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        info = self._ready()
        check_generation(request, info)
        check_honoured(request, self._server.flavour)
        check_length(request, info.context_tokens)
        left = request.stop.max_tokens - len(request.generated)
        if left <= 0:
            yield Delta(finish_reason=FinishReason.LENGTH)
            return
        with self._counted(), _as_engine_errors():
            if request.offer_kv and self._bootstraps is None:
                yield await self._prefill(request)
                return
            async with aclosing(self._streamed(request, left)) as deltas:
                async for delta in deltas:
                    yield delta

    async def embed(self, request: EmbedRequest) -> Embedding:
        check_embedding(request, self._ready())
        tokens = unpack_tokens(request.prompt)
        body = embedding_body(request, self._server, self._said(tokens))
        with self._counted(), _as_engine_errors():
            return Embedding(vector=read_vector(await self._posted(EMBEDDINGS, body)))

    def release(self, offer_id: int, nonce: int) -> None:
        """vLLM's servers settle that between themselves: by the pull's notification, or by the lease."""
        if self._bootstraps is not None:
            self._bootstraps.release(offer_id, nonce)

    def on_kv_events(self, listener: Callable[[Sequence[KvEvent]], object]) -> None:
        self._listeners.append(listener)

    def kv_snapshot(self) -> list[KvEvent]:
        return [] if self._follower is None else self._follower.cache.snapshot()

    def kv_digest(self) -> Digest:
        return Digest(0, 0) if self._follower is None else self._follower.cache.digest_now

    def load(self) -> EngineLoad:
        total = 0 if self._info is None else self._info.total_blocks
        waiting = min(self._load.waiting, self._in_flight)
        return EngineLoad(
            running=self._in_flight - waiting,
            waiting=waiting,
            used_blocks=round(self._load.cache_usage * total),
            cached_blocks=self.kv_digest().blocks,
            total_blocks=total,
            offers=0 if self._bootstraps is None else len(self._bootstraps),
        )

    def check_health(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._info is None:
            raise EngineError("the engine has not started")

    async def stop(self) -> None:
        self._failure = self._failure or EngineError(f"the worker of {self._config.attach_url} is stopping")
        self._waits.fail(self._failure)
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})
        if self._bootstraps is not None:
            await self._bootstraps.close()
        if self._metrics is not None:
            self._registry.unregister(self._metrics)
            self._metrics = None
        if self._follower is not None:
            await self._follower.close()
        if self._http is not None:
            await self._http.close()

    # --- requests -------------------------------------------------------------------------------------

    async def _prefill(self, request: GenerateRequest) -> Delta:
        """The ticket, and no token: vLLM's decode side draws the first one itself, from the same logits.

        Not streamed, because vLLM leaves kv_transfer_params out of streams.
        """
        prompt = prompt_of(request)
        body = body_of(request, self._server, prompt, max_tokens=1, stream=False)
        body["kv_transfer_params"] = dict(ASK_FOR_OFFER)
        answer = _checked(read_answer(await self._posted(COMPLETIONS, body)))
        ticket = self._ticket(answer, len(prompt))
        return Delta(ticket=ticket, cached_tokens=answer.cached_tokens)

    def _ticket(self, answer: Answer, prompt_tokens: int) -> Ticket:
        nonce = secrets.randbits(62) + 1
        params = bytes(answer.kv_transfer_params)
        return ticket_of(params, self._worker_id, self._address, nonce, prompt_tokens)

    async def _begin_prefill(self, bootstraps: Bootstraps, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """The ticket at once; who does not take it, ends the prefill."""
        prompt = prompt_of(request)
        body = body_of(request, self._server, prompt, max_tokens=1, stream=False)

        async def prefill(fields: Body) -> None:
            await self._posted(COMPLETIONS, body | fields)

        offer, bootstrap = bootstraps.offer(prefill)
        is_taken = False
        try:
            transfer = self._ready().transfer
            yield Delta(
                ticket=bootstrap_ticket(offer, bootstrap, self._worker_id, self._address, transfer, len(prompt))
            )
            is_taken = True
        finally:
            if not is_taken:
                bootstraps.release(offer.offer_id, offer.nonce)

    async def _streamed(self, request: GenerateRequest, max_tokens: int) -> AsyncGenerator[Delta, None]:
        prompt = prompt_of(request)
        body = body_of(request, self._server, self._said(prompt), max_tokens=max_tokens, stream=True)
        if self._bootstraps is not None and request.offer_kv:
            deltas = self._begin_prefill(self._bootstraps, request)
        elif self._bootstraps is not None:
            deltas = self._bootstrapped(body | self._bootstraps.fields_for(request), request)
        elif request.ticket is None:
            deltas = self._deltas(body, request)
        else:
            deltas = self._pulling(body, request, request.ticket, len(prompt))
        async with aclosing(deltas):
            async for delta in deltas:
                yield delta

    async def _pulling(
        self, body: Body, request: GenerateRequest, ticket: Ticket, prompt_tokens: int
    ) -> AsyncGenerator[Delta, None]:
        """With a ticket. What cannot be pulled the server computes itself, and the first delta says why."""
        started = time.perf_counter()
        has_begun = False
        try:
            params, num_blocks = params_of(ticket, prompt_tokens, self._ready().block_size)
            async with aclosing(self._deltas(body | {"kv_transfer_params": params}, request)) as deltas:
                async for delta in deltas:
                    report = None if has_begun else pull_report(ticket, num_blocks, started)
                    has_begun = True
                    yield msgspec.structs.replace(delta, pull=report)
            return
        except (TransferError, EngineError, InvalidRequestError) as error:
            if has_begun:
                raise
            log.warning("KV of %s was not pulled: %s", ticket.worker_id, error)
            problem = str(error)
        async with aclosing(self._deltas(body, request)) as deltas:
            async for delta in deltas:
                report = None if has_begun else pull_report(ticket, 0, started, problem)
                has_begun = True
                yield msgspec.structs.replace(delta, pull=report)

    async def _bootstrapped(self, body: Body, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """The first delta tells that the KV has come; there is no answer without."""
        report: PullReport | None = PullReport(self._ready().transfer, 0, 0, 0.0)
        async with aclosing(self._deltas(body, request)) as deltas:
            async for delta in deltas:
                yield delta if report is None else msgspec.structs.replace(delta, pull=report)
                report = None

    async def _deltas(self, body: Body, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """One for what came together. Ends after the finish reason; what a stream lacks of it is an error."""
        tokenize = None if self._texts is None else self._texts.tokens_of
        async with aclosing(self._client.events(COMPLETIONS, body)) as pieces:
            while (piece := await self._waits.next(pieces)) is not None:
                delta, failure = read_events(piece, request.sampling.top_logprobs, tokenize)
                if delta is not None:
                    yield delta
                    if delta.finish_reason is not None:
                        await read_to_end(pieces)
                        return
                if failure is not None:
                    raise failure
        raise PeerLostError(f"{self._config.attach_url} ended a stream without a finish reason")

    async def _posted(self, path: str, body: Body) -> bytes:
        return await self._waits.result(lambda: self._client.post(path, body))

    def _said(self, tokens: list[int]) -> list[int] | str:
        """In the form that the server takes."""
        return tokens if self._server.takes_token_ids else self._spoken.text_of(tokens)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1

    def _ready(self) -> EngineInfo:
        self.check_health()
        assert self._info is not None, "a healthy engine has started"
        return self._info

    @property
    def _client(self) -> ServerHttp:
        assert self._http is not None, "start has made it"
        return self._http

    @property
    def _spoken(self) -> Texts:
        assert self._texts is not None, "a server that takes no token ids returns none"
        return self._texts

    # --- what the server is ---------------------------------------------------------------------------

    async def _until_healthy(self) -> None:
        """Raises EngineError if the server is not there within START_S."""
        deadline = asyncio.get_running_loop().time() + START_S
        is_told = False
        while (problem := await self._look()) is not None:
            if asyncio.get_running_loop().time() > deadline:
                raise EngineError(f"no server at {self._config.attach_url}: {problem}", hint="is it running there?")
            if not is_told:
                log.warning("waiting for the server: %s", problem)
                is_told = True
            await asyncio.sleep(self._poll_s)

    async def _look(self) -> str | None:
        """What is wrong with the server now; None: nothing. Servers without /health are asked for their models."""
        try:
            status, _ = await self._client.get(self._health_path, ANSWER_S)
            if status == 404 and self._health_path == "/health":
                self._health_path = "/v1/models"
                status, _ = await self._client.get(self._health_path, ANSWER_S)
        except MeshError as error:
            return str(error)
        return None if status < 300 else f"{self._health_path} answers {status}"

    async def _probe(self) -> Server:
        """Raises ConfigError if the server has not what the settings want, EngineError if it fails at this."""
        with _as_engine_errors():
            status, body = await self._client.get("/v1/models", PROBE_S)
            if status != 200:
                raise ConfigError(
                    f"{self._config.attach_url}/v1/models answers {status}, 200 was expected",
                    hint=f"is it an OpenAI-compatible server? Its key, if it wants one, goes into {API_KEY}",
                )
            server = read_models(body, self._config.model)
            if server.flavour is Flavour.VLLM:
                server = await self._probe_vllm(server)
            elif server.flavour is Flavour.LLAMACPP:
                server = await self._probe_llamacpp(server)
            elif server.flavour is Flavour.SGLANG:
                server = await self._probe_sglang(server)
        return server

    async def _probe_vllm(self, server: Server) -> Server:
        _, metrics = await self._client.get(METRICS, PROBE_S)
        if (cache := read_cache_config(metrics.decode(errors="replace"))) is not None:
            server = replace(server, block_size=cache[0], num_blocks=cache[1])
        status, body = await self._client.get("/kv_event_sources", PROBE_S)
        if status != 200:
            return server
        return replace(server, event_sources=read_event_sources(body, self._host))

    async def _probe_llamacpp(self, server: Server) -> Server:
        status, body = await self._client.get("/props", PROBE_S)
        if status != 200:
            return server
        slots, context_tokens = read_props(body)
        return replace(server, slots=slots, context_tokens=context_tokens or server.context_tokens)

    async def _probe_sglang(self, server: Server) -> Server:
        for path in ("/server_info", "/get_server_info"):  # the second one until 2026
            status, body = await self._client.get(path, PROBE_S)
            if status == 200:
                return replace(server, disaggregation=read_disaggregation(body))
        return server

    async def _probe_tasks(self, server: Server) -> Server:
        """By asking: a server without a task refuses, each in words of its own. Most generate and do not embed."""
        text = [1] if server.takes_token_ids else "a"
        if not await self._can(EMBEDDINGS, {"model": server.model, "input": text}):
            return server
        generates = await self._can(COMPLETIONS, {"model": server.model, "prompt": text, "max_tokens": 1})
        return replace(server, embeds=True, generates=generates)

    async def _can(self, path: str, body: Body) -> bool:
        try:
            async with asyncio.timeout(PROBE_S):
                await self._client.post(path, body)
        except (MeshError, TimeoutError) as error:
            log.debug("%s of %s: %s", path, self._config.attach_url, error)
            return False
        return True

    @property
    def _host(self) -> str:
        return urlsplit(self._config.attach_url).hostname or ""

    def _event_source(self) -> EventSource | None:
        if self._config.attach_kv_events:
            return EventSource(self._config.attach_kv_events, self._config.attach_kv_replay)
        source = only_rank(self._server.event_sources)
        if source is None and self._server.event_sources:
            log.warning(
                "%s has %d data-parallel ranks, and any of them may answer: their KV events are not followed; "
                "attach each rank's own server",
                self._config.attach_url,
                len(self._server.event_sources),
            )
        return source

    async def _prove_transfer(self) -> None:
        """A prefill server gives tickets, or it is none. Raises ConfigError."""
        body = {"model": self._server.model, "prompt": [1], "max_tokens": 1, "temperature": 0}
        with _as_engine_errors():
            answer = read_answer(
                await self._client.post(COMPLETIONS, body | {"kv_transfer_params": dict(ASK_FOR_OFFER)})
            )
            try:
                self._ticket(answer, 1)
            except EngineError as error:
                raise ConfigError(f"{self._config.attach_url} cannot prefill for others", hint=START_HINT) from error

    # --- how it gets on -------------------------------------------------------------------------------

    async def _watch_server(self) -> None:
        """Until it is gone, or cancelled."""
        misses = 0
        while misses < MAX_MISSES:
            await asyncio.sleep(self._poll_s)
            problem = await self._look()
            misses = 0 if problem is None else misses + 1
            if problem is None and tells_load(self._server.flavour):
                await self._read_load()
        self._failure = EngineError(f"the server at {self._config.attach_url} is gone: {problem}")
        self._waits.fail(self._failure)

    async def _read_load(self) -> None:
        """A look that fails leaves what was known: /health says whether the server lives."""
        try:
            status, body = await self._client.get(METRICS, ANSWER_S)
        except MeshError as error:
            log.debug("no metrics: %s", error)
            return
        if status == 200:
            text = body.decode(errors="replace")
            self._load = read_load(text, self._server.flavour)
            if self._metrics is not None:
                self._metrics.told(text)

    def _announce(self, events: Sequence[KvEvent]) -> None:
        for listener in self._listeners:
            listener(events)


def pull_report(ticket: Ticket, num_blocks: int, started: float, problem: str = "") -> PullReport:
    """The server does not tell how many bytes it moved: its metrics do. `started`: by time.perf_counter."""
    return PullReport(ticket.backend, 0, num_blocks, time.perf_counter() - started, problem)


def model_folder(config: WorkerConfig, server: Server) -> Path:
    """Where the tokenizer is: as set, or where the server has the model from if that is a folder here.

    Raises ConfigError.
    """
    for folder in (config.model_path, server.root):
        if folder and (Path(folder) / "tokenizer.json").is_file():
            return Path(folder).resolve()
    where = f"--model-path is {config.model_path!r}" if config.model_path else "there is no --model-path"
    raise ConfigError(
        f"{where}, and the server has its model from {server.root or 'an unknown place'!r}: no tokenizer.json there",
        hint="give --model-path the model's Hugging Face folder: the mesh tokenizes with it",
    )


def info_of(config: WorkerConfig, server: Server, folder: Path) -> EngineInfo:
    """Raises ConfigError if the role is none for this kind of server, or something has to be said that is not."""
    context_tokens = server.context_tokens or _context_of(folder)
    return EngineInfo(
        model=server.model,
        model_path=str(folder),
        block_size=server.block_size or config.block_size,
        total_blocks=server.num_blocks or config.num_blocks,
        context_tokens=context_tokens,
        max_num_seqs=server.slots or config.max_num_seqs,
        layout=NO_LAYOUT,
        transfer=transfer_name(config.role, server),
        features=features_of(server),
        loras=server.loras,
        tells_events=False,
    )


def transfer_name(role: Role, server: Server) -> str:
    """How it hands KV over; "" for a server that does both halves. Raises ConfigError if it cannot do its role."""
    if server.flavour is Flavour.SGLANG:
        return transfer_of(role, server.disaggregation)
    if role is Role.AGGREGATED:
        return ""
    if server.flavour is Flavour.VLLM:
        return BACKEND
    raise ConfigError(
        f"--role {role.value} for a server of kind {server.flavour.value}: vLLM's and SGLang's handovers are known",
        hint="attach it without --role",
    )


class _ModelConfig(msgspec.Struct):
    max_position_embeddings: int


def _context_of(folder: Path) -> int:
    """Raises ConfigError."""
    try:
        return msgspec.json.decode((folder / "config.json").read_bytes(), type=_ModelConfig).max_position_embeddings
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"the server does not tell its context, and {folder}/config.json neither: {error}",
            hint="give --model-path the model's Hugging Face folder",
        ) from error


def read_events(
    events: Sequence[bytes], top_logprobs: int | None, tokenize: Callable[[str], Sequence[int]] | None
) -> tuple[Delta | None, MeshError | None]:
    """What came together, as one delta, and the failure after it if there is one: tokens that came are not lost."""
    deltas: list[Delta] = []
    failure: MeshError | None = None
    for data in events:
        if data == _DONE:
            continue
        try:
            delta = delta_of(_checked(read_answer(data)), top_logprobs, tokenize)
        except MeshError as error:
            failure = error
            break
        if delta is not None:
            deltas.append(delta)
    return merged(deltas), failure


async def read_to_end(pieces: AsyncIterator[list[bytes]]) -> None:
    """What comes after an answer says nothing, but a connection that was read to its end can be used again."""
    with suppress(TimeoutError, MeshError):
        async with asyncio.timeout(LINGER_S):
            async for _ in pieces:
                pass


def _checked(answer: Answer) -> Answer:
    if answer.error is not None:
        raise failure_in_stream(answer.error)
    return answer


@contextmanager
def _as_engine_errors() -> Iterator[None]:
    """What a server says and nobody understands is its failure, not the caller's: another may do better."""
    try:
        yield
    except WireError as error:
        raise EngineError(str(error)) from error
