"""Run `kvmesh lab bench engine steps`: measure the torch engine's prefill and decode beside what the device could do.

The roofline is measured on the same device in the same run, the best of some tries: the rate of matrix products at the
model's own shapes, and the rate at which all threads read memory. Prefill is bound by the first, decode by the second.
A share above 100 % is an error of the measurement, and the command fails. Weights are random: speed does not depend on
their values, and no checkpoint is needed.
"""

import cProfile
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta, Struct
from rich.console import Console
from rich.table import Table

from kvmesh.lab.settings import LabConfig
from kvmesh.mesh.config import load
from kvmesh.protocol.errors import ConfigError, EngineError
from kvmesh.protocol.messages import SamplingParams
from kvmesh.workers.engines.torch.config import bucket_sizes, read_config
from kvmesh.workers.executor import ModelInfo, Row

if TYPE_CHECKING:
    from kvmesh.workers.engines.torch.executor import TorchExecutor

SHAPES = Path(__file__).parent / "shapes"


class EngineStepsConfig(LabConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_BENCH_<NAME>`, that over the TOML file of `--config`, that over the default."""

    shape: Annotated[str, Meta(description="a folder of lab/bench/shapes, or any folder with a config.json")] = (
        "llama-8b"
    )
    device: Annotated[str, Meta(description="cpu, cuda, cuda:<n> or auto")] = "auto"
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], Meta(description="of weights and KV")] = "auto"
    isl_tokens: Annotated[int, Meta(ge=1, description="prompt length")] = 2048
    batch: Annotated[int, Meta(ge=1, description="sequences that decode together")] = 32
    context_tokens: Annotated[int, Meta(ge=1, description="context of each while it decodes")] = 1024
    block_size: Annotated[int, Meta(ge=1, description="tokens per KV block")] = 64
    decode_buckets: Annotated[str, Meta(description="batch sizes that are CUDA graphs: the worker's setting")] = ""
    rounds: Annotated[int, Meta(ge=1, description="measured steps; the median counts")] = 5


class EngineStepsReport(Struct, frozen=True, kw_only=True):
    """Rates per second. `*_roofline_share`: measured rate / the rate that the device's limit would allow."""

    device: str
    dtype: str
    weights_gib: float
    matmul_tflops: float
    read_gb_s: float
    prefill_tokens_s: float
    prefill_roofline_share: float
    decode_tokens_s: float
    decode_roofline_share: float
    decode_step_ms: float
    prefill_parts: dict[str, float]  # share of a prefill by part, under a profiler that makes "python" look larger
    decode_parts: dict[str, float]


PARTS = {  # names of built-in functions, as the profiler has them
    "projections": ("_nn.linear", "_native.linear", "'to' of"),  # where a weight is widened first
    "attention": ("_native.attend", "scaled_dot_product_attention"),
    "kv copy": ("'index_select'", "'index_fill_'", "_native.prepare", "index_put"),
    "norms and activation": ("rms_norm", "add_and_norm", "_native.gate", "silu", "'roll'", "'addcmul_'", "torch.mul"),
    "sampling": ("'argmax'", "'float'", "'softmax'", "'sort'", "'cumsum'", "searchsorted"),
}


def main(argv: list[str]) -> int:
    config = load(
        EngineStepsConfig,
        argv,
        os.environ,
        prefix="KVMESH_BENCH_",
        prog="kvmesh lab bench engine steps",
        description="Measure how fast the torch engine prefills and decodes, beside what its device could do: the "
        "rate of a large matrix product, and the rate at which memory is read. Weights are random.",
        section="bench",
    )
    report = measure(config, Console(stderr=True))
    Console().print(table_of(config, report))
    if config.json:
        print(json.dumps(msgspec.to_builtins(report)))
    if max(report.prefill_roofline_share, report.decode_roofline_share) > 1:
        raise EngineError(
            "a share is above 100 %", hint="the machine was busy while its rates were measured: try again"
        )
    return 0


def measure(config: EngineStepsConfig, console: Console) -> EngineStepsReport:
    import torch

    folder = shape_folder(config.shape)
    console.print(f"making random weights in the shape of {folder.name}")
    executor = _executor_of(config, folder)
    info = executor.load()
    shape = StepModel.of(folder, info)
    blocks_each = -(-max(config.isl_tokens, config.context_tokens + 1) // config.block_size)
    region = executor.allocate_kv(blocks_each * config.batch, None)
    device, dtype = torch.device(region.device), getattr(torch, info.layout.dtype)
    console.print("measuring the device")
    matmul_flops_s = _matmul_rate(torch, device, dtype, shape, config.isl_tokens)
    read_bytes_s = read_rate(region.device, folder)
    console.print("prefilling")
    prompt = [prefill_row(config.isl_tokens, blocks_each)]
    prefill_s = statistics.median(_times_s(config.rounds, lambda: executor.execute(prompt)))
    console.print("decoding")
    rows = [decode_row(n, config.context_tokens, blocks_each) for n in range(config.batch)]
    decode_s = statistics.median(_times_s(config.rounds, lambda: executor.execute(rows)))
    prefill_parts, decode_parts = parts_of(lambda: executor.execute(prompt)), parts_of(lambda: executor.execute(rows))
    executor.close()
    best_prefill_s = shape.prefill_flops(config.isl_tokens) / matmul_flops_s
    best_decode_s = shape.decode_bytes(config.batch, config.context_tokens) / read_bytes_s
    return EngineStepsReport(
        device=torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"cpu, {torch.get_num_threads()} threads",
        dtype=info.layout.dtype,
        weights_gib=round(shape.weight_bytes / 2**30, 2),
        matmul_tflops=round(matmul_flops_s / 1e12, 3),
        read_gb_s=round(read_bytes_s / 1e9, 1),
        prefill_tokens_s=round(config.isl_tokens / prefill_s, 1),
        prefill_roofline_share=round(best_prefill_s / prefill_s, 3),
        decode_tokens_s=round(config.batch / decode_s, 1),
        decode_roofline_share=round(best_decode_s / decode_s, 3),
        decode_step_ms=round(1000 * decode_s, 2),
        prefill_parts=prefill_parts,
        decode_parts=decode_parts,
    )


def _executor_of(config: EngineStepsConfig, folder: Path) -> "TorchExecutor":
    from kvmesh.workers.engines.torch.executor import TorchExecutor

    return TorchExecutor(
        str(folder),
        device=config.device,
        dtype=config.dtype,
        block_size=config.block_size,
        random_weights=True,
        decode_buckets=bucket_sizes(config.decode_buckets),
    )


def parts_of(step: Callable[[], object]) -> dict[str, float]:
    """Return which share of a step's time each part takes; "python" is all that is no part."""
    profile = cProfile.Profile()
    profile.runcall(step)
    taken_s = dict.fromkeys((*PARTS, "python"), 0.0)
    for entry in profile.getstats():
        name = str(entry.code)
        part = next((part for part, names in PARTS.items() if any(each in name for each in names)), "python")
        taken_s[part] += entry.inlinetime
    total_s = sum(taken_s.values())
    return {part: round(each_s / total_s, 3) for part, each_s in taken_s.items()}


def shape_folder(shape: str) -> Path:
    """Return the folder of a shape. Raises ConfigError if there is none."""
    folder = SHAPES / shape if (SHAPES / shape).is_dir() else Path(shape)
    if not (folder / "config.json").is_file():
        names = ", ".join(sorted(path.name for path in SHAPES.iterdir()))
        raise ConfigError(f"no shape {shape!r}", hint=f"use one of {names}, or a folder with a config.json")
    return folder


class StepModel(Struct, frozen=True, kw_only=True):
    """Count what a step must compute and read at least."""

    matrix_params: int  # weights that every token is multiplied with
    head_params: int  # of the output layer: only for tokens that are sampled
    num_layers: int
    query_width: int  # num_heads * head_dim
    kv_bytes_per_token: int
    item_bytes: int
    matrices: tuple[tuple[int, int], ...] = ()  # of one layer: outputs, inputs

    @staticmethod
    def of(folder: Path, info: ModelInfo) -> "StepModel":
        config = json.loads((folder / "config.json").read_text())
        hidden, inner, layers = (config[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers"))
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        head_dim = config.get("head_dim") or hidden // heads
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        layout = info.layout
        return StepModel(
            matrix_params=layers * (attention + 3 * hidden * inner),
            head_params=hidden * config["vocab_size"],
            num_layers=layers,
            query_width=heads * head_dim,
            kv_bytes_per_token=layout.block_bytes // layout.block_size,
            item_bytes=4 if layout.dtype == "float32" else 2,
            matrices=(
                ((heads + 2 * kv_heads) * head_dim, hidden),
                (hidden, heads * head_dim),
                (2 * inner, hidden),
                (hidden, inner),
            ),
        )

    @property
    def weight_bytes(self) -> int:
        return (self.matrix_params + self.head_params) * self.item_bytes

    def prefill_flops(self, isl_tokens: int) -> float:
        """Count one prompt: matrices for every token, and attention over the causal half of the square."""
        attention = 2 * self.num_layers * self.query_width * isl_tokens**2
        return 2 * self.matrix_params * isl_tokens + 2 * self.head_params + attention

    def decode_bytes(self, batch: int, context_tokens: int) -> float:
        """Count one step: all weights once, and the whole KV of every sequence."""
        return self.weight_bytes + batch * context_tokens * self.kv_bytes_per_token


def prefill_row(isl_tokens: int, blocks: int) -> Row:
    tokens = [i % 1000 for i in range(isl_tokens)]
    return Row("bench", tokens, 0, list(range(blocks)), True, SamplingParams(temperature=0), tokens, [])


def decode_row(number: int, context_tokens: int, blocks: int) -> Row:
    table = list(range(number * blocks, (number + 1) * blocks))
    return Row(str(number), [1], context_tokens, table, True, SamplingParams(temperature=0), [1], [1])


def _times_s(rounds: int, step: Callable[[], object]) -> list[float]:
    step()  # what happens only once is not measured
    times_s = []
    for _ in range(rounds):
        started = time.perf_counter()
        step()
        times_s.append(time.perf_counter() - started)
    return times_s


def _matmul_rate(torch: ModuleType, device: object, dtype: object, shape: "StepModel", isl_tokens: int) -> float:
    """FLOP/s of the fastest product: those of the model's own matrices with a prompt, and a large square one."""
    side = 8192 if str(device).startswith("cuda") else 2048
    rates = []
    for tokens, outputs, inputs in {(side, side, side), *((isl_tokens, *matrix) for matrix in shape.matrices)}:
        x = torch.randn(tokens, inputs, device=device).to(dtype)
        weight = torch.randn(outputs, inputs, device=device).to(dtype)
        best_s = min(_times_s(4, partial(_finish_way, torch, device, partial(torch.nn.functional.linear, x, weight))))
        rates.append(2 * tokens * outputs * inputs / best_s)
    return max(rates)


def read_rate(device_name: str, folder: Path) -> float:
    """Bytes/s at which all threads read memory: the best of a sum and of products with one token."""
    import torch

    from kvmesh.workers.engines.torch.kernels import Projection, open_kernels

    device = torch.device(device_name)
    rows, columns = (1 << 18, 4096) if str(device).startswith("cuda") else (1 << 17, 1024)
    data = torch.ones(rows, columns, dtype=torch.float32, device=device)
    token = torch.ones(1, columns, dtype=torch.float32, device=device)
    ways: list[Callable[[], object]] = [data.sum, lambda: torch.nn.functional.linear(token, data)]
    if kernels := open_kernels(read_config(folder), device, torch.float32):
        ways.append(partial(kernels.linear, token, Projection((data,), (None,))))
    best_s = min(min(_times_s(10, partial(_finish_way, torch, device, way))) for way in ways)
    return 4 * rows * columns / best_s


def _finish_way(torch: ModuleType, device: object, way: Callable[[], object]) -> None:
    _finish(torch, device, way())


def _finish(torch: ModuleType, device: object, result: object) -> None:
    if str(device).startswith("cuda"):
        torch.cuda.synchronize(device)


def table_of(config: EngineStepsConfig, report: EngineStepsReport) -> Table:
    table = Table(title=f"{config.shape}, {report.dtype}, {report.device}", title_justify="left")
    for column in ("", "measured", "of the roofline"):
        table.add_column(column)
    rows: Sequence[tuple[str, str, str]] = [
        ("matrix product", f"{report.matmul_tflops} TFLOP/s", "is it"),
        ("memory read", f"{report.read_gb_s} GB/s", "is it"),
        (
            f"prefill, {config.isl_tokens} tokens",
            f"{report.prefill_tokens_s:,} tokens/s",
            _share(report.prefill_roofline_share),
        ),
        (
            f"decode, {config.batch} x {config.context_tokens} tokens",
            f"{report.decode_tokens_s:,} tokens/s, {report.decode_step_ms} ms a step",
            _share(report.decode_roofline_share),
        ),
    ]
    for row in rows:
        table.add_row(*row)
    for name, parts in (("prefill", report.prefill_parts), ("decode", report.decode_parts)):
        table.add_row(f"{name}, by part", ", ".join(f"{part} {_share(each)}" for part, each in parts.items()), "")
    return table


def _share(share: float) -> str:
    return f"{100 * share:.0f} %"
