"""Run `kvmesh bench engine versus`: compare the torch engine with vLLM for CPUs, step by step.

Both load one checkpoint with random weights, in a process each, with all cores and the same prompts. Both stay up, and
while one computes the other is idle. Each round asks both for a prefill and for a step of each batch size, so that
figures are ratios of neighbours in time. Ours is the executor; theirs the engine in its own process, without a server.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import psutil
from msgspec import Meta, Struct
from rich.console import Console
from rich.table import Table

from benchmarks.engine_steps import StepModel, read_rate, shape_folder
from mesh.config import load
from protocol.errors import ConfigError, EngineError
from protocol.messages import KvLayout
from workers.engines.torch.config import read_config
from workers.executor import ModelInfo

PYTHON = "KVMESH_VLLM_PYTHON"
BATCHES = (1, 8, 32)
OURS, THEIRS = "torch", "vllm"
GOALS = {
    "prefill_ratio": ">= 1.0",
    "decode_ratio_1": ">= 1.0",
    "decode_ratio_8": ">= 1.0",
    "decode_ratio_32": ">= 0.8",
    "decode_roofline_share_8": ">= 0.5",
    "rss_ratio": "<= 1.0",
    "ready_s_ratio": "<= 0.5",
}

DtypeName = Literal["float32", "bfloat16"]


class EngineVersusConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_BENCH_<NAME>`, that over the TOML file of `--config`, that over the default."""

    shape: Annotated[str, Meta(description="a folder of benchmarks/shapes, or any folder with a config.json")] = (
        "qwen3-0.6b"
    )
    dtypes: Annotated[str, Meta(description="float32, bfloat16 or both")] = "float32,bfloat16"
    isl_tokens: Annotated[int, Meta(ge=16, description="prompt length, and context while decoding")] = 512
    rounds: Annotated[int, Meta(ge=1, description="pairs of each figure; the median ratio counts")] = 5
    json: Annotated[bool, Meta(description="the last line is one JSON object")] = False


class DtypeReport(Struct, frozen=True, kw_only=True):
    """Ratios are ours / theirs: of tokens per second, and of RSS and time to ready where less is better."""

    prefill_ratio: float
    decode_ratio_1: float
    decode_ratio_8: float
    decode_ratio_32: float
    decode_roofline_share_8: float  # the least time that reading weights and KV takes / our time
    rss_ratio: float
    ready_s_ratio: float
    prefill_s: dict[str, list[float]]  # by side, of each round
    decode_s: dict[str, dict[str, list[float]]]  # by side and batch
    rss_bytes: dict[str, int]
    ready_s: dict[str, float]
    read_gb_s: float


class RunningSide:
    """A process of one engine that answers questions."""

    def __init__(self, name: str, python: str, folder: Path, dtype: str, isl_tokens: int) -> None:
        """Start the process. Raises EngineError if it cannot load the model."""
        self._name = name
        kv_gib = room_gib(step_model(folder, dtype), isl_tokens)
        environ = os.environ | side_environment(name, kv_gib)
        sizes = [str(max(BATCHES)), str(isl_tokens), str(kv_gib)]
        argv = [python, "-m", "benchmarks.engine_side", name, str(folder), dtype, *sizes]
        self._log = folder / f"{name}-{dtype}.log"
        started = time.perf_counter()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environ, cwd=_root(), text=True
            )
        self._answer()
        self.ready_s = time.perf_counter() - started

    def ask(self, question: dict[str, int]) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])
            raise EngineError(f"the {self._name} side ended with {self._process.returncode}", hint=f"it said:\n{tail}")
        answer: str = json.loads(line)
        return answer

    def rss_bytes(self) -> int:
        process = psutil.Process(self._process.pid)
        return sum(each.memory_info().rss for each in (process, *process.children(recursive=True)))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def _root() -> Path:
    return Path(__file__).resolve().parent.parent


def room_gib(model: StepModel, isl_tokens: int) -> int:
    """Return the size of both KV caches: the contexts of the largest batch, and some prompts beside them."""
    tokens = (max(BATCHES) + 4) * (isl_tokens + 64)
    return math.ceil(tokens * model.kv_bytes_per_token / 2**30)


def side_environment(name: str, kv_gib: int) -> dict[str, str]:
    """Return what both sides get, all cores, and what vLLM needs beside."""
    both = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), "PYTHONPATH": str(_root())}
    if name == OURS:
        return both
    return both | {
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }


def step_model(folder: Path, dtype: str) -> StepModel:
    config = read_config(folder)
    layout = KvLayout(config.num_layers, config.num_kv_heads, config.head_dim, 16, dtype)
    return StepModel.of(folder, ModelInfo(layout, config.context_tokens, config.vocab_size, ()))


def main(argv: list[str]) -> int:
    config = load(
        EngineVersusConfig,
        argv,
        os.environ,
        prefix="KVMESH_BENCH_",
        prog="kvmesh bench engine versus",
        description="Compare the torch engine with vLLM for CPUs: prefill and steps of decoding with the same random "
        f"weights, in turn; memory and time to ready. Needs {PYTHON}, a Python with vLLM.",
        section="bench",
    )
    dtypes = [name.strip() for name in config.dtypes.split(",")]
    if unknown := set(dtypes) - {"float32", "bfloat16"}:
        raise ConfigError(f"no dtype {sorted(unknown)[0]!r}", hint="set --dtypes to float32, bfloat16 or both")
    python = os.environ.get(PYTHON, "")
    if not python:
        raise ConfigError(
            f"{PYTHON} is not set", hint=f"`make .venv-vllm/.installed`, then {PYTHON}=.venv-vllm/bin/python"
        )
    console = Console(stderr=True)
    reports = {dtype: measure(config, dtype, str(Path(python).absolute()), console) for dtype in dtypes}
    Console().print(table_of(config, reports))
    if config.json:
        print(json.dumps(msgspec.to_builtins(reports)))
    return 0


def measure(config: EngineVersusConfig, dtype: str, python: str, console: Console) -> DtypeReport:
    prefill_s: dict[str, list[float]] = {OURS: [], THEIRS: []}
    decode_s: dict[str, dict[str, list[float]]] = {name: {str(b): [] for b in BATCHES} for name in (OURS, THEIRS)}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvmesh-versus-")))
        console.print(f"writing random weights in {dtype}")
        write_checkpoint(shape_folder(config.shape), folder, dtype)
        sides: dict[str, RunningSide] = {}
        for name, its_python in ((THEIRS, python), (OURS, sys.executable)):
            console.print(f"starting {name}")
            sides[name] = RunningSide(name, its_python, folder, dtype, config.isl_tokens)
            stack.callback(sides[name].close)
        for number in range(-1, config.rounds):  # the first is not counted: what happens only once
            for name in (OURS, THEIRS) if number % 2 else (THEIRS, OURS):
                taken_s = sides[name].ask({"prefill": 1})
                steps_s = {str(batch): sides[name].ask({"decode": batch}) for batch in BATCHES}
                if number >= 0:
                    prefill_s[name].append(taken_s)
                    for batch, step_s in steps_s.items():
                        decode_s[name][batch].append(step_s)
                    console.print(_said(name, taken_s, steps_s), highlight=False)
        rss_bytes = {name: side.rss_bytes() for name, side in sides.items()}
        ready_s = {name: round(side.ready_s, 2) for name, side in sides.items()}
        for side in sides.values():
            side.close()
        read_bytes_s = read_rate("cpu", folder)
        least_bytes = step_model(folder, dtype).decode_bytes(8, config.isl_tokens)
    share = least_bytes / read_bytes_s / min(decode_s[OURS]["8"])
    if share > 1:
        raise EngineError(f"a step took {share:.2f} of the least time", hint="the machine was busy; measure again")
    return DtypeReport(
        prefill_ratio=ratio(prefill_s[THEIRS], prefill_s[OURS]),
        decode_ratio_1=ratio(decode_s[THEIRS]["1"], decode_s[OURS]["1"]),
        decode_ratio_8=ratio(decode_s[THEIRS]["8"], decode_s[OURS]["8"]),
        decode_ratio_32=ratio(decode_s[THEIRS]["32"], decode_s[OURS]["32"]),
        decode_roofline_share_8=round(share, 3),
        rss_ratio=round(rss_bytes[OURS] / rss_bytes[THEIRS], 3),
        ready_s_ratio=round(ready_s[OURS] / ready_s[THEIRS], 3),
        prefill_s=prefill_s,
        decode_s=decode_s,
        rss_bytes=rss_bytes,
        ready_s=ready_s,
        read_gb_s=round(read_bytes_s / 1e9, 1),
    )


def ratio(theirs_s: Sequence[float], ours_s: Sequence[float]) -> float:
    """Return the median of the pairs: above 1, ours takes less time."""
    return round(statistics.median(theirs / ours for theirs, ours in zip(theirs_s, ours_s, strict=True)), 3)


def write_checkpoint(shape: Path, folder: Path, dtype: str) -> None:
    """Write random weights of the shape, with the names of a Hugging Face checkpoint."""
    import torch
    from safetensors.torch import save_file

    raw = json.loads((shape / "config.json").read_text())
    architecture = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}
    raw |= {"architectures": [architecture[raw["model_type"]]], "dtype": dtype, "torch_dtype": dtype}
    (folder / "config.json").write_text(json.dumps(raw))
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, size in tensor_sizes(folder).items():
        weight = torch.empty(size, dtype=getattr(torch, dtype))
        if len(size) == 1:
            weight.fill_(0.0 if name.endswith(".bias") else 1.0)
        else:
            weight.normal_(0.0, size[-1] ** -0.5, generator=generator)
        tensors[name] = weight
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def tensor_sizes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the tensors that a checkpoint of the model has."""
    c = read_config(folder)
    hidden, inner, q, kv = c.hidden_size, c.intermediate_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    sizes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not c.tie_word_embeddings:
        sizes["lm_head.weight"] = (c.vocab_size, hidden)
    for index in range(c.num_layers):
        layer, attn, mlp = (f"model.layers.{index}{part}" for part in ("", ".self_attn", ".mlp"))
        sizes |= {f"{layer}.input_layernorm.weight": (hidden,), f"{layer}.post_attention_layernorm.weight": (hidden,)}
        sizes |= {f"{attn}.{name}_proj.weight": (size, hidden) for name, size in (("q", q), ("k", kv), ("v", kv))}
        sizes |= {f"{attn}.o_proj.weight": (hidden, q), f"{mlp}.down_proj.weight": (hidden, inner)}
        sizes |= {f"{mlp}.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        if c.qk_norm:
            sizes |= {f"{attn}.{name}_norm.weight": (c.head_dim,) for name in ("q", "k")}
        if c.qkv_bias:
            sizes |= {f"{attn}.{name}_proj.bias": (size,) for name, size in (("q", q), ("k", kv), ("v", kv))}
    return sizes


def _said(name: str, prefill_s: float, steps_s: dict[str, float]) -> str:
    steps = ", ".join(f"{batch}: {1000 * step_s:.0f} ms" for batch, step_s in steps_s.items())
    return f"{name}: prefill {prefill_s:.2f} s; steps of {steps}"


def table_of(config: EngineVersusConfig, reports: dict[str, DtypeReport]) -> Table:
    table = Table(title=f"{config.shape}, {config.isl_tokens} tokens, torch engine / vLLM", title_justify="left")
    for column in ("", *reports, "goal"):
        table.add_column(column)
    for name, goal in GOALS.items():
        table.add_row(name, *(str(getattr(report, name)) for report in reports.values()), goal)
    return table
