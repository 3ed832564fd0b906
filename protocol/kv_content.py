"""Compare what KV was computed with: weights, configuration, quantisation and KV dtype, and the adapter. Pure.

KV of one content must never be used with another one: the tokens would be wrong, and no error would say so.
"""

from collections.abc import Sequence

UNKNOWN = ""  # of a release or an engine that does not say
PENDING = "pending"  # the weights are still being hashed: the worker exchanges no KV
MAX_CONTENT_CHARS = 64
MAX_ADAPTERS = 4096  # whose fingerprints are on a card

Adapters = Sequence[tuple[str, str]]  # name of an adapter, fingerprint of the adapter on the weights of its worker


def content_of(content: str, adapters: Adapters, lora: str | None) -> str:
    """Return the fingerprint for the requests of one adapter, or of none.

    An adapter without a fingerprint of its own counts as equal where the weights are equal.
    """
    if lora is None or content == PENDING:
        return content
    return next((found for name, found in adapters if name == lora), content)


def mismatch(ours: str, theirs: str) -> bool:
    """Return whether KV must not move between two contents. An unknown content fits all but a pending one."""
    if PENDING in (ours, theirs):
        return True
    return ours != theirs and bool(ours) and bool(theirs)
