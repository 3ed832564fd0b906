"""Run `kvmesh lab bench memory`: measure what the memory service brings to workers of one host.

Real worker processes of one model share weights through a service of their own. The checkpoint has random weights in
the shape that is asked for, in bfloat16. Times are those from the start of a process to its card in discovery. The
memory that a process has written alone is read from /proc/PID/smaps, without that of a worker with the tiny model.
"""

import asyncio
import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from rich.console import Console
from rich.table import Table

from kvmesh.lab.bench.engine_steps import shape_folder
from kvmesh.lab.bench.engine_versus import write_checkpoint
from kvmesh.lab.bench.memory_workers import BenchedWorker, MemoryBench, memory_bench
from kvmesh.lab.settings import LabConfig
from kvmesh.mesh.config import load
from kvmesh.protocol.errors import ConfigError, EngineError
from kvmesh.protocol.messages import ControlAction
from kvmesh.workers.tiers import MIB


class MemoryBenchConfig(LabConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_BENCH_<NAME>`, that over the TOML file of `--config`, that over the default."""

    shape: Annotated[str, Meta(description="a folder of lab/bench/shapes, or any folder with a config.json")] = (
        "qwen3-0.6b"
    )
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"], Meta(description="of the workers; the checkpoint is in bfloat16")
    ] = "float32"
    folder: Annotated[
        str, Meta(description="where the checkpoint is written for the run; default: a temporary one")
    ] = ""
    limit_gib: Annotated[float, Meta(gt=0, description="limit of the memory service")] = 64.0


class MemoryBenchReport(Struct, frozen=True, kw_only=True):
    same_address: bool  # in two workers, and in one after sleep and wake
    second_start_ratio: float  # time from process to ready of the second worker / the first
    second_private_share: float  # memory that the second wrote alone / bytes of the weights
    survives_writer_kill: bool  # in the middle of writing, and later; with the same tokens
    survives_service_kill: bool  # a worker answers on, and wakes with weights of its own
    wrong_tokens: int  # in greedy answers of all workers
    first_ready_s: float
    second_ready_s: float
    alone_ready_s: float  # of a worker without a service
    after_kill_ready_s: float  # of a worker that waited for a writer that was killed
    sleep_s: float
    wake_s: float
    asleep_private_mib: float  # written by the whole process, asleep
    image_mib: float
    dtype: str
    shape: str


GOALS = {
    "same_address": "True",
    "second_start_ratio": "<= 0.5",
    "second_private_share": "<= 0.2",
    "survives_writer_kill": "True",
    "survives_service_kill": "True",
    "wrong_tokens": "0",
}


def main(argv: list[str]) -> int:
    config = load(
        MemoryBenchConfig,
        argv,
        os.environ,
        prefix="KVMESH_BENCH_",
        prog="kvmesh lab bench memory",
        description="Measure the memory service of a host with real torch workers: time to ready and memory of the "
        "second worker, addresses, what is left after kill -9 of the writer and of the service, sleep and wake.",
        section="bench",
    )
    if not Path("/proc/self/smaps").exists():
        raise ConfigError("this benchmark reads /proc/PID/smaps, which is not here", hint="run it on Linux")
    report = asyncio.run(measure(config, Console(stderr=True)))
    Console().print(table_of(report))
    if config.json:
        print(json.dumps(msgspec.to_builtins(report)))
    if report.wrong_tokens or not (report.survives_writer_kill and report.survives_service_kill):
        raise EngineError("an answer was wrong or missing", hint="this is a bug: report it")
    return 0


async def measure(config: MemoryBenchConfig, console: Console) -> MemoryBenchReport:
    with TemporaryDirectory(prefix="kvmesh-bench-memory-", dir=config.folder or None) as temporary:
        folder = Path(temporary)
        (folder / "checkpoint").mkdir()
        console.print("writing a checkpoint of random weights")
        await asyncio.to_thread(write_checkpoint, shape_folder(config.shape), folder / "checkpoint", "bfloat16")
        async with memory_bench(folder, config.dtype, config.limit_gib) as bench:
            answers = ComparedAnswers(bench)
            console.print("a worker without a service, and the tiny model")
            alone = await answers.first(await bench.until_ready(await bench.start("alone", is_shared=False)))
            await alone.kill()
            console.print("a writer that is killed in the middle, and one that waits for it")
            killed = await kill_a_writer(bench, answers)
            console.print("two workers, one after the other")
            shared = await measure_two(bench, answers)
            console.print("sleep, wake, and a service that is killed")
            slept = await measure_sleep(bench, answers, shared.pop("survivor"))
    return MemoryBenchReport(
        same_address=shared.pop("same_address") and slept.pop("same_address"),
        survives_writer_kill=killed["survives"] and shared.pop("survives"),
        after_kill_ready_s=killed["ready_s"],
        alone_ready_s=round(alone.ready_s, 3),
        wrong_tokens=answers.wrong_tokens,
        dtype=config.dtype,
        shape=config.shape,
        **shared,
        **slept,
    )


class ComparedAnswers:
    """Compares the answers of all workers with that of one without a service."""

    def __init__(self, bench: MemoryBench) -> None:
        self._bench = bench
        self._expected: list[int] = []
        self.wrong_tokens = 0

    async def first(self, worker: BenchedWorker) -> BenchedWorker:
        self._expected = await self._bench.ask(worker)
        return worker

    async def are_right(self, worker: BenchedWorker) -> bool:
        found = await self._bench.ask(worker)
        wrong = sum(one != other for one, other in zip(found, self._expected, strict=False))
        self.wrong_tokens += wrong
        return not wrong and len(found) == len(self._expected)


async def kill_a_writer(bench: MemoryBench, answers: ComparedAnswers) -> dict[str, Any]:
    """Kill one of two workers that start together, while it writes: the other one writes instead."""
    await bench.start_service()
    workers = [await bench.start(name) for name in ("one", "other")]
    killed = await bench.writer_of(workers)
    [other] = [worker for worker in workers if worker is not killed]
    await killed.kill()
    await bench.until_ready(other)
    found = [(image.state, image.users) for image in bench.holdings().images]
    survives = await answers.are_right(other) and found == [("ready", 1)] and other.weights_address() != 0
    await other.kill()
    await bench.kill_service()
    return {"survives": survives, "ready_s": round(other.ready_s, 3)}


async def measure_two(bench: MemoryBench, answers: ComparedAnswers) -> dict[str, Any]:
    """Start two workers one after the other, then kill the first, which has written the image."""
    await bench.start_service()
    first = await bench.until_ready(await bench.start("first"))
    is_right = await answers.are_right(first)
    second = await bench.until_ready(await bench.start("second"))
    is_right = await answers.are_right(second) and is_right
    tiny = await bench.until_ready(await bench.start("tiny", tiny=True, is_shared=False))
    await bench.ask(tiny)
    [image] = bench.holdings().images
    own_bytes = second.private_bytes() - tiny.private_bytes()  # with the larger buffers and KV cache
    await tiny.kill()
    same_address = first.weights_address() == second.weights_address() != 0
    await first.kill()
    return {
        "survivor": second,
        "same_address": same_address,
        "survives": await answers.are_right(second) and is_right,
        "second_start_ratio": round(second.ready_s / first.ready_s, 3),
        "second_private_share": round(max(0, own_bytes) / image.num_bytes, 4),
        "first_ready_s": round(first.ready_s, 3),
        "second_ready_s": round(second.ready_s, 3),
        "image_mib": round(image.num_bytes / MIB, 1),
    }


async def measure_sleep(bench: MemoryBench, answers: ComparedAnswers, worker: BenchedWorker) -> dict[str, Any]:
    """Have a worker sleep and wake, kill the service, and have the worker sleep and wake again."""
    address = worker.weights_address()
    sleep_s = await bench.control(worker, ControlAction.SLEEP)
    asleep_bytes, was_unmapped = worker.private_bytes(), not worker.weights_address()
    wake_s = await bench.control(worker, ControlAction.WAKE)
    same_address = was_unmapped and worker.weights_address() == address
    is_right = await answers.are_right(worker)
    await bench.kill_service()
    survives = await answers.are_right(worker) and is_right
    await bench.control(worker, ControlAction.SLEEP)
    await bench.control(worker, ControlAction.WAKE)
    return {
        "same_address": same_address,
        "survives_service_kill": await answers.are_right(worker) and survives and not worker.weights_address(),
        "sleep_s": round(sleep_s, 3),
        "wake_s": round(wake_s, 3),
        "asleep_private_mib": round(asleep_bytes / MIB, 1),
    }


def table_of(report: MemoryBenchReport) -> Table:
    table = Table(title=f"{report.shape}, {report.dtype}", title_justify="left")
    for column in ("", "measured", "goal"):
        table.add_column(column)
    for name, value in msgspec.to_builtins(report).items():
        table.add_row(name, str(value), GOALS.get(name, ""))
    return table
