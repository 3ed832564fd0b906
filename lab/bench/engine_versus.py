"""Run `kvmesh lab bench engine versus`: compare the torch engine with vLLM for CPUs, step by step.

Both load one checkpoint with random weights, in a process each, with all cores and the same lengths. Both stay up, and
while one computes the other is idle. A pair asks both for the same work, one after the other, and each figure is the
median ratio of its pairs. Ours is the executor; theirs the engine in its own process, without a server. What was
measured can be kept in a file, which a later run continues: a run may end after any pair.
"""

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import psutil
from msgspec import Meta, Struct, field
from rich.console import Console
from rich.table import Table

from kvmesh.lab.bench.engine_steps import StepModel, read_rate, shape_folder
from kvmesh.lab.settings import LabConfig
from kvmesh.mesh.config import load
from kvmesh.protocol.errors import ConfigError, EngineError
from kvmesh.protocol.messages import KvLayout
from kvmesh.workers.engines.torch.config import read_config
from kvmesh.workers.executor import ModelInfo

PYTHON = "KVMESH_VLLM_PYTHON"
BATCHES = (1, 8, 32)
OURS, THEIRS = "torch", "vllm"
WORK = ("prefill", *(f"decode_{batch}" for batch in BATCHES))
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
Count = Annotated[float, Meta(ge=0)]


class EngineVersusConfig(LabConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_BENCH_<NAME>`, that over the TOML file of `--config`, that over the default."""

    shape: Annotated[str, Meta(description="a folder of lab/bench/shapes, or any folder with a config.json")] = (
        "qwen3-0.6b"
    )
    dtypes: Annotated[str, Meta(description="float32, bfloat16 or both")] = "float32,bfloat16"
    isl_tokens: Annotated[int, Meta(ge=16, description="prompt length, and context while decoding")] = 512
    rounds: Annotated[int, Meta(ge=1, description="pairs of each figure; the median ratio counts")] = 5
    seconds: Annotated[float, Meta(ge=0, description="begin no pair that would end later; 0: no limit")] = 0.0
    results: Annotated[str, Meta(description="file that keeps what was measured; a later run continues it")] = ""


class Pairs(Struct):
    """Values of both sides, pair by pair: seconds, or bytes."""

    torch: list[Count] = field(default_factory=list)
    vllm: list[Count] = field(default_factory=list)

    def add(self, ours: float, theirs: float) -> None:
        self.torch.append(ours)
        self.vllm.append(theirs)

    @property
    def ratio(self) -> float | None:
        """Return the median of theirs / ours: above 1, ours takes less. None without a pair."""
        return ratio(self.vllm, self.torch) if self.torch else None


class VersusMeasured(Struct):
    """Hold all that was measured with one dtype, by any number of runs."""

    work_s: dict[str, Pairs] = field(default_factory=lambda: {name: Pairs() for name in WORK})
    rss_bytes: Pairs = field(default_factory=Pairs)
    ready_s: Pairs = field(default_factory=Pairs)
    read_bytes_s: Count = 0.0

    def next_work(self, rounds: int) -> str | None:
        """Return the work with the fewest pairs, or None if all has `rounds` of them."""
        name = min(WORK, key=lambda name: len(self.work_s[name].torch))
        return name if len(self.work_s[name].torch) < rounds else None


class VersusResults(Struct, kw_only=True):
    """The file of `--results`."""

    shape: str
    isl_tokens: int
    dtypes: dict[str, VersusMeasured] = field(default_factory=dict)


class DtypeReport(Struct, frozen=True, kw_only=True):
    """Ratios are ours / theirs: of tokens per second, and of RSS and time to ready where less is better.

    `null`: not measured yet.
    """

    prefill_ratio: float | None
    decode_ratio_1: float | None
    decode_ratio_8: float | None
    decode_ratio_32: float | None
    decode_roofline_share_8: float | None  # the least time that reading weights and KV takes / our time
    rss_ratio: float | None
    ready_s_ratio: float | None
    measured: VersusMeasured


class RunningSide:
    """A process of one engine that answers questions."""

    def __init__(self, name: str, python: str, folder: Path, dtype: str, isl_tokens: int) -> None:
        """Start the process. Raises EngineError if it cannot load the model."""
        self._name = name
        kv_gib = room_gib(step_model(folder, dtype), isl_tokens)
        environ = os.environ | side_environment(name, kv_gib)
        sizes = [str(max(BATCHES)), str(isl_tokens), str(kv_gib)]
        argv = [python, "-P", "-m", "kvmesh.lab.bench.engine_side", name, str(folder), dtype, *sizes]
        self._log = folder / f"{name}-{dtype}.log"
        started = time.perf_counter()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environ,
                cwd=_root(),
                text=True,
                start_new_session=True,  # so that `close` ends whatever the engine has started
            )
        try:
            self._answer()
        except BaseException:  # KeyboardInterrupt, too, must leave no process behind
            self.close()
            raise
        self.ready_s = time.perf_counter() - started

    def ask(self, work: str) -> float:
        """Return how many seconds the work took."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(work) + "\n")
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
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _root() -> Path:
    return Path(__file__).absolute().parents[3]


def room_gib(model: StepModel, isl_tokens: int) -> int:
    """Return the size of both KV caches: the contexts of the largest batch, and some prompts beside them."""
    tokens = (max(BATCHES) + 4) * (isl_tokens + 64)
    return math.ceil(tokens * model.kv_bytes_per_token / 2**30)


def check_memory(model: StepModel, isl_tokens: int, available_bytes: int) -> None:
    """Raise EngineError if both sides would not fit: their weights, the contexts of the largest batch, their code."""
    contexts = max(BATCHES) * (isl_tokens + 64) * model.kv_bytes_per_token
    wanted = 2 * (model.weight_bytes + contexts + 2**30)
    if wanted > available_bytes:
        raise EngineError(
            f"both engines take {wanted / 2**30:.1f} GiB, {available_bytes / 2**30:.1f} GiB are free",
            hint="end other programs, or lower --isl-tokens",
        )


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
        prog="kvmesh lab bench engine versus",
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
    signal.signal(signal.SIGTERM, _stop)
    results = read_results(config)
    console = Console(stderr=True)
    ends_s = time.monotonic() + config.seconds if config.seconds else math.inf
    for dtype in dtypes:
        run = VersusRun(config, dtype, results, ends_s, console)
        run.measure(str(Path(python).absolute()))
    reports = {dtype: report_of(config, dtype, results.dtypes[dtype]) for dtype in dtypes}
    Console().print(table_of(config, reports))
    if config.json:
        print(json.dumps(msgspec.to_builtins(reports)))
    if wrong := [dtype for dtype, report in reports.items() if (report.decode_roofline_share_8 or 0) > 1]:
        raise EngineError(
            f"in {wrong[0]} a step took less than reading its weights does",
            hint="the machine was busy while its memory was measured: measure again",
        )
    return 0


def _stop(number: int, _: object) -> None:
    """End by an exception, so that the sides are closed and the checkpoint is removed."""
    raise SystemExit(128 + number)


def read_results(config: EngineVersusConfig) -> VersusResults:
    """Return what earlier runs have measured. Raises ConfigError if they measured something else."""
    path = Path(config.results)
    if not config.results or not path.exists():
        return VersusResults(shape=config.shape, isl_tokens=config.isl_tokens)
    try:
        found = msgspec.json.decode(path.read_bytes(), type=VersusResults)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} holds no results: {error}", hint="name another file") from error
    _check_results(path, found, config)
    return found


def _check_results(path: Path, found: VersusResults, config: EngineVersusConfig) -> None:
    if (found.shape, found.isl_tokens) != (config.shape, config.isl_tokens):
        raise ConfigError(
            f"{path} is of {found.shape} with {found.isl_tokens} tokens, not {config.shape} with {config.isl_tokens}",
            hint="name another file",
        )
    for measured in found.dtypes.values():
        if set(measured.work_s) != set(WORK) or any(len(p.torch) != len(p.vllm) for p in measured.work_s.values()):
            raise ConfigError(f"{path} lacks values of one side", hint="name another file")


class VersusRun:
    """One run with one dtype."""

    def __init__(
        self,
        config: EngineVersusConfig,
        dtype: str,
        results: VersusResults,
        ends_s: float,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Add to `results`, and begin nothing that would end after `ends_s` of `clock`."""
        self._config = config
        self._dtype = dtype
        self._results = results
        self._measured = results.dtypes.setdefault(dtype, VersusMeasured())
        self._ends_s = ends_s
        self._clock = clock
        self._console = console
        self._warm: set[str] = set()
        self._took_s: dict[str, float] = {}  # a pair of each work, the last time

    def measure(self, python: str) -> None:
        """Measure pairs until there are enough of each, or the time is over."""
        if self._measured.next_work(self._config.rounds) is None or self._clock() >= self._ends_s:
            return
        shape = shape_folder(self._config.shape)
        check_memory(step_model(shape, self._dtype), self._config.isl_tokens, psutil.virtual_memory().available)
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvmesh-versus-")))
            self._say(f"writing random weights in {self._dtype}")
            write_checkpoint(shape, folder, self._dtype)
            self._measured.read_bytes_s = max(self._measured.read_bytes_s, read_rate("cpu", folder))
            sides = self._start(stack, folder, python)
            self._pairs(sides)
            if f"decode_{max(BATCHES)}" in self._warm:  # both have written the contexts of the largest batch
                self._measured.rss_bytes.add(*(sides[name].rss_bytes() for name in (OURS, THEIRS)))
        self._keep()

    def _start(self, stack: ExitStack, folder: Path, python: str) -> dict[str, RunningSide]:
        """Start both, one after the other, until `stack` ends."""
        sides: dict[str, RunningSide] = {}
        for name, its_python in ((THEIRS, python), (OURS, sys.executable)):
            sides[name] = RunningSide(name, its_python, folder, self._dtype, self._config.isl_tokens)
            stack.callback(sides[name].close)
            self._say(f"{name} is ready after {sides[name].ready_s:.1f} s")
        self._measured.ready_s.add(*(round(sides[name].ready_s, 2) for name in (OURS, THEIRS)))
        return sides

    def _pairs(self, sides: dict[str, RunningSide]) -> None:
        while name := self._measured.next_work(self._config.rounds):
            started_s = self._clock()
            if started_s + self._took_s.get(name, 0.0) > self._ends_s:
                self._say(f"no time is left for {name}")
                return
            self._pair(name, sides)
            self._took_s[name] = self._clock() - started_s

    def _pair(self, name: str, sides: dict[str, RunningSide]) -> None:
        """Ask both for the same work. What happens only once is not counted."""
        pairs = self._measured.work_s[name]
        order = (OURS, THEIRS) if len(pairs.torch) % 2 else (THEIRS, OURS)
        taken_s = {side: sides[side].ask(name) for side in order}
        said = ", ".join(f"{side} {1000 * taken_s[side]:.0f} ms" for side in (OURS, THEIRS))
        if name not in self._warm:
            self._warm.add(name)
            self._say(f"{name}, not counted: {said}")
            return
        pairs.add(taken_s[OURS], taken_s[THEIRS])
        self._keep()
        self._say(f"{name}, pair {len(pairs.torch)}: {said}; ratio so far {pairs.ratio}")

    def _keep(self) -> None:
        if self._config.results:
            path = Path(self._config.results)
            new = path.with_name(f"{path.name}.new")
            new.write_bytes(msgspec.json.format(msgspec.json.encode(self._results)))
            new.replace(path)

    def _say(self, what: str) -> None:
        self._console.print(f"{self._dtype}: {what}", highlight=False)


def report_of(config: EngineVersusConfig, dtype: str, measured: VersusMeasured) -> DtypeReport:
    least_bytes = step_model(shape_folder(config.shape), dtype).decode_bytes(8, config.isl_tokens)
    steps_s, share = measured.work_s["decode_8"].torch, None
    if steps_s and measured.read_bytes_s:
        share = round(least_bytes / measured.read_bytes_s / min(steps_s), 3)
    return DtypeReport(
        prefill_ratio=measured.work_s["prefill"].ratio,
        decode_ratio_1=measured.work_s["decode_1"].ratio,
        decode_ratio_8=measured.work_s["decode_8"].ratio,
        decode_ratio_32=measured.work_s["decode_32"].ratio,
        decode_roofline_share_8=share,
        rss_ratio=_inverse(measured.rss_bytes),
        ready_s_ratio=_inverse(measured.ready_s),
        measured=measured,
    )


def _inverse(pairs: Pairs) -> float | None:
    """Return the median of ours / theirs."""
    return ratio(pairs.torch, pairs.vllm) if pairs.torch else None


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


def table_of(config: EngineVersusConfig, reports: dict[str, DtypeReport]) -> Table:
    table = Table(title=f"{config.shape}, {config.isl_tokens} tokens, torch engine / vLLM", title_justify="left")
    for column in ("", *reports, "goal"):
        table.add_column(column)
    for name, goal in GOALS.items():
        found = (getattr(report, name) for report in reports.values())
        table.add_row(name, *("-" if each is None else str(each) for each in found), goal)
    return table
