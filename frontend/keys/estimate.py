"""Estimate how many tokens a request needs before it has run. Pure."""

FIRST_GUESS_TOKENS = 256
WEIGHT = 0.1  # of the latest answer in the mean


class Estimate:
    """Track the mean length of a key's latest answers."""

    __slots__ = ("_mean",)

    def __init__(self) -> None:
        self._mean = float(FIRST_GUESS_TOKENS)

    def note(self, answer_tokens: int) -> None:
        self._mean += WEIGHT * (answer_tokens - self._mean)

    @property
    def tokens(self) -> int:
        return max(1, round(self._mean))


def reserved_tokens(prompt_tokens: int, max_tokens: int | None, estimated_tokens: int, limit: int) -> int:
    """Return how many tokens a request reserves; what it uses is settled when it has ended.

    An answer is as long as `max_tokens`, or as the key's answers have been where the request names no limit. Clients
    name limits that they never reach, so what goes beyond a quarter of the key's limit counts only as far as it is
    likely: a request that reserved the whole minute would wait for ever beside shorter ones.
    """
    likely = prompt_tokens + estimated_tokens
    if max_tokens is None:
        return min(limit, likely)
    return min(limit, prompt_tokens + max_tokens, max(limit // 4, likely))
