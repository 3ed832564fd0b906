"""Compute how long the steps of an engine would take, by a fitted polynomial or by a profile. Pure.

The mock engine takes these times in real time, the simulator in simulated time.
"""

from typing import Protocol

from kvmesh.protocol.profile import Profile

KV_BYTES_PER_TOKEN = 131_072  # of the 8B model of PolynomialTiming: 32 layers, k and v, 8 heads of 128, 2 bytes


class Timing(Protocol):
    """The times of one worker. A step that prefills and decodes takes the sum."""

    def prefill_s(self, new_tokens: int) -> float:
        """Return the time to compute `new_tokens` of prompts in one step; 0 for no tokens."""

    def decode_s(self, sequences: int, kv_tokens: int) -> float:
        """Return the time of one token for each of `sequences`, while the worker holds `kv_tokens` in all."""


class PolynomialTiming:
    """A fit to measurements of an 8B model on one data-centre GPU, used where there is no profile.

    prefill [ms] = 4.209989e-07 t^2 + 1.518344e-02 t + 16.50142, t: new tokens of the step
    decode [ms] = max(1, -25.74 u^2 + 54.01 u + 5.74), u: held share of `total_kv_tokens`, at most 1

    The time of a step depends on what is held, not on how much could be: whoever compares caches of different sizes
    gives the same `total_kv_tokens` for all.
    """

    def __init__(self, total_kv_tokens: int, speedup: float = 1.0) -> None:
        """Make the times `speedup` (> 0) times as fast as the fit."""
        self._total = max(1, total_kv_tokens)
        self._speedup = speedup

    def prefill_s(self, new_tokens: int) -> float:
        if new_tokens <= 0:
            return 0.0
        return (4.209989e-07 * new_tokens**2 + 1.518344e-02 * new_tokens + 16.50142) / 1e3 / self._speedup

    def decode_s(self, sequences: int, kv_tokens: int) -> float:
        if sequences <= 0:
            return 0.0
        usage = min(1.0, kv_tokens / self._total)  # it exceeds 1 where sequences share blocks; the fit falls beyond 1
        return max(1.0, -25.74 * usage**2 + 54.01 * usage + 5.74) / 1e3 / self._speedup


class ProfileTiming:
    """The times of a profile's tables."""

    def __init__(self, profile: Profile, speedup: float = 1.0) -> None:
        self._profile = profile
        self._speedup = speedup

    def prefill_s(self, new_tokens: int) -> float:
        return self._profile.prefill_s(new_tokens) / self._speedup

    def decode_s(self, sequences: int, kv_tokens: int) -> float:
        if sequences <= 0:
            return 0.0
        return self._profile.decode_s(kv_tokens, kv_tokens / sequences) / self._speedup


def pull_s_per_token(profile: Profile | None, gigabytes_per_s: float, speedup: float = 1.0) -> float:
    """Return how long the KV of one token takes from a prefill to a decode worker.

    0 if `gigabytes_per_s` or `speedup` is 0. Without a known size of KV, that of PolynomialTiming's model counts.
    """
    if not gigabytes_per_s or not speedup:
        return 0.0
    known = 0 if profile is None else profile.kv_bytes_per_token
    return (known or KV_BYTES_PER_TOKEN) / (gigabytes_per_s * 1e9) / speedup
