"""The engine seam over a server that knows nothing of the mesh: its HTTP API, its KV events, its own KV transfer."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from urllib.parse import urlsplit

import msgspec
from prometheus_client import REGISTRY, CollectorRegistry

from kvmesh.kvevents.subscriber import KvEventSubscriber
from kvmesh.kvevents.transport import KvSource
from kvmesh.protocol.errors import EngineError, MeshError
from kvmesh.protocol.events import Digest, KvEvent
from kvmesh.protocol.hashing import hash_seed, token_bytes
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import Delta, Embedding, EmbedRequest, FinishReason, GenerateRequest, unpack_tokens
from kvmesh.workers.checks import check_embedding, check_generation, check_prompt
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.engine import EngineInfo, EngineLoad, EngineReport
from kvmesh.workers.engines.attached.asking import ANSWER_S, HealthCheck, probe_server, probe_tasks
from kvmesh.workers.engines.attached.completions import EMBEDDINGS, Completions, as_engine_errors
from kvmesh.workers.engines.attached.describe import info_of, model_folder
from kvmesh.workers.engines.attached.handover import BootstrapHandover, Handover, ParamsHandover
from kvmesh.workers.engines.attached.http import ServerHttp
from kvmesh.workers.engines.attached.metrics import ServerMetrics
from kvmesh.workers.engines.attached.outside import OutsideCallers
from kvmesh.workers.engines.attached.probe import only_rank, read_load
from kvmesh.workers.engines.attached.server import AttachedServer, EventSource, ServerLoad
from kvmesh.workers.engines.attached.texts import read_texts
from kvmesh.workers.engines.attached.translate import TOKEN_BYTES, check_honoured, embedding_body, read_vector
from kvmesh.workers.engines.external.cache import EngineCache, RankCache
from kvmesh.workers.engines.external.content import ServerContent
from kvmesh.workers.engines.external.life import EngineLife


class Follower:
    """Follows one server. Belongs to the event loop it was made on."""

    def __init__(self, worker_id: WorkerId, source: EventSource, cache: EngineCache) -> None:
        """Raise ConfigError for an endpoint that is none."""
        self._worker_id = worker_id
        self._subscriber = KvEventSubscriber(cache)
        self._subscriber.add(KvSource(worker_id, source.endpoint, source.replay_endpoint, topic=source.topic))

    @property
    def is_live(self) -> bool:
        """True once all that the server is known to have published was applied."""
        return self._subscriber.is_live(self._worker_id)

    async def close(self) -> None:
        """A second call does nothing."""
        await self._subscriber.close()


log = logging.getLogger(__name__)

METRICS = "/metrics"
POLL_S = 1.0
MAX_MISSES = 3  # looks at its health in a row, until a server counts as gone


class AttachedEngine:
    """Implements kvmesh.workers.engine.Engine for one server."""

    def __init__(
        self,
        config: WorkerConfig,
        *,
        api_key: str = "",
        poll_s: float = POLL_S,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        """The server's metrics are in `registry` from `start` to `stop`."""
        self._config = config
        self._api_key = api_key
        self._poll_s = poll_s
        self._registry = registry
        self._life = EngineLife()
        self._content = ServerContent()
        self.kv_content = self._content.kv_content
        self._cache = RankCache()  # empty for ever where no events are followed
        self._load = ServerLoad()
        self._outside = OutsideCallers()
        self._load_listeners: list[Callable[[], object]] = []
        self._http: ServerHttp | None = None
        self._follower: Follower | None = None
        self._handover: Handover | None = None
        self._metrics: ServerMetrics | None = None
        self._watch: asyncio.Task[None] | None = None
        self._server: AttachedServer  # this one and the next: from `start` on
        self._completions: Completions

    # --- the seam -------------------------------------------------------------------------------------

    async def start(self, worker_id: WorkerId, address: str) -> EngineInfo:
        self._life.begin(worker_id, address)
        http = self._http = ServerHttp(self._config.attach_url, self._api_key)
        health = HealthCheck(http)
        await health.until_healthy(self._poll_s)
        server = await probe_server(http, self._config.model)
        folder = model_folder(self._config, server)
        texts = None if server.kind.returns_token_ids else await asyncio.to_thread(read_texts, folder)
        server = self._server = await probe_tasks(http, server)
        await self._content.read(server.root)
        source = event_source(self._config, server)
        info = info_of(self._config, server, folder, tells_events=source is not None)
        self._completions = Completions(http, server, texts, self._life.waits)
        self._handover = self._open_handover(info)
        await self._handover.prove()
        if source is not None:
            self._follower = Follower(worker_id, source, self._cache.begin(info.block_size))
        self._metrics = ServerMetrics(server.kind.metrics_prefix)
        self._registry.register(self._metrics)
        self._watch = asyncio.create_task(self._watch_server(http, health), name=f"watch {self._config.attach_url}")
        self._life.uses_xgrammar("vllm" if server.kind.name == "vllm" else "")
        self._life.info = info
        log.info("attached to %s, %s server of %s", self._config.attach_url, server.kind.name, server.model)
        return info

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        info = self._life.check()
        check_generation(request, info)
        check_honoured(request, self._server.kind)
        check_prompt(len(request.prompt) // TOKEN_BYTES, len(request.generated), info.context_tokens)
        await self._life.try_guide(request)
        left = request.stop.max_tokens - len(request.generated)
        if left <= 0:
            yield Delta(finish_reason=FinishReason.LENGTH)
            return
        held_tokens = self._held_tokens(request)
        with self._life.counted(), as_engine_errors():
            async with aclosing(self._answer(request, left)) as deltas:
                async for delta in deltas:
                    if held_tokens is not None and delta.cached_tokens is None:
                        delta = msgspec.structs.replace(delta, cached_tokens=held_tokens)
                    held_tokens = None
                    yield delta

    async def embed(self, request: EmbedRequest) -> Embedding:
        check_embedding(request, self._life.check())
        text = self._completions.spoken(unpack_tokens(request.prompt))
        body = embedding_body(request, self._server, text)
        with self._life.counted(), as_engine_errors():
            return Embedding(vector=read_vector(await self._completions.post(EMBEDDINGS, body)))

    def release(self, offer_id: int, nonce: int) -> None:
        if self._handover is not None:
            self._handover.release(offer_id, nonce)

    def on_kv_events(self, listener: Callable[[Sequence[KvEvent]], object]) -> None:
        self._cache.on_kv_events(listener)

    def kv_snapshot(self) -> list[KvEvent]:
        return self._cache.kv_snapshot()

    def kv_digest(self) -> Digest:
        return self._cache.kv_digest()

    def load(self) -> EngineLoad:
        in_flight, total = self._life.in_flight, 0 if self._life.info is None else self._life.info.total_blocks
        waiting = min(self._load.waiting, in_flight)
        return EngineLoad(
            running=in_flight - waiting,
            waiting=waiting,
            used_blocks=round(self._load.cache_usage * total),
            cached_blocks=self._cache.num_blocks,
            total_blocks=total,
            offers=0 if self._handover is None else len(self._handover),
        )

    def on_load_change(self, listener: Callable[[], object]) -> None:
        self._load_listeners.append(listener)

    def report(self) -> EngineReport:
        """Report the server's other callers, as they were at the last look at its metrics."""
        return self._outside.report

    def check_health(self) -> None:
        self._life.check()

    async def stop(self) -> None:
        self._life.stop()
        self._content.close()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})
        if self._handover is not None:
            await self._handover.close()
        if self._metrics is not None:
            self._registry.unregister(self._metrics)
            self._metrics = None
        if self._follower is not None:
            await self._follower.close()
        if self._http is not None:
            await self._http.close()

    # --- requests -------------------------------------------------------------------------------------

    def _answer(self, request: GenerateRequest, max_tokens: int) -> AsyncGenerator[Delta, None]:
        assert self._handover is not None, "a healthy engine has started"
        if request.offer_kv:
            return self._handover.prefill(request)
        return self._handover.answer(self._completions.body(request, max_tokens=max_tokens), request)

    def _held_tokens(self, request: GenerateRequest) -> int | None:
        """Return how much of the prompt the server's KV events say it has; None where none are followed.

        It counts until the server itself reports its cached tokens, which most do only on a flag.
        """
        if self._follower is None:
            return None
        tokens = request.prompt + token_bytes(request.generated)
        return self._cache.held_tokens(tokens[:-TOKEN_BYTES], hash_seed(request.lora, request.cache_salt))

    def _open_handover(self, info: EngineInfo) -> Handover:
        server, url = self._server, self._config.attach_url
        if server.disaggregation is not None and info.transfer:
            host = urlsplit(url).hostname or ""
            return BootstrapHandover(
                self._completions, self._life, self._config.role, host, server.disaggregation, info.transfer,
                self._content,
            )  # fmt: skip
        return ParamsHandover(self._completions, self._life, url, server.model, self._config.role, self._content)

    # --- watching the server -------------------------------------------------------------------------

    async def _watch_server(self, http: ServerHttp, health: HealthCheck) -> None:
        """Run until the server is gone, or until cancelled."""
        misses = 0
        while misses < MAX_MISSES:
            await asyncio.sleep(self._poll_s)
            problem = await health.look()
            misses = 0 if problem is None else misses + 1
            if problem is None:
                await self._read_load(http)
        self._life.fail(EngineError(f"the server at {self._config.attach_url} is gone: {problem}"))

    async def _read_load(self, http: ServerHttp) -> None:
        """A look that fails leaves what was known: /health says whether the server lives."""
        if (names := self._server.kind.load_metrics) is None:
            return
        try:
            status, body = await http.get(METRICS, ANSWER_S)
        except MeshError as error:
            log.debug("no metrics: %s", error)
            return
        if status == 200:
            text = body.decode(errors="replace")
            self._load = read_load(text, names)
            self._note_load()
            if self._metrics is not None:
                self._metrics.told(text)

    def _note_load(self) -> None:
        life = self._life
        total_blocks = 0 if life.info is None else life.info.total_blocks
        if self._outside.look(self._load, life.take_most_in_flight(), life.in_flight, total_blocks):
            for listener in self._load_listeners:
                listener()


def event_source(config: WorkerConfig, server: AttachedServer) -> EventSource | None:
    """Return where the server's KV events are: as set, or as it says if it has one rank. None if nowhere."""
    if config.attach_kv_events:
        return EventSource(config.attach_kv_events, config.attach_kv_replay)
    source = only_rank(server.event_sources)
    if source is None and server.event_sources:
        log.warning(
            "%s has %d data-parallel ranks, and any of them may answer: their KV events are not followed; "
            "attach each rank's own server",
            config.attach_url,
            len(server.event_sources),
        )
    return source
