"""Decide which workers can be used together. Pure.

The workers of one model must have the same tokenizer, cut prompts into equal blocks and take equally long ones.
Overlaps are compared in blocks, KV moves in blocks, and the frontend tokenizes and checks a prompt before it knows
where it will run. A worker that contradicts the others waits until they have left. That happens when a worker is
started again with other settings while the card of its predecessor still stands.
"""

from protocol.ids import WorkerId
from protocol.messages import WorkerCard


class Members:
    def __init__(self) -> None:
        self._in: dict[WorkerId, WorkerCard] = {}
        self._waiting: dict[WorkerId, WorkerCard] = {}

    def join(self, card: WorkerCard) -> bool:
        """Let a worker in that has come or changed its card. Return False if it has to wait."""
        self._waiting.pop(card.worker_id, None)
        if any(contradicts(card, other) for other in self._in.values()):
            self._in.pop(card.worker_id, None)
            self._waiting[card.worker_id] = card
            return False
        self._in[card.worker_id] = card
        return True

    def leave(self, worker_id: WorkerId) -> list[WorkerCard]:
        """Forget a worker. Return the workers that need wait no longer."""
        self._waiting.pop(worker_id, None)
        if self._in.pop(worker_id, None) is None:
            return []
        return [card for card in list(self._waiting.values()) if self.join(card)]

    def conflict(self, card: WorkerCard) -> str:
        """Return why a worker has to wait; "" if it has not to."""
        return next((why_apart(card, other) for other in self._in.values() if contradicts(card, other)), "")


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
