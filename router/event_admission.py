"""Be admitted to the KV events of closed workers: one call stays open to each worker that is followed."""

import asyncio
import logging
from collections.abc import Callable

from kvmesh.kvevents.door import KeyPair
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.protocol.errors import DeadlineExceededError, InvalidRequestError, MeshError
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import EventKey, EventKeyRequest, WorkerCard

log = logging.getLogger(__name__)

CALL_S = 86_400.0  # a call that is older is opened again
RETRY_S = 0.5


class EventAdmission:
    """Shows this follower's key to workers. The worker admits the key as long as the call is open."""

    def __init__(
        self,
        plane: PlaneClient,
        keys: KeyPair,
        on_admitted: Callable[[WorkerCard], object],
        on_refused: Callable[[WorkerCard, str], object],
    ) -> None:
        """Call `on_admitted` once for each card, `on_refused` for a worker that is not the one of its card."""
        self._plane = plane
        self._keys = keys
        self._on_admitted = on_admitted
        self._on_refused = on_refused
        self._calls: dict[WorkerId, asyncio.Task[None]] = {}

    def show(self, card: WorkerCard) -> None:
        """Show the key to a worker, from now on."""
        self.let_go(card.worker_id)
        name = f"router: event key for {card.worker_id}"
        self._calls[card.worker_id] = asyncio.create_task(self._show(card), name=name)

    def let_go(self, worker_id: WorkerId) -> None:
        if (call := self._calls.pop(worker_id, None)) is not None:
            call.cancel()

    async def close(self) -> None:
        calls, self._calls = list(self._calls.values()), {}
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    async def _show(self, card: WorkerCard) -> None:
        """Keep a call open until cancelled. Its link may break while the events go on: then the key is shown again."""
        is_followed = has_complained = False
        request = EventKeyRequest(key=self._keys.public)
        while True:
            try:
                async with self._plane.open(card.address, "event_key", request, CALL_S) as stream:
                    async for reply in stream.messages(EventKey):
                        if (reply.worker_id, reply.key) != (card.worker_id, card.kv_key):
                            self._on_refused(card, f"{reply.worker_id} answers at its address, or its key is another")
                            return
                        if not is_followed:
                            is_followed = True
                            self._on_admitted(card)
            except DeadlineExceededError:
                continue
            except InvalidRequestError as error:
                self._on_refused(card, str(error))
                return
            except MeshError as error:
                log.log(
                    logging.DEBUG if has_complained or is_followed else logging.WARNING,
                    "worker %s does not admit this follower of its KV events yet: %s", card.worker_id, error,
                )  # fmt: skip
                has_complained = True
            await asyncio.sleep(RETRY_S)
