"""Fill the tables of a profile with an estimator, without hardware."""

from typing import Protocol

from kvmesh.profiler.gpus import Gpu
from kvmesh.profiler.grid import (
    DecodePoint,
    PrefillPoint,
    WorkerLimits,
    decode_cells,
    decode_table,
    prefill_axis,
    prefill_table,
)
from kvmesh.profiler.shape import ModelShape
from kvmesh.protocol.profile import Profile
from kvmesh.workers.engines.mapping import ParallelMapping

PREFILL_POINTS = 16
CONTEXT_POINTS = 8
BATCH_POINTS = 10


class Estimator(Protocol):
    """Estimates one model on one GPU and mapping. Every estimator passes tests/profiler/test_estimators.py."""

    @property
    def name(self) -> str: ...

    def limits(self, max_num_seqs: int) -> WorkerLimits:
        """Return what the worker can hold. Raise ConfigError if the model does not fit."""

    def prefill_s(self, isl_tokens: int) -> float:
        """Return the time of one prompt on every data-parallel rank, with nothing beside it."""

    def decode_s(self, batch: int, context_tokens: int) -> float:
        """Return the time of one step of `batch` sequences with `context_tokens` each."""


def estimate_profile(
    estimator: Estimator,
    shape: ModelShape,
    gpu: Gpu,
    mapping: ParallelMapping,
    *,
    engine: str,
    max_num_seqs: int,
    notes: str,
) -> Profile:
    """Return the profile. Raise ConfigError if the model does not fit."""
    limits = estimator.limits(max_num_seqs)
    prefill = [
        PrefillPoint(isl_tokens=isl, ttft_s=estimator.prefill_s(isl), spread=0.0, repeats=1)
        for isl in prefill_axis(limits, PREFILL_POINTS)
    ]
    decode = [
        DecodePoint(
            context_tokens=cell.context_tokens,
            batch=cell.batch,
            kv_tokens=cell.context_tokens * cell.batch,
            itl_s=estimator.decode_s(cell.batch, cell.context_tokens),
            spread=0.0,
            repeats=1,
        )
        for cell in decode_cells(limits, CONTEXT_POINTS, BATCH_POINTS, 0)
    ]
    return Profile(
        model=shape.name,
        engine=engine,
        device=gpu.name,
        mapping=mapping.name,
        gpus=mapping.gpus,
        dp_size=mapping.ranks,
        provider=estimator.name,
        notes=notes,
        prefill=prefill_table(prefill),
        decode=decode_table(decode),
        total_kv_tokens=limits.total_kv_tokens,
        max_num_seqs=limits.max_num_seqs,
        kv_bytes_per_token=shape.kv_bytes_per_token,
    )
