"""Carry gossip between routers: a ZMQ publisher for this router, a subscription to each other one in discovery."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack

import zmq

from kvmesh.kvevents.door import EventDoor, close_to_strangers, new_keys, show_key
from kvmesh.kvevents.sockets import Frames, LoopSocket, bind_socket, open_socket
from kvmesh.mesh.address import split_address
from kvmesh.mesh.discovery import Deleted, Discovery, Put
from kvmesh.mesh.lapsed import Lapsed
from kvmesh.protocol.card_checks import is_event_key
from kvmesh.protocol.errors import FeedLostError, MeshError, WireError
from kvmesh.protocol.messages import RouterCard, decode_card, encode
from kvmesh.router.gossip import GossipReceiver, GossipSender, decode_news
from kvmesh.router.load import ActiveLoad
from kvmesh.router.metrics import GOSSIP_RECEIVED, GOSSIP_SENT

log = logging.getLogger(__name__)

MAX_NEWS_BYTES = 16 << 20
PROBE_TIMEOUT_S = 1.0
HANDSHAKE_BYTES = 1024  # of a peer's message: a subscription has one, a handshake of CURVE some hundred
_QUEUED_NEWS = 256  # of one router, while the loop is busy; later messages make dropped ones good


class Gossip:
    """Keeps the `load` of a router complete with what the other routers have placed. Needs a running event loop.

    `on_news` is called when that has changed: requests that wait may have room now. While nobody listens, nothing is
    sent and no timer runs. In a closed mesh only routers whose keys are on cards can follow or be followed. Raises
    ConfigError if it cannot listen at `bind`.
    """

    def __init__(
        self,
        load: ActiveLoad,
        name: str,
        on_news: Callable[[], None],
        *,
        bind: str,
        advertise_host: str = "",
        is_closed: bool = False,
    ) -> None:
        self._name = name
        self._on_news = on_news
        self._loop = asyncio.get_running_loop()
        self._sender = GossipSender(load, name, generation=time.time_ns())
        self._receiver = GossipReceiver(load)
        self._listeners = 0
        self._tell_timer: asyncio.TimerHandle | None = None
        self._tell_at = 0.0
        self._expiry_timer: asyncio.TimerHandle | None = None
        self._endpoints: dict[str, str] = {}  # by router
        self._lapsed = Lapsed(self._listens, lambda name: self._follow(name, ""))
        self._complained = False
        self._keys = new_keys() if is_closed else None
        self._door = EventDoor() if is_closed else None
        self._peer_keys: dict[str, str] = {}  # by router
        self._admitted: dict[str, ExitStack] = {}  # by router: its key is let in
        # XPUB reports each new listener, which needs a full report, and when the last one has gone
        open_one = open_socket if self._door is None else self._door.open_socket
        pub = open_one(zmq.XPUB, send=_QUEUED_NEWS, max_bytes=HANDSHAKE_BYTES)
        if self._keys is not None:
            close_to_strangers(pub, self._keys)
        pub.setsockopt(zmq.XPUB_VERBOSER, 1)
        try:
            self.endpoint = bind_socket(pub, bind, advertise_host or None, to="gossip")
        except BaseException:
            pub.close()
            if self._door is not None:
                self._door.close_unused()
            raise
        self._sub = open_socket(zmq.SUB, receive=_QUEUED_NEWS, max_bytes=MAX_NEWS_BYTES)
        self._sub.setsockopt(zmq.SUBSCRIBE, b"")
        self._telling = LoopSocket(pub, self._on_subscription)
        self._listening = LoopSocket(self._sub, self._on_message)

    @property
    def key(self) -> str:
        """The public key of this router's gossip, for its card; "" in an open mesh."""
        return "" if self._keys is None else self._keys.public

    @property
    def peers(self) -> int:
        """The number of other routers that gossip."""
        return len(self._endpoints)

    def on_change(self) -> None:
        """Plan a report, because the router's own load may have changed."""
        if self._listeners:
            self._sender.on_change(time.monotonic())
            self._plan_tell()

    async def run(self, discovery: Discovery) -> None:
        """Follow all other routers until cancelled. Raises FeedLostError if the feed ends.

        A router whose lease has ended is followed as long as something listens at its endpoint. An idle router says
        nothing, so its silence proves nothing.
        """
        try:
            async for change in discovery.watch("routers/"):
                name = change.key.removeprefix("routers/")
                self._lapsed.discard(name)
                match change:
                    case Put():
                        self._on_card(name, change.value)
                    case Deleted() if change.has_lapsed and name in self._endpoints:
                        self._lapsed.add(name)
                    case Deleted():
                        self._follow(name, "")
        finally:
            await self._lapsed.close()
        raise FeedLostError("the discovery watch ended", hint="check --discovery")

    async def close(self) -> None:
        """A second call does nothing."""
        for timer in (self._tell_timer, self._expiry_timer):
            if timer is not None:
                timer.cancel()
        self._telling.close()
        self._listening.close()
        if self._door is not None:
            await self._door.close()

    # --- telling ---------------------------------------------------------------------------------------

    def _on_subscription(self, frames: Frames) -> None:
        """Count listeners: `[1 topic]` comes from one that begins to listen, `[0 topic]` from one that ends."""
        if len(frames) != 1 or frames[0] not in (b"\0", b"\1"):
            return
        if frames[0] == b"\1":
            self._listeners += 1
            self._sender.on_listener(time.monotonic())
        else:
            self._listeners = max(0, self._listeners - 1)
            if not self._listeners:
                self._sender.on_alone()
        self._plan_tell()

    def _plan_tell(self) -> None:
        due_s = self._sender.next_s()
        if self._tell_timer is not None:
            if due_s is not None and due_s >= self._tell_at:
                return
            self._tell_timer.cancel()
            self._tell_timer = None
        if due_s is not None:
            self._tell_at = due_s
            self._tell_timer = self._loop.call_later(max(0.0, due_s - time.monotonic()), self._tell)

    def _tell(self) -> None:
        self._tell_timer = None
        if (news := self._sender.tell(time.monotonic())) is not None:
            self._telling.send([encode(news)])
            GOSSIP_SENT.inc()
        self._plan_tell()

    # --- listening -------------------------------------------------------------------------------------

    def _on_card(self, name: str, value: bytes) -> None:
        """Follow a router as its card says, unless it is this one."""
        if name == self._name:
            return
        try:
            card = decode_card(value, RouterCard)
        except WireError as error:
            log.warning("ignoring routers/%s: %s", name, error)
            self._follow(name, "")
            return
        if card.gossip_key and not is_event_key(card.gossip_key):
            log.warning("ignoring routers/%s: its gossip_key is no key", name)
            self._follow(name, "")
            return
        if card.gossip and (self._keys is None) == bool(card.gossip_key):
            found = "closed" if card.gossip_key else "open"
            log.warning(
                "the gossip of router %s is not followed: it is %s; start all with --mesh-tls, or none", name, found
            )
            self._follow(name, "")
            return
        self._follow(name, card.gossip, card.gossip_key)

    async def _listens(self, name: str) -> bool:
        """Return whether a process listens where a router gossips."""
        try:
            host, port = split_address(self._endpoints[name].removeprefix("tcp://"))
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                _, writer = await asyncio.open_connection(host, port)
        except (OSError, ValueError, OverflowError):  # TimeoutError is an OSError
            return False
        writer.close()
        return True

    def _follow(self, name: str, endpoint: str, key: str = "") -> None:
        """Follow a router at an endpoint; "": follow it no more, and let it in no more."""
        if key != self._peer_keys.get(name, ""):  # another process, perhaps where the one before was
            if endpoint and self._endpoints.get(name) == endpoint:
                self._follow(name, "")
            self._let_in(name, key)
            self._peer_keys[name] = key
        if not endpoint:
            self._peer_keys.pop(name, None)
        if not endpoint and self._receiver.forget(name, time.monotonic()):
            self._on_news()
        before = set(self._endpoints.values())
        self._endpoints.pop(name, None)
        if endpoint:
            self._endpoints[name] = endpoint
        after = set(self._endpoints.values())
        try:
            for lost in before - after:
                self._sub.disconnect(lost)
            for new in after - before:
                if self._keys is not None:
                    show_key(self._sub, self._keys, key)
                self._sub.connect(new)
        except zmq.ZMQError as error:
            self._endpoints.pop(name, None)
            log.warning("cannot listen to router %s at %r: %s", name, endpoint, error)
        self._listening.look_soon()

    def _let_in(self, name: str, key: str) -> None:
        """Let a router in by its key, and no more by an earlier one."""
        if (before := self._admitted.pop(name, None)) is not None:
            before.close()
        if self._door is None or not key:
            return
        admitted = ExitStack()
        try:
            admitted.enter_context(self._door.admitted(key))
        except MeshError as error:
            log.warning("router %s is not let in: %s", name, error)
        else:
            self._admitted[name] = admitted

    def _on_message(self, frames: Frames) -> None:
        GOSSIP_RECEIVED.inc()
        try:
            news = decode_news(b"".join(frames))
        except WireError as error:
            log.log(logging.DEBUG if self._complained else logging.WARNING, "gossip: %s", error)
            self._complained = True
            return
        if news.router in self._endpoints and self._receiver.on_news(news, time.monotonic()):
            self._plan_expiry()
            self._on_news()

    def _plan_expiry(self) -> None:
        """Come back when a router with something in flight must have reported."""
        if self._expiry_timer is None and (due_s := self._receiver.next_s()) is not None:
            self._expiry_timer = self._loop.call_later(max(0.0, due_s - time.monotonic()), self._expire)

    def _expire(self) -> None:
        self._expiry_timer = None
        if silent := self._receiver.expire(time.monotonic()):
            log.warning("forgot the load of routers that fell silent: %s", ", ".join(sorted(silent)))
            self._on_news()
        self._plan_expiry()
