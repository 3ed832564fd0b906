"""Refusals of requests whose key is known."""

from kvmesh.frontend.keys.budget import LimitName
from kvmesh.protocol.errors import MeshError

_RETRY_S = 1.0  # at least


class RateLimitedError(MeshError):
    """A limit of the key is reached."""

    code = "rate_limited"

    def __init__(self, limit: LimitName, most: int, wait_s: float) -> None:
        unit = "requests in progress" if limit == "streams" else f"{limit} in any minute"
        super().__init__(f"this API key may have {most} {unit}", hint="", retry_after_s=max(_RETRY_S, wait_s))
        self.limit = limit


class TooLargeForKeyError(MeshError):
    """One request alone is more than the key may have in a minute. To send it again does not help."""

    code = "too_large_for_key"

    def __init__(self, tokens: int, most: int) -> None:
        super().__init__(
            f"the prompt has {tokens} tokens, and this API key may have {most} in any minute", hint="shorten the prompt"
        )
        self.limit: LimitName = "tokens"
