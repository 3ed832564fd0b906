"""Run `kvmesh bench kv`: measure what tiers for KV bring, and what host memory costs those who do not use it.

Torch engines of one model run in this process: one has no tier, one keeps evicted KV in host memory, one on a disk, and
one in storage that it shares with a process, and one pulls it from another process. The first and one of the others are
given the same prompts in turn, and while one is asked the other is idle. Greedy answers of both are compared token by
token. Where prompts are evicted, the device holds fewer than are asked for in a circle. Times are the engine's own,
without router and frontend.
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

from benchmarks.kv_chaos import index_equal
from benchmarks.kv_disk import corrupt, measure_shares
from benchmarks.kv_engines import BenchedEngine, KvBenchConfig, ThrottledStore, running
from benchmarks.kv_peers import measure_peer, nixl_read_share
from benchmarks.kv_restart import fill_and_kill
from benchmarks.kv_shared import corrupt_shared, measure_shared
from mesh.config import load
from protocol.errors import EngineError
from workers.disk_tier import DiskSettings
from workers.tiers import MIB, TierSettings

EQUAL_PROMPTS = 16  # at once
CIRCLE = 4  # prompts that are asked for in turn; the device holds two of them and a half
VOCABULARY = 1500  # token ids of prompts are below
SLOWER = 3.0  # a throttled load takes so many times as long as computing


class KvBenchReport(Struct, frozen=True, kw_only=True):
    wrong_tokens: int  # tokens that differ between the sides
    failed: int  # requests without a whole answer
    over_limit_bytes: int  # most that host memory ever held beyond its limit
    host_speedup: float  # TTFT computed / TTFT from host memory
    disk_speedup: float  # ... TTFT from the disk
    restart_speedup: float  # ... TTFT from the disk, of prompts that a killed process has left there
    shared_speedup: float  # ... TTFT from shared storage, of prompts that another, killed worker has stored
    shared_place: str  # a folder, or the bucket that was given
    peer_speedup: float  # ... TTFT with the prompt pulled from another process
    peer_transfer: str
    nixl_read_share: float | None  # speed of our reads of scattered blocks / that of bare NIXL; None: it does not load
    corrupt_injected: int  # blocks that were damaged, and reads and writes that failed
    corrupt_caught: int
    corrupt_served: int  # with other bytes than were stored
    index_equal: bool  # an index of the engine's events equals its caches, after aborts, resets and damaged loads
    disk_read_share: float  # speed of the store / that of dd with direct I/O
    disk_write_share: float
    disk_path: str  # direct or buffered
    shared_prefix_loads: float  # for equal prompts at once; the mean of the rounds
    slow_tier_regret: float  # TTFT with a throttled tier / that of computing
    itl_ratio: float  # of a stream beside prompts that never come again: with host memory / without
    one_shot_throughput_ratio: float  # of prompts that never come again: with host memory / without
    ttft_host_ms: float
    ttft_disk_ms: float
    ttft_restart_ms: float
    ttft_shared_ms: float
    ttft_peer_ms: float
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
    "disk_speedup": ">= 5",
    "restart_speedup": ">= 5",
    "shared_speedup": ">= 5",
    "peer_speedup": ">= 5",
    "peer_transfer": "nixl",
    "nixl_read_share": ">= 0.9",
    "corrupt_injected": "> 100",
    "corrupt_caught": "all",
    "corrupt_served": "0",
    "index_equal": "True",
    "disk_read_share": ">= 0.8",
    "disk_write_share": ">= 0.7",
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
        description="Measure KV in host memory, on a disk, in shared storage and from other workers against computing "
        "it again, with the torch engine, and what host memory costs prompts that never come again.",
        section="bench",
    )
    report = asyncio.run(measure(config, Console(stderr=True)))
    Console().print(table_of(report))
    if config.json:
        print(json.dumps(msgspec.to_builtins(report)))
    problems = (report.wrong_tokens, report.failed, report.over_limit_bytes, report.corrupt_served)
    if any(problems) or not report.index_equal:
        raise EngineError(
            "an answer or index was wrong, a request failed, or a limit was passed", hint="this is a bug: report it"
        )
    return 0


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
        """Return the median TTFTs of prompts that were evicted: from the tier, and computed."""
        prompts = [self.fresh_prompt() for _ in range(CIRCLE)]
        for prompt in prompts * 3:  # a disk has a prompt when it was asked for twice
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
    with TemporaryDirectory(prefix="kvmesh-bench-kv-", dir=config.disk or None) as folder:
        async with running(config, TierSettings()) as engine:
            plain = BenchedEngine(engine)
            host = await measure_host(config, plain, console)
            disk = await measure_disk(config, plain, Path(folder), console)
            shared = await measure_other(config, plain, Path(folder), console)
            peer = await measure_peers(config, plain, console)
            assert engine._info is not None
            layout = engine._info.layout
        seed = time.time_ns() % 10_000
        console.print(f"aborts, resets and damaged loads (seed {seed})")
        is_equal = await index_equal(config, layout.block_bytes, Path(folder), seed)
        console.print("the disk by itself")
        shares = measure_shares(Path(folder), layout.block_bytes, config.disk_mib // 4, config.rounds)
        damages = corrupt(Path(folder), layout.block_bytes), corrupt_shared(Path(folder), layout.block_bytes)
    return KvBenchReport(
        wrong_tokens=sum([side.pop("wrong_tokens") for side in (host, disk, shared, peer)]),
        failed=sum([side.pop("failed") for side in (host, disk, shared, peer)]) + plain.failed,
        corrupt_injected=sum([each.injected for each in damages]),
        corrupt_caught=sum([each.caught for each in damages]),
        corrupt_served=sum([each.served for each in damages]),
        index_equal=is_equal,
        disk_read_share=shares.read,
        disk_write_share=shares.write,
        disk_path=shares.path,
        model=config.model,
        dtype=layout.dtype,
        isl_tokens=config.isl_tokens,
        **host,
        **disk,
        **shared,
        **peer,
    )


async def measure_host(config: KvBenchConfig, plain: BenchedEngine, console: Console) -> dict[str, Any]:
    """Return the fields of the report that are about host memory."""
    async with running(config, TierSettings(config.host_mib * MIB)) as engine:
        host = BenchedEngine(engine)
        bench = KvBench(config, host, plain)
        stores: Any = engine._copies._tiers.stores  # type: ignore[union-attr]
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
        [use] = engine.load().tiers
        return {
            "wrong_tokens": bench.wrong_tokens,
            "failed": host.failed,
            "over_limit_bytes": max(0, host.over_limit_bytes),
            "host_speedup": round(computed_s / hit_s, 2),
            "shared_prefix_loads": shared,
            "slow_tier_regret": round(regret, 3),
            "itl_ratio": round(itl, 3),
            "one_shot_throughput_ratio": round(one_shot, 3),
            "ttft_host_ms": round(1000 * hit_s, 2),
            "ttft_computed_ms": round(1000 * computed_s, 2),
            "loaded_blocks": use.counts["loaded"],
            "saved_blocks": use.counts["saved"],
            "block_bytes": use.block_bytes,
        }


async def measure_disk(config: KvBenchConfig, plain: BenchedEngine, folder: Path, console: Console) -> dict[str, Any]:
    """Return the fields of the report that are about an engine with a disk."""
    settings = DiskSettings(str(folder / "engine"), config.disk_mib * MIB)
    async with running(config, TierSettings(disk=settings)) as engine:
        disk = BenchedEngine(engine)
        bench = KvBench(config, disk, plain)
        console.print("prompts that come back from the disk")
        disk_s, computed_s = await bench.speedup()
    settings = DiskSettings(str(folder / "killed"), config.disk_mib * MIB)
    prompts = [bench.fresh_prompt() for _ in range(config.rounds)]
    console.print("prompts that a killed process has left")
    await asyncio.to_thread(fill_and_kill, config, TierSettings(disk=settings), prompts)
    async with running(config, TierSettings(disk=settings)) as engine:
        again = BenchedEngine(engine)
        restarted = KvBench(config, again, plain)
        await restarted.both([VOCABULARY, *prompts[0][1:]])  # both have computed something
        times = [await restarted.both(prompt) for prompt in prompts]
    return {
        "wrong_tokens": bench.wrong_tokens + restarted.wrong_tokens,
        "failed": disk.failed + again.failed,
        "disk_speedup": round(computed_s / disk_s, 2),
        "restart_speedup": round(statistics.median([without_s / with_s for with_s, without_s in times]), 2),
        "ttft_disk_ms": round(1000 * disk_s, 2),
        "ttft_restart_ms": round(1000 * statistics.median([with_s for with_s, _ in times]), 2),
    }


async def measure_other(config: KvBenchConfig, plain: BenchedEngine, folder: Path, console: Console) -> dict[str, Any]:
    """Return the fields of the report that are about shared storage."""
    place = config.shared or f"dir:{folder / 'shared'}"
    console.print("prompts that another worker has stored")
    bench = KvBench(config, plain, plain)
    salt = time.time_ns() % VOCABULARY  # storage that is given may hold the prompts of a run before
    prompts = [[salt, *bench.fresh_prompt()[1:]] for _ in range(config.rounds)]
    times = await measure_shared(config, plain, place, prompts)
    return {
        "wrong_tokens": times.wrong_tokens,
        "failed": times.failed,
        "shared_speedup": round(times.speedup, 2),
        "shared_place": config.shared or "dir",
        "ttft_shared_ms": round(1000 * statistics.median(times.loaded_s), 2),
    }


async def measure_peers(config: KvBenchConfig, plain: BenchedEngine, console: Console) -> dict[str, Any]:
    """Return the fields of the report that are about prefixes from another worker."""
    prompts = KvBench(config, plain, plain)
    console.print("prompts that another process has computed")
    found = await measure_peer(config, plain, [prompts.fresh_prompt() for _ in range(config.rounds + 1)])
    console.print("scattered blocks over NIXL")
    share = await nixl_read_share(16 * config.rounds)
    return {
        "wrong_tokens": found.wrong_tokens,
        "failed": found.failed,
        "peer_speedup": round(found.computed_s / found.pulled_s, 2),
        "peer_transfer": found.transfer,
        "nixl_read_share": None if share is None else round(share, 3),
        "ttft_peer_ms": round(1000 * found.pulled_s, 2),
    }


def table_of(report: KvBenchReport) -> Table:
    table = Table(title=f"{report.model}, {report.dtype}, {report.isl_tokens} tokens", title_justify="left")
    for column in ("", "measured", "goal"):
        table.add_column(column)
    for name, value in msgspec.to_builtins(report).items():
        table.add_row(name, str(value), GOALS.get(name, ""))
    return table
