"""Implement kvmesh.workers.engine.Engine over TensorRT-LLM's LLM API.

A prefill worker computes the prompt and the first token (`context_only`), and gives what TensorRT-LLM calls the opaque
state. A decode worker continues with the state and the token (`generation_only`). TensorRT-LLM keeps the blocks until
they are fetched or until its `kv_transfer_timeout_ms` is over. It cannot free them earlier: `release` does nothing.
"""

import asyncio
import contextlib
import logging
import secrets
import zlib
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from kvmesh.protocol.errors import ConfigError, EngineError, InvalidRequestError, TransferError, WireError, kind_of
from kvmesh.protocol.events import Digest, KvEvent
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import (
    NO_LAYOUT,
    Delta,
    Embedding,
    EmbedRequest,
    Feature,
    FinishReason,
    GenerateRequest,
    PullReport,
    Role,
    Ticket,
)
from kvmesh.workers.checks import check_embedding, check_generation
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.engine import EngineInfo, EngineLoad
from kvmesh.workers.engines.external.cache import EngineCache
from kvmesh.workers.engines.external.content import EngineContent
from kvmesh.workers.engines.external.launch import Launch
from kvmesh.workers.engines.external.life import EngineLife
from kvmesh.workers.engines.trtllm.arguments import prune, read_arguments
from kvmesh.workers.engines.trtllm.events import RankStats, TrtllmEventReader, read_stats
from kvmesh.workers.engines.trtllm.extension import EXTENSION
from kvmesh.workers.engines.trtllm.runtime import (
    Llm,
    LlmResult,
    Trtllm,
    gpu_blocks,
    is_healthy,
    kv_settings,
    launch,
    load_trtllm,
)
from kvmesh.workers.engines.trtllm.translate import (
    BACKEND,
    ContextState,
    TrtllmAnswer,
    encode_state,
    guide_fields,
    input_ids,
    read_ticket,
    sampling_fields,
    state_of,
)

log = logging.getLogger(__name__)

POLL_TIMEOUT_S = 0.2  # that TensorRT-LLM waits for news
POLL_PAUSE_S = 0.01  # between polls that brought none
POLL_RETRY_S = 1.0
WARM_UP_TIMEOUT_S = 1800.0
DEFAULT_MAX_NUM_SEQS = 64  # where TensorRT-LLM does not say how many
_MACHINES = 1021  # the largest prime of ten bits


class TrtllmEngine:
    """Belongs to the event loop that `start` runs on."""

    def __init__(self, config: WorkerConfig, served_name: str, load: Callable[[], Trtllm] = load_trtllm) -> None:
        """Raises ConfigError for arguments that contradict the settings."""
        self._config = config
        self._arguments = read_arguments(config)
        self._served_name = served_name
        self._model_path = str(Path(config.model_path).resolve())
        self._load = load
        self._trtllm: Trtllm | None = None
        self._launch: Launch[Llm] | None = None
        self._llm: Llm | None = None
        self._life = EngineLife()
        self._reader = TrtllmEventReader(config.block_size)
        self._cache = EngineCache(config.block_size, self._arguments.ranks)
        self._stats: dict[int, RankStats] = {}  # by rank
        self._polls: list[asyncio.Task[None]] = []
        self._content = EngineContent(config.model_path, has_weights=not config.random_weights)
        self.kv_content = self._content.kv_content

    async def start(self, worker_id: WorkerId, address: str) -> EngineInfo:
        self._life.begin(worker_id, address)
        trtllm = self._trtllm = await asyncio.to_thread(self._load)
        fields = await asyncio.to_thread(trtllm.fields, self._arguments.variant)
        kwargs, removed = prune(self._arguments, fields)
        if removed:
            names = ", ".join(sorted(removed))
            log.warning("TensorRT-LLM %s (%s) does not know %s", trtllm.version, self._arguments.variant, names)
        await self._content.begin()
        self._launch = Launch("TensorRT-LLM", lambda: launch(trtllm, self._arguments, kwargs))
        self._llm = llm = await self._launch.result()
        await self._content.loaded(kv_settings(llm))
        self._life.uses_xgrammar("sglang" if self._arguments.uses_xgrammar else "")
        await self._warm_up(trtllm, llm)
        if self._arguments.tells_events:
            await self._take_events(llm)  # the first event has the size of the cache
            self._polls.append(asyncio.create_task(self._poll(self._take_events), name="poll KV events"))
        self._polls.append(asyncio.create_task(self._poll(self._take_stats), name="poll statistics"))
        self._life.info = info = await self._describe(llm)
        log.info("TensorRT-LLM %s (%s) is up", trtllm.version, self._arguments.variant)
        return info

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        info, trtllm, llm = self._ready()
        check_generation(request, info)
        await self._life.try_guide(request)
        if request.offer_kv:
            yield await self._prefill(request, info, trtllm, llm)
            return
        state, report = self._state_of(request)
        disaggregated = None if state is None else _generation_only(trtllm, state)
        result = self._ask(request, info, trtllm, llm, disaggregated, state)
        given = () if state is None else state.first_gen_tokens
        answer = TrtllmAnswer(top_logprobs=request.sampling.top_logprobs, given=given)
        async with contextlib.aclosing(self._deltas(result, answer)) as deltas:
            async for delta in deltas:
                yield delta if report is None else replace(delta, pull=report)
                report = None

    async def embed(self, request: EmbedRequest) -> Embedding:
        check_embedding(request, self._life.check())
        raise EngineError("TensorRT-LLM workers compute no embeddings")

    def release(self, offer_id: int, nonce: int) -> None:
        """Do nothing: TensorRT-LLM frees the blocks by itself, see above."""

    def on_kv_events(self, listener: Callable[[Sequence[KvEvent]], object]) -> None:
        self._cache.listeners.append(listener)

    def kv_snapshot(self) -> list[KvEvent]:
        return self._cache.snapshot()

    def kv_digest(self) -> Digest:
        return self._cache.digest_now

    def load(self) -> EngineLoad:
        """Return TensorRT-LLM's own counts; before it has reported any, what was asked of it."""
        told = self._stats.values()
        used = sum(rank.used_blocks for rank in told)
        return EngineLoad(
            running=sum(rank.active for rank in told) if told else self._life.in_flight,
            waiting=sum(rank.waiting for rank in told),
            used_blocks=used,
            cached_blocks=max(0, self._cache.num_blocks - used),
            total_blocks=0 if self._life.info is None else self._life.info.total_blocks,
            offers=0,
        )

    def check_health(self) -> None:
        self._life.check()
        if self._llm is not None and not is_healthy(self._llm):
            self._life.fail(EngineError("TensorRT-LLM has died", hint="see its log; the worker is started again"))
            self._life.check()

    async def stop(self) -> None:
        if not self._life.stop():
            return
        self._content.close()
        for poll in self._polls:
            poll.cancel()
        await asyncio.gather(*self._polls, return_exceptions=True)
        if self._launch is not None and (launched := await self._launch.ended()) is not None:
            await asyncio.to_thread(launched.shutdown)

    # --- starting -------------------------------------------------------------------------------------

    async def _warm_up(self, trtllm: Trtllm, llm: Llm) -> None:
        """Run one small request, so that all kernels are compiled."""
        params = trtllm.sampling_params(max_tokens=2, ignore_eos=True, detokenize=False)
        try:
            async with asyncio.timeout(WARM_UP_TIMEOUT_S):
                async for _ in llm.generate_async([0, 1, 2, 3], sampling_params=params, streaming=True):
                    pass
        except Exception as error:
            raise EngineError(f"TensorRT-LLM failed its first request: {error!r}", hint="see its log") from error

    async def _describe(self, llm: Llm) -> EngineInfo:
        blocks = await asyncio.to_thread(gpu_blocks, llm) or self._reader.gpu_blocks
        if not blocks or not llm.args.max_seq_len:
            raise ConfigError(
                f"TensorRT-LLM tells of {blocks} KV blocks and a context of {llm.args.max_seq_len} tokens",
                hint="use release 1.3 or later, and set -- --max-seq-len",
            )
        without = () if self._arguments.has_guides else (Feature.GUIDED,)
        return EngineInfo(
            model=self._served_name,
            model_path=self._model_path,
            block_size=self._config.block_size,
            total_blocks=blocks * self._arguments.ranks,
            context_tokens=llm.args.max_seq_len,
            max_num_seqs=llm.args.max_batch_size or DEFAULT_MAX_NUM_SEQS,
            layout=NO_LAYOUT,
            transfer="" if self._config.role is Role.AGGREGATED else BACKEND,
            features=tuple(feature for feature in EXTENSION.features if feature not in without),
            tells_events=self._arguments.tells_events,
        )

    # --- polling --------------------------------------------------------------------------------------

    async def _poll(self, take: Callable[[Llm], Any]) -> None:
        """Poll until cancelled. A failure is logged once; what a poll missed shows in the events' numbers."""
        assert self._llm is not None
        has_complained = False
        while True:
            try:
                took = await take(self._llm)
                has_complained = False
            except Exception as error:
                log.log(logging.DEBUG if has_complained else logging.WARNING, "a poll of TensorRT-LLM: %r", error)
                has_complained = True
                await asyncio.sleep(POLL_RETRY_S)
                continue
            await asyncio.sleep(0 if took else POLL_PAUSE_S)

    async def _take_events(self, llm: Llm) -> bool:
        """Return whether there were any events."""
        took = False
        async for raw in llm.get_kv_cache_events_async(timeout=POLL_TIMEOUT_S):
            took = True
            try:
                news = self._reader.read(raw)
                if news.lost:
                    log.warning("TensorRT-LLM dropped KV events: what it holds is not known any more")
                    self._cache.clear(news.rank)
                self._cache.apply(news.rank, news.events)
            except WireError as error:
                log.warning("%s", error)
        return took

    async def _take_stats(self, llm: Llm) -> bool:
        took = False
        async for raw in llm.get_stats_async(timeout=POLL_TIMEOUT_S):
            took = True
            stats = read_stats(raw)
            if stats is not None and stats.rank < self._arguments.ranks:
                self._stats[stats.rank] = stats
        return took

    # --- serving --------------------------------------------------------------------------------------

    def _ready(self) -> tuple[EngineInfo, Trtllm, Llm]:
        self.check_health()
        assert self._trtllm is not None and self._llm is not None, "a healthy engine has started"
        return self._life.check(), self._trtllm, self._llm

    def _state_of(self, request: GenerateRequest) -> tuple[ContextState | None, PullReport | None]:
        """Return a ticket's state. With a bad ticket the prompt is computed here, and the report says so."""
        if request.ticket is None:
            return None, None
        if self._config.role is not Role.DECODE:
            raise InvalidRequestError("an aggregated TensorRT-LLM worker takes no tickets", hint="set --role decode")
        try:
            self._content.check(request)
            state = read_ticket(request.ticket, request.generated)
        except TransferError as error:
            log.warning("a prompt is computed again: %s", error)
            return None, PullReport(BACKEND, 0, 0, 0.0, str(error))
        return state, PullReport(BACKEND, 0, 0, 0.0)

    def _ask(
        self,
        request: GenerateRequest,
        info: EngineInfo,
        trtllm: Trtllm,
        llm: Llm,
        disaggregated: Any,
        state: ContextState | None = None,
    ) -> LlmResult:
        """Raises InvalidRequestError for what TensorRT-LLM refuses."""
        tokens = input_ids(request, info.context_tokens, state)
        fields = sampling_fields(request, state)
        if request.guide is not None:
            fields["guided_decoding"] = trtllm.guided_decoding(**guide_fields(request.guide))
        optional = {} if request.cache_salt is None else {"cache_salt": request.cache_salt}
        try:
            return llm.generate_async(
                tokens,
                sampling_params=trtllm.sampling_params(**fields),
                streaming=not request.offer_kv,
                disaggregated_params=disaggregated,
                **optional,
            )
        except (ValueError, trtllm.request_error) as error:
            raise InvalidRequestError(f"TensorRT-LLM refused the request: {error}") from error
        except RuntimeError as error:
            raise EngineError(f"TensorRT-LLM takes no request: {kind_of(error)}") from error

    async def _deltas(self, result: LlmResult, answer: TrtllmAnswer) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of one result, which is aborted if it has not ended when this is closed."""
        stream = aiter(result)
        try:
            with self._life.counted():
                while not answer.has_ended:
                    step = await self._step(stream)
                    if (delta := answer.on_result(step)) is not None:
                        yield delta
        finally:
            if not answer.has_ended and not self._life.is_stopping:
                result.abort()

    async def _step(self, stream: Any) -> LlmResult:
        try:
            step: LlmResult | None = await self._life.waits.next(stream)
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"TensorRT-LLM failed a request: {kind_of(error)}") from error
        if step is None:
            raise EngineError("TensorRT-LLM ended an answer without a finish reason")
        return step

    async def _prefill(self, request: GenerateRequest, info: EngineInfo, trtllm: Trtllm, llm: Llm) -> Delta:
        """The first token, with the ticket unless the answer ends there."""
        if self._config.role is not Role.PREFILL:
            raise InvalidRequestError("an aggregated TensorRT-LLM worker offers no KV", hint="set --role prefill")
        params = trtllm.disaggregated_params(request_type="context_only", **self._request_id(trtllm))
        result = self._ask(request, info, trtllm, llm, params)
        answer = TrtllmAnswer(top_logprobs=request.sampling.top_logprobs)
        first: Delta | None = None
        async with contextlib.aclosing(self._deltas(result, answer)) as deltas:
            async for delta in deltas:
                first = delta
        if first is None or not first.token_ids:
            raise EngineError("TensorRT-LLM computed a prompt and no token")
        if first.finish_reason is FinishReason.STOP:
            return first
        if len(request.generated) + len(first.token_ids) >= request.stop.max_tokens:
            return replace(first, finish_reason=FinishReason.LENGTH)
        nonce = secrets.randbits(62) + 1
        ticket = Ticket(
            offer_id=nonce,
            worker_id=self._life.worker_id,
            address=self._life.address,
            backend=BACKEND,
            nonce=nonce,
            num_tokens=len(request.prompt) // 4 + len(request.generated),
            opaque=encode_state(state_of(result.outputs[0].disaggregated_params)),
        )
        return replace(first, finish_reason=None, ticket=ticket)

    def _request_id(self, trtllm: Trtllm) -> dict[str, int]:
        """Return a request id that no other prefill worker gives: 10 bits of it are ours."""
        if trtllm.request_id is None:
            return {}
        return {"disagg_request_id": trtllm.request_id(zlib.crc32(self._life.worker_id.encode()) % _MACHINES)}


def _generation_only(trtllm: Trtllm, state: ContextState) -> Any:
    fields = {
        name: list(value) if isinstance(value := getattr(state, name), tuple) else value
        for name in state.__struct_fields__
    }
    return trtllm.disaggregated_params(
        request_type="generation_only", **{name: value for name, value in fields.items() if value is not None}
    )
