"""Native kernels for one step on a CPU: projections of few tokens, new keys and values, attention over pages.

Their specification is the torch code in model.py, which runs wherever these kernels do not: on GPUs, in float16, and
where the extension was not built.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from kvmesh.protocol import native
from kvmesh.workers.engines.torch.batch import PagedRows, StepBatch, ToldRows
from kvmesh.workers.engines.torch.cache import PagedKv
from kvmesh.workers.engines.torch.config import ModelConfig
from kvmesh.workers.engines.torch.cpu import bfloat16_by, cpu_flags, is_amd

NO_KERNELS = "no native kernels: not built, KVMESH_NATIVE=0, float16, or heads of an odd size"

_MAX_HEAD_DIM = 512
_MAX_GROUP = 64
_AVX2_LANES = 8
_WIDENED_ROWS = 1024
_LARGE_HIDDEN_SIZE = 1024  # from here on a product is worth the 0.4 ms that oneDNN takes for each new size
_ALL = 1 << 62
_NATIVE: ModuleType | None = None
if native.WANTED:
    try:
        from kvmesh.workers.engines.torch import _native as _built

        _NATIVE = _built
    except ImportError:  # not built here, or torch without the OpenMP library whose threads the kernels use
        pass


@dataclass(frozen=True, slots=True)
class Projection:
    """Matrices [outputs, inputs] that read the same input, each with its bias. They need not lie side by side."""

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]

    @property
    def num_outputs(self) -> int:
        return sum(len(weight) for weight in self.weights)

    def without_first(self, num_outputs: int) -> "Projection":
        """Return the projection to all outputs but the first: those of the first matrix, or of a part of it."""
        weight, bias = self.weights[0], self.biases[0]
        if len(weight) == num_outputs:
            return Projection(self.weights[1:], self.biases[1:])
        rest = None if bias is None else bias[num_outputs:]
        return Projection((weight[num_outputs:], *self.weights[1:]), (rest, *self.biases[1:]))


@dataclass(frozen=True, slots=True)
class KernelShare:
    """Limit what the kernels do: the rest is faster in torch."""

    linear_tokens: int  # projections of a step with up to so many tokens
    attend_below: int  # attention of rows with fewer new tokens
    further: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear  # projects more tokens than that


class CpuKernels:
    """The kernels of one instruction set, for one dtype. Tensors are contiguous and on the CPU."""

    def __init__(self, module: ModuleType, level: int, name: str, dtype: torch.dtype, share: KernelShare) -> None:
        """Use the kernels of `level` for their share of the work."""
        self.name = name
        self.share = share
        self._module = module
        self._level = level
        self._is_bf16 = int(dtype == torch.bfloat16)
        self._dtype = dtype

    def linear(self, x: Tensor, projection: Projection) -> Tensor:
        """Compute what torch's F.linear computes, for all matrices of `projection`: [T, inputs] -> [T, outputs]."""
        x = x.contiguous()
        num_tokens, depth = x.shape
        width = projection.num_outputs
        out = torch.empty(num_tokens, width, dtype=self._dtype)
        parts: list[int] = []
        for weight, bias in zip(projection.weights, projection.biases, strict=True):
            parts += (weight.data_ptr(), 0 if bias is None else bias.data_ptr(), len(weight))
        self._module.linear(
            self._level,
            torch.get_num_threads(),
            self._is_bf16,
            x.data_ptr(),
            num_tokens,
            depth,
            depth,
            out.data_ptr(),
            width,
            *parts,
        )
        return out

    def prepare(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        rope: Tensor,
        norm: Tensor | None,
        eps: float,
        batch: StepBatch | ToldRows,
        kv: PagedKv,
    ) -> None:
        """Norm and rotate queries and keys in place; write keys and values to the cache.

        queries: [T, num_heads * head_dim]; keys, values: [T, num_kv_heads * head_dim]. Rows may lie apart.
        """
        parts = (queries, keys, values)
        self._module.prepare(
            self._level,
            torch.get_num_threads(),
            self._is_bf16,
            *(part.data_ptr() for part in parts),
            *(part.stride(0) for part in parts),
            len(queries),
            queries.shape[1] // kv.layout.head_dim,
            rope.data_ptr(),
            0 if norm is None else norm.data_ptr(),
            batch.positions.data_ptr(),
            batch.write_blocks.data_ptr(),
            *_cache_arguments(layer, kv),
            eps,
        )

    def add_and_norm(self, x: Tensor, more: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add `more` to `x` in place and return what torch's F.rms_norm makes of it. All [T, width] but the weight."""
        out = torch.empty_like(x)
        self._module.add_and_norm(
            self._level,
            torch.get_num_threads(),
            self._is_bf16,
            x.data_ptr(),
            0 if more is None else more.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            *x.shape,
            eps,
        )
        return out

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        """Compute F.silu(gate) * up: all [T, width]. The rows of `gate` and `up` may lie apart."""
        out = torch.empty(gate.shape, dtype=self._dtype)
        self._module.gate(
            self._level,
            torch.get_num_threads(),
            self._is_bf16,
            gate.data_ptr(),
            up.data_ptr(),
            out.data_ptr(),
            *out.shape,
            gate.stride(0),
            up.stride(0),
        )
        return out

    def attend(self, layer: int, queries: Tensor, rows: PagedRows | None, kv: PagedKv) -> Tensor:
        """Let the queries of `rows` see their sequences' keys: [T, num_heads * head_dim], as `queries`.

        What belongs to no row is not filled in.
        """
        layout = kv.layout
        out = torch.empty(queries.shape, dtype=self._dtype)
        if rows is None:
            return out
        self._module.attend(
            self._level,
            torch.get_num_threads(),
            self._is_bf16,
            queries.data_ptr(),
            out.data_ptr(),
            rows.sequences.data_ptr(),
            rows.tables.data_ptr(),
            len(rows.sequences),
            queries.shape[1] // layout.head_dim,
            queries.stride(0),
            *_cache_arguments(layer, kv),
            layout.head_dim**-0.5,
        )
        return out


def linear_widened(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute F.linear in float32, some rows of `weight` at a time: [T, inputs] -> [T, outputs], in the dtype of x."""
    out = torch.empty(len(x), len(weight), dtype=x.dtype)
    wide = x.to(torch.float32)
    for first in range(0, len(weight), _WIDENED_ROWS):
        rows = slice(first, first + _WIDENED_ROWS)
        out[:, rows] = F.linear(wide, weight[rows].to(torch.float32), None if bias is None else bias[rows].float())
    return out


def linear_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute F.linear by oneDNN, which torch asks for bfloat16 alone: [T, inputs] -> [T, outputs]."""
    projected: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return projected


def has_onednn() -> bool:
    """Return whether torch was built with what `linear_onednn` calls."""
    return hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _cache_arguments(layer: int, kv: PagedKv) -> tuple[int, ...]:
    layout, blocks = kv.layout, kv.blocks
    keys = blocks.data_ptr() + layer * blocks.stride(1) * blocks.element_size()
    return keys, blocks.stride(0), layout.num_kv_heads, layout.block_size, layout.head_dim


def open_kernels(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> CpuKernels | None:
    """Return the fastest kernels for the model; None where torch has to do."""
    kernels = all_kernels(config, device, dtype)
    return kernels[-1] if kernels else None


def all_kernels(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> list[CpuKernels]:
    """Return the kernels of every instruction set that this processor has and the model's heads allow."""
    if _NATIVE is None or device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return []
    if config.head_dim > _MAX_HEAD_DIM or config.group_size > _MAX_GROUP:
        return []
    has_amx = bfloat16_by(cpu_flags()) == "amx_bf16"
    by_onednn = config.hidden_size >= _LARGE_HIDDEN_SIZE and is_amd() and has_onednn()
    return [
        CpuKernels(_NATIVE, level, name, dtype, share_of(lanes, dtype == torch.bfloat16, has_amx, by_onednn))
        for level, name, lanes in _NATIVE.levels()
        if config.head_dim % lanes == 0
    ]


def share_of(lanes: int, is_bf16: bool, has_amx: bool, by_onednn: bool = False) -> KernelShare:
    """Return what the kernels of so many lanes are faster at than torch: docs/decisions/0046-torch-on-cpus.md.

    `by_onednn`: its products are faster in float32 than those that torch takes on this processor, MKL's.
    """
    if is_bf16 and has_amx:  # torch multiplies tiles there
        return KernelShare(1 if lanes >= _AVX2_LANES else 0, 64)
    if lanes < _AVX2_LANES:
        return KernelShare(0, _ALL)
    if lanes == _AVX2_LANES:  # where torch has no fast bfloat16
        return KernelShare(64, _ALL, linear_widened) if is_bf16 else KernelShare(32, _ALL)
    if is_bf16:
        return KernelShare(32, _ALL)
    return KernelShare(64, _ALL, linear_onednn if by_onednn else F.linear)
