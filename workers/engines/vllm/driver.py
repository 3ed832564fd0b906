"""The only module that imports vLLM: from plain values to its objects and back, and from its errors to ours.

Its imports take many seconds and its start longer: `open_driver` and `open_node` are for a thread.
"""

import asyncio
import contextlib
import io
import json
import os
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

import psutil

from kvmesh.protocol.errors import ConfigError, EngineError, InvalidRequestError, kind_of
from kvmesh.workers.engines.vllm.guard import Guard
from kvmesh.workers.engines.vllm.transfer import check_can_run
from kvmesh.workers.engines.vllm.translate import VllmQuestion, VllmStep

SHUTDOWN_S = 10.0

ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"  # by its short name, "uni", vLLM refuses it on a CPU


@dataclass(frozen=True, slots=True)
class VllmFacts:
    """Facts that vLLM decided when it started."""

    block_size: int
    total_blocks: int  # of each data-parallel rank
    block_bytes: int  # of all layers; 0: not known
    context_tokens: int
    max_num_seqs: int
    eos_token_ids: frozenset[int]
    tasks: frozenset[str]
    guesses: bool = False  # speculative decoding is on
    kv_settings: str = ""  # what changes KV beside the files: dtypes, quantisation, overrides of the configuration
    uses_xgrammar: bool = False  # for guides
    kept_adapters: int = 0  # beyond them vLLM reads adapters again from their folders


@dataclass(slots=True)
class RankLoad:
    """The load of one data-parallel rank after its last step."""

    running: int = 0
    waiting: int = 0
    used_share: float = 0.0  # of its KV blocks, by requests


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    name: str  # for vLLM: unique to its content
    number: int  # >= 1, unique to one loading
    path: str


class Driver(Protocol):
    facts: VllmFacts  # known after `prepare`
    loads: Sequence[RankLoad]  # by rank

    async def prepare(self) -> None:
        """Prepare for use. Call it once, on the event loop that the driver is used on."""

    def event_endpoints(self) -> list[tuple[str, str]]:
        """Return for each rank where its KV events are published, and where they are replayed."""

    def generate(
        self, question: VllmQuestion, request_id: str, salt: str | None, adapter: LoadedAdapter | None, rank: int
    ) -> AsyncGenerator[VllmStep, None]:
        """Yield the steps of one answer. Closing it aborts the request. Raises InvalidRequestError, EngineError."""

    async def embed(
        self, prompt: Sequence[int], request_id: str, salt: str | None, adapter: LoadedAdapter | None
    ) -> bytes:
        """Return the vector: float32 little endian, of length 1. Raise InvalidRequestError, EngineError."""

    async def reset_prefix_cache(self) -> bool:
        """False: blocks are in use, nothing was done."""

    async def sleep(self, level: int) -> None: ...

    async def wake(self) -> None: ...

    async def profile(self, start: bool) -> None:
        """Raises InvalidRequestError if vLLM was started without a profiler."""

    async def add_adapter(self, adapter: LoadedAdapter) -> None:
        """Raises InvalidRequestError if it cannot be loaded."""

    async def remove_adapter(self, adapter: LoadedAdapter) -> None: ...

    def failure(self) -> str:
        """Return why vLLM can serve no more, "" while it can."""

    async def close(self) -> None: ...


class NodeProcesses(Protocol):
    """The processes of vLLM on a node that does not lead."""

    def failure(self) -> str:
        """Return why the processes compute no more, "" while they do."""

    async def close(self) -> None: ...


def open_driver(flags: Sequence[str], environ: Mapping[str, str]) -> Driver:
    """Blocks until vLLM is ready. What `environ` says is set where it is not set yet: vLLM's processes inherit it.

    Raises ConfigError if vLLM is not installed or refuses the flags, EngineError if it does not start.
    """
    config = _engine_config(flags, environ, headless=False)
    try:
        return _VllmDriver(config)
    except Exception as error:
        raise EngineError(f"vLLM did not start: {error}", hint="its own log, above, says why") from error


def open_node(flags: Sequence[str], environ: Mapping[str, str]) -> NodeProcesses:
    """Start vLLM on a node that does not lead, as `open_driver` does. Blocks until the leading node has been found."""
    config = _engine_config(flags, environ, headless=True)
    try:
        return _VllmNode(config)
    except Exception as error:
        hint = "its own log, above, says why; is the node of --master-addr there?"
        raise EngineError(f"vLLM did not start on this node: {error}", hint=hint) from error


def _engine_config(flags: Sequence[str], environ: Mapping[str, str], *, headless: bool) -> Any:
    for name, value in environ.items():
        os.environ.setdefault(name, value)
    try:
        from vllm.engine.arg_utils import AsyncEngineArgs as engine_args  # noqa: N813
        from vllm.utils.argparse_utils import FlexibleArgumentParser as parser  # noqa: N813
    except ImportError as error:
        hint = "`make test-vllm` installs it for the CPU; for GPUs: pip install vllm"
        raise ConfigError(f"the vllm engine needs vLLM: {error}", hint=hint) from error
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            parsed = engine_args.add_cli_args(parser(prog="vllm", add_help=False)).parse_args(list(flags))
    except SystemExit as error:
        reason = (told.getvalue().strip().splitlines() or ["see above"])[-1]
        raise ConfigError(f"vLLM does not know these flags: {reason}", hint="see `vllm serve --help`") from error
    try:
        args = engine_args.from_cli_args(parsed)
        _check_connectors(args)
        _prefer_one_process(args)
        return args.create_engine_config(headless=headless)
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"vLLM refuses its flags: {error}", hint="change what stands after --") from error


def _check_connectors(args: Any) -> None:
    from vllm.platforms import current_platform

    if (told := args.kv_transfer_config) is not None:
        found = {"kv_connector": told.kv_connector, "kv_connector_extra_config": told.kv_connector_extra_config}
        check_can_run(
            found,
            on_cpu=current_platform.is_cpu(),
            has_module=lambda name: find_spec(name) is not None,
            has_adapters=bool(args.enable_lora),
        )


def _prefer_one_process(args: Any) -> None:
    """Choose vLLM's executor of one process for a single rank on a CPU.

    vLLM's default there is a process beside its engine's. The two wait for each other by spinning with `sched_yield`:
    on busy cores a step of 20 ms took 10 s and more. vLLM does it to pin the rank's threads. So the default stays if
    threads are to be pinned, if the flags name an executor, and on several nodes, for which vLLM takes no other.
    """
    from vllm.platforms import current_platform

    num_ranks = args.tensor_parallel_size * args.pipeline_parallel_size * args.prefill_context_parallel_size
    is_free = args.distributed_executor_backend is None and os.environ.get("VLLM_CPU_OMP_THREADS_BIND") == "nobind"
    if current_platform.is_cpu() and num_ranks == 1 and args.nnodes == 1 and is_free:
        args.distributed_executor_backend = ONE_PROCESS


class _VllmDriver:
    def __init__(self, config: Any) -> None:
        from vllm.v1.engine.async_llm import AsyncLLM

        self.facts: VllmFacts
        self.loads: Sequence[RankLoad] = [RankLoad() for _ in range(config.parallel_config.data_parallel_size)]
        with _guarded() as self._guard:
            self._llm: Any = AsyncLLM.from_vllm_config(config, stat_loggers=[_stat_logger(self.loads)])
        self._pulls = PullCounts(self._llm.output_processor)

    async def prepare(self) -> None:
        tasks = frozenset(await self._llm.get_supported_tasks())
        self.facts = _facts(self._llm.vllm_config, tasks)

    def event_endpoints(self) -> list[tuple[str, str]]:
        told = self._llm.get_kv_event_sources()
        return [(told[rank].endpoint, told[rank].replay_endpoint) for rank in range(len(self.loads))]

    async def generate(
        self, question: VllmQuestion, request_id: str, salt: str | None, adapter: LoadedAdapter | None, rank: int
    ) -> AsyncGenerator[VllmStep, None]:
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        params = _sampling(question)
        try:
            outputs = self._llm.generate(
                self._rendered(question.prompt, salt),
                params,
                request_id,
                lora_request=_lora(adapter),
                data_parallel_rank=rank if len(self.loads) > 1 else None,
            )
            with self._pulls.counted(request_id) as pulled:
                async with aclosing(outputs):
                    async for output in outputs:
                        yield _step(output, pulled.tokens)
        except EngineDeadError as error:
            raise EngineError("vLLM's engine process died", hint="see the worker's log") from error
        except EngineGenerateError as error:
            raise EngineError(
                f"vLLM failed the request: {kind_of(error.__cause__ or error)}", hint="see the worker's log"
            ) from error
        except (VLLMClientError, ValueError) as error:
            raise InvalidRequestError(f"vLLM refuses the request: {error}") from error

    async def embed(
        self, prompt: Sequence[int], request_id: str, salt: str | None, adapter: LoadedAdapter | None
    ) -> bytes:
        from vllm import PoolingParams
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        params = PoolingParams(task="embed")
        vector = b""
        try:
            rendered = self._rendered(list(prompt), salt)
            outputs = self._llm.encode(rendered, params, request_id, lora_request=_lora(adapter))
            async with aclosing(outputs):
                async for output in outputs:
                    vector = output.outputs.data.float().cpu().numpy().astype("<f4").tobytes()
        except (EngineDeadError, EngineGenerateError) as error:
            raise EngineError(f"vLLM failed an embedding: {kind_of(error)}", hint="see the worker's log") from error
        except (VLLMClientError, ValueError) as error:
            raise InvalidRequestError(f"vLLM refuses the request: {error}") from error
        return vector

    def _rendered(self, tokens: list[int], salt: str | None) -> Any:
        """Return a prompt of token ids in the form that vLLM's engine takes. Raises vLLM's own errors."""
        from vllm.inputs import TokensPrompt

        prompt = TokensPrompt(prompt_token_ids=tokens, **({"cache_salt": salt} if salt else {}))
        [rendered] = self._llm.renderer.render_cmpl([prompt])
        return rendered

    async def reset_prefix_cache(self) -> bool:
        return bool(await self._llm.reset_prefix_cache())

    async def sleep(self, level: int) -> None:
        await self._llm.sleep(level)

    async def wake(self) -> None:
        await self._llm.wake_up()

    async def profile(self, start: bool) -> None:
        try:
            await (self._llm.start_profile() if start else self._llm.stop_profile())
        except Exception as error:  # vLLM raises plain ones
            hint = 'start the worker with -- --profiler-config \'{"profiler": "torch", ...}\''
            raise InvalidRequestError(f"vLLM cannot profile: {error}", hint=hint) from error

    async def add_adapter(self, adapter: LoadedAdapter) -> None:
        try:
            await self._llm.add_lora(_lora(adapter))
        except Exception as error:  # vLLM raises plain ones
            raise InvalidRequestError(f"vLLM cannot load adapter {adapter.name!r}: {error}", param="path") from error

    async def remove_adapter(self, adapter: LoadedAdapter) -> None:
        await self._llm.remove_lora(adapter.number)

    def failure(self) -> str:
        if self._llm is None:
            return "it was shut down"
        return str(self._llm.dead_error) if self._llm.errored else ""

    async def close(self) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown, timeout=SHUTDOWN_S)
            await asyncio.to_thread(self._guard.close)


@dataclass(slots=True)
class Pulled:
    """Count the tokens of one prompt that came from another worker."""

    tokens: int | None = None  # None: vLLM has not reported it yet


class PullCounts:
    """Reads from vLLM's internal outputs how many tokens of each prompt were pulled.

    A RequestOutput does not tell: on a decode leg its `num_cached_tokens` is the count of the prefill worker.
    """

    def __init__(self, processor: Any) -> None:
        """Follow `processor`, the OutputProcessor of an AsyncLLM."""
        self._running: dict[str, Pulled] = {}
        process_outputs = processor.process_outputs

        def counting(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            for output in outputs:
                if output.prefill_stats is not None:
                    self._note(processor.request_states.get(output.request_id), output.prefill_stats)
            return process_outputs(outputs, *args, **kwargs)

        processor.process_outputs = counting

    @contextmanager
    def counted(self, request_id: str) -> Iterator[Pulled]:
        """Count for the request as long as the block runs."""
        pulled = self._running[request_id] = Pulled()
        try:
            yield pulled
        finally:
            if self._running.get(request_id) is pulled:
                del self._running[request_id]

    def _note(self, state: Any, stats: Any) -> None:
        pulled = None if state is None else self._running.get(state.external_req_id)
        if pulled is not None and pulled.tokens is None:
            pulled.tokens = stats.num_external_cached_tokens


@contextmanager
def _guarded() -> Iterator[Guard]:
    """The processes that vLLM starts in the block do not outlive this one."""
    guard = Guard()
    not_vllms = {child.pid for child in psutil.Process().children()}
    try:
        yield guard
    except BaseException:
        guard.close()
        raise
    guard.watch({child.pid for child in psutil.Process().children()} - not_vllms)


class _VllmNode:
    """Runs what `vllm serve --headless` runs: the ranks of this node for another node's engine, or engines of their own
    that another node's worker feeds.
    """

    def __init__(self, config: Any) -> None:
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        self._executor: Any = None
        self._engines: Any = None
        with _guarded() as self._guard:
            if config.parallel_config.node_rank_within_dp > 0:
                self._executor = MultiprocExecutor(config)
            else:
                self._engines = _engines_of(config)

    def failure(self) -> str:
        if self._executor is not None:
            return "one of its processes ended" if self._executor.is_failed else ""
        ended = self._engines.finished_procs()
        return f"ended: {', '.join(ended)}" if ended else ""

    async def close(self) -> None:
        await asyncio.to_thread((self._executor or self._engines).shutdown)
        await asyncio.to_thread(self._guard.close)


def _engines_of(config: Any) -> Any:
    from vllm.utils.network_utils import get_tcp_uri
    from vllm.v1.engine.utils import CoreEngineProcManager
    from vllm.v1.executor import Executor

    parallel = config.parallel_config
    return CoreEngineProcManager(
        local_engine_count=parallel.data_parallel_size_local,
        start_index=parallel.data_parallel_rank,
        local_start_index=0,
        vllm_config=config,
        local_client=False,
        handshake_address=get_tcp_uri(parallel.data_parallel_master_ip, parallel.data_parallel_rpc_port),
        executor_class=Executor.get_class(config),
        log_stats=True,
    )


def _facts(config: Any, tasks: frozenset[str]) -> VllmFacts:
    cache, model = config.cache_config, config.model_config
    return VllmFacts(
        block_size=cache.block_size,
        total_blocks=cache.num_gpu_blocks // config.parallel_config.data_parallel_size,  # vLLM has their sum
        block_bytes=_block_bytes(config),
        context_tokens=model.max_model_len,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        eos_token_ids=_eos_token_ids(model),
        tasks=tasks,
        guesses=config.speculative_config is not None,
        kv_settings=_kv_settings(config),
        uses_xgrammar=config.structured_outputs_config.backend in ("auto", "xgrammar"),
        kept_adapters=0 if config.lora_config is None else config.lora_config.max_cpu_loras or 0,
    )


def _kv_settings(config: Any) -> str:
    """Return what changes the values of KV beside the model's files. How many GPUs share the work does not."""
    cache, model = config.cache_config, config.model_config
    settings = {
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "kv_dtype": str(model.dtype if cache.cache_dtype == "auto" else cache.cache_dtype).removeprefix("torch."),
        "seed": str(model.seed) if config.load_config.load_format == "dummy" else "",  # of random weights
        "overrides": None if callable(model.hf_overrides) else model.hf_overrides,
    }
    return json.dumps(settings, sort_keys=True, default=repr)


def _block_bytes(config: Any) -> int:
    """Keys and values of all layers, where every layer keeps them."""
    model = config.model_config
    if model.use_mla or model.is_hybrid:
        return 0
    item_bytes = 1 if str(config.cache_config.cache_dtype).startswith("fp8") else model.dtype.itemsize
    num_layers = model.get_num_layers(config.parallel_config)
    num_heads = model.get_total_num_kv_heads()
    return int(2 * num_layers * num_heads * model.get_head_size() * config.cache_config.block_size * item_bytes)


def _eos_token_ids(model: Any) -> frozenset[int]:
    found: set[int] = set()
    for source in (
        getattr(model.hf_config, "eos_token_id", None),
        model.try_get_generation_config().get("eos_token_id"),
    ):
        found.update([source] if isinstance(source, int) else source or [])
    return frozenset(found)


def _sampling(question: VllmQuestion) -> Any:
    """Raises InvalidRequestError."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    try:
        guide = None if question.guide is None else StructuredOutputsParams(**question.guide)
        return SamplingParams(
            **question.sampling,
            output_kind=RequestOutputKind.DELTA,
            structured_outputs=guide,
            extra_args=None if question.kv is None else {"kv_transfer_params": dict(question.kv)},
        )
    except (VLLMClientError, ValueError) as error:
        raise InvalidRequestError(f"vLLM refuses the request: {error}") from error


def _lora(adapter: LoadedAdapter | None) -> Any:
    from vllm.lora.request import LoRARequest

    return None if adapter is None else LoRARequest(adapter.name, adapter.number, adapter.path)


def _step(output: Any, pulled_tokens: int | None) -> VllmStep:
    completion = output.outputs[0]
    return VllmStep(
        token_ids=completion.token_ids,
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
        logprobs=completion.logprobs,
        cached_tokens=output.num_cached_tokens,
        pulled_tokens=pulled_tokens,
        kv=output.kv_transfer_params,
        prompt_logprobs=output.prompt_logprobs or (),
    )


def _stat_logger(loads: Sequence[RankLoad]) -> Any:
    """A class, as vLLM wants it: it makes one per rank. Called on the event loop after every step."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class LoadLogger(StatLoggerBase):  # type: ignore[misc, unused-ignore]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self._rank = engine_index

        def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
            if scheduler_stats is not None:
                load = loads[self._rank]
                load.running = scheduler_stats.num_running_reqs
                load.waiting = scheduler_stats.num_waiting_reqs
                load.used_share = scheduler_stats.kv_cache_usage

        def log_engine_initialized(self) -> None:
            pass

        def log(self) -> None:
            pass

    return LoadLogger
