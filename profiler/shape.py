"""Count what a model computes and reads, from its config.json. Pure except for reading that file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.messages import UNREADABLE

MAX_CONFIG_BYTES = 4 << 20
_BITS = {"fp8": 8, "compressed-tensors": 8, "awq": 4, "gptq": 4, "mxfp4": 4, "modelopt": 8}
_DTYPE_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "float8_e4m3fn": 8}


class ModelShape(Struct, frozen=True, kw_only=True):
    """The sizes of a model. Names with `layer` count one layer. Norms and biases are left out: below 0.1 %."""

    name: str
    layers: int
    hidden: int
    attention_layer_params: int
    dense_layers: int  # layers with one feed-forward network; the others have experts
    dense_layer_params: int  # of one such network
    experts: int = 0
    experts_per_token: int = 0
    expert_params: int = 0  # of one expert of one layer
    shared_layer_params: int = 0  # experts that every token takes, and the gate
    head_params: int
    embedding_params: int  # beside the head; 0: head and embedding are one matrix
    kv_heads: int  # the KV cache can be split over this number of GPUs; 1 for latent attention
    kv_bytes_per_token: int  # of all layers
    prefill_pair_flops: int  # of one query and one key, in all layers
    decode_pair_flops: int
    weight_bits: int
    context_tokens: int

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers

    @property
    def common_params(self) -> int:
        """Return the parameters that every token is multiplied with, without the head."""
        return (
            self.layers * self.attention_layer_params
            + self.dense_layers * self.dense_layer_params
            + self.moe_layers * self.shared_layer_params
        )

    @property
    def routed_params(self) -> int:
        """Return the parameters of all experts together."""
        return self.moe_layers * self.experts * self.expert_params

    @property
    def total_params(self) -> int:
        return self.common_params + self.routed_params + self.head_params + self.embedding_params

    @property
    def active_params(self) -> int:
        """Return the parameters that one token is multiplied with, including the head."""
        routed = self.moe_layers * self.experts_per_token * self.expert_params
        return self.common_params + routed + self.head_params

    def bytes_of(self, params: float) -> float:
        return params * self.weight_bits / 8

    def touched_experts(self, tokens: float) -> float:
        """Return the experts of one layer that `tokens` choose, if they choose evenly: E (1 - (1 - k/E)^tokens)."""
        if not self.experts:
            return 0.0
        return float(self.experts * (1 - (1 - self.experts_per_token / self.experts) ** tokens))


def read_shape(folder: Path, kv_bits: int = 0) -> ModelShape:
    """Return the sizes of the model in `folder`. Raise ConfigError if it has no config.json of a language model.

    `kv_bits` is the size of a value in the KV cache; 0: that of the model's dtype.
    """
    config = config_of(folder)
    path = folder / "config.json" if folder.is_dir() else folder
    try:
        return shape_of(config, folder.resolve().name if folder.is_dir() else folder.resolve().parent.name, kv_bits)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            f"{path} does not say what a decoder's config says: {error!r}", hint="estimates need a language model"
        ) from error


def config_of(folder: Path) -> dict[str, Any]:
    """Return the config.json in `folder`, which may also be the file itself. Raise ConfigError if it is none."""
    path = folder / "config.json" if folder.is_dir() else folder
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"{path} is too large for a model's config.json")
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ConfigError(f"no model config at {path}: {error.strerror}", hint="name a Hugging Face folder") from error
    except UNREADABLE as error:
        raise ConfigError(f"{path} is no model config: {error}", hint="name a Hugging Face folder") from error


def shape_of(config: Mapping[str, Any], name: str, kv_bits: int = 0) -> ModelShape:
    """Return the sizes. Raise KeyError, TypeError or ValueError if the config is not a language model's."""
    text = config.get("text_config") or config
    hidden, layers, heads = (int(text[key]) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    bits = _DTYPE_BITS.get(str(text.get("torch_dtype") or text.get("dtype") or "bfloat16"), 16)
    attention = _latent_attention if text.get("kv_lora_rank") else _grouped_attention
    experts = _experts(text, hidden, layers)
    head_params = hidden * int(text["vocab_size"])
    tied = bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        dense_layer_params=3 * hidden * int(text["intermediate_size"]),
        head_params=head_params,
        embedding_params=0 if tied else head_params,
        weight_bits=_weight_bits(text, config, bits),
        context_tokens=int(text.get("max_position_embeddings") or 8192),
        **attention(text, hidden, layers, heads, kv_bits or min(bits, 16)),
        **experts,
    )


def _grouped_attention(text: Mapping[str, Any], hidden: int, layers: int, heads: int, kv_bits: int) -> dict[str, int]:
    kv_heads = int(text.get("num_key_value_heads") or heads)
    head_dim = int(text.get("head_dim") or hidden // heads)
    pair_flops = 4 * layers * heads * head_dim
    return {
        "attention_layer_params": hidden * head_dim * (2 * heads + 2 * kv_heads),
        "kv_heads": kv_heads,
        "kv_bytes_per_token": layers * 2 * kv_heads * head_dim * kv_bits // 8,
        "prefill_pair_flops": pair_flops,
        "decode_pair_flops": pair_flops,
    }


def _latent_attention(text: Mapping[str, Any], hidden: int, layers: int, heads: int, kv_bits: int) -> dict[str, int]:
    """Count latent attention: one vector per token replaces keys and values, and decoding works on it directly."""
    rank, rope, nope, value = (
        int(text[key]) for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    query_rank = int(text.get("q_lora_rank") or 0)
    query = query_rank * (hidden + heads * (nope + rope)) if query_rank else hidden * heads * (nope + rope)
    return {
        "attention_layer_params": query
        + hidden * (rank + rope)
        + rank * heads * (nope + value)
        + heads * value * hidden,
        "kv_heads": 1,
        "kv_bytes_per_token": layers * (rank + rope) * kv_bits // 8,
        "prefill_pair_flops": 2 * layers * heads * (nope + rope + value),
        "decode_pair_flops": 2 * layers * heads * (2 * rank + rope),
    }


def _experts(text: Mapping[str, Any], hidden: int, layers: int) -> dict[str, int]:
    """Count the experts. Every family of models names them differently."""
    names = ("num_local_experts", "n_routed_experts", "num_experts")
    count = next((int(text[name]) for name in names if text.get(name)), 0)
    if not count:
        return {"dense_layers": layers}
    inner = int(text.get("moe_intermediate_size") or text["intermediate_size"])
    shared = int(text.get("n_shared_experts") or 0) * inner + int(text.get("shared_expert_intermediate_size") or 0)
    every = int(text.get("decoder_sparse_step") or text.get("moe_layer_freq") or 1)
    dense = int(text.get("first_k_dense_replace") or 0)
    sparse = (layers - dense) // every - len(text.get("mlp_only_layers") or ())
    return {
        "dense_layers": layers - sparse,
        "experts": count,
        "experts_per_token": int(text["num_experts_per_tok"]),
        "expert_params": 3 * hidden * inner,
        "shared_layer_params": 3 * hidden * shared + hidden * count,
    }


def _weight_bits(text: Mapping[str, Any], config: Mapping[str, Any], bits: int) -> int:
    quantization = config.get("quantization_config") or text.get("quantization_config")
    if not quantization:
        return bits
    given = quantization.get("bits") or quantization.get("w_bit")
    return int(given or _BITS.get(str(quantization.get("quant_method", "")), bits))
