"""Judge answers: tokens of greedy answers have to be equal, but for the rounding of the numbers they come from. Pure.

In bfloat16 an answer depends on how many tokens are computed at once: the same prompt, with its beginning cached on the
device or computed, has logits that differ by a step of rounding, and the likeliest token may change where two are as
likely. In float32 no token may differ.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

TOP = 8  # likeliest tokens that an answer has with it, where numbers are rounded so
ROUNDING = {"bfloat16": 0.1}  # of a logit: three steps at 4 to 8


class Answer(NamedTuple):
    """One answer: its time to first token, its tokens, when they came, and for each the likeliest with logprobs."""

    ttft_s: float
    tokens: Sequence[int]
    came_s: Sequence[float]
    top: Sequence[Sequence[tuple[int, float]]] = ()


class Judge:
    """Compares answers with those of an engine without tiers."""

    def __init__(self, dtype: str) -> None:
        self.wrong_tokens = 0
        self.rounded_answers = 0  # that differ from a token on that was as likely
        self._rounding = ROUNDING.get(dtype, 0.0)

    def compare(self, answer: Answer, expected: Answer) -> None:
        for place, (one, other) in enumerate(zip(answer.tokens, expected.tokens, strict=False)):
            if one != other:
                if self._is_as_likely(one, place, expected):
                    self.rounded_answers += 1  # what follows continues another text
                    return
                self.wrong_tokens += 1

    def _is_as_likely(self, token: int, place: int, expected: Answer) -> bool:
        if not self._rounding or place >= len(expected.top):
            return False
        likeliest = dict(expected.top[place])
        return max(likeliest.values()) - likeliest.get(token, -math.inf) <= self._rounding
