"""The engine benchmark: what it counts, and that it runs."""

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.engine import SHAPES, ModelShape
from kvmesh.tiny_model import CHECKPOINT_DIR
from protocol.errors import ConfigError
from protocol.messages import KvLayout
from workers.executor import ModelInfo


def shape_of(folder: Path) -> ModelShape:
    layout = KvLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=64, dtype="bfloat16")
    return ModelShape.of(folder, ModelInfo(layout, 8192, 128256, ()))


def test_an_8b_model_has_8_billion_parameters_and_128_kib_of_kv_per_token() -> None:
    shape = shape_of(SHAPES / "llama-8b")
    embeddings = shape.head_params  # as many again, which no step multiplies with
    assert 7.9e9 < shape.matrix_params + shape.head_params + embeddings < 8.1e9
    assert shape.kv_bytes_per_token == 128 * 1024


def test_the_least_that_a_step_must_do() -> None:
    shape = shape_of(SHAPES / "llama-8b")
    assert shape.prefill_flops(1) == pytest.approx(2 * (shape.matrix_params + shape.head_params), rel=1e-3)
    assert shape.prefill_flops(2048) > 2048 * 2 * shape.matrix_params
    assert shape.decode_bytes(0, 1000) == shape.weight_bytes
    assert shape.decode_bytes(3, 100) - shape.weight_bytes == 300 * 128 * 1024


def test_it_runs_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--isl-tokens", "40", "--batch", "2", "--context-tokens", "30", "--block-size", "16", "--rounds", "1"]
    assert main(["engine", "--shape", str(CHECKPOINT_DIR), "--device", "cpu", "--json", *flags]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["prefill_tokens_s"] > 0
    assert report["decode_tokens_s"] > 0


def test_an_unknown_shape_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match="llama-8b"):
        main(["engine", "--shape", "nonsense"])
    with pytest.raises(ConfigError, match="engine"):
        main(["nonsense"])
