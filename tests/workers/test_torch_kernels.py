"""The native kernels compute what the torch code of the model computes, with every instruction set found here."""

import resource
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR  # noqa: E402
from kvmesh.protocol.messages import KvLayout, SamplingParams  # noqa: E402
from kvmesh.workers.engines.torch import kernels  # noqa: E402
from kvmesh.workers.engines.torch.batch import plan_step, to_device  # noqa: E402
from kvmesh.workers.engines.torch.cache import PagedKv, allocate  # noqa: E402
from kvmesh.workers.engines.torch.config import ModelConfig, RopeConfig  # noqa: E402
from kvmesh.workers.engines.torch.cpu import bfloat16_by, cpu_flags, is_amd, keep_freed_memory  # noqa: E402
from kvmesh.workers.engines.torch.executor import TorchExecutor  # noqa: E402
from kvmesh.workers.engines.torch.kernels import CpuKernels, KernelShare, Projection, all_kernels, share_of  # noqa: E402
from kvmesh.workers.engines.torch.metrics import STEPS as STEPS_TAKEN  # noqa: E402
from kvmesh.workers.engines.torch.model import Transformer  # noqa: E402
from kvmesh.workers.engines.torch.weights import ModelWeights, random_weights  # noqa: E402
from kvmesh.workers.executor import Row  # noqa: E402

CPU = torch.device("cpu")
CONFIG = ModelConfig(
    model_type="qwen3",
    vocab_size=61,
    hidden_size=56,
    intermediate_size=72,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
    context_tokens=512,
    rms_norm_eps=1e-6,
    rope=RopeConfig(),
    tie_word_embeddings=False,
    qkv_bias=True,
    o_bias=False,
    mlp_bias=True,
    qk_norm=True,
    eos_token_ids=(),
    dtype=None,
)
ONE_LAYER = replace(CONFIG, num_layers=1)
SHAPES = {
    "groups of four": ONE_LAYER,
    "two layers": CONFIG,
    "groups of one": replace(ONE_LAYER, num_kv_heads=8),
    "groups of seven": replace(ONE_LAYER, num_heads=7, num_kv_heads=1),
    "groups of forty": replace(ONE_LAYER, num_heads=40, num_kv_heads=1, head_dim=16),
    "heads of 128": replace(ONE_LAYER, head_dim=128, qk_norm=False),
    "heads of 24": replace(ONE_LAYER, head_dim=24, qkv_bias=False),
}
DTYPES = {"float32": (torch.float32, 2e-5), "bfloat16": (torch.bfloat16, 3e-2)}
# (tokens computed before, new tokens) of each row
STEPS = {
    "decode": [(0, 1), (1, 1), (15, 1), (16, 1), (63, 1), (64, 1), (200, 1)],
    "prefill": [(0, 2), (0, 65), (0, 150)],
    "prefill over cached prefixes": [(1, 3), (64, 64), (100, 17), (17, 130)],
    "mixed": [(40, 1), (0, 9), (33, 20), (0, 1)],
}

needs_native = pytest.mark.skipif(kernels._NATIVE is None, reason="the kernels were not built here, or KVMESH_NATIVE=0")


def rows_of(step: Sequence[tuple[int, int]], block_size: int) -> list[Row]:
    """Rows with blocks in no order; the last block is of no row."""
    generator = torch.Generator().manual_seed(2)
    counts = [-(-(start + new) // block_size) for start, new in step]
    ids = torch.randperm(sum(counts), generator=generator).tolist()
    rows = []
    for number, ((start, new), count) in enumerate(zip(step, counts, strict=True)):
        tokens = torch.randint(CONFIG.vocab_size, (new,), generator=generator).tolist()
        table = [ids.pop() for _ in range(count)]
        rows.append(Row(str(number), tokens, start, table, True, SamplingParams(), tokens, []))
    return rows


def filled_cache(config: ModelConfig, rows: Sequence[Row], dtype: str, block_size: int, rest: float) -> PagedKv:
    """A cache that holds keys and values of the tokens computed before, and `rest` wherever else."""
    layout = KvLayout(config.num_layers, config.num_kv_heads, config.head_dim, block_size, dtype)
    kv = allocate(layout, 1 + sum(len(row.block_table) for row in rows), None, CPU)
    kv.blocks.fill_(rest)
    generator = torch.Generator().manual_seed(4)
    for row in rows:
        for place in range(row.start):
            slot = kv.blocks[row.block_table[place // block_size], :, :, :, place % block_size]
            slot.copy_(torch.randn(slot.shape, generator=generator))
    return kv


def states(
    config: ModelConfig, weights: ModelWeights, rows: Sequence[Row], kv: PagedKv, using: CpuKernels | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state after every row's last token, and the keys and values of all its tokens."""
    paged_below = 0 if using is None else using.share.attend_below
    batch = to_device(plan_step(rows, kv.layout.block_size), kv, weights.embed.dtype, paged_below)
    hidden = Transformer(config, weights, using).forward(batch, kv)
    written = [
        kv.blocks[row.block_table[place // kv.layout.block_size], :, :, :, place % kv.layout.block_size]
        for row in rows
        for place in range(row.start + len(row.token_ids))
    ]
    return hidden.float(), torch.stack(written).float()


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "block_size"),
    [*((shape, 16) for shape in SHAPES), ("groups of four", 1), ("two layers", 5), ("groups of four", 80)],
)
def test_every_instruction_set_computes_what_torch_computes(shape: str, dtype: str, block_size: int) -> None:
    config, (torch_dtype, atol) = SHAPES[shape], DTYPES[dtype]
    weights = random_weights(config, CPU, torch_dtype)
    found = all_kernels(config, CPU, torch_dtype)
    assert found
    for step in STEPS.values():
        rows = rows_of(step, block_size)
        plain = states(config, weights, rows, filled_cache(config, rows, dtype, block_size, 0.0), None)
        for kernels_here in found:
            for kernels_here.share in (KernelShare(10_000, 10_000), KernelShare(0, 40, kernels.linear_widened)):
                kv = filled_cache(config, rows, dtype, block_size, float("nan"))
                for ours, theirs in zip(states(config, weights, rows, kv, kernels_here), plain, strict=True):
                    error = (ours - theirs).abs().max() / theirs.abs().max()
                    assert error < atol, f"{kernels_here.name}, {step}: {error}"


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 7, 16, 33, 70])
def test_projections_of_odd_sizes_equal_those_of_torch(dtype: str, num_tokens: int) -> None:
    torch_dtype, atol = DTYPES[dtype]
    generator = torch.Generator().manual_seed(num_tokens)
    sizes, depth = (1, 50, 97, 6), 75
    weights = tuple(torch.randn(size, depth, generator=generator).to(torch_dtype) for size in sizes)
    biases = tuple(torch.randn(size, generator=generator).to(torch_dtype) if size % 2 else None for size in sizes)
    x = torch.randn(num_tokens, depth, generator=generator).to(torch_dtype)
    expected = torch.cat(
        [
            torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
            for weight, bias in zip(weights, biases, strict=True)
        ],
        -1,
    )
    for found in all_kernels(CONFIG, CPU, torch_dtype):
        error = (found.linear(x, Projection(weights, biases)).double() - expected).abs().max()
        assert error < atol * expected.abs().max(), found.name


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [16, 512, 1001])
def test_projections_of_packed_tokens_equal_those_of_torch(dtype: str, depth: int) -> None:
    torch_dtype, atol = DTYPES[dtype]
    weight, x = torch.randn(100, depth).to(torch_dtype), torch.randn(21, depth).to(torch_dtype)
    expected = x.double() @ weight.double().T
    for found in all_kernels(CONFIG, CPU, torch_dtype):
        error = (found.linear(x, Projection((weight,), (None,))).double() - expected).abs().max()
        assert error < atol * expected.abs().max(), found.name


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [2, 3, 4, 5, 6, 7, 8, 9, 16, 23, 32])
def test_projections_of_woven_tokens_equal_those_of_torch(dtype: str, num_tokens: int) -> None:
    torch_dtype, atol = DTYPES[dtype]
    weight, x = torch.randn(100, 224).to(torch_dtype), torch.randn(num_tokens, 224).to(torch_dtype)
    bias = torch.randn(100).to(torch_dtype)
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    for found in all_kernels(CONFIG, CPU, torch_dtype):
        error = (found.linear(x, Projection((weight,), (bias,))).double() - expected).abs().max()
        assert error < atol * expected.abs().max(), found.name


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("told", ["some", "none"])
def test_tokens_that_nobody_asks_for_change_nothing(dtype: str, step: str, told: str) -> None:
    config, (torch_dtype, atol) = SHAPES["two layers"], DTYPES[dtype]
    weights = random_weights(config, CPU, torch_dtype)
    rows = rows_of(STEPS[step], 16)
    fewer = [replace(row, sample=told == "some" and number % 2 == 0) for number, row in enumerate(rows)]
    sampled = plan_step(rows, 16).sampled_rows
    for using in (None, *all_kernels(config, CPU, torch_dtype)):
        all_states, all_written = states(config, weights, rows, filled_cache(config, rows, dtype, 16, 0.0), using)
        some, written = states(config, weights, fewer, filled_cache(config, rows, dtype, 16, 0.0), using)
        assert torch.equal(written, all_written)
        expected = all_states[[place for place, row in enumerate(sampled) if fewer[row].sample]]
        torch.testing.assert_close(some, expected, rtol=atol, atol=atol * all_states.abs().max().item())


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gate_equals_silu_times_up_at_any_size(dtype: str) -> None:
    torch_dtype, atol = DTYPES[dtype]
    both = (8 * torch.randn(20, 2 * 83)).to(torch_dtype)
    both[0, :5] = torch.tensor([0.0, 90.0, -90.0, float("inf"), float("nan")])
    gate, up = both.chunk(2, -1)
    expected = torch.nn.functional.silu(gate.double()) * up.double()
    for found in all_kernels(CONFIG, CPU, torch_dtype):
        torch.testing.assert_close(found.gate(gate, up).double(), expected, rtol=atol, atol=1e-5, equal_nan=True)


def test_a_widened_projection_is_rounded_once() -> None:
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(1500, 40, generator=generator).bfloat16()
    bias = torch.randn(1500, generator=generator).bfloat16()
    x = torch.randn(9, 40, generator=generator).bfloat16()
    expected = (x.float() @ weight.float().T + bias.float()).bfloat16()
    torch.testing.assert_close(kernels.linear_widened(x, weight, bias), expected, rtol=0.008, atol=1e-6)


@pytest.mark.skipif(not kernels.has_onednn(), reason="this torch was built without oneDNN")
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_projection_by_onednn_is_that_of_torch(has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(6)
    weight, x = torch.randn(150, 40, generator=generator), torch.randn(90, 40, generator=generator)
    bias = torch.randn(150, generator=generator) if has_bias else None
    torch.testing.assert_close(kernels.linear_onednn(x, weight, bias), torch.nn.functional.linear(x, weight, bias))


@needs_native
def test_threads_share_a_step_without_changing_it() -> None:
    weights = random_weights(CONFIG, CPU, torch.float32)
    rows = rows_of(STEPS["mixed"], 16)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            kv = filled_cache(CONFIG, rows, "float32", 16, float("nan"))
            results.append(states(CONFIG, weights, rows, kv, all_kernels(CONFIG, CPU, torch.float32)[-1])[0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("attention", [pytest.param("paged", marks=needs_native), "gathered"])
def test_the_way_of_attention_is_logged_and_counted(
    attention: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if attention == "gathered":
        monkeypatch.setattr(kernels, "_NATIVE", None)
    executor = TorchExecutor(CHECKPOINT_DIR, device="cpu", dtype="float32")
    with caplog.at_level("INFO", "kvmesh.workers.engines.torch"):
        executor.load()
    executor.allocate_kv(4, None)
    before = STEPS_TAKEN.labels(attention)._value.get()
    executor.execute(rows_of([(16, 5)], 16))
    assert STEPS_TAKEN.labels(attention)._value.get() == before + 1
    assert ("in place" if attention == "paged" else "copies all keys") in caplog.text


def test_what_the_kernels_lack_is_left_to_torch() -> None:
    assert all_kernels(CONFIG, CPU, torch.float16) == []
    assert all_kernels(replace(CONFIG, head_dim=30), CPU, torch.float32) == []
    assert all_kernels(replace(CONFIG, head_dim=1024), CPU, torch.float32) == []
    assert share_of(4, is_bf16=False, has_amx=False).linear_tokens == 0
    assert share_of(8, is_bf16=True, has_amx=False).further is kernels.linear_widened
    assert share_of(16, is_bf16=True, has_amx=False).further is torch.nn.functional.linear
    assert share_of(16, is_bf16=False, has_amx=False, by_onednn=True).further is kernels.linear_onednn
    assert share_of(8, is_bf16=False, has_amx=False, by_onednn=True).further is torch.nn.functional.linear
    assert share_of(16, is_bf16=True, has_amx=True) == KernelShare(linear_tokens=1, attend_below=64)


def test_the_fastest_bfloat16_of_a_processor_is_named(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nflags\t\t: fpu avx512f avx512_bf16 amx_bf16\nflags\t\t: other\n")
    assert bfloat16_by(cpu_flags(cpuinfo)) == "amx_bf16"
    cpuinfo.write_text("processor : 0\nvendor_id\t: AuthenticAMD\n")
    assert is_amd(cpuinfo)
    assert not is_amd(tmp_path / "none")
    cpuinfo.write_text("Features\t: fp asimd bf16\n")
    assert bfloat16_by(cpu_flags(cpuinfo)) == "bf16"
    assert bfloat16_by(cpu_flags(tmp_path / "none")) == ""


def test_memory_that_a_step_frees_is_there_for_the_next() -> None:
    if not keep_freed_memory():
        pytest.skip("only glibc can be told to keep freed memory")

    def pages_taken() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        held = [torch.empty(512, 6144).fill_(1.0) for _ in range(3)]
        del held
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    pages_taken()
    assert min(pages_taken() for _ in range(5)) < 1000  # 9,216 pages of 4 KiB


@pytest.mark.parametrize("is_fused", [True, False])
def test_a_projection_without_its_first_outputs_keeps_the_others(is_fused: bool) -> None:
    weight, bias = torch.randn(12, 3), torch.randn(12)
    sizes = (12,) if is_fused else (6, 3, 3)
    whole = Projection(tuple(weight.split(sizes)), tuple(bias.split(sizes)))
    rest = whole.without_first(6)
    assert torch.equal(torch.cat(rest.weights), weight[6:])
    assert torch.equal(torch.cat([each for each in rest.biases if each is not None]), bias[6:])
