"""Invent tokens instead of computing them, at the pace of a real engine or faster.

The token after n tokens of an answer is a pure function of the prompt, the adapter and n: a test can compute the right
answer. The KV cache holds for each position the token that was computed there. A row that builds on KV which is not its
own (a wrong block, a lost pull) is noticed.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from kvmesh.kvcache.memory import KvRegion
from kvmesh.protocol.errors import EngineError
from kvmesh.protocol.messages import KvLayout, Role, TokenLogprob
from kvmesh.protocol.profile import Profile
from kvmesh.protocol.tiers import Tier
from kvmesh.protocol.timing import PolynomialTiming, ProfileTiming, Timing
from kvmesh.workers.engines.mock.alarm import Alarm
from kvmesh.workers.engines.mock.answers import answer_token, mock_token, mock_vector
from kvmesh.workers.engines.mock.pace import MockPace
from kvmesh.workers.engines.mock.vocabulary import FIRST_TOKEN, Vocabulary
from kvmesh.workers.engines.mock.witness import Seen, Witness
from kvmesh.workers.engines.registry import ENGINES
from kvmesh.workers.executor import Embedded, ModelInfo, Result, Row, Sampled, Scored

__all__ = ["MockExecutor", "mock_token", "mock_vector"]

FEATURES = ENGINES["mock"].features


class MockExecutor:
    def __init__(
        self,
        *,
        block_size: int,
        vocab_size: int = 2048,
        vocabulary: Vocabulary | None = None,
        context_tokens: int = 32768,
        speedup: float = 1.0,
        itl_ms: float = 0.0,
        profile: Profile | None = None,
        pull_s_per_token: float = 0.0,
        tier_s_per_token: Mapping[Tier, float] | None = None,
        start_s: float = 0.0,
        loras: Sequence[str] = (),
    ) -> None:
        """Invent the tokens of `vocabulary`; without one, `vocab_size` tokens, of which those from FIRST_TOKEN on are
        plain.

        Steps take the time of `profile`, `speedup` times as fast; None: of a fit to a real engine. A speedup of 0: no
        time.
        """
        self._layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=block_size, dtype="float32")
        self._vocabulary = vocabulary or Vocabulary(vocab_size, range(FIRST_TOKEN, vocab_size))
        self._context_tokens = context_tokens
        self._alarm = Alarm()
        self._profile = profile
        self._speedup = speedup
        self._start_s = start_s
        self._pace = MockPace(
            None,
            itl_ms,
            self._alarm.wait_until,
            block_size=block_size,
            pull_s_per_token=pull_s_per_token,
            tier_s_per_token=tier_s_per_token,
        )
        self._loras = tuple(loras)
        self._witness: Witness | None = None

    def load(self) -> ModelInfo:
        return ModelInfo(
            self._layout,
            self._context_tokens,
            self._vocabulary.size,
            eos_token_ids=(2,),
            features=FEATURES,
            loras=self._loras,
            pace=self._pace,
            start_s=self._start_s,
            roles=tuple(role for role in Role if not missing_tables(self._profile, role)),
            kv_settings="mock",
            capacity=1.0 if self._profile is None else self._profile.capacity,
        )

    def allocate_kv(self, num_blocks: int, memory: memoryview | None) -> KvRegion:
        shape = (num_blocks, 2, self._layout.block_size)  # [block, k or v, offset]: the token, as k
        whole = np.zeros(shape, np.float32) if memory is None else np.frombuffer(memory, np.float32).reshape(shape)
        self._pace.timing = self._timing(num_blocks * self._layout.block_size)
        self._witness = Witness(whole)
        return KvRegion(whole.ctypes.data, num_blocks, self._layout, "cpu", whole)

    def execute(self, rows: Sequence[Row]) -> list[Result]:
        if self._witness is None:
            raise EngineError("a step was asked for before the KV cache was made")
        return [self._result(row, seen) for row, seen in zip(rows, self._witness.take(rows), strict=True)]

    def close(self) -> None:
        self._alarm.close()

    def _timing(self, total_kv_tokens: int) -> Timing | None:
        if not self._speedup:
            return None
        if self._profile is not None:
            return ProfileTiming(self._profile, self._speedup)
        return PolynomialTiming(total_kv_tokens, self._speedup)

    def _result(self, row: Row, seen: Seen) -> Result:
        if row.scored_from is not None:
            return Scored(mock_prompt_logprobs(row), self._sampled(row, seen) if row.sample else None)
        if not row.sample:
            return None
        if row.embed:
            return Embedded(mock_vector(row.prompt, row.lora))
        return self._sampled(row, seen)

    def _sampled(self, row: Row, seen: Seen) -> Sampled:
        token = answer_token(seen.digest, len(row.output), self._vocabulary.answers)
        wants = row.sampling.top_logprobs
        return Sampled(token, None if wants is None else mock_logprob(token, wants))


def mock_prompt_logprobs(row: Row) -> tuple[TokenLogprob, ...]:
    top = row.sampling.prompt_logprobs or 0
    return tuple([mock_logprob(row.prompt[token], top) for token in row.scored_tokens])


def mock_logprob(token: int, top: int) -> TokenLogprob:
    """Every token is certain, and the likeliest."""
    return TokenLogprob(token, 0.0, ((token, 0.0),) * min(1, top))


def missing_tables(profile: Profile | None, role: Role) -> list[str]:
    """Return the tables that a worker in `role` needs and the profile lacks. Without a profile none is missing."""
    if profile is None:
        return []
    needed = {
        "prefill": role is not Role.DECODE and profile.prefill is None,
        "decode": role is not Role.PREFILL and profile.decode is None,
    }
    return [name for name, is_missing in needed.items() if is_missing]
