"""Rules that every estimator keeps, and rooflines of models and GPUs whose figures are known."""

import json
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.lab.bench.engine_steps import SHAPES
from kvmesh.profiler.aiconfigurator import AiConfigurator
from kvmesh.profiler.commands.estimate import EstimateConfig, main, open_estimator
from kvmesh.profiler.estimate import Estimator, estimate_profile
from kvmesh.profiler.gpus import GPUS, find_gpu
from kvmesh.profiler.grid import WorkerLimits
from kvmesh.profiler.roofline import Roofline, Shares
from kvmesh.profiler.shape import ModelShape, read_shape, shape_of
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.profile import check_profile, read_profile
from kvmesh.workers.engines.mapping import parse_mapping
from tests.support.budget import examples

# As the models' own config.json say.
DEEPSEEK_V3 = {
    "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "n_shared_experts": 1, "first_k_dense_replace": 3, "moe_layer_freq": 1, "vocab_size": 129280,
    "max_position_embeddings": 163840, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip
MIXTRAL = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000,
    "max_position_embeddings": 32768, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_30B_A3B = {
    "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "decoder_sparse_step": 1, "vocab_size": 151936, "max_position_embeddings": 40960, "torch_dtype": "bfloat16",
}  # fmt: skip


def llama() -> ModelShape:
    return read_shape(SHAPES / "llama-8b")


@pytest.mark.parametrize(
    ("config", "total_billions", "active_billions"),
    [(DEEPSEEK_V3, 671, 37), (MIXTRAL, 46.7, 12.9), (QWEN3_30B_A3B, 30.5, 3.3)],
)
def test_parameters_are_counted_as_the_models_makers_do(
    config: dict[str, object], total_billions: float, active_billions: float
) -> None:
    """Makers count the embedding among what is active, or not: that is the tolerance."""
    shape = shape_of(config, "m")
    assert shape.total_params / 1e9 == pytest.approx(total_billions, rel=0.01)
    assert shape.active_params / 1e9 == pytest.approx(active_billions, rel=0.1)


def test_kv_bytes_of_grouped_and_of_latent_attention() -> None:
    assert llama().kv_bytes_per_token == 128 * 1024
    assert shape_of(DEEPSEEK_V3, "m").kv_bytes_per_token == 61 * (512 + 64) * 2
    assert read_shape(SHAPES / "llama-8b", kv_bits=8).kv_bytes_per_token == 64 * 1024


def test_weights_of_fp8_models_take_a_byte() -> None:
    shape = shape_of(DEEPSEEK_V3, "m")
    assert shape.weight_bits == 8
    assert shape.bytes_of(10) == 10


def test_a_language_model_within_a_vision_model_is_found() -> None:
    assert shape_of({"text_config": MIXTRAL, "vision_config": {}}, "m") == shape_of(MIXTRAL, "m")


def test_a_step_reads_the_experts_that_its_tokens_choose() -> None:
    shape = shape_of(MIXTRAL, "m")
    assert shape.touched_experts(1) == pytest.approx(2)
    assert shape.touched_experts(1000) == pytest.approx(8)
    assert llama().touched_experts(5) == 0


def test_a_file_that_is_no_model_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model config"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": 3}')
    with pytest.raises(ConfigError, match="does not say what a decoder's config says"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(ConfigError, match="is no model config"):
        read_shape(tmp_path)


# --- every estimator --------------------------------------------------------------------------------------


def roofline_of(tmp_path: Path) -> Estimator:
    return Roofline(llama(), GPUS["h200"], parse_mapping("tp2"))


def aiconfigurator_of(tmp_path: Path) -> Estimator:
    pytest.importorskip("aiconfigurator", reason="pip install 'kvmesh[aiconfigurator]'")
    folder = SHAPES / "llama-8b"
    settings = EstimateConfig(model_path=str(folder), provider="aiconfigurator")
    estimator, notes = open_estimator(settings, read_shape(folder), GPUS["h200"], parse_mapping("tp2"))
    assert "aiconfigurator" in notes
    return estimator


@pytest.mark.parametrize("make", [roofline_of, aiconfigurator_of])
class TestEveryEstimator:
    def test_longer_prompts_and_larger_batches_take_longer(
        self, make: Callable[[Path], Estimator], tmp_path: Path
    ) -> None:
        estimator = make(tmp_path)
        prompts = [estimator.prefill_s(isl) for isl in (100, 1000, 4000)]
        batches = [estimator.decode_s(batch, 2048) for batch in (1, 16, 128)]
        contexts = [estimator.decode_s(64, context) for context in (100, 1000, 4000)]
        for times_s in (prompts, batches, contexts):
            assert times_s[0] > 0
            assert all(a <= b for a, b in pairwise(times_s))

    def test_estimates_are_near_known_figures_of_an_8b_model(
        self, make: Callable[[Path], Estimator], tmp_path: Path
    ) -> None:
        """The data sheet allows 2 x 8e9 x 4000 / 2 / 989e12 = 32 ms and 8e9 x 2 / 2 / 4.8e12 = 1.7 ms."""
        estimator = make(tmp_path)
        assert 0.032 < estimator.prefill_s(4000) < 0.1
        assert 0.0017 < estimator.decode_s(1, 100) < 0.006

    def test_limits_are_within_the_memory(self, make: Callable[[Path], Estimator], tmp_path: Path) -> None:
        limits = make(tmp_path).limits(64)
        assert limits.max_num_seqs == 64
        assert 1_000_000 < limits.total_kv_tokens < 2 * 141e9 / (128 * 1024)


# --- the roofline -----------------------------------------------------------------------------------------


@given(
    st.sampled_from(list(GPUS)),
    st.sampled_from(["tp1", "tp2", "tp4", "tp8"]),
    st.integers(1, 8000),
    st.integers(1, 8000),
    st.integers(1, 500),
    st.integers(1, 500),
)
def test_more_work_never_takes_less_time(gpu: str, mapping: str, isl: int, more: int, batch: int, others: int) -> None:
    roofline = Roofline(llama(), GPUS[gpu], parse_mapping(mapping))
    assert roofline.prefill_s(isl) <= roofline.prefill_s(isl + more)
    assert roofline.decode_s(batch, isl) <= roofline.decode_s(batch + others, isl)
    assert roofline.decode_s(batch, isl) <= roofline.decode_s(batch, isl + more)


@given(st.integers(100, 8000), st.floats(0.1, 1.0), st.floats(0.1, 1.0))
def test_nothing_is_faster_than_the_data_sheet(isl: int, compute: float, memory: float) -> None:
    shape, gpu = llama(), GPUS["h100"]
    roofline = Roofline(shape, gpu, parse_mapping("tp1"), Shares(compute=compute, memory=memory))
    matrices = shape.active_params - shape.head_params
    assert roofline.prefill_s(isl) > 2 * matrices * isl / gpu.bf16_flops_s
    assert roofline.decode_s(1, isl) > (2 * shape.active_params + isl * shape.kv_bytes_per_token) / gpu.memory_bytes_s


def test_only_a_cache_of_grouped_heads_is_split() -> None:
    grouped = [Roofline(llama(), GPUS["h100"], parse_mapping(name)) for name in ("tp1", "tp8", "tp16")]
    assert [r.kv_bytes_per_gpu / 1024 for r in grouped] == [128, 16, 16]
    latent = shape_of(DEEPSEEK_V3, "m")
    whole = latent.kv_bytes_per_token
    assert Roofline(latent, GPUS["h200"], parse_mapping("tp8")).kv_bytes_per_gpu == whole
    assert Roofline(latent, GPUS["h200"], parse_mapping("tep8")).kv_bytes_per_gpu == whole


def test_data_parallel_attention_has_room_for_more_latent_caches() -> None:
    """The reason why large MoE models are decoded that way."""
    shape = shape_of(DEEPSEEK_V3, "m")
    tp, dep = (Roofline(shape, GPUS["h200"], parse_mapping(name)).limits(256) for name in ("tp16", "dep16"))
    assert dep.total_kv_tokens > 8 * tp.total_kv_tokens


def test_a_data_parallel_worker_computes_a_prompt_on_every_rank() -> None:
    shape = shape_of(QWEN3_30B_A3B, "m")
    mapping = parse_mapping("dep8")
    profile = estimate_profile(
        Roofline(shape, GPUS["h100"], mapping), shape, GPUS["h100"], mapping, engine="vllm", max_num_seqs=256, notes=""
    )
    assert profile.dp_size == 8
    one = Roofline(shape, GPUS["h100"], parse_mapping("tp1"))
    assert profile.prefill_s(4096) < 2 * one.prefill_s(4096)


def test_a_model_that_does_not_fit_says_what_it_needs() -> None:
    with pytest.raises(ConfigError, match=r"m needs 6\d\d\.\d GB .* each GPU of tp1.*more GPUs"):
        Roofline(shape_of(DEEPSEEK_V3, "m"), GPUS["h200"], parse_mapping("tp1")).limits(1)


def test_mappings_that_a_model_cannot_have_are_refused() -> None:
    with pytest.raises(ConfigError, match="has none; use tp4"):
        Roofline(llama(), GPUS["h100"], parse_mapping("dep4"))
    with pytest.raises(ConfigError, match="cannot be spread evenly"):
        Roofline(shape_of(MIXTRAL, "m"), GPUS["h100"], parse_mapping("tep3"))
    for name in ("tp", "tp0", "pp4", "tp9999", "4"):
        with pytest.raises(ConfigError, match="no mapping"):
            parse_mapping(name)
    with pytest.raises(ConfigError, match=r"b300.*h200"):
        find_gpu("b300")


@settings(max_examples=examples(30))
@given(
    st.sampled_from([llama(), *(shape_of(c, "m") for c in (MIXTRAL, QWEN3_30B_A3B))]), st.sampled_from(["tp4", "tp8"])
)
def test_estimated_profiles_are_valid_and_grow_with_the_work(shape: ModelShape, name: str) -> None:
    gpu, mapping = GPUS["h200"], parse_mapping(name)
    profile = estimate_profile(
        Roofline(shape, gpu, mapping), shape, gpu, mapping, engine="vllm", max_num_seqs=256, notes=""
    )
    check_profile(profile, name)
    assert profile.prefill is not None
    assert profile.decode is not None
    assert all(a < b for a, b in pairwise(profile.prefill.ttft_s))
    for column in range(len(profile.decode.context_tokens)):
        assert all(a <= b for a, b in pairwise(row[column] for row in profile.decode.itl_s))


def test_the_command_writes_fitting_mappings_and_names_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    argv = ["--model-path", str(tmp_path), "--gpu", "b200", "--out-dir", str(tmp_path / "out")]
    assert main([*argv, *(word for name in ("tp4", "tp8", "dep8") for word in ("--mapping", name))]) == 0
    told = capsys.readouterr()
    assert told.out.split() == [str(tmp_path / "out" / name) for name in ("tp8.json", "dep8.json")]
    assert "tp4 is left out" in told.err
    profile = read_profile(tmp_path / "out" / "dep8.json")
    assert (profile.gpus, profile.dp_size, profile.provider) == (8, 8, "roofline")
    assert (tmp_path / "out" / "dep8.npz").exists()
    with pytest.raises(ConfigError, match=r"no mapping of .* can be estimated"):
        main([*argv, "--mapping", "tp1"])


def test_a_provider_without_its_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "aiconfigurator", None)
    monkeypatch.setitem(__import__("sys").modules, "aiconfigurator.cli", None)
    monkeypatch.setitem(__import__("sys").modules, "aiconfigurator.cli.api", None)
    config = EstimateConfig(model_path=str(SHAPES / "llama-8b"), provider="aiconfigurator")
    with pytest.raises(ConfigError, match=r"pip install 'kvmesh\[aiconfigurator\]'"):
        open_estimator(config, llama(), GPUS["h100"], parse_mapping("tp1"))


def _no_limits(max_num_seqs: int) -> WorkerLimits:
    raise NotImplementedError


def test_a_config_without_architectures_is_refused_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    api = SimpleNamespace(cli_estimate=None)
    for name, module in (("aiconfigurator", api), ("aiconfigurator.cli", api), ("aiconfigurator.cli.api", api)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("kvmesh.profiler.aiconfigurator.version", lambda name: "1")
    for folder in SHAPES.iterdir():
        config = json.loads((folder / "config.json").read_text())
        assert config.pop("architectures"), "the shapes of this repository work with every estimator"
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ConfigError, match="has no `architectures`"):
            AiConfigurator(tmp_path, GPUS["h200"], parse_mapping("tp2"), "vllm", _no_limits)
