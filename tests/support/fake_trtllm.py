"""TensorRT-LLM without a model: what `workers.engines.trtllm` uses of the package, with the shapes of its LLM API.

From its source and reference, release 1.3 to 1.4.0rc1: `LLM.generate_async`, `get_kv_cache_capacity`, `_check_health`
(llmapi/llm.py), results that are one object per request with all tokens so far (executor/result.py), SamplingParams and
GuidedDecodingParams (sampling_params.py), DisaggregatedParams (disaggregated_params.py), events as its
KVCacheEventSerializer writes them (_utils.py), iteration statistics as its /metrics gives them.

Tokens are those of tests.support.toy_model. The LLMs of one `FakeTrtllm` can fetch from each other.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kvmesh.workers.engines.trtllm.arguments import Variant
from kvmesh.workers.engines.trtllm.runtime import Llm, Trtllm
from tests.support.toy_model import Event, PagedCache, StoredBlocks, next_token

CONTEXT_TOKENS = 4096
VERSION = "1.3.0"
FIELDS = frozenset(
    {
        "model",
        "backend",
        "tensor_parallel_size",
        "enable_attention_dp",
        "kv_cache_config",
        "cache_transceiver_config",
        "guided_decoding_backend",
        "enable_iter_perf_stats",
        "scheduler_config",
        "max_batch_size",
        "max_seq_len",
    }
)
AUTODEPLOY_FIELDS = FIELDS - {"guided_decoding_backend"} | {"world_size", "compile_backend"}

_EOS = 2
_U64 = 0xFFFF_FFFF_FFFF_FFFF


class RequestError(RuntimeError):
    """The request cannot be done."""


@dataclass(kw_only=True)
class SamplingParams:
    max_tokens: int = 32
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    logprobs: int | None = None
    guided_decoding: "GuidedDecodingParams | None" = None


@dataclass(kw_only=True)
class GuidedDecodingParams:
    json: str | None = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False


@dataclass(kw_only=True)
class DisaggregatedParams:
    request_type: str | None = None
    first_gen_tokens: list[int] | None = None
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None
    disagg_request_id: int | None = None
    ctx_dp_rank: int | None = None
    ctx_info_endpoint: str | None = None


@dataclass
class Seen:
    tokens: list[int]
    params: SamplingParams
    disaggregated: DisaggregatedParams | None
    streaming: bool

    @property
    def is_generation_only(self) -> bool:
        return self.disaggregated is not None and self.disaggregated.request_type == "generation_only"


class FakeTrtllm:
    """The package, and the network over which its LLMs move KV."""

    def __init__(self, num_blocks: int = 256) -> None:
        self.num_blocks = num_blocks
        self.llms: list[FakeLlm] = []
        self.offered: dict[int, bytes] = {}  # opaque state by request id
        self._ids = itertools.count(1 << 42)

    def package(self) -> Trtllm:
        return Trtllm(
            version=VERSION,
            fields=lambda variant: FIELDS if variant is Variant.PYTORCH else AUTODEPLOY_FIELDS,
            launch=self._launch,
            sampling_params=SamplingParams,
            guided_decoding=GuidedDecodingParams,
            disaggregated_params=DisaggregatedParams,
            request_error=RequestError,
            request_id=lambda machine_id: next(self._ids) << 10 | machine_id,
        )

    def _launch(self, variant: Variant, kwargs: dict[str, Any]) -> Llm:
        if unknown := kwargs.keys() - (FIELDS if variant is Variant.PYTORCH else AUTODEPLOY_FIELDS):
            raise ValueError(f"unexpected keyword arguments: {sorted(unknown)}")
        llm = FakeLlm(self, kwargs)
        self.llms.append(llm)
        return llm


@dataclass
class _Output:
    """CompletionOutput."""

    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | None = None
    disaggregated_params: DisaggregatedParams | None = None


class _Result:
    """RequestOutput: a step changes it when it is read."""

    def __init__(self, llm: "FakeLlm", *, streaming: bool) -> None:
        self.outputs = [_Output()]
        self.finished = False
        self.cached_tokens = 0
        self.aborted = False
        self._llm = llm
        self._streaming = streaming
        self._steps: asyncio.Queue[tuple[list[int], str | None]] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None

    def push(self, tokens: list[int], reason: str | None = None) -> None:
        self._steps.put_nowait((tokens, reason))

    def abort(self) -> None:
        self.aborted = True
        if self.task is not None:
            self.task.cancel()
        self._llm.running.discard(self)
        self.push([], "cancelled")

    def __aiter__(self) -> "_Result":
        return self

    async def __anext__(self) -> "_Result":
        if self.finished:
            raise StopAsyncIteration
        while True:
            tokens, reason = await self._steps.get()
            output = self.outputs[0]
            output.token_ids.extend(tokens)
            output.logprobs.extend(self._llm.logprobs(self, tokens))
            output.finish_reason = reason
            self.finished = reason is not None
            if self.finished or self._streaming:
                return self


class FakeLlm:
    """Stands for `LLM`: implements kvmesh.workers.engines.trtllm.runtime.Llm."""

    def __init__(self, network: FakeTrtllm, kwargs: dict[str, Any]) -> None:
        self.kwargs = kwargs
        self.args = SimpleNamespace(max_seq_len=CONTEXT_TOKENS, max_batch_size=8)
        self.seen: list[Seen] = []  # the warm-up aside
        self.running: set[_Result] = set()
        self.gate = asyncio.Event()
        self.gate.set()
        self.block_size: int = kwargs["kv_cache_config"]["tokens_per_block"]
        self.cache = PagedCache(network.num_blocks, self.block_size)
        self.is_shut_down = False
        self.events: list[dict[str, Any]] = [
            _event(0, {"type": "created", "num_blocks_per_cache_level": [network.num_blocks, 0]})
        ]
        self._network = network
        self._is_dead = False
        self._next_event = 1
        self._is_warm = False
        self._wanted_logprobs: dict[_Result, int | None] = {}

    def generate_async(
        self,
        inputs: list[int],
        sampling_params: SamplingParams | None = None,
        streaming: bool = False,
        disaggregated_params: DisaggregatedParams | None = None,
        cache_salt: str | None = None,
    ) -> _Result:
        if self._is_dead or self.is_shut_down:
            raise RuntimeError("LLM is shutting down")
        params = sampling_params or SamplingParams()
        if self._is_warm:
            self.seen.append(Seen(inputs, params, disaggregated_params, streaming))
        self._is_warm = True
        result = _Result(self, streaming=streaming)
        self._wanted_logprobs[result] = params.logprobs
        self.running.add(result)
        result.task = asyncio.create_task(self._run(result, list(inputs), params, disaggregated_params, cache_salt))
        return result

    def logprobs(self, result: _Result, tokens: list[int]) -> list[dict[int, Any]]:
        wanted = self._wanted_logprobs[result]
        if not wanted:
            return []
        return [{token + n: SimpleNamespace(logprob=-0.5 - n, rank=n + 1) for n in range(wanted)} for token in tokens]

    def get_kv_cache_capacity(self) -> dict[str, int]:
        return {"maxNumBlocks": self._network.num_blocks, "tokensPerBlock": self.block_size}

    async def get_kv_cache_events_async(self, timeout: float | None = 2) -> AsyncIterator[Any]:
        while self.events:
            yield self.events.pop(0)

    async def get_stats_async(self, timeout: float | None = 2) -> AsyncIterator[Any]:
        yield {
            "iter": 1,
            "numActiveRequests": len(self.running),
            "numQueuedRequests": 0,
            "kvCacheStats": {"usedNumBlocks": len(self.running), "maxNumBlocks": self._network.num_blocks},
        }

    def _check_health(self) -> bool:
        return not self._is_dead

    def die(self) -> None:
        self._is_dead = True

    def shutdown(self) -> None:
        self.is_shut_down = True

    async def _run(
        self,
        result: _Result,
        sequence: list[int],
        params: SamplingParams,
        disaggregated: DisaggregatedParams | None,
        salt: str | None,
    ) -> None:
        kind = None if disaggregated is None else disaggregated.request_type
        answer: list[int] = []
        result.cached_tokens = self.cache.cached_tokens(sequence, None, salt)
        if kind == "generation_only":
            assert disaggregated is not None
            request_id = disaggregated.disagg_request_id or disaggregated.ctx_request_id
            assert request_id is not None
            assert self._network.offered.pop(request_id) == disaggregated.opaque_state
            answer = list(disaggregated.first_gen_tokens or [])
            sequence += answer
        untold = list(answer)  # the given token comes with the second one
        limit = 1 if kind == "context_only" else params.max_tokens
        while (reason := _reason(answer, params, limit)) is None:
            await self.gate.wait()
            await asyncio.sleep(0)
            answer.append(next_token(sequence))
            sequence.append(answer[-1])
            if _reason(answer, params, limit) is None:
                result.push([*untold, answer[-1]])
                untold = []
            else:
                untold.append(answer[-1])
        self.cache.store(sequence, None, salt)
        self._tell()
        if kind == "context_only":
            assert disaggregated is not None and disaggregated.disagg_request_id is not None
            state = b"state of " + str(disaggregated.disagg_request_id).encode()
            self._network.offered[disaggregated.disagg_request_id] = state
            result.outputs[0].disaggregated_params = DisaggregatedParams(
                request_type="context_only",
                first_gen_tokens=list(answer),
                ctx_request_id=7,
                opaque_state=state,
                disagg_request_id=disaggregated.disagg_request_id,
            )
        self.running.discard(result)
        result.push(untold, reason)

    def _tell(self) -> None:
        for event in self.cache.take_news():
            self.events.append(_event(self._next_event, _data(event)))
            self._next_event += 1


def _reason(answer: list[int], params: SamplingParams, limit: int) -> str | None:
    if not answer:
        return None
    stops = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else (_EOS,))}
    if answer[-1] in stops:
        return "stop"
    return "length" if len(answer) >= limit else None


def _event(event_id: int, data: dict[str, Any]) -> dict[str, Any]:
    return {"event_id": event_id, "data": data, "window_size": CONTEXT_TOKENS}


def _data(event: Event) -> dict[str, Any]:
    if not isinstance(event, StoredBlocks):
        return {"type": "removed", "block_hashes": [event.block_hash & _U64]}
    return {
        "type": "stored",
        "parent_hash": None if event.parent is None else event.parent & _U64,
        "blocks": [
            {
                "type": "stored_block",
                "block_hash": block_hash & _U64,
                "tokens": [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens],
                "cache_level": 0,
                "priority": 35,
                "cache_salt": event.salt,
            }
            for block_hash, tokens in zip(event.hashes, event.tokens, strict=True)
        ],
    }
