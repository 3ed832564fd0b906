"""Know which workers a gateway can send requests to: those whose card has an address of their HTTP API."""

import ipaddress
import logging
from collections.abc import Callable, Iterator, Sequence

from kvmesh.mesh.address import join_address, split_address
from kvmesh.protocol.errors import NoWorkerError
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import Role, WorkerCard
from kvmesh.router.feeds import WorkerNews

log = logging.getLogger(__name__)

NO_ENDPOINT = "its card has no HTTP endpoint; start it with --http-endpoint ip:port, see docs/gateway.md"


def endpoint_of(text: str) -> str | None:
    """Return an endpoint in the form that gateways compare, ip:port; None if `text` is none."""
    try:
        host, port = split_address(text)
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return join_address(str(address), port) if 0 < port <= 65535 else None


class EndpointFeed:
    """Passes on the workers that a picker can use: those with an endpoint, and those that only prefill."""

    def __init__(self, workers: WorkerNews) -> None:
        self._joined: list[Callable[[WorkerCard], object]] = []
        self._left: list[Callable[[WorkerId], object]] = []
        self._endpoints: dict[WorkerId, str] = {}  # of all workers that have one
        self._serving: dict[str, set[WorkerId]] = {}  # of those that can answer, by endpoint
        self._unusable: dict[WorkerId, str] = {}
        self._turn = 0
        workers.listen(self._join, self._leave)

    def listen(self, joined: Callable[[WorkerCard], object], left: Callable[[WorkerId], object]) -> None:
        self._joined.append(joined)
        self._left.append(left)

    def __len__(self) -> int:
        return len(self._serving)

    def unusable(self) -> Iterator[tuple[WorkerId, str]]:
        """Yield the workers that no gateway can reach, with the reason."""
        yield from self._unusable.items()

    def of(self, worker_id: WorkerId) -> str | None:
        return self._endpoints.get(worker_id)

    def workers_at(self, subset: Sequence[str]) -> list[WorkerId]:
        """Return the workers that answer at these endpoints."""
        serving = self._serving
        found = [serving.get(text) or serving.get(endpoint_of(text) or "") or () for text in subset]
        return [worker_id for workers in found for worker_id in workers]

    def any(self, subset: Sequence[str] | None) -> str:
        """Return one endpoint after the other. Raise NoWorkerError if there is none."""
        endpoints = list(self._serving)
        if subset is not None:
            allowed = {endpoint_of(text) for text in subset}
            endpoints = [endpoint for endpoint in endpoints if endpoint in allowed]
        if not endpoints:
            where = "" if subset is None else f" among the {len(subset)} that the gateway allows"
            raise NoWorkerError(f"no endpoint is ready{where}", hint="GET /health of the picker says why")
        self._turn += 1
        return endpoints[self._turn % len(endpoints)]

    def _join(self, card: WorkerCard) -> None:
        self._forget(card.worker_id)
        endpoint = endpoint_of(card.http_endpoint)
        if endpoint is None and card.role is not Role.PREFILL:
            reason = NO_ENDPOINT
            if card.http_endpoint:
                reason = f"its HTTP endpoint is {card.http_endpoint[:80]!r}, which is no ip:port"
            self._unusable[card.worker_id] = reason
            log.warning("worker %s cannot be picked: %s", card.worker_id, reason)
            self._tell_left(card.worker_id)
            return
        if endpoint is not None:
            self._endpoints[card.worker_id] = endpoint
            if card.role is not Role.PREFILL:
                self._serving.setdefault(endpoint, set()).add(card.worker_id)
        for joined in self._joined:
            joined(card)

    def _leave(self, worker_id: WorkerId) -> None:
        self._forget(worker_id)
        self._tell_left(worker_id)

    def _forget(self, worker_id: WorkerId) -> None:
        self._unusable.pop(worker_id, None)
        endpoint = self._endpoints.pop(worker_id, None)
        if endpoint is not None and (workers := self._serving.get(endpoint)) is not None:
            workers.discard(worker_id)
            if not workers:
                del self._serving[endpoint]

    def _tell_left(self, worker_id: WorkerId) -> None:
        for left in self._left:
            left(worker_id)
