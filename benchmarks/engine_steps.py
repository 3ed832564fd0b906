"""Run `kvmesh bench engine steps`: measure the torch engine's prefill and decode beside what the device could do.

The roofline is measured on the same device in the same run, the best of ten tries: the rate of a large matrix
product, and the rate at which memory is read. Prefill is bound by the first, decode by the second. Weights are
random: speed does not depend on their values, and no checkpoint is needed.
"""

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct
from rich.console import Console
from rich.table import Table

from mesh.config import load
from protocol.errors import ConfigError
from protocol.messages import SamplingParams
from workers.executor import ModelInfo, Row

SHAPES = Path(__file__).parent / "shapes"


class EngineStepsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_BENCH_<NAME>`, that over the TOML file of `--config`, that over the default."""

    shape: Annotated[str, Meta(description="a folder of benchmarks/shapes, or any folder with a config.json")] = (
        "llama-8b"
    )
    device: Annotated[str, Meta(description="cpu, cuda, cuda:<n> or auto")] = "auto"
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], Meta(description="of weights and KV")] = "auto"
    isl_tokens: Annotated[int, Meta(ge=1, description="prompt length")] = 2048
    batch: Annotated[int, Meta(ge=1, description="sequences that decode together")] = 32
    context_tokens: Annotated[int, Meta(ge=1, description="context of each while it decodes")] = 1024
    block_size: Annotated[int, Meta(ge=1, description="tokens per KV block")] = 64
    rounds: Annotated[int, Meta(ge=1, description="measured steps; the median counts")] = 5
    json: Annotated[bool, Meta(description="the last line is one JSON object")] = False


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


def main(argv: list[str]) -> int:
    config = load(
        EngineStepsConfig,
        argv,
        os.environ,
        prefix="KVMESH_BENCH_",
        prog="kvmesh bench engine steps",
        description="Measure how fast the torch engine prefills and decodes, beside what its device could do: the "
        "rate of a large matrix product, and the rate at which memory is read. Weights are random.",
        section="bench",
    )
    report = measure(config, Console(stderr=True))
    Console().print(table_of(config, report))
    if config.json:
        print(json.dumps(msgspec.to_builtins(report)))
    return 0


def measure(config: EngineStepsConfig, console: Console) -> EngineStepsReport:
    import torch

    from workers.engines.torch.executor import TorchExecutor

    folder = SHAPES / config.shape if (SHAPES / config.shape).is_dir() else Path(config.shape)
    if not (folder / "config.json").is_file():
        names = ", ".join(sorted(path.name for path in SHAPES.iterdir()))
        raise ConfigError(f"no shape {config.shape!r}", hint=f"use one of {names}, or a folder with a config.json")
    console.print(f"making random weights in the shape of {folder.name}")
    executor = TorchExecutor(
        str(folder), device=config.device, dtype=config.dtype, block_size=config.block_size, random_weights=True
    )
    info = executor.load()
    shape = StepModel.of(folder, info)
    blocks_each = -(-max(config.isl_tokens, config.context_tokens + 1) // config.block_size)
    region = executor.allocate_kv(blocks_each * config.batch, None)
    device, dtype = torch.device(region.device), getattr(torch, info.layout.dtype)
    console.print("measuring the device")
    matmul_flops_s = _matmul_rate(torch, device, dtype)
    read_bytes_s = _read_rate(torch, device)
    console.print("prefilling")
    prompt = [_prefill_row(config.isl_tokens, blocks_each)]
    prefill_s = statistics.median(_times_s(config.rounds, lambda: executor.execute(prompt)))
    console.print("decoding")
    rows = [_decode_row(n, config.context_tokens, blocks_each) for n in range(config.batch)]
    decode_s = statistics.median(_times_s(config.rounds, lambda: executor.execute(rows)))
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
    )


class StepModel(Struct, frozen=True, kw_only=True):
    """Count what a step must compute and read at least."""

    matrix_params: int  # weights that every token is multiplied with
    head_params: int  # of the output layer: only for tokens that are sampled
    num_layers: int
    query_width: int  # num_heads * head_dim
    kv_bytes_per_token: int
    item_bytes: int

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


def _prefill_row(isl_tokens: int, blocks: int) -> Row:
    tokens = [i % 1000 for i in range(isl_tokens)]
    return Row("bench", tokens, 0, list(range(blocks)), True, SamplingParams(temperature=0), tokens, [])


def _decode_row(number: int, context_tokens: int, blocks: int) -> Row:
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


def _matmul_rate(torch: ModuleType, device: object, dtype: object) -> float:
    """FLOP/s of a square product, large enough to be bound by the arithmetic."""
    side = 8192 if str(device).startswith("cuda") else 2048
    a = torch.randn(side, side, device=device).to(dtype)
    return 2 * side**3 / min(_times_s(10, lambda: _finish(torch, device, a @ a)))


def _read_rate(torch: ModuleType, device: object) -> float:
    """Bytes/s at which a large array is read."""
    num_bytes = (4 << 30) if str(device).startswith("cuda") else (512 << 20)
    data = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    return num_bytes / min(_times_s(10, lambda: _finish(torch, device, data.sum())))


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
    return table


def _share(share: float) -> str:
    return f"{100 * share:.0f} %"
