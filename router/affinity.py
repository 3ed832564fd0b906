"""Remember which worker served a session last. Pure; the time is a parameter.

The binding is a preference: a placement ignores it if that worker is full or may not serve the request.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import NewType

from xxhash import xxh3_128_digest

from kvmesh.protocol.ids import WorkerId
from kvmesh.router.index import Holder

SessionKey = NewType("SessionKey", bytes)


def session_key(model: str, tenant: str, session: str) -> SessionKey:
    """Return 16 bytes that name a session of one tenant and model, however long the client's name for it is."""
    return SessionKey(xxh3_128_digest(repr((model, tenant, session)).encode()))


@dataclass(frozen=True, slots=True)
class _Binding:
    holder: Holder
    ends_s: float


class SessionAffinity:
    """Binds at most `max_sessions`; the least recently used go first. Each ends `ttl_s` after its last use."""

    def __init__(self, ttl_s: float = 600.0, max_sessions: int = 100_000) -> None:
        self._ttl_s = ttl_s
        self._max_sessions = max_sessions
        self._bindings: OrderedDict[SessionKey, _Binding] = OrderedDict()  # by last use, and so by end
        self._of_worker: dict[WorkerId, dict[SessionKey, None]] = {}

    def __len__(self) -> int:
        return len(self._bindings)

    def get(self, key: SessionKey, now: float) -> Holder | None:
        """Return where a session is bound, or None. Only `bind` counts as a use."""
        self._expire(now)
        binding = self._bindings.get(key)
        return None if binding is None else binding.holder

    def bind(self, key: SessionKey, holder: Holder, now: float) -> None:
        """Bind the session to this holder from now on."""
        self._expire(now)
        self._drop(key)
        if self._max_sessions <= 0:
            return
        if len(self._bindings) >= self._max_sessions:
            self._drop(next(iter(self._bindings)))
        self._bindings[key] = _Binding(holder, now + self._ttl_s)
        self._of_worker.setdefault(holder.worker_id, {})[key] = None

    def forget_worker(self, worker_id: WorkerId) -> None:
        for key in self._of_worker.pop(worker_id, {}):
            del self._bindings[key]

    def _expire(self, now: float) -> None:
        while self._bindings and next(iter(self._bindings.values())).ends_s <= now:
            self._drop(next(iter(self._bindings)))

    def _drop(self, key: SessionKey) -> None:
        if (binding := self._bindings.pop(key, None)) is None:
            return
        sessions = self._of_worker[binding.holder.worker_id]
        del sessions[key]
        if not sessions:
            del self._of_worker[binding.holder.worker_id]
