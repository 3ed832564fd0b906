"""Estimate how fast a worker could be, from what its GPUs compute and read in a second. Pure.

A step takes the longer of arithmetic and memory, then the exchange between its GPUs, then a fixed overhead. Real
kernels reach shares of a data sheet's rates. The shares here are the same for all models: an estimate compares
mappings and shows what is out of reach, but it is not a measurement. docs/profiler.md says how exact it is.
"""

from msgspec import Struct

from kvmesh.profiler.gpus import Gpu
from kvmesh.profiler.grid import WorkerLimits
from kvmesh.profiler.shape import ModelShape
from kvmesh.protocol.errors import ConfigError
from kvmesh.workers.engines.mapping import MappingKind, ParallelMapping


class Shares(Struct, frozen=True, kw_only=True):
    """The shares of the data sheet's rates that are reached."""

    compute: float = 0.7
    memory: float = 0.8
    link: float = 0.7
    usable_memory: float = 0.9  # share of a GPU's memory for weights and KV
    reserve_bytes: float = 2e9  # of that memory, for activations and graphs
    overhead_s: float = 0.001  # launches, sampling and scheduling of a step
    exchange_s: float = 10e-6  # latency of one collective operation


class Roofline:
    """An `Estimator` from data sheets."""

    name = "roofline"

    def __init__(self, shape: ModelShape, gpu: Gpu, mapping: ParallelMapping, shares: Shares | None = None) -> None:
        """Raise ConfigError if the model cannot be spread by this mapping."""
        if mapping.kind != MappingKind.TP and not shape.experts:
            raise ConfigError(
                f"{mapping.name} distributes experts, {shape.name} has none", hint=f"use tp{mapping.gpus}"
            )
        if mapping.kind != MappingKind.TP and shape.experts % mapping.gpus:
            raise ConfigError(
                f"{shape.experts} experts of {shape.name} cannot be spread evenly over {mapping.gpus} GPUs",
                hint="take a mapping whose number divides it",
            )
        self._shape = shape
        self._gpu = gpu
        self._mapping = mapping
        self._shares = shares or Shares()
        self._parts = 1 if mapping.kind == MappingKind.DEP else mapping.gpus  # of attention and what all tokens share

    def limits(self, max_num_seqs: int) -> WorkerLimits:
        """Return what the worker can hold. Raise ConfigError if the model does not fit."""
        shape, gpu, mapping = self._shape, self._gpu, self._mapping
        usable = gpu.memory_bytes * self._shares.usable_memory - self._shares.reserve_bytes
        free = usable - self.weight_bytes_per_gpu
        if free < self.kv_bytes_per_gpu:
            raise ConfigError(
                f"{shape.name} needs {self.weight_bytes_per_gpu / 1e9:.1f} GB for its weights on each GPU of "
                f"{mapping.name}, {gpu.name} has {usable / 1e9:.1f} GB for weights and KV",
                hint="take a mapping with more GPUs",
            )
        return WorkerLimits(
            context_tokens=shape.context_tokens,
            total_kv_tokens=int(free / self.kv_bytes_per_gpu) * mapping.ranks,
            max_num_seqs=max_num_seqs,
        )

    @property
    def weight_bytes_per_gpu(self) -> float:
        shape = self._shape
        shared = (shape.common_params + shape.head_params) / self._parts
        return shape.bytes_of(shared + shape.routed_params / self._mapping.gpus) + 2 * shape.embedding_params / (
            self._parts
        )

    @property
    def kv_bytes_per_gpu(self) -> float:
        """Return the KV bytes of one token on each GPU. With more GPUs than KV heads, heads are stored repeatedly."""
        return self._shape.kv_bytes_per_token / min(self._parts, self._shape.kv_heads)

    def prefill_s(self, isl_tokens: int) -> float:
        """Return the time of a prompt on every rank."""
        shape, tokens = self._shape, isl_tokens * self._mapping.ranks
        per_token = shape.active_params - shape.head_params
        flops = float(2 * per_token * tokens + 2 * shape.head_params * self._mapping.ranks)
        flops += shape.prefill_pair_flops * isl_tokens**2 / 2 * self._mapping.ranks  # half of the pairs are causal
        return self._step_s(flops, self._weights_read(tokens), tokens)

    def decode_s(self, batch: int, context_tokens: int) -> float:
        shape = self._shape
        flops = batch * (2 * shape.active_params + shape.decode_pair_flops * context_tokens)
        kv_bytes = batch / self._mapping.ranks * context_tokens * self.kv_bytes_per_gpu
        return self._step_s(flops, self._weights_read(batch) + kv_bytes, batch)

    def _weights_read(self, tokens: int) -> float:
        """Return the bytes of weights that each GPU reads."""
        shape = self._shape
        routed = shape.moe_layers * shape.touched_experts(tokens) * shape.expert_params / self._mapping.gpus
        return shape.bytes_of((shape.common_params + shape.head_params) / self._parts + routed)

    def _step_s(self, flops: float, bytes_per_gpu: float, tokens: int) -> float:
        """Return the time of a step. `flops` and `tokens` are those of the whole worker."""
        shares, gpu = self._shares, self._gpu
        compute_s = flops / self._mapping.gpus / (gpu.flops_s(self._shape.weight_bits) * shares.compute)
        memory_s = bytes_per_gpu / (gpu.memory_bytes_s * shares.memory)
        return max(compute_s, memory_s) + self._exchange_s(tokens) + shares.overhead_s

    def _exchange_s(self, tokens: int) -> float:
        """Return the time of the exchange between GPUs.

        tp and tep take two all-reduces in each layer. In dep, tokens go to their experts and come back.
        """
        shape, gpus = self._shape, self._mapping.gpus
        if gpus == 1:
            return 0.0
        others = (gpus - 1) / gpus
        if self._mapping.kind == MappingKind.DEP:
            count = 2 * shape.moe_layers
            moved = count * tokens / gpus * shape.experts_per_token * shape.hidden * 2 * others
        else:
            count = 2 * shape.layers
            moved = count * tokens * shape.hidden * 2 * 2 * others
        return moved / (self._gpu.link_bytes_s * self._shares.link) + count * self._shares.exchange_s
