"""Run `kvmesh lab bench kv`: measure what tiers for KV bring, and what host memory costs those who do not use it.

Torch engines of one model run in this process: one has no tier, one keeps evicted KV in host memory, one on a disk. The
first and one of the others are given the same prompts in turn, and while one is asked the other is idle. Greedy answers
of both are compared token by token. Where prompts are evicted, the device holds fewer than are asked for in a circle.
Times are the engine's own, without router and frontend. How long prompts are, and how often sides are compared, is
chosen once, by the speed of this machine.
"""

import asyncio
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from kvmesh.lab.bench.kv_cost import itl_cost, one_shot_cost
from kvmesh.lab.bench.kv_engines import BenchedEngine, FreshPrompts, KvBenchConfig, ThrottledStore, running
from kvmesh.lab.bench.kv_judge import Answer, Judge
from kvmesh.lab.bench.kv_pace import TRIED_ISL_TOKENS, cost_isl_tokens, is_paced, paced, sized
from kvmesh.mesh.config import load
from kvmesh.protocol.errors import EngineError
from kvmesh.workers.disk_tier import DiskSettings
from kvmesh.workers.step_engine import StepEngine
from kvmesh.workers.tiers import MIB, TierSettings

EQUAL_PROMPTS = 16  # at once
CIRCLE = 4  # prompts that are asked for in turn; the device holds two of them and a half
SLOWER = 3.0  # a throttled load takes so many times as long as computing
COST_ROUNDS = 3  # of what costs little to measure and differs much, in each round


class KvBenchReport(Struct, frozen=True, kw_only=True):
    wrong_tokens: int  # tokens that differ between the sides
    rounded_answers: int  # that differ in bfloat16 from a token on that is as likely, but for rounding
    failed: int  # requests without a whole answer
    over_limit_bytes: int  # most that host memory ever held beyond its limit
    host_speedup: float  # TTFT computed / TTFT from host memory
    disk_speedup: float  # ... TTFT from the disk
    host_is_on: bool  # host memory was not switched off meanwhile
    shared_prefix_loads: float  # for equal prompts at once; the mean of the rounds
    slow_tier_regret: float  # TTFT with a throttled tier / that of computing
    itl_ratio: float  # of a stream beside prompts that never come again: with host memory / without
    itl_control_ratio: float  # ... without / without: the noise
    itl_ratio_spread: float  # ... between the quartiles of the rounds
    one_shot_throughput_ratio: float  # of prompts that never come again: with host memory / without
    one_shot_control_ratio: float
    one_shot_ratio_spread: float
    ttft_host_ms: float
    ttft_disk_ms: float
    ttft_computed_ms: float
    loaded_blocks: int
    saved_blocks: int
    block_bytes: int
    model: str
    dtype: str
    isl_tokens: int
    rounds: int
    took_s: float


GOALS = {
    "wrong_tokens": "0",
    "failed": "0",
    "over_limit_bytes": "0",
    "host_speedup": ">= 8",
    "disk_speedup": ">= 5",
    "host_is_on": "True",
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
        prog="kvmesh lab bench kv",
        description="Measure KV in host memory and on a disk against computing it again, with the torch engine, "
        "and what host memory costs prompts that never come again.",
        section="bench",
    )
    report = asyncio.run(measure(config, PhaseNotes(Console(stderr=True))))
    Console().print(table_of(report))
    if config.json:
        print(json.dumps(msgspec.to_builtins(report)))
    if report.wrong_tokens or report.failed or report.over_limit_bytes:
        raise EngineError(
            "an answer was wrong, a request failed or a limit was passed", hint="this is a bug: report it"
        )
    return 0


class PlainSide(BenchedEngine):
    """The engine that computes all prompts, and the judge of those that need not."""

    def __init__(self, engine: StepEngine) -> None:
        super().__init__(engine)
        self.judge = Judge(self.dtype)
        self.prompts = FreshPrompts()


class KvBench:
    """The comparisons of an engine that has a tier with one that computes, one after the other."""

    def __init__(self, config: KvBenchConfig, tiered: BenchedEngine, plain: "PlainSide") -> None:
        self.config = config
        self.tiered = tiered
        self.plain = plain
        self.prompts = plain.prompts
        self._expected: dict[tuple[int, ...], Answer] = {}

    def fresh_prompt(self) -> list[int]:
        """Return a prompt that shares no block with any before."""
        return self.prompts.fresh(self.config.isl_tokens)

    async def both(self, prompt: Sequence[int]) -> tuple[float, float]:
        """Return the TTFT with the tier and computed."""
        answer = await self.tiered.ask(prompt)
        await self.tiered.rest()
        expected = self._expected[tuple(prompt)] = await self.plain.ask(prompt)
        self.plain.judge.compare(answer, expected)
        return answer.ttft_s, expected.ttft_s

    async def tiered_alone(self, prompt: Sequence[int]) -> None:
        """Ask for a prompt whose time does not count. What it is compared with is computed once."""
        answer = await self.tiered.ask(prompt)
        await self.tiered.rest()
        self.plain.judge.compare(answer, await self._expected_of(prompt))

    async def _expected_of(self, prompt: Sequence[int]) -> Answer:
        key = tuple(prompt)
        if key not in self._expected:
            self._expected[key] = await self.plain.ask(prompt)
        return self._expected[key]

    async def speedup(self, times: int = 2) -> tuple[float, float]:
        """Return the median TTFTs of prompts that were evicted: from the tier, and computed.

        `times`: how often a prompt is asked for before the tier has it and knows its speed.
        """
        pairs = await self._circle(times)
        return statistics.median([pair[0] for pair in pairs]), statistics.median([pair[1] for pair in pairs])

    async def _circle(self, times: int) -> list[tuple[float, float]]:
        """Return the TTFTs of prompts that are asked for in a circle, after so `times` in which a tier gets them."""
        prompts = [self.fresh_prompt() for _ in range(CIRCLE)]
        for prompt in prompts * times:
            await self.tiered_alone(prompt)
        return [await self.both(prompts[number % CIRCLE]) for number in range(self.config.rounds * CIRCLE)]

    async def equal_prompts(self) -> float:
        """Return how many loads equal prompts at once need."""
        prompts = [self.fresh_prompt() for _ in range(CIRCLE)]
        for prompt in prompts:
            await self.tiered_alone(prompt)
        loads = 0
        for prompt in prompts:
            before = self.tiered.count("loads")
            answers = await asyncio.gather(*[self.tiered.ask(prompt) for _ in range(EQUAL_PROMPTS)])
            await self.tiered.rest()
            loads += self.tiered.count("loads") - before
            for answer in answers:
                self.plain.judge.compare(answer, await self._expected_of(prompt))
        return loads / CIRCLE

    async def regret(self, computed_s: float, store: ThrottledStore) -> float:
        """Return TTFT / that of computing, where loads take SLOWER times as long as computing."""
        store.block_s = SLOWER * computed_s / (self.config.isl_tokens / self.tiered.engine._scheduler.pool.block_size)
        times = await self._circle(2)
        store.block_s = 0.0
        return statistics.median([with_s / without_s for with_s, without_s in times])


class PhaseNotes:
    """Says on stderr what is measured now, and since when all is."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began_s = time.perf_counter()

    @property
    def took_s(self) -> float:
        return time.perf_counter() - self._began_s

    def __call__(self, text: str) -> None:
        self._console.print(f"{self.took_s:5.0f} s  {text}", highlight=False)


async def measure(config: KvBenchConfig, say: PhaseNotes) -> KvBenchReport:
    if not is_paced(config):
        say("how fast this machine computes")
    config = paced(config, 0.0 if is_paced(config) else await computed_token_s(config))
    with TemporaryDirectory(prefix="kvmesh-bench-kv-", dir=config.disk or None) as folder:
        async with running(config, TierSettings()) as engine:
            plain = PlainSide(engine)
            assert engine._info is not None
            layout = engine._info.layout
            config = sized(config, config.isl_tokens // layout.block_size * layout.block_bytes)
            say(f"{config.rounds} rounds of prompts of {config.isl_tokens} tokens, {layout.block_bytes} bytes a block")
            host = await measure_host(config, plain, say)
            disk = await measure_disk(config, plain, Path(folder), say)
    return KvBenchReport(
        wrong_tokens=plain.judge.wrong_tokens,
        rounded_answers=plain.judge.rounded_answers,
        failed=sum([side.pop("failed") for side in (host, disk)]) + plain.failed,
        model=config.model,
        dtype=layout.dtype,
        isl_tokens=config.isl_tokens,
        rounds=config.rounds,
        took_s=round(say.took_s, 1),
        **host,
        **disk,
    )


async def computed_token_s(config: KvBenchConfig) -> float:
    """Return how long one token of a prompt takes here."""
    isl_tokens = TRIED_ISL_TOKENS
    async with running(msgspec.structs.replace(config, isl_tokens=isl_tokens)) as engine:
        side, prompts = BenchedEngine(engine), FreshPrompts()
        times = [(await side.ask(prompts.fresh(isl_tokens))).ttft_s for _ in range(3)]
    return statistics.median(times[1:]) / isl_tokens  # the first one warms up


async def measure_host(config: KvBenchConfig, plain: PlainSide, say: PhaseNotes) -> dict[str, Any]:
    """Return the fields of the report that are about host memory."""
    async with running(config, TierSettings(config.host_mib * MIB)) as engine:
        host = BenchedEngine(engine)
        bench = KvBench(config, host, plain)
        stores: Any = engine._copies._tiers.stores  # type: ignore[union-attr]
        [(tier, store)] = stores.items()
        throttled = stores[tier] = ThrottledStore(store)
        say("prompts that come again")
        hit_s, computed_s = await bench.speedup()
        say("equal prompts at once")
        shared = await bench.equal_prompts()
        say("a throttled tier")
        regret = await bench.regret(computed_s, throttled)
        say("prompts that never come again")
        isl_tokens = cost_isl_tokens(config.isl_tokens, computed_s / config.isl_tokens)
        rounds = COST_ROUNDS * config.rounds
        one_shot = await one_shot_cost(host, bench.prompts, isl_tokens, rounds)
        say("a stream beside prompts that never come again")
        itl = await itl_cost(host, bench.prompts, isl_tokens, rounds)
        [use] = engine.load().tiers
        return {
            "failed": host.failed,
            "over_limit_bytes": max(0, host.over_limit_bytes),
            "host_speedup": round(computed_s / hit_s, 2),
            "host_is_on": use.is_readable and use.is_writable,
            "shared_prefix_loads": shared,
            "slow_tier_regret": round(regret, 3),
            "itl_ratio": round(itl.ratio, 3),
            "itl_control_ratio": round(itl.control, 3),
            "itl_ratio_spread": round(itl.spread, 3),
            "one_shot_throughput_ratio": round(1 / one_shot.ratio, 3),
            "one_shot_control_ratio": round(1 / one_shot.control, 3),
            "one_shot_ratio_spread": round(one_shot.spread, 3),
            "ttft_host_ms": round(1000 * hit_s, 2),
            "ttft_computed_ms": round(1000 * computed_s, 2),
            "loaded_blocks": use.counts["loaded"],
            "saved_blocks": use.counts["saved"],
            "block_bytes": use.block_bytes,
        }


async def measure_disk(config: KvBenchConfig, plain: PlainSide, folder: Path, say: PhaseNotes) -> dict[str, Any]:
    """Return the fields of the report that are about an engine with a disk."""
    settings = DiskSettings(str(folder / "engine"), config.disk_mib * MIB)
    async with running(config, TierSettings(disk=settings)) as engine:
        disk = BenchedEngine(engine)
        bench = KvBench(config, disk, plain)
        say("prompts that come back from the disk")
        disk_s, computed_s = await bench.speedup(times=3)  # it has a prompt when it was asked for twice
    return {
        "failed": disk.failed,
        "disk_speedup": round(computed_s / disk_s, 2),
        "ttft_disk_ms": round(1000 * disk_s, 2),
    }


def table_of(report: KvBenchReport) -> Table:
    table = Table(title=f"{report.model}, {report.dtype}, {report.isl_tokens} tokens", title_justify="left")
    for column in ("", "measured", "goal"):
        table.add_column(column)
    for name, value in msgspec.to_builtins(report).items():
        table.add_row(name, str(value), GOALS.get(name, ""))
    return table
