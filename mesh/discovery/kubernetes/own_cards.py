"""Decide which of our cards have to be written to Kubernetes, and when. Pure.

A card is written when its value changes, and again when somebody has taken it away: the second time and later at most
once a minute. Nothing is written periodically.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvmesh.mesh.discovery.kubernetes.objects import CardOwner, MeshCard, name_of

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 60.0  # after failures, doubled each time; a part of it is drawn
REPAIR_S = 60.0  # between two repairs of one card
REPAIR_SPREAD_S = 1.0  # the owners of many cards do not repair them in the same moment


@dataclass(frozen=True, slots=True)
class WriteCard:
    """Write a card; an empty value tells watchers that it is withdrawn."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class DeleteCard:
    """Delete a card that is withdrawn, if it is still as we have written it."""

    key: str
    revision: str


@dataclass(slots=True)
class _Own:
    value: bytes  # empty: to be withdrawn
    due_s: float
    written: bytes | None = None
    revision: str = ""
    failures: int = 0
    repaired_s: float = field(default=-math.inf)

    def is_settled(self) -> bool:
        return bool(self.value) and self.written == self.value


class OwnCards:
    """Tracks the cards of this process. Times are seconds of one clock, `draw` returns from [0, 1)."""

    def __init__(self, mesh: str, owner: CardOwner, draw: Callable[[], float], cleans_up: bool = True) -> None:
        """`cleans_up`: cards that an earlier run of our container has left are withdrawn."""
        self._mesh = mesh
        self._owner = owner
        self._draw = draw
        self._cleans_up = cleans_up
        self._own: dict[str, _Own] = {}
        self._keys: dict[str, str] = {}  # names of our objects -> keys
        self._taken: set[str] = set()  # keys that another owner has written over ours

    def put(self, key: str, value: bytes, now_s: float) -> None:
        """Have a card written, or withdrawn if the value is empty."""
        own = self._own.get(key)
        if own is None:
            if value:
                self._own[key] = _Own(value, now_s)
                self._keys[name_of(self._mesh, key)] = key
            return
        own.value, own.due_s, own.failures = value, now_s, 0
        if not value and (own.written is None or key in self._taken):
            self._drop(key)  # there is nothing of ours to withdraw

    def keys(self) -> list[str]:
        return [key for key, own in self._own.items() if own.value]

    def is_settled(self, key: str) -> bool:
        """Return whether nothing is left to do for a key."""
        own = self._own.get(key)
        return own is None or own.is_settled()

    def due(self, now_s: float) -> WriteCard | DeleteCard | None:
        for key, own in self._own.items():
            if own.is_settled() or own.due_s > now_s:
                continue
            if own.value or own.written != b"":
                return WriteCard(key, own.value)
            return DeleteCard(key, own.revision)
        return None

    def due_s(self) -> float:
        """Return when the next one is due, infinity for never."""
        return min((own.due_s for own in self._own.values() if not own.is_settled()), default=math.inf)

    def on_done(self, order: WriteCard | DeleteCard, revision: str = "") -> None:
        if isinstance(order, DeleteCard):
            if (own := self._own.get(order.key)) is not None and not own.value:
                self._drop(order.key)
        elif (own := self._own.get(order.key)) is not None:
            own.written, own.revision, own.failures = order.value, revision, 0
            self._taken.discard(order.key)

    def on_failure(self, order: WriteCard | DeleteCard, now_s: float) -> None:
        """Take that an order was not carried out. The next try waits."""
        if (own := self._own.get(order.key)) is not None:
            wait_s = min(FIRST_WAIT_S * 2.0**own.failures, LONGEST_WAIT_S)
            own.failures = min(own.failures + 1, 16)
            own.due_s = now_s + wait_s * (0.5 + self._draw())

    def on_refused(self, order: WriteCard | DeleteCard) -> None:
        """Take that an order will never be carried out, and that its caller knows."""
        self._drop(order.key)

    # --- what is seen ---------------------------------------------------------------------------------

    def on_cards(self, found: Iterable[MeshCard], now_s: float) -> bool:
        """Take that these are all cards, or all those of our pod. Call `on_card` for each of them first.

        Return whether one of ours has to be written again.
        """
        names = {card.name for card in found}
        return sum(self.on_gone(name, now_s) for name in list(self._keys) if name not in names) > 0

    def on_card(self, card: MeshCard, now_s: float) -> str:
        """Take a card. Return the name of another pod that has written over ours, once."""
        key = self._keys.get(card.name)
        if key is None:
            if self._cleans_up and card.owner.uid == self._owner.uid and self._is_left(card):
                self._own[card.key] = _Own(b"", now_s, written=card.value)
                self._keys[card.name] = card.key
            return ""
        if card.owner.uid != self._owner.uid:
            is_news = key not in self._taken
            self._taken.add(key)
            return (card.owner.pod or "nobody") if is_news else ""
        self._taken.discard(key)
        if not card.value:
            self.on_gone(card.name, now_s)
        return ""

    def on_gone(self, name: str, now_s: float) -> bool:
        """Take that a card is not there, or is empty. Return whether it has to be written again."""
        own = self._own.get(self._keys.get(name, ""))
        if own is None or not own.is_settled():
            return False
        own.written = None
        own.due_s = max(now_s + REPAIR_SPREAD_S * self._draw(), own.repaired_s + REPAIR_S)
        own.repaired_s = own.due_s
        return True

    def _is_left(self, card: MeshCard) -> bool:
        owner = card.owner
        return owner.container == self._owner.container and owner.run != self._owner.run

    def _drop(self, key: str) -> None:
        self._own.pop(key, None)
        self._keys.pop(name_of(self._mesh, key), None)
        self._taken.discard(key)
