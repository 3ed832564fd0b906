"""Read what a Hugging Face folder says about its model: config.json and generation_config.json. Needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from kvmesh.protocol.errors import ConfigError

MODEL_TYPES = ("llama", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3")
DTYPES = ("float32", "bfloat16", "float16")
_MAX_BUCKETS = 32
_MAX_BUCKET_ROWS = 1024


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. The fields after `factor` matter to rope_type "llama3" alone."""

    rope_type: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_tokens: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int  # divides num_heads
    head_dim: int
    context_tokens: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # q and k are normed per head
    eos_token_ids: tuple[int, ...]
    dtype: str | None  # of the checkpoint, where it says so

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads


_Size = Annotated[int, Meta(ge=1)]
_Positive = Annotated[float, Meta(gt=0)]


class _ConfigFile(msgspec.Struct, frozen=True):
    """The keys of config.json that matter here; null and absent mean the same."""

    vocab_size: _Size
    hidden_size: _Size
    intermediate_size: _Size
    num_hidden_layers: _Size
    num_attention_heads: _Size
    max_position_embeddings: _Size
    num_key_value_heads: _Size | None = None
    head_dim: _Size | None = None
    hidden_act: str | None = None
    rms_norm_eps: _Positive | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    rope_parameters: dict[str, Any] | None = None  # transformers 5
    rope_scaling: dict[str, Any] | None = None  # transformers 4, with rope_theta beside it
    rope_theta: _Positive | None = None
    original_max_position_embeddings: _Size | None = None
    partial_rotary_factor: float | None = None
    use_sliding_window: bool | None = None
    layer_types: list[str] | None = None
    quantization_config: dict[str, Any] | None = None
    dtype: str | None = None  # transformers 5
    torch_dtype: str | None = None  # transformers 4
    eos_token_id: int | list[int] | None = None


class _RopeFile(msgspec.Struct, frozen=True):
    rope_theta: _Positive | None = None
    factor: _Positive | None = None
    low_freq_factor: _Positive | None = None
    high_freq_factor: _Positive | None = None
    original_max_position_embeddings: _Size | None = None
    partial_rotary_factor: float | None = None


class _GenerationFile(msgspec.Struct, frozen=True):
    eos_token_id: int | list[int] | None = None


def read_config(folder: Path) -> ModelConfig:
    """Read `folder`/config.json, and generation_config.json where there is one.

    Raises ConfigError for what is missing, malformed or not supported.
    """
    path = folder / "config.json"
    raw = _read_json(path)
    model_type = raw.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ConfigError(
            f"{path} has model_type {model_type!r}", hint=f"the torch engine runs {', '.join(MODEL_TYPES)}"
        )
    file = _convert(raw, _ConfigFile, path)
    _refuse_unsupported(file, path)
    num_kv_heads = file.num_key_value_heads or file.num_attention_heads
    return ModelConfig(
        model_type=model_type,
        vocab_size=file.vocab_size,
        hidden_size=file.hidden_size,
        intermediate_size=file.intermediate_size,
        num_layers=file.num_hidden_layers,
        num_heads=file.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(file, num_kv_heads, path),
        context_tokens=file.max_position_embeddings,
        rms_norm_eps=1e-6 if file.rms_norm_eps is None else file.rms_norm_eps,
        rope=_rope(file, path),
        tie_word_embeddings=bool(file.tie_word_embeddings),
        qkv_bias=model_type == "qwen2" or bool(file.attention_bias),
        o_bias=model_type != "qwen2" and bool(file.attention_bias),
        mlp_bias=model_type == "llama" and bool(file.mlp_bias),
        qk_norm=model_type == "qwen3",
        eos_token_ids=_eos_token_ids(file, folder),
        dtype=_dtype(file),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", hint="give the folder of a Hugging Face model"
        ) from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not a JSON object: {error}", hint="download the model again") from error


_T = TypeVar("_T")


def _convert(raw: Mapping[str, Any], kind: type[_T], path: Path) -> _T:
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{path} does not describe a model: {error}", hint="compare it with the model's page"
        ) from error


def _refuse_unsupported(file: _ConfigFile, path: Path) -> None:
    """Raise ConfigError for features that would be computed wrongly if they were ignored."""
    if file.hidden_act not in (None, "silu"):
        raise ConfigError(f"{path} has hidden_act {file.hidden_act!r}", hint="the torch engine has silu only")
    sliding = file.use_sliding_window or "sliding_attention" in (file.layer_types or ())
    if sliding:
        raise ConfigError(f"{path} uses a sliding window", hint="the torch engine has full attention only; use vllm")
    if file.quantization_config is not None:
        method = file.quantization_config.get("quant_method", "unknown")
        raise ConfigError(
            f"{path} describes quantized weights ({method})",
            hint=f"the torch engine reads {', '.join(DTYPES)}; use vllm or the unquantized model",
        )


def _head_dim(file: _ConfigFile, num_kv_heads: int, path: Path) -> int:
    if file.num_attention_heads % num_kv_heads:
        raise ConfigError(
            f"{path} has {file.num_attention_heads} attention heads and {num_kv_heads} KV heads",
            hint="the first has to be a multiple of the second",
        )
    if file.head_dim is None and file.hidden_size % file.num_attention_heads:
        raise ConfigError(
            f"{path} has hidden_size {file.hidden_size} and {file.num_attention_heads} attention heads",
            hint="without a head_dim the first has to be a multiple of the second",
        )
    head_dim = file.head_dim or file.hidden_size // file.num_attention_heads
    if head_dim % 2:
        raise ConfigError(f"{path} has heads of {head_dim} dimensions", hint="rotary embeddings need pairs")
    return head_dim


def _rope(file: _ConfigFile, path: Path) -> RopeConfig:
    """Return the rotary embedding: from `rope_parameters`; older files have `rope_scaling` and a theta beside it."""
    raw = file.rope_scaling or file.rope_parameters or {}
    rope_type = raw.get("rope_type", raw.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise ConfigError(f"{path} has rope type {rope_type!r}", hint=f"the torch engine has {', '.join(ROPE_TYPES)}")
    rope = _convert(raw, _RopeFile, path)
    if (rope.partial_rotary_factor or file.partial_rotary_factor or 1.0) != 1.0:
        raise ConfigError(f"{path} rotates a part of each head", hint="the torch engine rotates whole heads")
    needed = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
    for name in needed.get(rope_type, ()):
        if getattr(rope, name) is None:
            raise ConfigError(f"{path}: rope type {rope_type!r} lacks {name}", hint="download the model again")
    if rope_type == "llama3" and rope.low_freq_factor == rope.high_freq_factor:
        raise ConfigError(f"{path} has equal low_freq_factor and high_freq_factor", hint="the second has to be larger")
    default = RopeConfig()
    return RopeConfig(
        rope_type=rope_type,
        theta=rope.rope_theta or file.rope_theta or default.theta,
        factor=rope.factor or default.factor,
        low_freq_factor=rope.low_freq_factor or default.low_freq_factor,
        high_freq_factor=rope.high_freq_factor or default.high_freq_factor,
        original_context_tokens=(
            file.original_max_position_embeddings
            or rope.original_max_position_embeddings
            or file.max_position_embeddings
        ),
    )


def _eos_token_ids(file: _ConfigFile, folder: Path) -> tuple[int, ...]:
    """Return the ids in config.json, then those that generation_config.json adds."""
    path = folder / "generation_config.json"
    generation = _convert(_read_json(path), _GenerationFile, path) if path.exists() else _GenerationFile()
    ids = [*_as_list(file.eos_token_id), *_as_list(generation.eos_token_id)]
    return tuple(dict.fromkeys(ids))


def _as_list(ids: int | list[int] | None) -> list[int]:
    if ids is None:
        return []
    return ids if isinstance(ids, list) else [ids]


def _dtype(file: _ConfigFile) -> str | None:
    name = (file.dtype or file.torch_dtype or "").removeprefix("torch.")
    return name if name in DTYPES else None


def bucket_sizes(text: str) -> tuple[int, ...]:
    """Return the sizes that `--decode-buckets` lists, rising. Raises ConfigError if one is no size."""
    try:
        sizes = {int(part) for part in text.split(",")} if text.strip() else set()
    except ValueError:
        sizes = {0}
    if len(sizes) > _MAX_BUCKETS or not all(1 <= size <= _MAX_BUCKET_ROWS for size in sizes):
        raise ConfigError(
            f"--decode-buckets {text!r}: no list of batch sizes",
            hint=f"give up to {_MAX_BUCKETS} numbers from 1 to {_MAX_BUCKET_ROWS}, for example 1,2,4,8,16,32",
        )
    return tuple(sorted(sizes))
