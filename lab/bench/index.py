"""Run `kvmesh lab bench index`: measure how fast the prefix index takes events and lookups, and its memory.

Chains of up to 4096 blocks of 16 tokens. Each is held by one worker, and where it says so its first half by two others,
so that a match has three holders. All rates are per CPU second of this process, Python included; each case runs in a
process of its own, whose memory is then the index's. The tokens of each chain are made outside the
measured time. They are in the cache of the CPU, as tokens that have just come from a socket are.
"""

import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct
from rich.console import Console
from rich.table import Table

from kvmesh.commands.bench.apart import run_apart
from kvmesh.kvevents.formats import encode_payload
from kvmesh.lab.settings import LabConfig
from kvmesh.mesh.config import load
from kvmesh.protocol.events import Stored
from kvmesh.protocol.hashing import sequence_hash_bytes, token_bytes
from kvmesh.protocol.ids import EngineHash, RequestId, WorkerId
from kvmesh.protocol.messages import Role, RouteRequest, WorkerCard
from kvmesh.router.core import RouterState
from kvmesh.router.index import NATIVE, Holder, PrefixIndex
from kvmesh.router.rules import RouterRules

BLOCK = 16  # tokens
CHAIN = 4096  # blocks
VOCABULARY = 128_000
ASKED_BLOCKS = (64, 512, 4096)
PLACED_WORKERS = 64
PLACED_TOKENS = 8192
SMALL = 1 << 16  # blocks, for a quick run or plain Python

T = TypeVar("T")


class IndexBenchConfig(LabConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_BENCH_<NAME>`, that over the TOML file of `--config`, that over the default."""

    workers: Annotated[int, Meta(ge=4, description="that hold the chains")] = 256
    blocks: Annotated[int, Meta(ge=CHAIN, description="distinct blocks in the index")] = 1_000_000
    rounds: Annotated[int, Meta(ge=1, description="each measured so often; the median counts")] = 5
    quick: Annotated[bool, Meta(description="fewer rounds, and no growth beyond the first row")] = False


class Growth(Struct, frozen=True, kw_only=True):
    """Hold the figures of one index size, with three holders per match."""

    workers: int
    blocks: int  # distinct
    entries: int  # (worker, block)
    store_blocks_per_cpu_s: float  # 128 blocks an event
    match_us: dict[int, float]  # by the prompt's blocks
    bytes_per_entry: float


class IndexReport(Struct, frozen=True, kw_only=True):
    native: bool
    store_blocks_per_cpu_s_128: float  # by the blocks of an event
    store_blocks_per_cpu_s_16: float
    zmq_blocks_per_cpu_s: float  # from the bytes of a batch: one event of 32 blocks, as vLLM writes it
    match_us: dict[int, float]
    hash_mtok_per_cpu_s: float  # u32 tokens -> packed sequence hashes
    place_us_8k: float  # 8192 token ids -> a booked placement among 64 workers
    bytes_per_entry: float  # one holder per block
    growth: list[Growth]


@dataclass(frozen=True, slots=True)
class IndexCase:
    workers: int
    blocks: int
    blocks_per_event: int = 128
    others: int = 0  # workers that hold the first half of a chain too


@dataclass(frozen=True, slots=True)
class Filled:
    entries: int
    store_blocks_per_cpu_s: float
    bytes_per_entry: float
    match_us: dict[int, float]


def main(argv: list[str]) -> int:
    config = load(
        IndexBenchConfig,
        argv,
        os.environ,
        prefix="KVMESH_BENCH_",
        prog="kvmesh lab bench index",
        description="Measure the prefix index by itself: CPU time of an event and of a lookup, and memory, for "
        "chains of blocks that some workers hold.",
        section="bench",
    )
    report = measure(config, Console(stderr=True))
    console = Console()
    console.print(table_of(report))
    console.print(growth_table_of(report))
    if config.json:
        print(json.dumps(msgspec.to_builtins(report, str_keys=True)))
    return 0


def measure(config: IndexBenchConfig, console: Console) -> IndexReport:
    rounds = 1 if config.quick or not NATIVE else config.rounds
    blocks = config.blocks if NATIVE else SMALL
    if not NATIVE:
        console.print(f"plain Python: measuring with {blocks:,} blocks and one round")
    whole = IndexCase(config.workers, blocks, others=2)
    console.print("storing and matching")
    shared = run_apart(fill, whole, rounds)
    alone = run_apart(fill, IndexCase(config.workers, blocks), rounds)
    short = run_apart(fill, IndexCase(config.workers, blocks // 2, blocks_per_event=16), rounds)
    console.print("reading payloads, hashing, placing")
    zmq = run_apart(payload_rate, SMALL if NATIVE else CHAIN, rounds)
    hashing = run_apart(hash_rate, rounds)
    placing = run_apart(place_us, rounds)
    growth = [grown(whole, shared)]
    for case in [] if config.quick or not NATIVE else GROWTH:
        console.print(f"growing to {case.blocks:,} blocks and {case.workers:,} workers")
        growth.append(grown(case, run_apart(fill, case, 1)))
    return IndexReport(
        native=NATIVE,
        store_blocks_per_cpu_s_128=shared.store_blocks_per_cpu_s,
        store_blocks_per_cpu_s_16=short.store_blocks_per_cpu_s,
        zmq_blocks_per_cpu_s=zmq,
        match_us=shared.match_us,
        hash_mtok_per_cpu_s=hashing,
        place_us_8k=placing,
        bytes_per_entry=alone.bytes_per_entry,
        growth=growth,
    )


GROWTH = (
    IndexCase(16, 100_000, others=2),
    IndexCase(64, 300_000, others=2),
    IndexCase(1024, 3_000_000, others=2),
    IndexCase(4096, 10_000_000, others=2),
)


def grown(case: IndexCase, filled: Filled) -> Growth:
    return Growth(
        workers=case.workers,
        blocks=case.blocks,
        entries=filled.entries,
        store_blocks_per_cpu_s=filled.store_blocks_per_cpu_s,
        match_us=filled.match_us,
        bytes_per_entry=filled.bytes_per_entry,
    )


# --- storing and matching ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HashChain:
    """Hold `names` u64 [blocks], `tokens` u32 [blocks * BLOCK], and how many of the blocks each worker holds."""

    names: np.ndarray
    tokens: np.ndarray
    held: list[tuple[Holder, int]]

    def events(self, per_event: int) -> Iterator[tuple[Holder, bytes, int | None, bytes, int]]:
        """The arguments of `PrefixIndex.store`."""
        for holder, blocks in self.held:
            for first in range(0, blocks, per_event):
                end = min(first + per_event, blocks)
                parent = int(self.names[first - 1]) if first else None
                tokens = self.tokens[first * BLOCK : end * BLOCK]
                yield holder, self.names[first:end].tobytes(), parent, tokens.tobytes(), BLOCK


def chains(case: IndexCase) -> Iterator[HashChain]:
    numbers, rng = np.random.default_rng(1), random.Random(1)
    holders = [Holder(WorkerId(f"worker-{i}"), 0) for i in range(case.workers)]
    length = min(CHAIN, case.blocks)
    for i in range(case.blocks // length):
        tokens = numbers.integers(0, VOCABULARY, length * BLOCK, dtype=np.uint32)
        names = numbers.integers(0, 2**64, length, dtype=np.uint64)
        first = i % case.workers
        others = rng.sample([k for k in range(case.workers) if k != first], case.others)
        yield HashChain(names, tokens, [(holders[first], length), *((holders[k], length // 2) for k in others)])


def fill(case: IndexCase, rounds: int) -> Filled:
    for chain in chains(IndexCase(case.workers, CHAIN)):  # code and libraries are loaded before memory is counted
        store(PrefixIndex(), chain, case.blocks_per_event)
    before = resident_bytes()
    index, spent = fill_once(case)
    taken = resident_bytes() - before
    seconds = [spent]
    for _ in range(rounds - 1):
        del index  # one at a time
        index, spent = fill_once(case)
        seconds.append(spent)
    prompts = [sequence_hash_bytes(chain.tokens.data, BLOCK) for chain in islice(chains(case), 64)]
    return Filled(
        entries=index.num_entries,
        store_blocks_per_cpu_s=round(index.num_entries / statistics.median(seconds)),
        bytes_per_entry=round(taken / index.num_entries, 1),
        match_us={blocks: match_us(index, prompts, blocks) for blocks in ASKED_BLOCKS if 8 * blocks <= len(prompts[0])},
    )


def fill_once(case: IndexCase) -> tuple[PrefixIndex, float]:
    """A new index with all chains, and the CPU seconds that storing them took."""
    index = PrefixIndex(max_entries=1 << 26)
    return index, sum(store(index, chain, case.blocks_per_event) for chain in chains(case))


def store(index: PrefixIndex, chain: HashChain, per_event: int) -> float:
    events = list(chain.events(per_event))
    started = time.process_time()
    for event in events:
        index.store(*event)
    return time.process_time() - started


def match_us(index: PrefixIndex, prompts: Sequence[bytes], blocks: int) -> float:
    asked = [prompt[: 8 * blocks] for prompt in prompts]
    calls = [asked[i % len(asked)] for i in range(2000 if NATIVE else max(1, 4000 // blocks))]

    def ask() -> None:
        for prompt in calls:
            index.match(prompt)

    return round(1e6 * cpu_seconds(ask, 7) / len(calls), 2)


# --- the rest ---------------------------------------------------------------------------------------------


def payload_rate(blocks: int, rounds: int) -> float:
    """Blocks per CPU second, from the msgpack of batches with one event of 32 blocks."""
    batches = list(payloads(IndexCase(64, blocks, blocks_per_event=32)))

    def feed() -> None:
        index = PrefixIndex()
        for holder, payload in batches:
            index.apply_payload(holder, payload)

    return round(blocks / cpu_seconds(feed, rounds))


def payloads(case: IndexCase) -> Iterator[tuple[Holder, bytes]]:
    for chain in chains(case):
        for holder, names, parent, tokens, size in chain.events(case.blocks_per_event):
            hashes = tuple(EngineHash(int(name)) for name in np.frombuffer(names, np.uint64))
            ids = tuple(np.frombuffer(tokens, np.uint32).tolist())
            above = None if parent is None else EngineHash(parent)
            yield holder, encode_payload([Stored(hashes, above, ids, size)], 1.0)


def hash_rate(rounds: int) -> float:
    """Million tokens per CPU second, from a buffer of u32 to packed sequence hashes."""
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, PLACED_TOKENS, dtype=np.uint32).tobytes()
    times = 2000 if NATIVE else 20

    def hash_all() -> None:
        for _ in range(times):
            sequence_hash_bytes(tokens, BLOCK)

    return round(times * PLACED_TOKENS / cpu_seconds(hash_all, rounds) / 1e6)


def place_us(rounds: int) -> float:
    """Measure the way from token ids to a booked placement, for prompts of which some workers hold a part."""
    state = RouterState(RouterRules())
    cards = [placed_card(number) for number in range(PLACED_WORKERS)]
    for card in cards:
        state.add_worker(card)
    prompts: list[bytes] = []
    for number, chain in enumerate(chains(IndexCase(PLACED_WORKERS, PLACED_WORKERS * CHAIN, others=2))):
        prompts.append(token_bytes(chain.tokens[:PLACED_TOKENS].tolist()))
        for blocks, card in ((512, cards[number]), (300, cards[number - 1]), (64, cards[number - 2])):
            hashes = tuple(EngineHash(int(name)) for name in chain.names[:blocks])
            ids = tuple(chain.tokens[: blocks * BLOCK].tolist())
            state.fleet.on_kv_events(card.worker_id, 0, [Stored(hashes, None, ids, BLOCK)])
    now, request_id = 1000.0, RequestId("bench")
    seconds: list[float] = []
    for i in range(200 * rounds):
        started = time.process_time()
        hashes_of_prompt = sequence_hash_bytes(prompts[i % len(prompts)], BLOCK)
        request = RouteRequest(
            request_id=request_id, model="bench", isl_tokens=PLACED_TOKENS, sequence_hashes=hashes_of_prompt
        )
        state.place(request, now)
        seconds.append(time.process_time() - started)
        state.free(request_id, now)
    return round(1e6 * statistics.median(seconds), 1)


def placed_card(number: int) -> WorkerCard:
    return WorkerCard(
        worker_id=WorkerId(f"worker-{number}"),
        name=f"worker-{number}",
        role=Role.AGGREGATED,
        model="bench",
        model_path="",
        address="",
        block_size=BLOCK,
        total_blocks=100_000,
        context_tokens=1 << 20,
        kv_events="tcp://127.0.0.1:1",
    )


def cpu_seconds(function: Callable[[], None], rounds: int) -> float:
    """CPU seconds of one call, the median of `rounds`."""
    seconds: list[float] = []
    for _ in range(rounds):
        started = time.process_time()
        function()
        seconds.append(time.process_time() - started)
    return statistics.median(seconds)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --- what is shown ----------------------------------------------------------------------------------------


def table_of(report: IndexReport) -> Table:
    table = Table(title="native" if report.native else "plain Python", title_justify="left")
    for column in ("per CPU second of one core", ""):
        table.add_column(column)
    table.add_row("stored, 128 blocks an event", f"{report.store_blocks_per_cpu_s_128:,.0f} blocks/s")
    table.add_row("stored, 16 blocks an event", f"{report.store_blocks_per_cpu_s_16:,.0f} blocks/s")
    table.add_row("stored, from the bytes of a batch", f"{report.zmq_blocks_per_cpu_s:,.0f} blocks/s")
    for blocks, microseconds in report.match_us.items():
        table.add_row(f"match of {blocks} blocks", f"{microseconds} µs")
    table.add_row("hashed", f"{report.hash_mtok_per_cpu_s:,.0f} Mtok/s")
    table.add_row(f"{PLACED_TOKENS} tokens placed, {PLACED_WORKERS} workers", f"{report.place_us_8k} µs")
    table.add_row("memory, one holder per block", f"{report.bytes_per_entry} bytes/entry")
    return table


def growth_table_of(report: IndexReport) -> Table:
    table = Table(title="as it grows, three holders per match", title_justify="left")
    for column in (
        "workers",
        "blocks",
        "entries",
        "stored/s",
        *(f"match {n}, µs" for n in ASKED_BLOCKS),
        "bytes/entry",
    ):
        table.add_column(column, justify="right")
    for row in sorted(report.growth, key=lambda row: row.blocks):
        table.add_row(
            f"{row.workers:,}",
            f"{row.blocks:,}",
            f"{row.entries:,}",
            f"{row.store_blocks_per_cpu_s:,.0f}",
            *(str(row.match_us.get(blocks, "")) for blocks in ASKED_BLOCKS),
            str(row.bytes_per_entry),
        )
    return table
