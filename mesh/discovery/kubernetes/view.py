"""Decide which cards of Kubernetes count: those whose pod is ready. Pure.

A card leaves as withdrawn if its value is empty, or if Kubernetes has begun to delete its pod. In all other cases it
has lapsed, and a router then asks the worker itself: its pod is not ready or gone, or somebody has deleted the card.
"""

from collections.abc import Iterable, Iterator
from itertools import islice

from kvmesh.mesh.discovery.kubernetes.objects import MeshCard, MeshPod, UnreadableCard
from kvmesh.mesh.discovery.view import KeyView

RETURN_S = 10.0  # a card that a list no longer has counts for so long, so that its owner can put it again
MAX_CARDS = 65_536
MAX_IGNORED = 32
UNREADABLE_PREFIX, POD_PREFIX = "meshcards/", "pods/"  # before names of objects whose keys are not known


class PodView:
    """Tracks cards and pods of one mesh. Times are seconds of one monotonic clock."""

    def __init__(self, mesh_label: str) -> None:
        """`mesh_label` is that of the mesh's pods with its value, for reasons."""
        self._mesh_label = mesh_label
        self._keys = KeyView(RETURN_S)
        self._cards: dict[str, MeshCard] = {}  # by the names of the objects
        self._unreadable: dict[str, UnreadableCard] = {}
        self._pods: dict[str, MeshPod] = {}  # by uid
        self._of_pod: dict[str, set[str]] = {}  # uid -> names of its cards
        self._left_out: set[str] = set()

    # --- cards ----------------------------------------------------------------------------------------

    def on_cards(self, found: Iterable[MeshCard | UnreadableCard], now_s: float) -> None:
        """Take a list of all cards."""
        self._cards, self._unreadable, self._of_pod, self._left_out = {}, {}, {}, set()
        for one in found:
            self._remember(one)
        listed = {card.key: value for card in self._cards.values() if (value := self._counted(card)) is not None}
        self._keys.on_list(listed, now_s)
        for card in self._cards.values():
            if card.key not in listed:
                self._keys.on_lapse(card.key)

    def on_card(self, found: MeshCard | UnreadableCard) -> None:
        before = self._cards.get(found.name)
        self._forget(found.name)
        self._remember(found)
        if isinstance(found, MeshCard) and found.name in self._cards:
            self._weigh(found)
        elif before is not None:
            self._keys.on_lapse(before.key)

    def on_card_gone(self, name: str) -> None:
        if (card := self._forget(name)) is not None:
            self._keys.on_lapse(card.key)

    def on_away(self) -> None:
        """Take that the API server does not answer: no card lapses until the next list."""
        self._keys.on_away()

    def on_time(self, now_s: float) -> None:
        self._keys.on_time(now_s)

    # --- pods -----------------------------------------------------------------------------------------

    def on_pods(self, found: Iterable[MeshPod]) -> None:
        """Take a list of all pods of the mesh."""
        self._pods = {pod.uid: pod for pod in found}
        for card in self._cards.values():
            self._weigh(card)

    def on_pod(self, pod: MeshPod) -> None:
        before = self._pods.get(pod.uid)
        self._pods[pod.uid] = pod
        if before is None or (before.is_ready, before.is_leaving) != (pod.is_ready, pod.is_leaving):
            self._weigh_all(pod.uid)

    def on_pod_gone(self, uid: str) -> None:
        if self._pods.pop(uid, None) is not None:
            self._weigh_all(uid)

    # --- what follows ---------------------------------------------------------------------------------

    def present(self) -> dict[str, bytes]:
        return self._keys.present()

    def lapsed(self) -> frozenset[str]:
        return self._keys.lapsed()

    def card(self, name: str) -> MeshCard | None:
        return self._cards.get(name)

    def ignored(self) -> tuple[tuple[str, str], ...]:
        """Return keys that do not count, with the reasons. Of many, only the first."""
        return tuple(islice(self._ignored(), MAX_IGNORED))

    def _ignored(self) -> Iterator[tuple[str, str]]:
        for card in self._cards.values():
            if card.value and (reason := self._reason(card)):
                yield card.key, reason
        for one in self._unreadable.values():
            yield UNREADABLE_PREFIX + one.name, one.reason
        for pod in self._pods.values():
            if pod.uid not in self._of_pod and not pod.is_leaving:
                yield f"{POD_PREFIX}{pod.name}", f"{'is ready' if pod.is_ready else 'is not ready'} and has put no card"
        for name in self._left_out:
            yield UNREADABLE_PREFIX + name, f"there are more than {MAX_CARDS} cards"

    def _reason(self, card: MeshCard) -> str:
        """Return why a card does not count, "" if it does."""
        if not card.owner.uid:
            return "no pod owns its card"
        pod = self._pods.get(card.owner.uid)
        if pod is None:
            return f"its pod {card.owner.pod} is gone, or has not the label {self._mesh_label}"
        if pod.is_leaving:
            return f"its pod {pod.name} is being deleted"
        return "" if pod.is_ready else f"its pod {pod.name} is not ready"

    def _counted(self, card: MeshCard) -> bytes | None:
        """Return the value that counts, empty for a withdrawn key, None for one that has lapsed."""
        pod = self._pods.get(card.owner.uid)
        if not card.value or (pod is not None and pod.is_leaving):
            return b""
        return card.value if pod is not None and pod.is_ready else None

    def _weigh(self, card: MeshCard) -> None:
        if (value := self._counted(card)) is None:
            self._keys.on_lapse(card.key)
        else:
            self._keys.on_put(card.key, value)

    def _weigh_all(self, uid: str) -> None:
        for name in self._of_pod.get(uid, ()):
            self._weigh(self._cards[name])

    def _remember(self, found: MeshCard | UnreadableCard) -> None:
        if len(self._cards) + len(self._unreadable) >= MAX_CARDS:
            if len(self._left_out) < MAX_IGNORED:
                self._left_out.add(found.name)
        elif isinstance(found, UnreadableCard):
            self._unreadable[found.name] = found
        else:
            self._cards[found.name] = found
            self._of_pod.setdefault(found.owner.uid, set()).add(found.name)

    def _forget(self, name: str) -> MeshCard | None:
        self._left_out.discard(name)
        self._unreadable.pop(name, None)
        card = self._cards.pop(name, None)
        if card is not None:
            names = self._of_pod[card.owner.uid]
            names.discard(name)
            if not names:
                del self._of_pod[card.owner.uid]
        return card
