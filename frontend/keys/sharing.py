"""Share the limits of keys with the other frontends: who there is, leases for them, and leases from them."""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvmesh.frontend.keys.metrics import ASKS, BUDGETS, FRONTENDS
from kvmesh.frontend.keys.owned import Owned
from kvmesh.frontend.keys.owners import Owners
from kvmesh.mesh.discovery import Deleted, Discovery, Put
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.mesh.plane.server import Call, Handler
from kvmesh.protocol.errors import FeedLostError, MeshError, NoWorkerError, WireError
from kvmesh.protocol.ids import new_generation
from kvmesh.protocol.messages import BudgetAsk, BudgetGrant, LimiterCard, decode, decode_card, encode_card

log = logging.getLogger(__name__)

PREFIX = "limiters/"
ASK_S = 0.3  # for the owner of a key to answer
TICK_S = 0.5  # while leases are held
JOIN_S = 3.0  # at the start, for discovery to show the others


class Ticking(Protocol):
    """Something that has to be looked at from time to time."""

    def tick(self, now: float) -> bool:
        """Return whether to look again."""
        ...


class LimitSharing:
    """The place of this frontend among those that share limits. Without `run` it is alone."""

    def __init__(self, name: str = "here", clock: Callable[[], float] = time.monotonic) -> None:
        """Begin alone, as the owner of all keys."""
        self.clock = clock
        self.owners = Owners(name)
        self.owners.put(clock(), name, "")
        self.owned = Owned(self.owners, new_generation())
        self._plane: PlaneClient | None = None
        self._ticking: set[Ticking] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._asking: set[asyncio.Task[None]] = set()
        self._joined = asyncio.Event()
        self._silent: set[str] = set()  # owners that do not answer
        FRONTENDS.set_function(lambda: self.owners.count)
        BUDGETS.set_function(lambda: len(self.owned))

    def handlers(self) -> Mapping[str, Handler]:
        """Return what a frontend answers to other frontends."""

        async def budget(call: Call) -> None:
            await call.send(self.owned.answer(self.clock(), decode(call.body, BudgetAsk)))

        return {"budget": budget}

    async def run(self, discovery: Discovery, plane: PlaneClient, address: str) -> None:
        """Follow the other frontends until cancelled. Raise FeedLostError if the feed ends."""
        self._plane = plane
        self.owners.remove(self.clock(), self.owners.own)  # until discovery shows it
        card = LimiterCard(name=self.owners.own, address=address, pid=os.getpid())
        await discovery.put(f"{PREFIX}{self.owners.own}", encode_card(card))
        async for change in discovery.watch(PREFIX):
            name = change.key.removeprefix(PREFIX)
            match change:
                case Put():
                    self._put(name, change.value)
                case Deleted():
                    self.owners.remove(self.clock(), name)
                    self._silent.discard(name)
            if self.owners.is_joined:
                self._joined.set()
                self.hand_over()
        raise FeedLostError("the discovery watch ended", hint="check --discovery")

    def _put(self, name: str, value: bytes) -> None:
        try:
            card = decode_card(value, LimiterCard)
        except WireError as error:
            log.warning("ignoring %s%s: %s", PREFIX, name[:256], error)
            return
        if card.name == name:
            self.owners.put(self.clock(), name, card.address)
        else:
            log.warning("ignoring %s%s: its card is of %s", PREFIX, name[:256], card.name)

    async def joined(self) -> None:
        """Wait until the other frontends are known, or for JOIN_S."""
        try:
            async with asyncio.timeout(JOIN_S):
                await self._joined.wait()
        except TimeoutError:
            log.warning("discovery does not show this frontend yet; until then each key gets a part of its limits")

    async def ask(self, ask: BudgetAsk) -> BudgetGrant:
        """Ask the owner of a key. Raise MeshError if it does not answer in ASK_S."""
        address = self.owners.address(ask.owner)
        if self._plane is None or not address:
            raise NoWorkerError("the owner of the key is not known")
        try:
            grant = await self._plane.ask(address, "budget", ask, BudgetGrant, ASK_S)
        except MeshError as error:
            ASKS.labels("failed").inc()
            if ask.owner not in self._silent:
                self._silent.add(ask.owner)
                log.warning("%s does not share its keys' limits; a part of them is used: %s", ask.owner, error)
            raise
        self._silent.discard(ask.owner)
        ASKS.labels("answered").inc()
        return grant

    def hand_over(self) -> None:
        """Tell the new owners of budgets what counts, if there are any."""
        if asks := list(self.owned.to_hand_over(self.clock())):
            self.spawn(asyncio.create_task(self._hand_over(asks), name="hand over the budgets of keys"))

    async def _hand_over(self, asks: Sequence[BudgetAsk]) -> None:
        for ask in asks:
            try:
                await self.ask(ask)
            except MeshError:  # its new owner lets a fair part through at first
                continue

    def spawn(self, work: "asyncio.Task[None]") -> None:
        """Own a task until it has ended."""
        self._asking.add(work)
        work.add_done_callback(self._asking.discard)

    def watch(self, ticking: Ticking) -> None:
        """Look at something every TICK_S until it says that nothing is left to do."""
        self._ticking.add(ticking)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.look()

    def look(self) -> None:
        """Look at everything that has asked for it, now."""
        due, self._ticking = self._ticking, set()
        now = self.clock()
        for one in due:
            if one.tick(now):
                self.watch(one)

    async def close(self) -> None:
        """End what still runs."""
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._asking):
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)
