"""The executor that computes with torch. See workers/executor.py for the seam."""

import logging
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kvmesh.kvcache.memory import KvRegion
from kvmesh.protocol.errors import ConfigError, EngineError
from kvmesh.protocol.messages import Feature, KvLayout, TokenLogprob
from kvmesh.workers.engines.registry import ENGINES
from kvmesh.workers.engines.torch.batch import StepPlan, check_rows, plan_step, to_device
from kvmesh.workers.engines.torch.buckets import DecodeBuckets
from kvmesh.workers.engines.torch.cache import TORCH_DTYPES, PagedKv, allocate
from kvmesh.workers.engines.torch.config import DTYPES, ModelConfig, read_config
from kvmesh.workers.engines.torch.cpu import bfloat16_by, cpu_flags, keep_freed_memory
from kvmesh.workers.engines.torch.device_blocks import CudaBlocks
from kvmesh.workers.engines.torch.kernels import NO_KERNELS, CpuKernels, open_kernels
from kvmesh.workers.engines.torch.metrics import STEPS, WEIGHTS
from kvmesh.workers.engines.torch.model import Transformer
from kvmesh.workers.engines.torch.sampling import choose, logprobs_of
from kvmesh.workers.engines.torch.weights import ModelWeights, load_weights, random_weights
from kvmesh.workers.executor import Embedded, ModelInfo, Result, Row, Sampled, Scored
from kvmesh.workers.guides import open_guides
from kvmesh.workers.schemas import GuideWhitespace
from kvmesh.workers.weights_service import WeightsInUse, weights_service

log = logging.getLogger(__name__)

FEATURES = tuple(feature for feature in ENGINES["torch"].features if feature is not Feature.GUIDED)
_SMALL_HIDDEN_SIZE = 1024  # below, matrices are too small to be worth sharing between threads


class TorchExecutor:
    """Runs the model of a Hugging Face folder. Methods block and are called one at a time."""

    def __init__(
        self,
        model_path: str | Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        block_size: int = 16,
        num_threads: int | None = None,
        random_weights: bool = False,
        guide_whitespace: GuideWhitespace = "compact",
        weights_service: str = "",
        decode_buckets: Sequence[int] = (),
    ) -> None:
        """Take the settings; `load` reads the model.

        `device`: cpu, cuda, cuda:<n>, or auto: a GPU where there is one. `dtype`: one of DTYPES, or auto: see
        `choose_dtype`. `num_threads`: threads of a CPU's matrix products; None: 1 for small models; 0:
        as torch has it. `random_weights`: read config.json alone, for benchmarks of a shape. `guide_whitespace`,
        `weights_service`: see WorkerConfig. `decode_buckets`: rows of the padded steps of decoding, rising; CPU
        kernels need none.
        """
        self._model_path = Path(model_path)
        self._device_name = device
        self._dtype_name = dtype
        self._block_size = block_size
        self._num_threads = num_threads
        self._random_weights = random_weights
        self._guide_whitespace = guide_whitespace
        self._weights_service = weights_service
        self._weights: WeightsInUse | None = None
        self._bucket_sizes = decode_buckets
        self._buckets: DecodeBuckets | None = None
        self._model: Transformer | None = None
        self._info: ModelInfo | None = None
        self._kv: PagedKv | None = None
        self._device = torch.device("cpu")

    @torch.inference_mode()
    def load(self) -> ModelInfo:
        config = read_config(self._model_path)
        self._device = open_device(self._device_name)
        dtype_name = choose_dtype(self._dtype_name, self._device, config)
        dtype = TORCH_DTYPES[dtype_name]
        self._set_threads(config)
        if self._device.type == "cpu":
            keep_freed_memory()
        try:
            kernels = open_kernels(config, self._device, dtype)
            self._weights = self._load_weights(config, dtype_name, kernels)
            self._model = Transformer(config, self._weights.weights, kernels)
            self._log_path(self._model.kernels, dtype_name)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"the weights of {self._model_path} do not fit on {self._device}: {error}",
                hint="use a smaller model or dtype",
            ) from error
        layout = KvLayout(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=self._block_size,
            dtype=dtype_name,
        )
        guides = open_guides(self._model_path, config.vocab_size, config.eos_token_ids, self._guide_whitespace)
        self._info = ModelInfo(
            layout,
            config.context_tokens,
            config.vocab_size,
            config.eos_token_ids,
            FEATURES,
            guides=guides,
            kv_settings="random" if self._random_weights else "",
        )
        return self._info

    def _load_weights(self, config: ModelConfig, dtype_name: str, kernels: CpuKernels | None) -> WeightsInUse:
        folder, is_random, dtype = self._model_path, self._random_weights, TORCH_DTYPES[dtype_name]

        def load() -> ModelWeights:
            if is_random:
                return random_weights(config, self._device, dtype)
            return load_weights(folder, config, self._device, dtype)

        if not self._weights_service:
            return WeightsInUse(load())
        if self._device.type != "cpu":
            log.warning("weights on %s are this worker's own: the memory service shares those on CPUs", self._device)
            WEIGHTS.labels("own").inc()
            return WeightsInUse(load())
        service = weights_service()

        def key_of() -> bytes:
            return service.key(folder, dtype_name, "" if kernels is None else kernels.name, is_random)

        return service.share(self._weights_service, key_of, f"{folder.resolve().name} {dtype_name}", load)

    def _log_path(self, kernels: CpuKernels | None, dtype_name: str) -> None:
        if kernels is not None:
            log.info("%s; attention reads the KV cache in place: kernels %s", dtype_name, kernels.name)
        elif self._device.type == "cpu":
            log.warning("%s; attention copies all keys and values in every step: %s", dtype_name, NO_KERNELS)
        else:
            sizes = ", ".join(map(str, self._bucket_sizes)) or "none"
            log.info("%s; attention gathers keys and values; CUDA graphs for batches of %s", dtype_name, sizes)
        if self._bucket_sizes and self._device.type == "cpu":
            log.warning("a CPU records no CUDA graphs: decode buckets are of use on a GPU alone")

    def _set_threads(self, config: ModelConfig) -> None:
        count = self._num_threads
        if count is None:
            count = 1 if config.hidden_size < _SMALL_HIDDEN_SIZE else 0
        if self._device.type == "cpu" and count:
            torch.set_num_threads(count)

    def allocate_kv(self, num_blocks: int, memory: memoryview | None) -> KvRegion:
        # Not in inference mode: others write into this memory too.
        if self._info is None or self._model is None:
            raise EngineError("the KV cache was asked for before the model was loaded")
        self._kv = allocate(self._info.layout, num_blocks, memory, self._device)
        if self._bucket_sizes and self._model.kernels is None:
            dtype = TORCH_DTYPES[self._info.layout.dtype]
            self._buckets = DecodeBuckets(self._model, self._kv, dtype, self._bucket_sizes)
        return self._kv.region()

    def device_blocks(self) -> CudaBlocks:
        if self._kv is None:
            raise EngineError("copies of the KV cache were asked for before it was made")
        return CudaBlocks(self._kv.blocks)

    @torch.inference_mode()
    def execute(self, rows: Sequence[Row]) -> list[Result]:
        """See Executor. When it returns, the new keys and values are in memory, ready to be moved."""
        model, info, kv = self._model, self._info, self._kv
        if model is None or info is None or kv is None:
            raise EngineError("a step was asked for before the model was loaded and the KV cache made")
        check_rows(
            rows,
            block_size=self._block_size,
            num_blocks=kv.num_blocks,
            context_tokens=info.context_tokens,
            vocab_size=info.vocab_size,
        )
        results: list[Result] = [None] * len(rows)
        if not rows:
            return results
        plan = plan_step(rows, self._block_size)
        try:
            hidden = self._states(plan, model, kv)
            finished = _finish(model, hidden[: len(plan.sampled_rows)], [rows[i] for i in plan.sampled_rows])
            scored = _score(model, hidden[len(plan.sampled_rows) :], [rows[i] for i in plan.scored_rows])
        except torch.OutOfMemoryError as error:
            raise EngineError(
                f"a step of {len(plan.token_ids)} tokens ran out of memory on {self._device}",
                hint="lower the KV cache's share of memory or the tokens per step",
            ) from error
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for i, result in zip(plan.sampled_rows, finished, strict=True):
            results[i] = result
        for i, logprobs in zip(plan.scored_rows, scored, strict=True):
            sampled = results[i]
            results[i] = Scored(logprobs, sampled if isinstance(sampled, Sampled) else None)
        return results

    def _states(self, plan: StepPlan, model: Transformer, kv: PagedKv) -> Tensor:
        """Compute a step: what the model knows at the tokens that are sampled, then at those that are scored."""
        hidden = None if self._buckets is None else self._buckets.forward(plan)
        if hidden is not None:
            STEPS.labels("bucket").inc()
            return hidden
        paged_below = 0 if model.kernels is None else model.kernels.share.attend_below
        batch = to_device(plan, kv, TORCH_DTYPES[kv.layout.dtype], paged_below)
        hidden = model.forward(batch, kv)
        STEPS.labels("gathered" if batch.gathers else "paged").inc()
        return hidden

    def close(self) -> None:
        self._model = None
        self._kv = None
        self._buckets = None
        in_use, self._weights = self._weights, None
        if in_use is not None:
            in_use.close()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _finish(model: Transformer, hidden: Tensor, rows: Sequence[Row]) -> list[Result]:
    """A token or a vector for each of `rows` from the state after its last token. hidden: [len(rows), hidden]"""
    results: list[Result] = [None] * len(rows)
    for embed, of in ((False, _tokens), (True, _vectors)):
        places = [i for i, row in enumerate(rows) if row.embed is embed]
        if places:
            mine = hidden if len(places) == len(rows) else hidden[places]
            for i, result in zip(places, of(model, mine, [rows[i] for i in places]), strict=True):
                results[i] = result
    return results


def _tokens(model: Transformer, hidden: Tensor, rows: Sequence[Row]) -> Sequence[Result]:
    return choose(model.logits(hidden), rows)


def _score(model: Transformer, hidden: Tensor, rows: Sequence[Row]) -> list[tuple[TokenLogprob, ...]]:
    """Return the logprobs of the `scored_tokens` of each row. hidden: [those of all rows, hidden], row by row.

    Logits are computed for a few tokens at a time: those of a whole chunk of a prompt would take gigabytes.
    """
    if not rows:
        return []
    token_ids = [row.prompt[token] for row in rows for token in row.scored_tokens]
    top = [row.sampling.prompt_logprobs or 0 for row in rows for _ in row.scored_tokens]
    found: list[TokenLogprob] = []
    for first in range(0, len(token_ids), model.scored_at_once):
        part = slice(first, first + model.scored_at_once)
        found += logprobs_of(model.logits(hidden[part]), token_ids[part], top[part])
    ends = list(accumulate(len(row.scored_tokens) for row in rows))
    return [tuple(found[end - len(row.scored_tokens) : end]) for row, end in zip(rows, ends, strict=True)]


def _vectors(model: Transformer, hidden: Tensor, rows: Sequence[Row]) -> Sequence[Result]:
    """The state itself, of length 1."""
    return [Embedded(vector.tobytes()) for vector in F.normalize(hidden.float(), dim=-1).cpu().numpy().astype("<f4")]


def open_device(name: str) -> torch.device:
    """Raises ConfigError if this machine or this torch lacks the device."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if num_gpus else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    kind, _, number = name.partition(":")
    if kind != "cuda" or not (number or "0").isdecimal():
        raise ConfigError(f"no device {name!r}", hint="set the device to cpu, cuda, cuda:<n> or auto")
    if int(number or 0) >= num_gpus:
        raise ConfigError(
            f"device {name} is not here: torch {torch.__version__} sees {num_gpus} CUDA GPUs",
            hint="use --device cpu, or install torch for CUDA and check nvidia-smi",
        )
    return torch.device("cuda", int(number or 0))


def choose_dtype(name: str, device: torch.device, config: ModelConfig, bfloat16: str = bfloat16_by(cpu_flags())) -> str:
    """Return the dtype to compute in. `bfloat16`: the CPU's instructions for it, "" if it has none.

    Small models stay in float32 on any CPU: their weights fit into its caches, so half the bytes gain nothing.
    """
    if name == "auto" and device.type == "cpu":
        pays = bool(bfloat16) and config.dtype == "bfloat16" and config.hidden_size >= _SMALL_HIDDEN_SIZE
        return "bfloat16" if pays else "float32"
    if name == "auto":
        return config.dtype or "bfloat16"
    if name not in DTYPES:
        raise ConfigError(f"no dtype {name!r}", hint=f"set the dtype to auto, {', '.join(DTYPES)}")
    return name
