"""A model's weights: from safetensors files, or random ones of the same shapes."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from protocol.errors import ConfigError
from workers.engines.torch.config import ModelConfig

_FLOAT_FORMATS = ("F32", "BF16", "F16")  # safetensors' names


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer. Matrices are [outputs, inputs]; those that read the same input are fused along the
    outputs.
    """

    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden]
    qkv_bias: Tensor | None
    qk_norm: Tensor | None  # [num_heads + num_kv_heads, head_dim]
    o: Tensor  # [hidden, num_heads * head_dim]
    o_bias: Tensor | None
    post_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]
    gate_up_bias: Tensor | None
    down: Tensor  # [hidden, intermediate]
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    embed: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    lm_head: Tensor  # [vocab, hidden]; `embed` itself where the model ties them


class WeightSource(Protocol):
    def fill(self, name: str, into: Tensor) -> None:
        """Write the tensor of that name into `into`, converting its dtype. Raises ConfigError."""


def load_weights(folder: Path, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> ModelWeights:
    """Read model.safetensors, or the files that model.safetensors.index.json names.

    Raises ConfigError that names the tensor which is missing or has another shape.
    """
    with _open_checkpoint(folder) as source:
        return _build(source, config, device, dtype)


def random_weights(config: ModelConfig, device: torch.device, dtype: torch.dtype, seed: int = 0) -> ModelWeights:
    """Weights that keep activations near unit size, made on the device: for benchmarks of a shape."""
    return _build(_RandomSource(device, seed), config, device, dtype)


def _build(source: WeightSource, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> ModelWeights:
    def read(*parts: tuple[str, tuple[int, ...]]) -> Tensor:
        """Tensors (name, shape), put one after the other along their first dimension."""
        fused = torch.empty((sum(shape[0] for _, shape in parts), *parts[0][1][1:]), device=device, dtype=dtype)
        for (name, _), part in zip(parts, fused.split_with_sizes([shape[0] for _, shape in parts]), strict=True):
            source.fill(name, part)
        return fused

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
            qkv=read(*((f"{name}.weight", (size, hidden)) for name, size in qkv)),
            qkv_bias=read(*((f"{name}.bias", (size,)) for name, size in qkv)) if config.qkv_bias else None,
            qk_norm=qk_norm,
            o=read((f"{attn}.o_proj.weight", (hidden, q_size))),
            o_bias=read((f"{attn}.o_proj.bias", (hidden,))) if config.o_bias else None,
            post_norm=read((f"{prefix}.post_attention_layernorm.weight", (hidden,))),
            gate_up=read(*((f"{name}.weight", (size, hidden)) for name, size in gate_up)),
            gate_up_bias=(read(*((f"{name}.bias", (size,)) for name, size in gate_up)) if config.mlp_bias else None),
            down=read((f"{mlp}.down_proj.weight", (hidden, inter))),
            down_bias=read((f"{mlp}.down_proj.bias", (hidden,))) if config.mlp_bias else None,
        )

    vocab = (config.vocab_size, hidden)
    embed = read(("model.embed_tokens.weight", vocab))
    return ModelWeights(
        embed=embed,
        layers=tuple(layer(index) for index in range(config.num_layers)),
        norm=read(("model.norm.weight", (hidden,))),
        lm_head=embed if config.tie_word_embeddings else read(("lm_head.weight", vocab)),
    )


class _RandomSource:
    """Norms are one, biases zero, matrices normal with the variance 1 / inputs."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)

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

    def fill(self, name: str, into: Tensor) -> None:
        file = self._files.get(name)
        if file is None:
            raise ConfigError(f"{self._folder} has no tensor {name}", hint=f"it has {_examples(self._files)}")
        stored = file.get_slice(name)
        shape = tuple(stored.get_shape())
        if shape != tuple(into.shape):
            raise ConfigError(
                f"tensor {name} in {self._folder} has shape {shape}, config.json asks for {tuple(into.shape)}",
                hint="take weights and config.json from the same model",
            )
        if stored.get_dtype() not in _FLOAT_FORMATS:
            raise ConfigError(
                f"tensor {name} in {self._folder} is stored as {stored.get_dtype()}",
                hint=f"the torch engine reads {', '.join(_FLOAT_FORMATS)}",
            )
        into.copy_(file.get_tensor(name))


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
