"""Engines and settings of `kvmesh lab bench kv`."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.kvcache.tiers.store import Payload, TierStore
from kvmesh.lab.bench.engine_steps import SHAPES
from kvmesh.lab.bench.kv_judge import ROUNDING, TOP, Answer
from kvmesh.lab.settings import LabConfig
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.messages import Delta, GenerateRequest, SamplingParams, StopConditions, pack_tokens
from kvmesh.workers.step_engine import StepEngine, StepEngineConfig
from kvmesh.workers.tiers import NO_TIERS, TierSettings

VOCABULARY = 1500  # token ids of prompts are below
DEVICE_PROMPTS = 2.5  # that the device holds


class KvBenchConfig(LabConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_BENCH_<NAME>`, that over the TOML file of `--config`, that over the default."""

    model: Annotated[str, Meta(description="tiny, a shape of lab/bench/shapes with random weights, or a folder")] = (
        "tiny"
    )
    device: Annotated[str, Meta(description="cpu, cuda, cuda:<n> or auto")] = "cpu"
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], Meta(description="of weights and KV")] = "auto"
    isl_tokens: Annotated[int, Meta(ge=0, description="prompt length; 0: 1024, or less where computing is slow")] = 0
    rounds: Annotated[int, Meta(ge=0, description="of each comparison; 0: 8, or fewer where computing is slow")] = 0
    host_mib: Annotated[int, Meta(ge=1, description="host memory of one side, unless prompts need more")] = 2048
    disk: Annotated[str, Meta(description="folder on the disk to measure; default: a temporary one")] = ""
    disk_mib: Annotated[int, Meta(ge=64, description="space on the disk, unless prompts need more")] = 1024


class ThrottledStore:
    """A store whose loads take `block_s` longer for each block."""

    def __init__(self, store: TierStore) -> None:
        self.block_s = 0.0
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def load(self, addresses: Sequence[bytes], take: Callable[[Payload], object]) -> None:
        def take_late(payload: Payload) -> None:
            if self.block_s:
                time.sleep(self.block_s)
            take(payload)

        self._store.load(addresses, take_late)


class FreshPrompts:
    """Makes prompts that share no block with any before."""

    def __init__(self) -> None:
        self._made = 0

    def fresh(self, isl_tokens: int) -> list[int]:
        self._made += 1
        head = [self._made % VOCABULARY, self._made // VOCABULARY + 1]
        return head + [(31 * i + 7 * self._made) % VOCABULARY + 10 for i in range(isl_tokens - 2)]


class BenchedEngine:
    """One engine, and what was seen of it."""

    def __init__(self, engine: StepEngine) -> None:
        assert engine._info is not None, "start it first"
        self.engine = engine
        self.dtype = engine._info.layout.dtype
        self.failed = 0
        self.over_limit_bytes = 0
        self._asked = 0

    async def ask(self, prompt: Sequence[int], osl_tokens: int = 4) -> Answer:
        self._asked += 1
        request = GenerateRequest(
            request_id=RequestId(f"bench-{self._asked}"),
            model="bench",
            prompt=pack_tokens(prompt),
            sampling=SamplingParams(temperature=0, top_logprobs=TOP if self.dtype in ROUNDING else None),
            stop=StopConditions(max_tokens=osl_tokens, ignore_eos=True),
        )
        began, came, tokens, top = (
            time.perf_counter(),
            list[float](),
            list[int](),
            list[tuple[tuple[int, float], ...]](),
        )
        delta: Delta | None = None
        async for delta in self.engine.generate(request):
            came.append(time.perf_counter())
            tokens += delta.token_ids
            top += [logprob.top for logprob in delta.logprobs or ()]
        self.failed += delta is None or len(tokens) != osl_tokens
        for use in self.engine.load().tiers:
            self.over_limit_bytes = max(self.over_limit_bytes, use.used_bytes - use.limit_bytes)
        return Answer(came[0] - began, tokens, came, top)

    async def rest(self) -> None:
        """Wait until no copy is in progress: the other side is asked next."""
        copies = self.engine._copies
        while copies is not None and (copies.stack.in_flight or copies._loads):  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    @contextmanager
    def without_tiers(self) -> Iterator[None]:
        """Have the engine be one without tiers for a while. Nothing may be in progress at the beginning and the end."""
        engine, scheduler = self.engine, self.engine._scheduler
        kept = engine._copies, scheduler.tiers, scheduler.pool.journal
        engine._copies, scheduler.tiers, scheduler.pool.journal = None, None, None
        try:
            yield
        finally:
            engine._copies, scheduler.tiers, scheduler.pool.journal = kept

    def count(self, name: str) -> int:
        return sum(use.counts.get(name, 0) for use in self.engine.load().tiers)


@asynccontextmanager
async def running(config: KvBenchConfig, tiers: TierSettings = NO_TIERS) -> AsyncIterator[StepEngine]:
    """Yield an engine whose device holds some prompts, and as much more as answers need."""
    from kvmesh.workers.engines.torch.executor import TorchExecutor

    folder, has_weights = model_folder(config.model)
    block_size = 16
    executor = TorchExecutor(
        str(folder), device=config.device, dtype=config.dtype, block_size=block_size, random_weights=not has_weights
    )
    blocks = int(DEVICE_PROMPTS * config.isl_tokens / block_size) + 16
    settings = StepEngineConfig("bench", str(folder), blocks, 32, 512, 30.0, 60.0, tiers=tiers)
    engine = StepEngine(executor, None, settings)
    await engine.start(WorkerId("bench"), "")
    try:
        yield engine
    finally:
        await engine.stop()


def model_folder(name: str) -> tuple[Path, bool]:
    """Return the folder of a model, and whether it has weights. Raise ConfigError if there is none."""
    if name == "tiny":
        return CHECKPOINT_DIR, True
    folder = SHAPES / name if (SHAPES / name).is_dir() else Path(name)
    if not (folder / "config.json").is_file():
        names = ", ".join(["tiny", *sorted(path.name for path in SHAPES.iterdir())])
        raise ConfigError(f"no model {name!r}", hint=f"use one of {names}, or a folder with a config.json")
    return folder, any(folder.glob("*.safetensors"))
