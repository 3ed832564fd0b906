"""Decide which workers can be used together. Pure.

The workers of one model must have the same tokenizer, cut prompts into equal blocks and take equally long ones.
Overlaps are compared in blocks, KV moves in blocks, and the frontend tokenizes and checks a prompt before it knows
where it will run. Of workers that contradict each other, the larger group is used and the others wait. The first one
that came must not win: one worker with wrong settings would lock out all the others.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import WorkerCard


@dataclass(frozen=True, slots=True)
class Changes:
    """The workers that can be used from now on, and those that no longer can."""

    joined: Sequence[WorkerCard] = ()
    put_aside: Sequence[WorkerCard] = ()


class Members:
    def __init__(self) -> None:
        self._in: dict[WorkerId, WorkerCard] = {}
        self._waiting: dict[WorkerId, WorkerCard] = {}

    def join(self, card: WorkerCard) -> Changes:
        """Take a worker that has come or changed its card. It may have to wait."""
        before = self._in.pop(card.worker_id, None)
        self._waiting.pop(card.worker_id, None)
        self._waiting[card.worker_id] = card
        changes = [self._settle(card.model)]
        if before is not None and before.model != card.model:
            changes.append(self._settle(before.model))
        put_aside = [gone for change in changes for gone in change.put_aside]
        if before is not None and card.worker_id not in self._in:
            put_aside.append(card)
        return Changes([new for change in changes for new in change.joined], put_aside)

    def leave(self, worker_id: WorkerId) -> Changes:
        """Forget a worker. Others may be used instead."""
        self._waiting.pop(worker_id, None)
        gone = self._in.pop(worker_id, None)
        return Changes() if gone is None else self._settle(gone.model)

    def conflict(self, card: WorkerCard) -> str:
        """Return why a worker has to wait; "" if it has not to."""
        return next((why_apart(card, other) for other in self._in.values() if contradicts(card, other)), "")

    def _settle(self, model: str) -> Changes:
        """Let in who fits the workers of a model that are used. If more others fit each other, use those instead."""
        used = [card for card in self._in.values() if card.model == model]
        waiting = [card for card in self._waiting.values() if card.model == model]
        if not waiting:
            return Changes()
        joined = grown(used, waiting)
        groups = Counter([(card.block_size, card.context_tokens, card.model_files) for card in waiting])
        facts, count = groups.most_common(1)[0]
        if count <= len(used) + len(joined):
            return self._use(joined, [])
        agreed = [card for card in waiting if (card.block_size, card.context_tokens, card.model_files) == facts]
        return self._use([*agreed, *grown(agreed, [*used, *waiting])], used)

    def _use(self, chosen: Sequence[WorkerCard], instead_of: Sequence[WorkerCard]) -> Changes:
        for card in instead_of:
            del self._in[card.worker_id]
            self._waiting[card.worker_id] = card
        for card in chosen:
            del self._waiting[card.worker_id]
            self._in[card.worker_id] = card
        before = {card.worker_id for card in instead_of}
        return Changes(
            [card for card in chosen if card.worker_id not in before],
            [card for card in instead_of if card.worker_id not in self._in],
        )


def grown(group: Sequence[WorkerCard], cards: Iterable[WorkerCard]) -> list[WorkerCard]:
    """Return those of `cards` that fit the group and each other, in their order; none that is in the group."""
    ids = {card.worker_id for card in group}
    added: list[WorkerCard] = []
    for card in cards:
        if card.worker_id not in ids and not any(contradicts(card, other) for other in (*group, *added)):
            added.append(card)
    return added


def contradicts(card: WorkerCard, other: WorkerCard) -> bool:
    return (
        card.model == other.model
        and card.worker_id != other.worker_id
        and (
            (card.block_size, card.context_tokens) != (other.block_size, other.context_tokens)
            or has_other_files(card, other)
        )
    )


def why_apart(card: WorkerCard, other: WorkerCard) -> str:
    """Return in what a worker contradicts another one of its model."""
    if card.block_size != other.block_size:
        return f"its block size is {card.block_size}, that of the other workers of its model {other.block_size}"
    if card.context_tokens != other.context_tokens:
        return f"its context is {card.context_tokens}, that of the other workers of its model {other.context_tokens}"
    return "its tokenizer or chat template is not that of the other workers of its model"


def has_other_files(card: WorkerCard, other: WorkerCard) -> bool:
    """Return whether two workers that name their model's files have other ones: they would read tokens differently."""
    return bool(card.model_files and other.model_files) and card.model_files != other.model_files
