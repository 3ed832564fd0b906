"""A model's weights: from safetensors files, or random ones of the same shapes."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvmesh.protocol.errors import ConfigError
from kvmesh.workers.engines.torch.config import ModelConfig
from kvmesh.workers.engines.torch.kernels import Projection

_FLOAT_FORMATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # by safetensors' names


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer."""

    input_norm: Tensor  # [hidden]
    qkv: Projection  # hidden -> (num_heads + 2 * num_kv_heads) * head_dim
    qk_norm: Tensor | None  # [num_heads + num_kv_heads, head_dim]
    o: Projection  # num_heads * head_dim -> hidden
    post_norm: Tensor  # [hidden]
    gate_up: Projection  # hidden -> 2 * intermediate
    down: Projection  # intermediate -> hidden


@dataclass(frozen=True, slots=True)
class ModelWeights:
    embed: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    lm_head: Projection  # hidden -> vocab; `embed` itself where the model ties them


class WeightSource(Protocol):
    def mapped(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Return the tensor as it lies in its file, without a copy; None if it cannot be. Raises ConfigError."""

    def fill(self, name: str, into: Tensor) -> None:
        """Write the tensor of that name into `into`, converting its dtype. Raises ConfigError."""


def load_weights(folder: Path, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> ModelWeights:
    """Read model.safetensors, or the files that model.safetensors.index.json names.

    On a CPU, matrices of the same dtype stay in the file, mapped: the file must not be overwritten while they are used.

    Raises ConfigError that names the tensor which is missing or has another shape.
    """
    with _open_checkpoint(folder) as source:
        return _build(source, config, device, dtype)


def random_weights(config: ModelConfig, device: torch.device, dtype: torch.dtype, seed: int = 0) -> ModelWeights:
    """Weights that keep activations near unit size, made on the device: for benchmarks of a shape."""
    return _build(_RandomSource(device, seed), config, device, dtype)


class _Reader:
    """Take a model's tensors from a source: mapped where dtype and device allow it, else copied."""

    def __init__(self, source: WeightSource, device: torch.device, dtype: torch.dtype) -> None:
        self._source = source
        self._device = device
        self._dtype = dtype

    def read(self, *parts: tuple[str, tuple[int, ...]]) -> Tensor:
        """Copy tensors (name, shape), one after the other along their first dimension."""
        shape = (sum(shape[0] for _, shape in parts), *parts[0][1][1:])
        fused = torch.empty(shape, device=self._device, dtype=self._dtype)
        for (name, _), part in zip(parts, fused.split_with_sizes([shape[0] for _, shape in parts]), strict=True):
            self._source.fill(name, part)
        return fused

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        mapped = self._mapped(name, shape)
        return self.read((name, shape)) if mapped is None else mapped

    def project(self, outputs: Sequence[tuple[str, int]], num_inputs: int, has_bias: bool) -> Projection:
        """Return matrices (name, outputs): as they lie in the file, or else copied side by side."""
        found = [self._mapped(f"{name}.weight", (size, num_inputs)) for name, size in outputs]
        weights = tuple(weight for weight in found if weight is not None)
        if len(weights) == len(outputs):
            return Projection(
                weights, tuple(self.take(f"{n}.bias", (size,)) if has_bias else None for n, size in outputs)
            )
        weight = self.read(*((f"{name}.weight", (size, num_inputs)) for name, size in outputs))
        bias = self.read(*((f"{name}.bias", (size,)) for name, size in outputs)) if has_bias else None
        return Projection((weight,), (bias,))

    def _mapped(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        return self._source.mapped(name, shape, self._dtype) if self._device.type == "cpu" else None


def _build(source: WeightSource, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> ModelWeights:
    reader = _Reader(source, device, dtype)
    read, take, project = reader.read, reader.take, reader.project
    hidden, inter, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim

    def layer(index: int) -> LayerWeights:
        prefix = f"model.layers.{index}"
        attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv = ((f"{attn}.q_proj", q_size), (f"{attn}.k_proj", kv_size), (f"{attn}.v_proj", kv_size))
        gate_up = ((f"{mlp}.gate_proj", inter), (f"{mlp}.up_proj", inter))
        qk_norm = None
        if config.qk_norm:
            q_norm = read((f"{attn}.q_norm.weight", (head_dim,)))
            k_norm = read((f"{attn}.k_norm.weight", (head_dim,)))
            qk_norm = torch.cat((q_norm.expand(config.num_heads, -1), k_norm.expand(config.num_kv_heads, -1)))
        return LayerWeights(
            input_norm=read((f"{prefix}.input_layernorm.weight", (hidden,))),
            qkv=project(qkv, hidden, config.qkv_bias),
            qk_norm=qk_norm,
            o=project([(f"{attn}.o_proj", hidden)], q_size, config.o_bias),
            post_norm=read((f"{prefix}.post_attention_layernorm.weight", (hidden,))),
            gate_up=project(gate_up, hidden, config.mlp_bias),
            down=project([(f"{mlp}.down_proj", hidden)], inter, config.mlp_bias),
        )

    vocab = (config.vocab_size, hidden)
    embed = take("model.embed_tokens.weight", vocab)
    return ModelWeights(
        embed=embed,
        layers=tuple(layer(index) for index in range(config.num_layers)),
        norm=read(("model.norm.weight", (hidden,))),
        lm_head=Projection((embed if config.tie_word_embeddings else take("lm_head.weight", vocab),), (None,)),
    )


class _RandomSource:
    """Norms are one, biases zero, matrices normal with the variance 1 / inputs."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)

    def mapped(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        return None

    def fill(self, name: str, into: Tensor) -> None:
        if into.dim() == 1:
            into.fill_(0.0 if name.endswith(".bias") else 1.0)
        else:
            into.normal_(0.0, into.shape[-1] ** -0.5, generator=self._generator)


class _Checkpoint:
    """Tensors of open safetensors files, by name."""

    def __init__(self, folder: Path, files: dict[str, Any]) -> None:
        """Read from `files`: the open file of each tensor."""
        self._folder = folder
        self._files = files

    def mapped(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Return the tensor where safetensors has mapped its file: all workers of a host share the pages."""
        file = self._file(name, shape)
        if _FLOAT_FORMATS[file.get_slice(name).get_dtype()] != dtype:
            return None
        tensor: Tensor = file.get_tensor(name)
        return tensor

    def fill(self, name: str, into: Tensor) -> None:
        into.copy_(self._file(name, tuple(into.shape)).get_tensor(name))

    def _file(self, name: str, expected: tuple[int, ...]) -> Any:
        """Return the open file with the tensor of that name. Raise ConfigError if its shape or type is another."""
        file = self._files.get(name)
        if file is None:
            raise ConfigError(f"{self._folder} has no tensor {name}", hint=f"it has {_examples(self._files)}")
        stored = file.get_slice(name)
        shape = tuple(stored.get_shape())
        if shape != expected:
            raise ConfigError(
                f"tensor {name} in {self._folder} has shape {shape}, config.json asks for {expected}",
                hint="take weights and config.json from the same model",
            )
        if stored.get_dtype() not in _FLOAT_FORMATS:
            raise ConfigError(
                f"tensor {name} in {self._folder} is stored as {stored.get_dtype()}",
                hint=f"the torch engine reads {', '.join(_FLOAT_FORMATS)}",
            )
        return file


@contextmanager
def _open_checkpoint(folder: Path) -> Iterator[_Checkpoint]:
    with ExitStack() as stack:
        try:
            files = {name: stack.enter_context(_open(folder / name)) for name in _file_names(folder)}
            by_tensor = {tensor: file for file in files.values() for tensor in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ConfigError(f"{folder} has a damaged safetensors file: {error}", hint="download it again") from error
        yield _Checkpoint(folder, by_tensor)


def _open(path: Path) -> Any:
    if not path.is_file():
        raise ConfigError(f"{path} is missing", hint="download the model again")
    return safe_open(path, framework="pt", device="cpu")


def _file_names(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists() or not index.exists():
        return ["model.safetensors"]
    try:
        weight_map = msgspec.json.decode(index.read_bytes(), type=dict[str, Any]).get("weight_map")
        names = sorted(set(msgspec.convert(weight_map, dict[str, str]).values()))
    except msgspec.DecodeError as error:
        raise ConfigError(f"{index} is damaged: {error}", hint="download the model again") from error
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ConfigError(f"{index} names {outside[0]!r}", hint="it may only name files beside it")
    return names


def _examples(names: dict[str, Any]) -> str:
    return f"{len(names)} tensors, for example {', '.join(sorted(names)[:3])}" if names else "none at all"
