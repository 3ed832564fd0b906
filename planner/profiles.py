"""Open the profiles of prefill and decode workers: from files, or from the mock engine's own model."""

from pathlib import Path

import msgspec

from kvmesh.planner.config import ServiceConfig
from kvmesh.planner.sizing import check_tables
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.profile import DecodeTable, PrefillTable, Profile, read_profile
from kvmesh.protocol.timing import PolynomialTiming

MOCK = "mock"  # instead of a file


def open_profiles(config: ServiceConfig) -> tuple[Profile, Profile]:
    """Return the profiles of prefill and decode workers. Raise ConfigError if a file or a table is missing."""
    prefill = _open(config, config.prefill_profile, "--prefill-profile")
    decode = _open(config, config.decode_profile or config.prefill_profile, "--decode-profile")
    check_tables(prefill, decode)
    return prefill, decode


def _open(config: ServiceConfig, path: str, flag: str) -> Profile:
    if path == MOCK:
        profile = polynomial_profile(
            config.mock_kv_tokens, config.mock_num_seqs, config.mock_step_tokens, config.mock_speedup
        )
        return msgspec.structs.replace(profile, start_s=config.start_s)
    if not path:
        raise ConfigError(
            "there is no profile: how many requests a worker can take is not known",
            hint=f"measure one with `kvmesh profile` and give it with {flag}; for mock workers: {flag} mock",
        )
    return read_profile(Path(path))


def polynomial_profile(
    total_kv_tokens: int,
    max_num_seqs: int,
    max_step_tokens: int,
    speedup: float = 1.0,
    itl_s: float = 0.0,
    fit_kv_tokens: int = 0,
) -> Profile:
    """Return the mock engine's own model as tables, exact to 1 % of a step between the points.

    `itl_s` is the time of every decode step, if it is fixed; 0: as modelled. `fit_kv_tokens` are the held tokens at
    which the model is slowest; 0: a full cache.
    """
    timing = PolynomialTiming(fit_kv_tokens or total_kv_tokens, speedup)
    isl_tokens = sorted({*range(1, max_step_tokens, max(1, max_step_tokens // 32)), max_step_tokens})
    kv_tokens = sorted({total_kv_tokens * i // 64 for i in range(65)})
    context_tokens = [1, total_kv_tokens] if total_kv_tokens > 1 else [1]
    steps_s = [itl_s or timing.decode_s(1, held) for held in kv_tokens]
    return Profile(
        model="any",
        engine="mock",
        device="none",
        gpus=1,  # a mock worker stands for one GPU
        provider="polynomial",
        notes=f"protocol.timing.PolynomialTiming, {speedup:g} times as fast",
        prefill=PrefillTable(isl_tokens=isl_tokens, ttft_s=[timing.prefill_s(tokens) for tokens in isl_tokens]),
        decode=DecodeTable(
            kv_tokens=kv_tokens,
            context_tokens=context_tokens,
            itl_s=[[step_s] * len(context_tokens) for step_s in steps_s],
        ),
        total_kv_tokens=total_kv_tokens,
        max_num_seqs=max_num_seqs,
        max_step_tokens=max_step_tokens,
    )
