"""Run `kvmesh bench kv`: measure what host memory for KV brings, and what it costs those who do not use it.

Two torch engines of one model run in this process: one keeps evicted KV in host memory, the other computes it again.
Both are given the same prompts in turn, and while one is asked the other is idle. Greedy answers of both are compared
token by token. The device holds fewer prompts than are asked for in a circle, so every prompt has been evicted when it
comes again. Times are the engine's own, without router and frontend.
"""

import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from rich.console import Console
from rich.table import Table

from benchmarks.engine_steps import SHAPES
from cluster.tiny_model import CHECKPOINT_DIR
from kvcache.tiers.store import Payload, TierStore
from mesh.config import load
from protocol.errors import ConfigError, EngineError
from protocol.ids import RequestId, WorkerId
from protocol.messages import Delta, GenerateRequest, SamplingParams, StopConditions, pack_tokens
from workers.step_engine import StepEngine, StepEngineConfig
from workers.tiers import MIB, TierSettings

EQUAL_PROMPTS = 16  # at once
CIRCLE = 4  # prompts that are asked for in turn; the device holds two of them and a half
VOCABULARY = 1500  # token ids of prompts are below
SLOWER = 3.0  # a throttled load takes so many times as long as computing


class KvBenchConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_BENCH_<NAME>`, that over the TOML file of `--config`, that over the default."""

    model: Annotated[str, Meta(description="tiny, a shape of benchmarks/shapes with random weights, or a folder")] = (
        "tiny"
    )
    device: Annotated[str, Meta(description="cpu, cuda, cuda:<n> or auto")] = "cpu"
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], Meta(description="of weights and KV")] = "auto"
    isl_tokens: Annotated[int, Meta(ge=64, description="prompt length")] = 1024
    rounds: Annotated[int, Meta(ge=1, description="of each comparison; medians count")] = 8
    host_mib: Annotated[int, Meta(ge=1, description="host memory of the side that has it")] = 2048
    json: Annotated[bool, Meta(description="the last line is one JSON object")] = False


class KvBenchReport(Struct, frozen=True, kw_only=True):
    wrong_tokens: int  # tokens that differ between the sides
    failed: int  # requests without a whole answer
    over_limit_bytes: int  # most that host memory ever held beyond its limit
    host_speedup: float  # TTFT computed / TTFT from host memory
    shared_prefix_loads: float  # for equal prompts at once; the mean of the rounds
    slow_tier_regret: float  # TTFT with a throttled tier / that of computing
    itl_ratio: float  # of a stream beside prompts that never come again: with host memory / without
    one_shot_throughput_ratio: float  # of prompts that never come again: with host memory / without
    ttft_host_ms: float
    ttft_computed_ms: float
    loaded_blocks: int
    saved_blocks: int
    block_bytes: int
    model: str
    dtype: str
    isl_tokens: int


GOALS = {
    "wrong_tokens": "0",
    "failed": "0",
    "over_limit_bytes": "0",
    "host_speedup": ">= 8",
    "shared_prefix_loads": "1",
    "slow_tier_regret": "<= 1.15",
    "itl_ratio": "<= 1.05",
    "one_shot_throughput_ratio": ">= 0.97",
}


def main(argv: list[str]) -> int:
    config = load(
        KvBenchConfig,
        argv,
        os.environ,
        prefix="KVMESH_BENCH_",
        prog="kvmesh bench kv",
        description="Measure KV in host memory against computing it again, with the torch engine, and what it costs "
        "prompts that never come again.",
        section="bench",
    )
    report = asyncio.run(measure(config, Console(stderr=True)))
    Console().print(table_of(report))
    if config.json:
        print(json.dumps(msgspec.to_builtins(report)))
    if report.wrong_tokens or report.failed or report.over_limit_bytes:
        raise EngineError("an answer was wrong or failed, or a limit was passed", hint="this is a bug: report it")
    return 0


class ThrottledStore:
    """A store whose loads take `block_s` longer for each block."""

    def __init__(self, store: TierStore) -> None:
        self.block_s = 0.0
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def load(self, address: bytes, take: Callable[[Payload], object]) -> None:
        if self.block_s:
            time.sleep(self.block_s)
        self._store.load(address, take)


class BenchedEngine:
    """One engine, and what was seen of it."""

    def __init__(self, engine: StepEngine) -> None:
        self.engine = engine
        self.failed = 0
        self.over_limit_bytes = 0
        self._asked = 0

    async def ask(self, prompt: Sequence[int], osl_tokens: int = 4) -> tuple[float, list[int], list[float]]:
        """Return the TTFT, the answer, and when each of its parts came."""
        self._asked += 1
        request = GenerateRequest(
            request_id=RequestId(f"bench-{self._asked}"),
            model="bench",
            prompt=pack_tokens(prompt),
            sampling=SamplingParams(temperature=0),
            stop=StopConditions(max_tokens=osl_tokens, ignore_eos=True),
        )
        began, came, tokens = time.perf_counter(), list[float](), list[int]()
        delta: Delta | None = None
        async for delta in self.engine.generate(request):
            came.append(time.perf_counter())
            tokens += delta.token_ids
        self.failed += delta is None or len(tokens) != osl_tokens
        for use in self.engine.load().tiers:
            self.over_limit_bytes = max(self.over_limit_bytes, use.used_bytes - use.limit_bytes)
        return came[0] - began, tokens, came

    async def rest(self) -> None:
        """Wait until no copy is in progress: the other side is asked next."""
        copies = self.engine._copies
        while copies is not None and (copies.stack._in_flight or copies._loads):  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    def count(self, name: str) -> int:
        return sum(use.counts.get(name, 0) for use in self.engine.load().tiers)


class KvBench:
    """The comparisons, one after the other."""

    def __init__(self, config: KvBenchConfig, host: BenchedEngine, plain: BenchedEngine) -> None:
        self.config = config
        self.host = host
        self.plain = plain
        self.wrong_tokens = 0
        self._prompts = 0

    def fresh_prompt(self, isl_tokens: int = 0) -> list[int]:
        """Return a prompt that shares no block with any before."""
        self._prompts += 1
        length = isl_tokens or self.config.isl_tokens
        head = [self._prompts % VOCABULARY, self._prompts // VOCABULARY + 1]
        return head + [(31 * i + 7 * self._prompts) % VOCABULARY + 10 for i in range(length - 2)]

    async def both(self, prompt: Sequence[int]) -> tuple[float, float]:
        """Return the TTFT with host memory and without."""
        with_s, answer, _ = await self.host.ask(prompt)
        await self.host.rest()
        without_s, expected, _ = await self.plain.ask(prompt)
        self.wrong_tokens += sum([one != other for one, other in zip(answer, expected, strict=False)])
        return with_s, without_s

    async def speedup(self) -> tuple[float, float]:
        """Return the median TTFTs of prompts that were evicted: from host memory, and computed."""
        prompts = [self.fresh_prompt() for _ in range(CIRCLE)]
        for prompt in prompts * 2:
            await self.both(prompt)
        times = [await self.both(prompts[number % CIRCLE]) for number in range(self.config.rounds * CIRCLE)]
        return statistics.median([pair[0] for pair in times]), statistics.median([pair[1] for pair in times])

    async def equal_prompts(self) -> float:
        """Return how many loads equal prompts at once need."""
        prompts = [self.fresh_prompt() for _ in range(CIRCLE)]
        for prompt in prompts:
            await self.both(prompt)
        loads = 0
        for number in range(CIRCLE):
            before = self.host.count("loads")
            answers = await asyncio.gather(*[self.host.ask(prompts[number]) for _ in range(EQUAL_PROMPTS)])
            await self.host.rest()
            loads += self.host.count("loads") - before
            _, expected, _ = await self.plain.ask(prompts[number])
            self.wrong_tokens += sum([answer != expected for _, answer, _ in answers])
        return loads / CIRCLE

    async def regret(self, computed_s: float, store: ThrottledStore) -> float:
        """Return TTFT / that of computing, where loads take SLOWER times as long as computing."""
        tiers = self.host.engine._scheduler.tiers
        assert tiers is not None
        store.block_s = SLOWER * computed_s / (self.config.isl_tokens / tiers.pool.block_size)
        prompts = [self.fresh_prompt() for _ in range(CIRCLE)]
        for prompt in prompts * 3:  # calibrate: the first loads find out that they are slow
            await self.both(prompt)
        times = [await self.both(prompts[number % CIRCLE]) for number in range(self.config.rounds * CIRCLE)]
        store.block_s = 0.0
        return statistics.median([with_s / without_s for with_s, without_s in times])

    async def one_shot(self) -> float:
        """Return the ratio of throughputs of prompts that never come again, with host memory / without."""
        ratios: list[float] = []
        for number in range(self.config.rounds + 1):
            prompts = [self.fresh_prompt() for _ in range(2 * CIRCLE)]
            took: dict[bool, float] = {}
            for has_tier in (True, False) if number % 2 else (False, True):
                side = self.host if has_tier else self.plain
                began = time.perf_counter()
                await asyncio.gather(*[side.ask(prompt, 8) for prompt in prompts])
                took[has_tier] = time.perf_counter() - began
                await side.rest()
            ratios.append(took[False] / took[True])
        return statistics.median(ratios[1:])

    async def itl(self) -> float:
        """Return the ratio of a stream's ITL beside prompts that never come again, with host memory / without."""
        ratios: list[float] = []
        for number in range(self.config.rounds + 1):
            prompts = [self.fresh_prompt(self.config.isl_tokens // 2) for _ in range(2 * CIRCLE)]
            stream = self.fresh_prompt(64)
            itl_s: dict[bool, float] = {}
            for has_tier in (True, False) if number % 2 else (False, True):
                side = self.host if has_tier else self.plain
                streaming = asyncio.create_task(side.ask(stream, 64))
                for prompt in prompts:
                    await side.ask(prompt, 1)
                _, _, came = await streaming
                itl_s[has_tier] = (came[-1] - came[0]) / 63
                await side.rest()
            ratios.append(itl_s[True] / itl_s[False])
        return statistics.median(ratios[1:])


async def measure(config: KvBenchConfig, console: Console) -> KvBenchReport:
    async with AsyncExitStack() as engines:
        host = BenchedEngine(await engines.enter_async_context(running(config, TierSettings(config.host_mib * MIB))))
        plain = BenchedEngine(await engines.enter_async_context(running(config, TierSettings())))
        bench = KvBench(config, host, plain)
        stores: Any = host.engine._copies._tiers.stores  # type: ignore[union-attr]
        [(tier, store)] = stores.items()
        throttled = stores[tier] = ThrottledStore(store)
        console.print("prompts that come again")
        hit_s, computed_s = await bench.speedup()
        console.print("equal prompts at once")
        shared = await bench.equal_prompts()
        console.print("a throttled tier")
        regret = await bench.regret(computed_s, throttled)
        console.print("prompts that never come again")
        one_shot, itl = await bench.one_shot(), await bench.itl()
        [use] = host.engine.load().tiers
        assert plain.engine._info is not None
        return KvBenchReport(
            wrong_tokens=bench.wrong_tokens,
            failed=host.failed + plain.failed,
            over_limit_bytes=max(0, host.over_limit_bytes),
            host_speedup=round(computed_s / hit_s, 2),
            shared_prefix_loads=shared,
            slow_tier_regret=round(regret, 3),
            itl_ratio=round(itl, 3),
            one_shot_throughput_ratio=round(one_shot, 3),
            ttft_host_ms=round(1000 * hit_s, 2),
            ttft_computed_ms=round(1000 * computed_s, 2),
            loaded_blocks=use.counts["loaded"],
            saved_blocks=use.counts["saved"],
            block_bytes=use.block_bytes,
            model=config.model,
            dtype=plain.engine._info.layout.dtype,
            isl_tokens=config.isl_tokens,
        )


@asynccontextmanager
async def running(config: KvBenchConfig, tiers: TierSettings) -> Any:
    """Yield an engine whose device holds two prompts and a half."""
    from workers.engines.torch.executor import TorchExecutor

    folder, has_weights = model_folder(config.model)
    block_size = 16
    executor = TorchExecutor(
        str(folder), device=config.device, dtype=config.dtype, block_size=block_size, random_weights=not has_weights
    )
    blocks = 5 * config.isl_tokens // (2 * block_size) + 16
    engine = StepEngine(
        executor, None, StepEngineConfig("bench", str(folder), blocks, 32, 512, 30.0, 60.0, tiers=tiers)
    )
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


def table_of(report: KvBenchReport) -> Table:
    table = Table(title=f"{report.model}, {report.dtype}, {report.isl_tokens} tokens", title_justify="left")
    for column in ("", "measured", "goal"):
        table.add_column(column)
    for name, value in msgspec.to_builtins(report).items():
        table.add_row(name, str(value), GOALS.get(name, ""))
    return table
