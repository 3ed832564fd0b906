"""The torch engine reads a Hugging Face folder, and refuses what it cannot compute."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvmesh.protocol.errors import ConfigError
from kvmesh.workers.engines.torch.config import ModelConfig, RopeConfig, read_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 128,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def read(folder: Path, generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    """Read a Llama's config.json with `changes`; a change to None leaves the key out."""
    keys = {key: value for key, value in {**LLAMA, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(keys))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_config(folder)


def test_what_a_file_leaves_out_has_the_defaults_of_transformers(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (6, 8, 1e-6)
    assert config.rope == RopeConfig("default", theta=10_000.0, original_context_tokens=128)
    assert not config.tie_word_embeddings
    assert config.eos_token_ids == ()
    assert config.dtype is None


@pytest.mark.parametrize(
    ("changes", "qkv", "o", "mlp", "qk_norm"),
    [
        ({}, False, False, False, False),
        ({"attention_bias": True}, True, True, False, False),
        ({"mlp_bias": True}, False, False, True, False),
        ({"model_type": "qwen2"}, True, False, False, False),
        ({"model_type": "qwen3"}, False, False, False, True),
        ({"model_type": "qwen3", "attention_bias": True}, True, True, False, True),
    ],
)
def test_each_model_type_has_its_biases_and_norms(
    tmp_path: Path, changes: dict[str, Any], qkv: bool, o: bool, mlp: bool, qk_norm: bool
) -> None:
    config = read(tmp_path, **changes)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == (qkv, o, mlp, qk_norm)


def test_both_forms_of_rope_settings_mean_the_same(tmp_path: Path) -> None:
    new = read(tmp_path, rope_parameters={**LLAMA3_SCALING, "rope_theta": 5e5})
    old = read(tmp_path, rope_scaling=LLAMA3_SCALING, rope_theta=5e5)
    assert new.rope == old.rope == RopeConfig("llama3", 5e5, 8.0, 1.0, 4.0, 64)


def test_the_oldest_files_call_the_rope_type_type(tmp_path: Path) -> None:
    assert read(tmp_path, rope_scaling={"type": "linear", "factor": 2.0}).rope.rope_type == "linear"


def test_end_of_sequence_tokens_are_those_of_both_files(tmp_path: Path) -> None:
    config = read(tmp_path, eos_token_id=7, generation={"eos_token_id": [9, 7]})
    assert config.eos_token_ids == (7, 9)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_dtype_of_the_checkpoint_is_read_under_both_names(tmp_path: Path, key: str) -> None:
    assert read(tmp_path, **{key: "bfloat16"}).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma"}, r"model_type 'gemma'; .*llama, qwen2, qwen3"),
        ({"model_type": None}, "model_type None"),
        ({"hidden_size": 0}, r"hidden_size"),
        ({"hidden_size": "wide"}, r"hidden_size"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_attention_heads": 5}, "hidden_size 48 and 5 attention heads"),
        ({"num_key_value_heads": 4}, "6 attention heads and 4 KV heads"),
        ({"head_dim": 7}, "heads of 7 dimensions"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, r"'yarn'; .*default, linear, llama3"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' lacks factor"),
        ({"rope_scaling": {**LLAMA3_SCALING, "high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rotates a part"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "sliding window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding window"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantized weights \(awq\)"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, **changes)


def test_a_window_that_is_not_used_is_no_obstacle(tmp_path: Path) -> None:
    read(tmp_path, model_type="qwen2", sliding_window=4096, use_sliding_window=False)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"cannot read {tmp_path}.*Hugging Face"):
        read_config(tmp_path)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not a JSON object"):
        read_config(tmp_path)
