"""Choose how long prompts are, and how often sides are compared, by how fast this machine computes. Pure."""

import msgspec

from kvmesh.lab.bench.kv_engines import KvBenchConfig
from kvmesh.protocol.errors import ConfigError

ISL_TOKENS = (1024, 512)
TRIED_ISL_TOKENS = 256  # of a prompt that tells how fast this machine computes
LEAST_ISL_TOKENS = 64
PROMPT_S = 1.6  # that a prompt may take, unless the settings say how long it is
MOST_ROUNDS, LEAST_ROUNDS = 8, 1
ROUNDS_S = 240.0  # for what all rounds compute
ROUND_PROMPTS = 60  # that a round computes: of full length, all comparisons together
COST_PROMPT_S = 0.3  # that a prompt may take of which many are asked for, to see small differences
SPARE = 1.5  # times the space that prompts need is given to a tier that has to hold them


def is_paced(config: KvBenchConfig) -> bool:
    """Return whether the settings say all that `paced` would choose."""
    return bool(config.isl_tokens and config.rounds)


def paced(config: KvBenchConfig, token_s: float) -> KvBenchConfig:
    """Return the settings, with what they leave open chosen for a machine that computes a token in `token_s`.

    Raise ConfigError if prompts are too short.
    """
    if 0 < config.isl_tokens < LEAST_ISL_TOKENS:
        raise ConfigError(f"--isl-tokens is {config.isl_tokens}", hint=f"give 0 or at least {LEAST_ISL_TOKENS}")
    quick = [isl_tokens for isl_tokens in ISL_TOKENS if isl_tokens * token_s <= PROMPT_S]
    isl_tokens = config.isl_tokens or (quick[0] if quick else ISL_TOKENS[-1])
    prompt_s = isl_tokens * token_s
    affordable = int(ROUNDS_S / (ROUND_PROMPTS * prompt_s)) if prompt_s else MOST_ROUNDS
    rounds = config.rounds or min(MOST_ROUNDS, max(LEAST_ROUNDS, affordable))
    return msgspec.structs.replace(config, isl_tokens=isl_tokens, rounds=rounds)


def sized(config: KvBenchConfig, prompt_bytes: int) -> KvBenchConfig:
    """Return the settings with enough space in all tiers for the prompts that they have to hold at a time."""
    least_mib = int(SPARE * max(4, config.rounds) * prompt_bytes) >> 20
    return msgspec.structs.replace(
        config, host_mib=max(config.host_mib, least_mib), disk_mib=max(config.disk_mib, least_mib)
    )


def cost_isl_tokens(isl_tokens: int, token_s: float) -> int:
    """Return how long prompts are of which many are asked for: at most half as long as others."""
    quick = int(COST_PROMPT_S / token_s) if token_s else isl_tokens
    return max(LEAST_ISL_TOKENS, min(isl_tokens // 2, quick))
