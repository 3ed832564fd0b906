"""Estimate profiles of mappings on GPUs that are not at hand: `kvmesh profile estimate`."""

import os
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from kvmesh.mesh.config import load
from kvmesh.profiler.estimate import Estimator, estimate_profile
from kvmesh.profiler.files import profile_path, write_profile
from kvmesh.profiler.gpus import GPUS, Gpu, find_gpu
from kvmesh.profiler.roofline import Roofline, Shares
from kvmesh.profiler.shape import ModelShape, read_shape
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.profile import Profile
from kvmesh.workers.engines.mapping import ParallelMapping, parse_mapping


class EstimateConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_PROFILE_ESTIMATE_<NAME>`, that over the file of `--config`, that over the default."""

    model_path: Annotated[str, Meta(description="Hugging Face folder, or its config.json; weights are not read")]
    model: Annotated[str, Meta(description="name of the model; default: the folder's")] = ""
    gpu: Annotated[str, Meta(description=f"one of {', '.join(GPUS)}")] = "h100"
    mapping: Annotated[tuple[str, ...], Meta(description="tp<n>, tep<n>, dep<n>; repeat it")] = (
        "tp1",
        "tp2",
        "tp4",
        "tp8",
    )
    provider: Annotated[
        Literal["roofline", "aiconfigurator"], Meta(description="aiconfigurator: a package with measured kernels")
    ] = "roofline"
    engine: Annotated[Literal["vllm", "sglang", "trtllm"], Meta(description="engine that will run the model")] = "vllm"
    max_num_seqs: Annotated[int, Meta(ge=1, description="sequences in one step")] = 256
    kv_bits: Annotated[Literal[0, 8, 16], Meta(description="bits of a value in the KV cache; 0: the model's")] = 0
    compute_share: Annotated[
        float, Meta(gt=0, le=1, description="roofline: reached share of the data sheet's FLOP/s")
    ] = 0.7
    memory_share: Annotated[float, Meta(gt=0, le=1, description="roofline: reached share of its memory bandwidth")] = (
        0.8
    )
    out_dir: Annotated[str, Meta(description="folder for the profiles")] = "profiles"


def main(argv: list[str]) -> int:
    config = load(
        EstimateConfig,
        argv,
        os.environ,
        prefix="KVMESH_PROFILE_ESTIMATE_",
        prog="kvmesh profile estimate",
        description="Estimate profiles from a model's config.json and a GPU's data sheet. Mappings that the model does "
        "not fit are left out.",
        section="profile-estimate",
    )
    console = Console(stderr=True, highlight=False)
    profiles = estimates(config, console)
    for profile in profiles:
        path = profile_path(Path(config.out_dir), profile.mapping)
        write_profile(profile, path)
        print(path)
    console.print(table_of(profiles))
    return 0


def estimates(config: EstimateConfig, console: Console) -> list[Profile]:
    """Return the profiles of the mappings that fit. Raise ConfigError if none fits."""
    shape, gpu = read_shape(Path(config.model_path), config.kv_bits), find_gpu(config.gpu)
    profiles = []
    for mapping in [parse_mapping(name) for name in config.mapping]:
        try:
            profiles.append(one_estimate(config, shape, gpu, mapping))
        except ConfigError as error:
            console.print(f"{mapping.name} is left out: {error}", markup=False, soft_wrap=True)
    if not profiles:
        raise ConfigError(f"no mapping of {shape.name} can be estimated", hint="see above why; --mapping takes others")
    return profiles


def one_estimate(config: EstimateConfig, shape: ModelShape, gpu: Gpu, mapping: ParallelMapping) -> Profile:
    estimator, notes = open_estimator(config, shape, gpu, mapping)
    profile = estimate_profile(
        estimator, shape, gpu, mapping, engine=config.engine, max_num_seqs=config.max_num_seqs, notes=notes
    )
    return replace(profile, model=config.model or profile.model)


def open_estimator(
    config: EstimateConfig, shape: ModelShape, gpu: Gpu, mapping: ParallelMapping
) -> tuple[Estimator, str]:
    """Return an estimator, and the notes of its profile. Raise ConfigError if it cannot estimate the mapping."""
    roofline = Roofline(shape, gpu, mapping, Shares(compute=config.compute_share, memory=config.memory_share))
    counted = f"{shape.total_params / 1e9:.1f} B parameters, {shape.active_params / 1e9:.1f} B for a token"
    if config.provider == "roofline":
        reached = f"{config.compute_share:g} of the FLOP/s and {config.memory_share:g} of the bandwidth"
        return roofline, f"{counted}; {reached} of the {gpu.name}'s data sheet"
    from kvmesh.profiler.aiconfigurator import AiConfigurator

    estimator = AiConfigurator(Path(config.model_path), gpu, mapping, config.engine, roofline.limits)
    return estimator, f"{counted}; aiconfigurator {estimator.version}; KV tokens by the roofline"


def table_of(profiles: list[Profile]) -> Table:
    """Return a table that fits 80 columns."""
    title = f"{profiles[0].model} on {profiles[0].device}, contexts of 2048 tokens, times in ms"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for column in ("mapping", "GPUs", "KV tokens", "max. batch", "TTFT", "step of 1", "step of 64"):
        table.add_column(column, justify="right", no_wrap=True)
    for profile in profiles:
        fit = min(profile.max_num_seqs, profile.total_kv_tokens // 2048)
        table.add_row(
            profile.mapping,
            str(profile.gpus),
            f"{profile.total_kv_tokens:,}",
            str(fit),
            f"{1e3 * profile.prefill_s(2048):.1f}",
            f"{1e3 * profile.decode_s(2048, 2048):.2f}",
            f"{1e3 * profile.decode_s(64 * 2048, 2048):.2f}" if fit >= 64 else "no room",
        )
    return table
