"""Implement kvmesh.workers.engine.Engine over `sglang.Engine`.

Prefill and decode meet by a bootstrap server that runs in the prefill engine: both get the request at once, with the
same host, port and room. So a prefill worker's ticket is its first delta, without a token. The prefill is a standing
offer until the decode worker has what it needs, and the first token comes from the decode worker.
"""

import asyncio
import dataclasses
import itertools
import logging
import shutil
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import ExitStack, aclosing, suppress
from pathlib import Path
from typing import Any

import zmq
from msgspec.structs import replace

from kvmesh.kvevents.sockets import Frames, LoopSocket, bind_socket, open_socket
from kvmesh.kvevents.subscriber import KvEventSubscriber
from kvmesh.kvevents.transport import KvSource
from kvmesh.mesh.short_folder import short_folder
from kvmesh.protocol.errors import ConfigError, EngineError, InvalidRequestError, TransferError, WireError
from kvmesh.protocol.events import Digest, KvEvent
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import (
    NO_LAYOUT,
    Control,
    ControlReply,
    Delta,
    Embedding,
    EmbedRequest,
    Feature,
    GenerateRequest,
    PullReport,
    Role,
)
from kvmesh.workers.checks import check_embedding, check_generation
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.engine import EngineInfo, EngineLoad
from kvmesh.workers.engines.external.cache import EngineCache
from kvmesh.workers.engines.external.content import AdapterFiles, EngineContent
from kvmesh.workers.engines.external.launch import Launch
from kvmesh.workers.engines.external.life import EngineLife
from kvmesh.workers.engines.external.ports import free_ports
from kvmesh.workers.engines.sglang.arguments import (
    EventEndpoints,
    Flags,
    adapter_paths,
    argv_of,
    bootstrap_host,
    read_flags,
)
from kvmesh.workers.engines.sglang.bootstrap import Bootstrap, backend_name, bootstrap_to_decode
from kvmesh.workers.engines.sglang.control import carry_out
from kvmesh.workers.engines.sglang.extension import EXTENSION
from kvmesh.workers.engines.sglang.metrics import export_metrics
from kvmesh.workers.engines.sglang.offers import PrefillOffers, new_room
from kvmesh.workers.engines.sglang.runtime import (
    FAKE_BOOTSTRAP_HOST,
    MAX_METRICS_BYTES,
    Metrics,
    Runtime,
    Sglang,
    TokenizerManager,
    dead_child,
    kv_settings,
    launch,
    load_sglang,
    outlive_failures,
    parse,
    read_metrics,
    signals_kept,
    total_tokens,
)
from kvmesh.workers.engines.sglang.translate import SglangAnswer, generate_kwargs

log = logging.getLogger(__name__)

WARM_UP_TIMEOUT_S = 1800.0  # kernels are compiled
DEFAULT_MAX_NUM_SEQS = 64  # if SGLang has no limit of its own
_WARM_UP = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
_QUEUED_METRICS = 64


class SglangEngine:
    """Belongs to the event loop that `start` runs on."""

    def __init__(self, config: WorkerConfig, served_name: str, load: Callable[[], Sglang] = load_sglang) -> None:
        """Raises ConfigError for flags that contradict the settings."""
        self._config = config
        self._flags: Flags = read_flags(config)
        self._served_name = served_name
        self._model_path = str(Path(config.model_path).resolve())
        self._load = load
        self._loras: Mapping[str, str] = {name: name for name in adapter_paths(config)}  # SGLang's names
        self._controls = itertools.count(1)
        self._bootstrap_host = bootstrap_host(config) if config.role is Role.PREFILL else ""
        self._cleanup = ExitStack()
        self._launch: Launch[Runtime] | None = None
        self._runtime: Runtime | None = None
        self._life = EngineLife()
        self._cache = EngineCache(config.block_size, self._flags.dp_size)
        self._subscriber: KvEventSubscriber | None = None
        self._metrics: dict[int, Metrics] = {}  # by rank
        self._content = EngineContent(config.model_path, has_weights=not config.random_weights)
        self.kv_content = self._content.kv_content
        self._offers = PrefillOffers()
        self._numbers = itertools.count()

    async def start(self, worker_id: WorkerId, address: str) -> EngineInfo:
        self._life.begin(worker_id, address)
        sglang = await asyncio.to_thread(self._load)
        endpoints = self._open_endpoints()
        argv = argv_of(self._config, self._flags, self._served_name, endpoints)
        server_args = await asyncio.to_thread(parse, sglang, argv)
        outlive_failures(asyncio.get_running_loop(), self._cleanup)
        await self._content.begin()
        adapters = [(name, AdapterFiles(path)) for name, path in adapter_paths(self._config).items()]
        for _, files in adapters:
            await files.begin()
        self._launch = Launch("SGLang", lambda: launch(sglang, server_args, is_leader=self._flags.is_leader))
        runtime = self._runtime = await self._launch.result()
        await self._content.loaded(kv_settings(server_args))
        self._life.uses_xgrammar("sglang" if self._flags.uses_xgrammar else "")
        for name, files in adapters:
            self._content.add_adapter(name, await files.loaded())
        export_metrics(self._cleanup)
        if runtime.tokenizer_manager is not None:
            with signals_kept(asyncio.get_running_loop()):
                runtime.tokenizer_manager.auto_create_handle_loop()
            self._follow(runtime, endpoints)
            await self._warm_up(runtime)
        self._life.info = info = self._describe(runtime)
        log.info("SGLang %s is up", sglang.version)
        return info

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        info, runtime, manager = self._ready()
        check_generation(request, info)
        await self._life.try_guide(request)
        if request.offer_kv:
            async with aclosing(self._prefill(request, info)) as deltas:
                async for delta in deltas:
                    yield delta
            return
        bootstrap = self._bootstrap_of(request, info)
        kwargs = self._kwargs(request, info, bootstrap)
        answer = SglangAnswer(is_incremental=self._is_incremental, top_logprobs=request.sampling.top_logprobs)
        report = None if bootstrap is None else PullReport(info.transfer, 0, 0, 0.0)
        async with aclosing(self._outputs(runtime, manager, kwargs, answer)) as outputs:
            async for delta in outputs:
                yield delta if report is None else replace(delta, pull=report)
                report = None

    async def embed(self, request: EmbedRequest) -> Embedding:
        check_embedding(request, self._life.check())
        raise EngineError("SGLang workers compute no embeddings")

    def release(self, offer_id: int, nonce: int) -> None:
        self._offers.release(offer_id, nonce)

    def on_kv_events(self, listener: Callable[[Sequence[KvEvent]], object]) -> None:
        self._cache.listeners.append(listener)

    def kv_snapshot(self) -> list[KvEvent]:
        return self._cache.snapshot()

    def kv_digest(self) -> Digest:
        return self._cache.digest_now

    def load(self) -> EngineLoad:
        """Requests by our own count: all come through here. How many of them wait, and what they hold, is as the
        schedulers last told: with every prompt and every 40 steps of decoding, and not when they come to rest."""
        in_flight = self._life.in_flight
        page, told = self._config.block_size, self._metrics.values() if in_flight else ()
        waiting = min(in_flight, sum(rank.waiting for rank in told))
        used = sum(-(-rank.kv_used_tokens // page) for rank in told)
        total = 0 if self._life.info is None else self._life.info.total_blocks
        return EngineLoad(
            running=in_flight - waiting,
            waiting=waiting,
            used_blocks=used,
            cached_blocks=max(0, self._cache.num_blocks - used),
            total_blocks=total,
            offers=len(self._offers),
        )

    def check_health(self) -> None:
        self._life.check()
        if self._runtime is not None and (pid := dead_child(self._runtime)) is not None:
            hint = "see its log; the worker is started again"
            self._life.fail(EngineError(f"SGLang's process {pid} has ended", hint=hint))
            self._life.check()

    async def control(self, request: Control) -> ControlReply:
        """Implements kvmesh.workers.engine.Controllable."""
        info, runtime, manager = self._ready()
        done = await carry_out(request, runtime, manager, self._loras, next(self._controls), self._content)
        for name, engine_name in done.loras.items():
            if self._loras.get(name) != engine_name:
                self._cache.serve_adapter(name, engine_name)
        self._loras, loras = done.loras, tuple(done.loras)
        self._life.info = dataclasses.replace(info, loras=loras)
        return ControlReply(detail=done.detail, loras=loras)

    async def stop(self) -> None:
        if not self._life.stop():
            return
        self._content.close()
        await self._offers.close()
        if self._subscriber is not None:
            await self._subscriber.close()
        if self._launch is not None and (launched := await self._launch.ended()) is not None:
            await asyncio.to_thread(launched.shutdown)
        self._cleanup.close()

    # --- starting -------------------------------------------------------------------------------------

    def _open_endpoints(self) -> EventEndpoints:
        """Files for one rank. For more, ports that follow each other: SGLang counts from the first one."""
        ranks = self._flags.dp_size
        if ranks == 1:
            folder = short_folder("kvmesh-sglang-", "events")
            self._cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
            return EventEndpoints(f"ipc://{folder}/events", f"ipc://{folder}/replay")
        first = free_ports(2 * ranks)
        return EventEndpoints(f"tcp://127.0.0.1:{first}", f"tcp://127.0.0.1:{first + ranks}")

    def _follow(self, runtime: Runtime, endpoints: EventEndpoints) -> None:
        subscriber = self._subscriber = KvEventSubscriber(self._cache)
        for rank in range(self._flags.dp_size):
            live, replay = endpoints.of(rank)
            subscriber.add(KvSource(self._life.worker_id, live, replay, dp_rank=rank))
        pull = open_socket(zmq.PULL, receive=_QUEUED_METRICS, max_bytes=MAX_METRICS_BYTES)
        bind_socket(pull, runtime.port_args.metrics_ipc_name, None, to="take SGLang's metrics")
        self._cleanup.callback(LoopSocket(pull, self._on_metrics).close)

    def _on_metrics(self, frames: Frames) -> None:
        try:
            metrics = read_metrics(frames[-1])
        except WireError as error:
            log.debug("%s", error)
            return
        if 0 <= metrics.rank < self._flags.dp_size:
            self._metrics[metrics.rank] = metrics

    async def _warm_up(self, runtime: Runtime) -> None:
        """Run one small request, so that all kernels are compiled. That of a prefill worker has nobody to fetch it."""
        if self._config.role is Role.DECODE:
            return  # it computes nothing without a prefill worker
        kwargs: dict[str, Any] = {"input_ids": [0, 1, 2, 3], "sampling_params": dict(_WARM_UP), "stream": True}
        if self._config.role is Role.PREFILL:
            kwargs |= Bootstrap(FAKE_BOOTSTRAP_HOST, self._bootstrap_port, 0).kwargs
        try:
            async with asyncio.timeout(WARM_UP_TIMEOUT_S):
                async for _ in await runtime.async_generate(**kwargs):
                    pass
        except (TimeoutError, ValueError) as error:
            raise EngineError(f"SGLang failed its first request: {error!r}", hint="see its log") from error

    def _describe(self, runtime: Runtime) -> EngineInfo:
        manager, args = runtime.tokenizer_manager, runtime.server_args
        if args.page_size != self._config.block_size:
            raise ConfigError(
                f"SGLang keeps pages of {args.page_size} tokens, --block-size is {self._config.block_size}",
                hint=f"set --block-size {args.page_size}: this model or attention backend wants that",
            )
        without = () if self._flags.has_tokenizer else (Feature.GUIDED,)
        features = tuple(feature for feature in EXTENSION.features if feature not in without)
        return EngineInfo(
            model=self._served_name,
            model_path=self._model_path,
            block_size=self._config.block_size,
            total_blocks=total_tokens(runtime) // self._config.block_size * self._flags.dp_size,
            context_tokens=0 if manager is None else manager.context_len,
            max_num_seqs=args.max_running_requests or DEFAULT_MAX_NUM_SEQS,
            layout=NO_LAYOUT,
            transfer="" if self._config.role is Role.AGGREGATED else backend_name(self._flags.transfer),
            features=() if manager is None else features,
            loras=tuple(self._loras),
            serves=manager is not None,
            tells_events=manager is not None,
        )

    @property
    def _is_incremental(self) -> bool:
        return self._runtime is not None and bool(self._runtime.server_args.incremental_streaming_output)

    @property
    def _bootstrap_port(self) -> int:
        assert self._runtime is not None
        return int(self._runtime.server_args.disaggregation_bootstrap_port)

    # --- serving --------------------------------------------------------------------------------------

    def _ready(self) -> tuple[EngineInfo, Runtime, TokenizerManager]:
        self.check_health()
        assert self._runtime is not None, "a healthy engine has started"
        if self._runtime.tokenizer_manager is None:
            raise EngineError("this node computes for another", hint="send requests to the node with --node-rank 0")
        return self._life.check(), self._runtime, self._runtime.tokenizer_manager

    def _kwargs(self, request: GenerateRequest, info: EngineInfo, bootstrap: Bootstrap | None) -> dict[str, Any]:
        return generate_kwargs(
            request,
            adapter=None if request.lora is None else self._loras[request.lora],
            context_tokens=info.context_tokens,
            has_tokenizer=self._flags.has_tokenizer,
            bootstrap=bootstrap,
        )

    def _bootstrap_of(self, request: GenerateRequest, info: EngineInfo) -> Bootstrap | None:
        """A decode engine cannot compute a prompt, and the others cannot take one over."""
        if self._config.role is not Role.DECODE:
            if request.ticket is not None:
                raise InvalidRequestError("an aggregated SGLang worker takes no tickets", hint="set --role decode")
            return None
        try:
            self._content.check(request)
        except TransferError as error:
            raise EngineError(str(error)) from error
        remedy = "start a prefill worker, or one of --role aggregated"
        return bootstrap_to_decode(request, info.transfer, remedy=remedy)

    def _prefill(self, request: GenerateRequest, info: EngineInfo) -> AsyncGenerator[Delta, None]:
        """Begin to compute the prompt and yield its ticket at once."""
        if self._config.role is not Role.PREFILL:
            raise InvalidRequestError("an aggregated SGLang worker offers no KV", hint="set --role prefill")
        bootstrap = Bootstrap(self._bootstrap_host, self._bootstrap_port, new_room())
        kwargs = self._kwargs(request, info, bootstrap)
        num_tokens = len(kwargs["input_ids"])
        return self._offers.hand_out(
            bootstrap, lambda: self._drain(kwargs), backend=info.transfer, num_tokens=num_tokens, life=self._life
        )

    async def _drain(self, kwargs: dict[str, Any]) -> None:
        _, runtime, manager = self._ready()
        answer = SglangAnswer(is_incremental=self._is_incremental, top_logprobs=None)
        async with aclosing(self._outputs(runtime, manager, kwargs, answer)) as outputs:
            async for _ in outputs:
                pass

    async def _outputs(
        self, runtime: Runtime, manager: TokenizerManager, kwargs: dict[str, Any], answer: SglangAnswer
    ) -> AsyncGenerator[Delta, None]:
        """The deltas of one request of SGLang's, which is aborted if it has not ended when this is closed."""
        rid = f"kvmesh-{next(self._numbers)}"  # ours can come twice at once
        stream: AsyncGenerator[dict[str, Any], None] | None = None
        try:
            with self._life.counted():
                stream = await runtime.async_generate(**kwargs, rid=rid)
                while not answer.has_ended:
                    output = await self._life.waits.next(stream)
                    if output is None:
                        raise EngineError("SGLang ended an answer without a finish reason")
                    if (delta := answer.on_output(output)) is not None:
                        yield delta
        except ValueError as error:  # how SGLang refuses a request
            answer.has_ended = True
            raise InvalidRequestError(f"SGLang refused the request: {error}") from error
        finally:
            if not answer.has_ended and not self._life.is_stopping:
                manager.abort_request(rid=rid)
            if stream is not None:
                with suppress(RuntimeError):  # it is being cancelled already
                    await stream.aclose()
