"""Measure running servers, several side by side, or an engine in this process: `kvmesh profile measure`."""

import asyncio
import os
import secrets
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.mesh.config import load
from kvmesh.mesh.lifecycle import run
from kvmesh.profiler.endpoint import Known, MeasuredServer, check_url
from kvmesh.profiler.files import profile_path, write_profile
from kvmesh.profiler.grid import (
    DecodePoint,
    Point,
    PrefillPoint,
    WorkerLimits,
    decode_table,
    prefill_table,
    widest_spread,
)
from kvmesh.profiler.inprocess import MeasuredEngine
from kvmesh.profiler.journal import Journal, Subject
from kvmesh.profiler.measure import MeasuredWorker, MeasurePlan, first_of, measure, work_left, work_of
from kvmesh.protocol.errors import ConfigError, MeshError
from kvmesh.protocol.profile import Profile
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.engines.mapping import parse_mapping
from kvmesh.workers.engines.registry import StartedEngineName


class MeasureConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_PROFILE_MEASURE_<NAME>`, that over the file of `--config`, that over the default."""

    url: Annotated[tuple[str, ...], Meta(description="server to measure; repeat it for one mapping each")] = ()
    mapping: Annotated[
        tuple[str, ...], Meta(description="mapping of each --url: tp<n>, tep<n>, dep<n>; default: tp1")
    ] = ()
    model: Annotated[str, Meta(description="model's name on the servers; default: their only one")] = ""
    role: Annotated[Literal["both", "prefill", "decode"], Meta(description="what is measured")] = "both"
    device: Annotated[str, Meta(description="hardware, for the record; in process: cpu, cuda, auto")] = "auto"
    gpus: Annotated[
        Annotated[int, Meta(ge=0)] | None, Meta(description="GPUs of one worker; default: the mapping's")
    ] = None
    engine: Annotated[
        StartedEngineName | None,
        Meta(description="in this process, default torch; with --url for the record, default: asked from the server"),
    ] = None
    model_path: Annotated[str, Meta(description="without --url: Hugging Face folder; default: the tiny model")] = str(
        CHECKPOINT_DIR
    )
    engine_args: Annotated[str, Meta(description="without --url: vLLM's own flags")] = ""
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], Meta(description="torch: type of the weights")
    ] = "auto"
    random_weights: Annotated[bool, Meta(description="torch: the folder has only config.json")] = False
    block_size: Annotated[int, Meta(ge=1, le=1024, description="without --url: tokens per KV block")] = 16
    num_blocks: Annotated[int, Meta(ge=2, description="without --url: KV blocks")] = 2048
    max_step_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="tokens of one step; default: 512 in process, with --url a prompt is one step"),
    ] = None
    mock_speedup: Annotated[float, Meta(ge=0, description="mock: how much faster than modelled")] = 1.0
    context_tokens: Annotated[int, Meta(ge=0, description="longest context; 0: ask the server")] = 0
    total_kv_tokens: Annotated[int, Meta(ge=0, description="tokens of the KV cache; 0: ask the server")] = 0
    max_num_seqs: Annotated[int, Meta(ge=0, description="sequences in one step; 0: 32 in process, else required")] = 0
    prefill_points: Annotated[int, Meta(ge=1, le=256, description="most prompt lengths")] = 12
    context_points: Annotated[int, Meta(ge=1, le=64, description="most contexts of decoding sequences")] = 5
    batch_points: Annotated[int, Meta(ge=1, le=64, description="most batches for each context")] = 5
    repeats: Annotated[int, Meta(ge=1, le=100, description="measurements of each point; the median counts")] = 3
    steps: Annotated[int, Meta(ge=2, le=4096, description="decode steps of a measurement")] = 32
    warm_steps: Annotated[int, Meta(ge=1, le=4096, description="decode steps before them")] = 8
    seed: Annotated[int, Meta(ge=0, description="seed of the prompts")] = 0
    lowest_token: Annotated[int, Meta(ge=0)] = 100  # lowest token id in prompts
    token_range: Annotated[int, Meta(ge=2)] = 900  # number of token ids in prompts; they must be in the vocabulary
    out_dir: Annotated[str, Meta(description="folder for profiles, and for points while it runs")] = "profiles"
    fresh: Annotated[bool, Meta(description="start again; default: continue a stopped run")] = False
    start_s: Annotated[
        float, Meta(ge=0, description="time from the order of a worker until it serves; 0: not known")
    ] = 0.0
    notes: Annotated[str, Meta(description="text for the record")] = ""


IN_PROCESS_STEP_TOKENS = 512
ENVIRON_PREFIX = "KVMESH_PROFILE_MEASURE_"
API_KEY = "KVMESH_PROFILE_API_KEY"  # of the servers; all users of this machine could see a flag


@dataclass(slots=True)
class Measurement:
    """A worker to measure."""

    mapping: str
    target: MeasuredServer | MeasuredEngine
    name: str  # of the target, in the journal


def main(argv: list[str]) -> int:
    config = load(
        MeasureConfig,
        argv,
        os.environ,
        prefix=ENVIRON_PREFIX,
        prog="kvmesh profile measure",
        description="Measure how long prompts and decode steps take on a worker. "
        f"A server's key goes into the environment, {API_KEY}.",
        section="profile-measure",
    )
    console = Console(stderr=True, highlight=False)
    return run(lambda stop: until_stopped(config, stop, console))


async def until_stopped(config: MeasureConfig, stop: asyncio.Event, console: Console) -> int:
    """Measure, and return the exit code: 130 if `stop` came first. The same command then continues."""
    working = asyncio.create_task(measure_all(config, console), name="profile")
    stopping = asyncio.create_task(stop.wait(), name="wait for Ctrl-C")
    await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not working.done():
        working.cancel()
        await asyncio.wait({working, stopping})
        console.print(f"stopped; the points so far are in {config.out_dir}, the same command continues")
        return 130
    for path in working.result():
        print(path, flush=True)
    return 0


async def measure_all(config: MeasureConfig, console: Console) -> list[Path]:
    """Measure all mappings at the same time and return the profiles. The first failure ends all and is raised."""
    jobs = jobs_of(config)
    with progress_bar(console) as progress:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(measure_one(config, job, progress), name=job.name) for job in jobs]
        except* MeshError as failures:
            raise first_of(failures) from None
    return [task.result() for task in tasks]


def jobs_of(config: MeasureConfig) -> list[Measurement]:
    """Return the workers to measure. Raise ConfigError for settings that do not fit together."""
    names = config.mapping or ("tp1",)
    if config.url and len(names) != len(config.url):
        raise ConfigError(
            f"{len(config.url)} --url, {len(config.mapping)} --mapping", hint="say the mapping of each, in order"
        )
    if not config.url and len(names) > 1:
        raise ConfigError("several mappings of one engine in this process", hint="start servers, name them with --url")
    mappings = [parse_mapping(name).name for name in names]
    if len(set(mappings)) < len(mappings):
        raise ConfigError(f"a mapping is given twice: {', '.join(mappings)}", hint="measure replicas one at a time")
    for url in config.url:
        check_url(url)
    known = Known(
        context_tokens=config.context_tokens,
        total_kv_tokens=config.total_kv_tokens,
        max_num_seqs=config.max_num_seqs,
    )
    key = os.environ.get(API_KEY, "")
    if config.url:
        pairs = zip(mappings, config.url, strict=True)
        return [Measurement(mapping, MeasuredServer(url, config.model, known, key), url) for mapping, url in pairs]
    worker = worker_config(config)
    return [Measurement(mappings[0], engine_target(worker), msgspec.json.encode(worker).decode())]


def engine_target(worker: WorkerConfig) -> MeasuredEngine:
    from kvmesh.workers.engines.opening import open_engine

    return MeasuredEngine(open_engine(worker))


def worker_config(config: MeasureConfig) -> WorkerConfig:
    return WorkerConfig(
        name="profile",
        engine=config.engine or "torch",
        engine_args=config.engine_args,
        model_path=config.model_path,
        model=config.model,
        random_weights=config.random_weights,
        device=config.device,
        dtype=config.dtype,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        max_num_seqs=config.max_num_seqs or 32,
        max_step_tokens=config.max_step_tokens or IN_PROCESS_STEP_TOKENS,
        mock_speedup=config.mock_speedup,
        kv_transfer="auto" if config.engine == "vllm" else "shm",  # it moves nothing
    )


def plan_of(config: MeasureConfig, mapping: str) -> MeasurePlan:
    return MeasurePlan(
        prefill_points=0 if config.role == "decode" else config.prefill_points,
        context_points=0 if config.role == "prefill" else config.context_points,
        batch_points=config.batch_points,
        repeats=config.repeats,
        steps=config.steps,
        warm_steps=config.warm_steps,
        wave=parse_mapping(mapping).ranks,
        seed=config.seed,
        lowest_token=config.lowest_token,
        token_range=config.token_range,
    )


async def measure_one(config: MeasureConfig, job: Measurement, progress: Progress) -> Path:
    """Measure all points, write the profile and return the path of its JSON."""
    plan, path = plan_of(config, job.mapping), profile_path(Path(config.out_dir), job.mapping, config.role)
    row = progress.add_task(f"{job.mapping}: starting", total=None, points="")
    async with AsyncExitStack() as stack:
        stack.push_async_callback(job.target.close)
        limits = capped(await job.target.limits(), config)
        subject = await subject_of(config, job, plan, limits)
        with Journal(path.with_suffix(".points.jsonl"), subject, fresh=config.fresh) as journal:
            await take_points(job.target, plan, limits, journal, progress, row)
            profile = await profile_of(config, job, subject, limits, journal.points)
    write_profile(profile, path)
    progress.update(row, description=f"{job.mapping}: {path}")
    return path


async def take_points(
    target: MeasuredWorker, plan: MeasurePlan, limits: WorkerLimits, journal: Journal, progress: Progress, row: TaskID
) -> None:
    """Measure the points that the journal does not have."""
    work = work_of(plan, limits)
    left = work_left(work, journal.points)
    count = len(work.prefill) + len(work.decode)
    name = str(progress.tasks[row].description).partition(":")[0]
    progress.update(row, total=work.tokens, completed=work.tokens - left.tokens)

    def show() -> None:
        progress.update(row, description=f"{name}: measuring", points=f"{len(journal.points)}/{count} points")

    def on_point(point: Point, weight: int) -> None:
        journal.add(point)
        progress.advance(row, weight)
        show()

    show()
    await measure(target, plan, left, limits, secrets.token_hex(8), on_point)


def capped(limits: WorkerLimits, config: MeasureConfig) -> WorkerLimits:
    """Return the limits, lowered to what the settings ask for."""
    return WorkerLimits(
        context_tokens=min(limits.context_tokens, config.context_tokens or limits.context_tokens),
        total_kv_tokens=min(limits.total_kv_tokens, config.total_kv_tokens or limits.total_kv_tokens),
        max_num_seqs=min(limits.max_num_seqs, config.max_num_seqs or limits.max_num_seqs),
    )


async def subject_of(config: MeasureConfig, job: Measurement, plan: MeasurePlan, limits: WorkerLimits) -> Subject:
    if isinstance(job.target, MeasuredServer):
        model, engine = job.target.model, config.engine or job.target.engine or "openai"
    else:
        model, engine = (await job.target.info()).model, config.engine or "torch"
    return Subject(
        model=model,
        engine=engine,
        mapping=job.mapping,
        target=job.name,
        settings=msgspec.json.encode([plan, limits]).decode(),
    )


async def profile_of(
    config: MeasureConfig, job: Measurement, subject: Subject, limits: WorkerLimits, points: Sequence[Point]
) -> Profile:
    mapping = parse_mapping(job.mapping)
    kv_bytes, notes = 0, notes_of(config, points)
    if isinstance(job.target, MeasuredEngine):
        info = await job.target.info()
        notes += f"; the engine alone took {job.target.start_s:.1f} s to load"
        kv_bytes = info.layout.block_bytes // info.layout.block_size if info.layout.block_size else 0
    device, gpus = hardware_of(config, mapping.gpus)
    return Profile(
        model=subject.model,
        engine=subject.engine,
        device=device,
        mapping=mapping.name,
        gpus=gpus,
        dp_size=mapping.ranks,
        notes=notes,
        prefill=prefill_table(point for point in points if isinstance(point, PrefillPoint)),
        decode=decode_table(point for point in points if isinstance(point, DecodePoint)),
        total_kv_tokens=limits.total_kv_tokens,
        max_num_seqs=limits.max_num_seqs,
        max_step_tokens=config.max_step_tokens or (limits.context_tokens if config.url else IN_PROCESS_STEP_TOKENS),
        kv_bytes_per_token=kv_bytes,
        start_s=config.start_s,
    )


def hardware_of(config: MeasureConfig, mapping_gpus: int) -> tuple[str, int]:
    """Return the device and the GPUs of a worker: as the settings say, otherwise as found here."""
    if config.url:
        return config.device, mapping_gpus if config.gpus is None else config.gpus
    on_cpu = config.engine == "mock" or config.device == "cpu" or (config.device == "auto" and not has_gpu())
    device = ("cpu" if on_cpu else "cuda") if config.device == "auto" else config.device
    return device, config.gpus if config.gpus is not None else 0 if on_cpu else mapping_gpus


def has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def notes_of(config: MeasureConfig, points: Sequence[Point]) -> str:
    said = [config.notes] if config.notes else []
    said.append(f"medians of {config.repeats} or more, seed {config.seed}, {config.steps} decode steps each")
    said.append(f"widest spread of a point: {100 * widest_spread(points):.0f} % of its median")
    return "; ".join(said)


def progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[points]}"),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
        console=console,
    )
