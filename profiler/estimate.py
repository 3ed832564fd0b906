"""Profiles without hardware: the same tables as a measurement's, filled by an estimator."""

from typing import Protocol

from profiler.gpus import Gpu
from profiler.grid import (
    DecodePoint,
    PrefillPoint,
    WorkerLimits,
    decode_cells,
    decode_table,
    prefill_axis,
    prefill_table,
)
from profiler.shape import ModelShape
from protocol.profile import Profile
from workers.engines.mapping import ParallelMapping

PREFILL_POINTS = 16
CONTEXT_POINTS = 8
BATCH_POINTS = 10


class Estimator(Protocol):
    """Of one model, GPU and mapping. Every one passes tests/profiler/test_estimators.py."""

    @property
    def name(self) -> str: ...

    def limits(self, max_num_seqs: int) -> WorkerLimits:
        """Raises ConfigError if the model does not fit."""

    def prefill_s(self, isl_tokens: int) -> float:
        """One prompt for every data-parallel rank, alone."""

    def decode_s(self, batch: int, context_tokens: int) -> float:
        """One step of so many sequences of that length."""


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
    """Raises ConfigError."""
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
