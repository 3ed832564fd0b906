"""The torch executor around its model: weights, memory, devices, and the steps it refuses."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

from kvmesh.protocol.errors import ConfigError, EngineError  # noqa: E402
from kvmesh.protocol.messages import KvLayout, SamplingParams  # noqa: E402
from kvmesh.workers.engines.torch.config import read_config  # noqa: E402
from kvmesh.workers.engines.torch.executor import TorchExecutor, choose_dtype, open_device  # noqa: E402
from kvmesh.workers.engines.torch.weights import load_weights  # noqa: E402
from kvmesh.workers.executor import Executor, Row, Sampled  # noqa: E402

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "eos_token_id": 3,
    "dtype": "bfloat16",
}
LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder without weights."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def shapes() -> dict[str, tuple[int, ...]]:
    result: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (50, 32), "model.norm.weight": (32,)}
    for index in range(2):
        layer = f"model.layers.{index}"
        result |= {
            f"{layer}.input_layernorm.weight": (32,),
            f"{layer}.post_attention_layernorm.weight": (32,),
            f"{layer}.self_attn.q_proj.weight": (32, 32),
            f"{layer}.self_attn.k_proj.weight": (16, 32),
            f"{layer}.self_attn.v_proj.weight": (16, 32),
            f"{layer}.self_attn.o_proj.weight": (32, 32),
            f"{layer}.self_attn.q_norm.weight": (8,),
            f"{layer}.self_attn.k_norm.weight": (8,),
            f"{layer}.mlp.gate_proj.weight": (48, 32),
            f"{layer}.mlp.up_proj.weight": (48, 32),
            f"{layer}.mlp.down_proj.weight": (32, 48),
        }
    return result


def save(folder: Path, tensors: dict[str, torch.Tensor], name: str = "model.safetensors") -> None:
    safetensors_torch.save_file(tensors, folder / name)


def random_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes().items()}


def executor(folder: Path, **settings: Any) -> TorchExecutor:
    return TorchExecutor(folder, **{"device": "cpu", "block_size": 4, "random_weights": True, **settings})


def ready(folder: Path) -> TorchExecutor:
    made = executor(folder)
    made.load()
    made.allocate_kv(8, None)
    return made


def row(tokens: Sequence[int], start: int, blocks: Sequence[int], sample: bool = True) -> Row:
    return Row("r", tokens, start, blocks, sample, GREEDY, prompt=tokens, output=[])


# what load says


def test_it_is_an_executor(folder: Path) -> None:
    seam: Executor = executor(folder)
    info = seam.load()
    assert info.layout == LAYOUT
    assert (info.context_tokens, info.vocab_size, info.eos_token_ids) == (64, 50, (3,))


def test_random_weights_are_the_same_on_every_start(folder: Path) -> None:
    results = [ready(folder).execute([row([5, 9, 14], 0, [2])]) for _ in range(2)]
    assert results[0] == results[1]
    assert isinstance(results[0][0], Sampled)


# weights


def test_a_missing_tensor_is_named(folder: Path) -> None:
    tensors = random_tensors()
    del tensors["model.layers.1.self_attn.k_norm.weight"]
    save(folder, tensors)
    with pytest.raises(ConfigError, match=r"no tensor model\.layers\.1\.self_attn\.k_norm\.weight"):
        executor(folder, random_weights=False).load()


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder: Path) -> None:
    save(folder, random_tensors() | {"model.layers.0.mlp.up_proj.weight": torch.zeros(40, 32)})
    with pytest.raises(ConfigError, match=r"up_proj.* has shape \(40, 32\), .* asks for \(48, 32\)"):
        executor(folder, random_weights=False).load()


def test_weights_that_are_no_floats_are_refused(folder: Path) -> None:
    save(folder, random_tensors() | {"model.norm.weight": torch.zeros(32, dtype=torch.int8)})
    with pytest.raises(ConfigError, match=r"model\.norm\.weight .* is stored as I8"):
        executor(folder, random_weights=False).load()


def test_a_folder_without_weights_says_which_file_is_missing(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.safetensors is missing"):
        executor(folder, random_weights=False).load()


def test_a_missing_shard_is_named(folder: Path) -> None:
    index = {"weight_map": dict.fromkeys(shapes(), "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"model-00001-of-00001\.safetensors is missing"):
        executor(folder, random_weights=False).load()


def test_an_index_may_not_lead_out_of_the_folder(folder: Path) -> None:
    index = {"weight_map": dict.fromkeys(shapes(), "../other.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"names '\.\./other"):
        executor(folder, random_weights=False).load()


def test_a_damaged_file_is_a_config_error(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ConfigError, match="damaged"):
        executor(folder, random_weights=False).load()


# memory


def test_the_cache_lies_in_the_memory_that_is_given(folder: Path) -> None:
    made = executor(folder)
    made.load()
    memory = bytearray(b"\xff" * (6 * LAYOUT.block_bytes + 10))
    region = made.allocate_kv(6, memoryview(memory))
    assert (region.num_blocks, region.layout, region.device) == (6, LAYOUT, "cpu")
    assert memory[: region.num_bytes] == bytes(region.num_bytes)
    made.execute([row([7, 8], 0, [3])])
    written = memoryview(memory).cast("B")[3 * LAYOUT.block_bytes : 4 * LAYOUT.block_bytes]
    assert any(written)
    assert not any(memory[: 3 * LAYOUT.block_bytes])
    assert region.address == torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


def test_a_block_is_contiguous_with_tokens_in_place(folder: Path) -> None:
    made = executor(folder)
    made.load()
    region = made.allocate_kv(6, None)
    blocks = region.owner
    assert isinstance(blocks, torch.Tensor)
    assert blocks.shape == (6, 2, 2, 2, 4, 8)
    assert blocks.is_contiguous()
    assert region.block_address(1) == blocks[1].data_ptr()
    made.execute([row([7, 8, 9, 10, 11], 0, [4, 2])])
    filled = blocks.abs().sum((1, 2, 3, 5)) > 0
    assert filled.tolist() == [[False] * 4, [False] * 4, [True, False, False, False], [False] * 4, [True] * 4] + [
        [False] * 4
    ]


def test_memory_that_is_too_small_or_readonly_is_refused(folder: Path) -> None:
    made = executor(folder)
    made.load()
    for memory in (bytearray(100), bytes(6 * LAYOUT.block_bytes)):
        with pytest.raises(ConfigError, match=f"{6 * LAYOUT.block_bytes} writable bytes"):
            made.allocate_kv(6, memoryview(memory))


def test_more_blocks_than_fit_anywhere_are_refused(folder: Path) -> None:
    made = executor(folder)
    made.load()
    with pytest.raises(ConfigError, match="ask for fewer blocks"):
        made.allocate_kv(2**45, None)


# steps


def test_rows_that_do_not_sample_have_no_result(folder: Path) -> None:
    results = ready(folder).execute(
        [row([1, 2], 0, [0], sample=False), row([3], 0, [1]), row([4], 0, [2], sample=False)]
    )
    assert [result is None for result in results] == [True, False, True]


def test_a_step_may_sample_nothing_or_be_empty(folder: Path) -> None:
    made = ready(folder)
    assert made.execute([row([1, 2], 0, [0], sample=False)]) == [None]
    assert made.execute([]) == []


def test_a_row_without_room_is_refused(folder: Path) -> None:
    with pytest.raises(EngineError, match="row r ends at token 5, its 1 blocks hold 4"):
        ready(folder).execute([row([1, 2, 3, 4, 5], 0, [0])])


def test_a_step_before_the_cache_exists_is_refused(folder: Path) -> None:
    made = executor(folder)
    with pytest.raises(EngineError, match="before the model was loaded"):
        made.allocate_kv(4, None)
    made.load()
    with pytest.raises(EngineError, match="KV cache made"):
        made.execute([row([1], 0, [0])])


def test_closing_twice_does_nothing(folder: Path) -> None:
    made = ready(folder)
    made.close()
    made.close()


# devices and dtypes


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "cuda:-1", ""])
def test_an_unknown_device_is_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        open_device(name)


def test_a_missing_gpu_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"sees \d+ CUDA GPUs"):
        open_device("cuda:99")


@pytest.mark.parametrize(("dtype", "is_mapped"), [(torch.float32, True), (torch.bfloat16, False)])
def test_matrices_of_the_dtype_asked_for_stay_in_their_file(folder: Path, dtype: torch.dtype, is_mapped: bool) -> None:
    save(folder, {name: torch.ones(shape) for name, shape in shapes().items()})
    weights = load_weights(folder, read_config(folder), torch.device("cpu"), dtype)
    mapped = [
        tuple(int(end, 16) for end in line.split()[0].split("-"))
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith("/model.safetensors")
    ]
    layer = weights.layers[1]
    for matrix in (weights.embed, *layer.qkv.weights, *layer.gate_up.weights, *layer.o.weights):
        assert matrix.dtype == dtype
        assert any(start <= matrix.data_ptr() < end for start, end in mapped) is is_mapped
    assert len(layer.qkv.weights) == (3 if is_mapped else 1)


def test_auto_dtype_is_bfloat16_where_it_pays(folder: Path) -> None:
    small = read_config(folder)
    large = replace(small, hidden_size=1024, dtype="bfloat16")
    cpu = torch.device("cpu")
    assert choose_dtype("auto", cpu, large, "avx512_bf16") == "bfloat16"
    assert choose_dtype("auto", cpu, large, "") == "float32"
    assert choose_dtype("auto", cpu, small, "avx512_bf16") == "float32"
    assert choose_dtype("auto", cpu, replace(large, dtype="float32"), "avx512_bf16") == "float32"


def test_auto_dtype_on_a_gpu_is_that_of_the_checkpoint(folder: Path) -> None:
    config = read_config(folder)
    assert choose_dtype("auto", torch.device("cuda", 0), config) == "bfloat16"
    assert choose_dtype("float16", torch.device("cpu"), config) == "float16"
    with pytest.raises(ConfigError, match="no dtype 'int4'"):
        choose_dtype("int4", torch.device("cpu"), config)
