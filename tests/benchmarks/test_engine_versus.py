"""The torch engine beside vLLM: what is compared, and that our side answers."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks.engine_steps import PARTS, SHAPES, parts_of
from benchmarks.engine_versus import (
    OURS,
    PYTHON,
    THEIRS,
    RunningSide,
    main,
    ratio,
    room_gib,
    side_environment,
    step_model,
    write_checkpoint,
)
from cluster.tiny_model import CHECKPOINT_DIR
from protocol.errors import ConfigError, EngineError


def test_a_ratio_is_the_median_of_pairs() -> None:
    assert ratio([2.0, 9.0, 1.0], [1.0, 1.0, 1.0]) == 2.0


def test_without_vllm_the_error_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PYTHON, raising=False)
    with pytest.raises(ConfigError, match=PYTHON):
        main([])


def test_an_unknown_dtype_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="int4"):
        main(["--dtypes", "float32,int4"])


def test_both_have_room_for_the_largest_batch() -> None:
    gib = room_gib(step_model(SHAPES / "qwen3-0.6b", "bfloat16"), 512)
    assert gib == 3  # 36 sequences of 576 tokens, 112 KiB each
    assert side_environment(THEIRS, gib)["VLLM_CPU_KVCACHE_SPACE"] == "3"


@pytest.mark.long
def test_our_side_loads_the_written_checkpoint_and_answers(tmp_path: Path) -> None:
    write_checkpoint(CHECKPOINT_DIR, tmp_path, "float32")
    side = RunningSide(OURS, sys.executable, tmp_path, "float32", 16)
    try:
        assert side.ask({"prefill": 1}) > 0
        assert side.ask({"decode": 8}) > 0
        assert side.rss_bytes() > 0
    finally:
        side.close()


def test_a_side_that_fails_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((CHECKPOINT_DIR / "config.json").read_bytes())
    with pytest.raises(EngineError, match=r"model\.safetensors is missing"):
        RunningSide(OURS, sys.executable, tmp_path, "float32", 16)


def test_the_parts_of_a_step_are_shares_of_it() -> None:
    import torch

    parts = parts_of(lambda: torch.nn.functional.linear(torch.ones(64, 512), torch.ones(512, 512)))
    assert set(parts) == {*PARTS, "python"}
    assert sum(parts.values()) == pytest.approx(1, abs=0.01)
    assert parts["projections"] > 0
