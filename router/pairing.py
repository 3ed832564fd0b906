"""Decide whether a decode worker may take KV of a prefill worker. Pure.

The transfer must be the same, and so must the content: weights, quantisation, KV dtype and adapter. A worker whose card
says no content is of an older release, or attached: it is paired, and counted.
"""

from collections.abc import Iterable, Sequence

from kvmesh.protocol.kv_content import PENDING, mismatch
from kvmesh.protocol.messages import RouteRequest, WorkerCard
from kvmesh.router.fleet import Slot

TRANSFER, CONTENT, ADAPTER, IS_PENDING = "transfer", "content", "adapter", "pending"
REASONS = {
    TRANSFER: "no common KV transfer",
    CONTENT: "other weights, quantisation or KV dtype",
    ADAPTER: "other weights of the adapter",
    IS_PENDING: "weights that are not hashed yet",
}
"""The reasons why two workers are not paired, with the words of explanations."""
UNKNOWN_PAIRS = "unknown_pairs"  # are counted
MOST_NAMED = 4  # workers in an explanation


def why_apart(prefill: WorkerCard, decode: WorkerCard, lora: str | None) -> str:
    """Return why KV must not move from one worker to the other, one of REASONS; "" if it may."""
    if not prefill.transfer or prefill.transfer != decode.transfer:
        return TRANSFER
    ours, theirs = prefill.content_of(lora), decode.content_of(lora)
    if not mismatch(ours, theirs):
        return ""
    if PENDING in (ours, theirs):
        return IS_PENDING
    if lora is not None and not mismatch(prefill.content_fingerprint, decode.content_fingerprint):
        return ADAPTER
    return CONTENT


def partners(prefill: WorkerCard, decoders: Sequence[Slot], lora: str | None) -> list[Slot]:
    """Return the slots that may decode with KV of a prefill worker. Every placement on two workers asks this."""
    transfer, content = prefill.transfer, prefill.content_fingerprint
    if lora is not None or not transfer or content == PENDING:
        return [slot for slot in decoders if not why_apart(prefill, slot.card, lora)]
    return [
        slot
        for slot in decoders
        if (card := slot.card).transfer == transfer
        and (card.content_fingerprint == content or not why_apart(prefill, card, lora))
    ]


def may_continue(card: WorkerCard, request: RouteRequest) -> bool:
    """Return whether a worker may go on with an answer: with other weights it would be the answer of two models."""
    return not request.content or not mismatch(request.content, card.content_of(request.lora))


def is_unknown(prefill: WorkerCard, decode: WorkerCard) -> bool:
    """Return whether one of two workers that are paired does not say what its KV is computed with."""
    return not (prefill.content_fingerprint and decode.content_fingerprint)


class Apart:
    """The decode workers that may not take KV of a prefill worker."""

    def __init__(self, prefill: WorkerCard, decoders: Iterable[Slot], lora: str | None) -> None:
        self._prefill = prefill
        self._names: dict[str, list[str]] = {}
        for slot in decoders:
            if why := why_apart(prefill, slot.card, lora):
                self._names.setdefault(why, []).append(slot.card.name)

    @property
    def reasons(self) -> Sequence[str]:
        return tuple(self._names)

    @property
    def problem(self) -> str:
        """Return why there is no pair, where all decode workers are apart."""
        if [*self._names] == [TRANSFER]:
            return f"no decode worker can pull KV over {self._prefill.transfer!r}"
        return f"no decode worker can pull KV: {self}"

    def __str__(self) -> str:
        return "; ".join(
            f"{_named(names)} cannot take KV of {self._prefill.name}: {REASONS[why]}"
            for why, names in self._names.items()
        )


def _named(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
