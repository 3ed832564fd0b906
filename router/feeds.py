"""Follow the mesh for a router: workers come and go through discovery, and each reports its cache by KV events."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from kvmesh.kvevents.connect import Links
from kvmesh.kvevents.door import KeyPair
from kvmesh.kvevents.subscriber import KvEventSubscriber
from kvmesh.kvevents.transport import KvSource, Snapshot
from kvmesh.mesh.discovery import Deleted, Discovery, Put
from kvmesh.mesh.discovery.place import SearchPlace
from kvmesh.mesh.lapsed import Lapsed
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.protocol.card_checks import problem_of
from kvmesh.protocol.errors import ConfigError, FeedLostError, MeshError, WireError
from kvmesh.protocol.events import Digest
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.kv_content import UNKNOWN
from kvmesh.protocol.messages import KvDigest, KvRank, KvSnapshot, WorkerCard, WorkerIdentity, decode, decode_card
from kvmesh.protocol.model_files import fingerprint
from kvmesh.protocol.version import VersionError
from kvmesh.router.event_admission import EventAdmission
from kvmesh.router.findings import KEY_PREFIX, UNREADABLE, Complaint, DiscoveryReport, Findings
from kvmesh.router.fleet import OverfullError, WorkerFleet, most_blocks
from kvmesh.router.members import Changes, Members
from kvmesh.router.metrics import EVENT_RESTS, EVENTS, LAPSED_WORKERS, OVERFULL, FeedFacts

log = logging.getLogger(__name__)

SNAPSHOT_TIMEOUT_S = 10.0
MAX_SNAPSHOT_BYTES = 2 << 30
EVENT_BYTES = 2048  # of one block in an event of its own, with the names of adapter and salt
TOKEN_BYTES = 5
ANSWER_TIMEOUT_S = 1.0  # of a worker that is asked who it is
LOOK_S = 1.0  # between two looks whether there is a worker
NOWHERE_YET = SearchPlace("")


class WorkerNews(Protocol):
    """Tells listeners of workers that come and go."""

    def listen(self, joined: Callable[[WorkerCard], object], left: Callable[[WorkerId], object]) -> None: ...


class WorkerFeed:
    """Follows the workers of the mesh and tells the listeners in this process.

    Listeners hear also of a worker that left without having joined, and ignore it. With a plane, a worker whose lease
    has lapsed stays as long as it answers: it may have lost discovery only.
    """

    def __init__(self, plane: PlaneClient | None = None) -> None:
        self._members = Members()
        self._joined: list[Callable[[WorkerCard], object]] = []
        self._told: set[WorkerId] = set()  # that have joined and not left
        self._left: list[Callable[[WorkerId], object]] = []
        self._plane = plane
        self._values: dict[str, bytes] = {}  # of the keys whose workers have joined
        self._at: dict[str, dict[str, str]] = {}  # the same keys by the address of the worker, with its name
        self._asking: set[asyncio.Task[None]] = set()  # who is there, at addresses with several workers
        self._lapsed = Lapsed(self._is_there, self._lose, LAPSED_WORKERS.set)
        self._findings = Findings()
        self.resting: dict[WorkerId, WorkerCard] = {}  # that have a card and take no requests
        self._where: Callable[[], SearchPlace] = lambda: NOWHERE_YET
        self.seen = asyncio.Event()  # discovery has reported a worker
        self.loss = ""  # while listeners are told of a worker that left: why, "" if it left in good order

    def listen(self, joined: Callable[[WorkerCard], object], left: Callable[[WorkerId], object]) -> None:
        self._joined.append(joined)
        self._left.append(left)

    def report(self, others: Iterable[tuple[WorkerId, str]] = ()) -> DiscoveryReport:
        """Return where workers are searched, and what does not count; `others` have joined, and cannot be used here."""
        return self._findings.report(self._where(), ((KEY_PREFIX + worker_id, why) for worker_id, why in others))

    async def run(self, discovery: Discovery) -> None:
        """Follow until cancelled. Raises FeedLostError if the feed ends: a stale list would misroute in silence."""
        self._where = discovery.where
        try:
            async for change in discovery.watch(KEY_PREFIX):
                self.seen.set()
                match change:
                    case Put():
                        self._on_put(change.key, change.value)
                    case Deleted():
                        self._on_deleted(change)
        finally:
            await self._lapsed.close()
            for asking in self._asking:
                asking.cancel()
            await asyncio.gather(*self._asking, return_exceptions=True)
        raise FeedLostError("the discovery watch ended", hint="check --discovery")

    def _on_put(self, key: str, value: bytes) -> None:
        if self._lapsed.discard(key) and self._values.get(key) == value:
            log.info("worker %s has renewed its lease", key.removeprefix(KEY_PREFIX))
            return
        self._join(key, value)

    def _on_deleted(self, change: Deleted) -> None:
        value = self._values.get(change.key)
        if change.has_lapsed and self._plane is not None and value is not None:
            card = decode(value, WorkerCard)
            self._plane.suspect(card.address, f"the lease of worker {card.worker_id} has ended")
            self._lapsed.add(change.key)
            return
        self._lapsed.discard(change.key)
        if change.has_lapsed:
            self._lose(change.key)
        else:
            self._forget(change.key)

    async def _is_there(self, key: str) -> bool:
        """Return whether a worker answers at its address, and under its id."""
        card = decode(self._values[key], WorkerCard)
        return self._plane is not None and await who_is_at(self._plane, card.address) == card.worker_id

    def lapsed(self) -> frozenset[WorkerId]:
        """Return the workers whose leases have ended, and who are asked whether they are still there."""
        return frozenset([WorkerId(key.removeprefix(KEY_PREFIX)) for key in self._lapsed.asked()])

    def _lose(self, key: str, why: str = "its lease has ended, and it does not answer") -> None:
        self.loss = why
        try:
            self._forget(key)
        finally:
            self.loss = ""

    def _forget(self, key: str) -> None:
        self._findings.forget(key)
        self.resting.pop(WorkerId(key.removeprefix(KEY_PREFIX)), None)
        if (value := self._values.pop(key, None)) is not None:
            self._note_address(key, decode(value, WorkerCard), is_there=False)
            self._leave(WorkerId(key.removeprefix(KEY_PREFIX)))

    def _note_address(self, key: str, card: WorkerCard, *, is_there: bool) -> None:
        names = self._at.setdefault(card.address, {})
        if is_there:
            names[key] = card.name
        else:
            names.pop(key, None)
        if self._plane is not None:
            self._plane.expect(card.address, names.values())
        if not names:
            del self._at[card.address]

    async def _leave_if_replaced(self, address: str, plane: PlaneClient) -> None:
        """Forget the workers of an address at which another of its workers answers: they have ended before it began.

        Their cards stand until their leases end, and would get requests that the other worker has to answer.
        """
        found = await who_is_at(plane, address)
        keys = set(self._at.get(address, ()))
        if found is None or KEY_PREFIX + found not in keys:
            return
        for key in keys - {KEY_PREFIX + found}:
            log.info("worker %s has replaced %s at its address", found, key.removeprefix(KEY_PREFIX))
            self._lapsed.discard(key)
            self._lose(key, "another worker answers at its address")

    def _join(self, key: str, value: bytes) -> None:
        try:
            card = decode_card(value, WorkerCard)
        except WireError as error:
            log.warning("ignoring %s: %s", key, error)
            self._findings.ignore(key, str(error) if isinstance(error, VersionError) else UNREADABLE)
            return
        if problem := problem_of(card, key.removeprefix(KEY_PREFIX)):
            log.warning("ignoring %s: %s", key, problem)
            self._findings.ignore(key, problem)
            return
        self._note_card(key, value, card)
        if card.resting:
            self._rest(key, card)
            return
        self.resting.pop(card.worker_id, None)
        self._findings.count(key)
        changes = self._members.join(card)
        if card not in (*changes.joined, *changes.put_aside):
            changes = Changes(changes.joined, [*changes.put_aside, card])
        self._carry_out(changes)

    def _rest(self, key: str, card: WorkerCard) -> None:
        """Take no more account of a worker that takes no requests, until its card says otherwise."""
        self._findings.ignore(key, f"it is {card.resting}; see `kvmesh workers`")
        if card.worker_id not in self.resting:
            self._leave(card.worker_id)
        self.resting[card.worker_id] = card

    def _carry_out(self, changes: Changes) -> None:
        for card in changes.put_aside:
            self._findings.ignore(KEY_PREFIX + card.worker_id, self._members.conflict(card))
            self._tell_left(card.worker_id)
            log.warning(
                "worker %s (%s) waits: its block size %d, its context %d or its tokenizer %s is not that of the other "
                "workers of %s; start all with the same --block-size and model", card.name, card.worker_id,
                card.block_size, card.context_tokens, fingerprint(card.model_files)[:12] or "(not told)", card.model,
            )  # fmt: skip
        for card in changes.joined:
            self._findings.count(KEY_PREFIX + card.worker_id)
            self.tell_joined(card)

    def _note_card(self, key: str, value: bytes, card: WorkerCard) -> None:
        if (before := self._values.get(key)) is not None:
            self._note_address(key, decode(before, WorkerCard), is_there=False)
        self._values[key] = value
        self._note_address(key, card, is_there=True)
        if card.address and len(self._at[card.address]) > 1 and self._plane is not None:
            asking = asyncio.create_task(self._leave_if_replaced(card.address, self._plane), name="ask who is there")
            self._asking.add(asking)
            asking.add_done_callback(self._asking.discard)

    def _leave(self, worker_id: WorkerId) -> None:
        log.info("worker left", extra={"worker": worker_id})
        self._tell_left(worker_id)
        self._carry_out(self._members.leave(worker_id))

    def tell_joined(self, card: WorkerCard) -> None:
        if card.worker_id not in self._told:  # a card that tells new figures is no news
            self._told.add(card.worker_id)
            log.info("worker joined", extra={"worker": card.worker_id, "role": card.role.value, "model": card.model})
            if card.transfer and card.content_fingerprint == UNKNOWN:
                log.warning(
                    "worker %s does not say with which weights its KV is computed, and may exchange it with any worker "
                    "of %s: it is of an older release, or attached; keep the weights of both equal",
                    card.worker_id,
                    card.model,
                )
        for joined in self._joined:
            joined(card)

    def _tell_left(self, worker_id: WorkerId) -> None:
        self._told.discard(worker_id)
        for left in self._left:
            left(worker_id)


async def tell_missing(is_served: Callable[[], bool], report: Callable[[], DiscoveryReport]) -> None:
    """Say in the log, until cancelled, why there is no worker."""
    complaint, loop = Complaint(), asyncio.get_running_loop()
    while True:
        if line := complaint.on_time(loop.time(), is_served(), report):
            log.warning("%s", line)
        await asyncio.sleep(LOOK_S)


async def who_is_at(plane: PlaneClient, address: str) -> WorkerId | None:
    """Return the id of the worker that answers at an address, None if none does."""
    try:
        return (await plane.ask(address, "identify", None, WorkerIdentity, ANSWER_TIMEOUT_S)).worker_id
    except MeshError:
        return None


class LinkWatch:
    """Ends the open calls to a worker whose lease has ended: it may hang, which the keepalive would see much later."""

    def __init__(self, plane: PlaneClient, workers: WorkerFeed) -> None:
        self._plane = plane
        self._addresses: dict[WorkerId, str] = {}
        workers.listen(self._join, self._leave)

    def _join(self, card: WorkerCard) -> None:
        self._addresses[card.worker_id] = card.address

    def _leave(self, worker_id: WorkerId) -> None:
        if (address := self._addresses.pop(worker_id, None)) is not None:
            self._plane.suspect(address, f"worker {worker_id} has left the mesh")


class KvFeed:
    """Follows the KV events of the workers that publish them, and applies them to the fleet."""

    def __init__(
        self,
        fleet: WorkerFleet,
        plane: PlaneClient,
        nats_url: str = "",
        keys: KeyPair | None = None,
    ) -> None:
        """Make a feed; one with `keys` follows closed events alone. Raises ConfigError for a bad `nats_url`."""
        self._plane = plane
        self._admission = None if keys is None else EventAdmission(plane, keys, self._follow, self._refuse)
        self._subscriber = KvEventSubscriber(
            KvSink(fleet), links=Links(nats_url=nats_url, keys=keys), on_rest=EVENT_RESTS.inc
        )
        self._unfollowed: set[WorkerId] = set()

    def follow(self, card: WorkerCard) -> None:
        """Follow a worker's KV events, if it publishes any."""
        if not card.kv_events:
            return
        if self._admission is not None and card.kv_key:
            self._admission.show(card)
        else:
            self._follow(card)

    def _follow(self, card: WorkerCard) -> None:
        endpoints = ((card.kv_events, card.kv_replay), *card.rank_kv_events)[: card.dp_size]
        try:
            for dp_rank, (live, replay) in enumerate(endpoints):
                source = KvSource(
                    worker_id=card.worker_id,
                    endpoint=live,
                    replay_endpoint=replay,
                    dp_rank=dp_rank,
                    key=card.kv_key,
                    snapshot=partial(self._snapshot, card, dp_rank),
                    digest=partial(self._digest, card, dp_rank),
                )
                self._subscriber.add(source)
        except ConfigError as error:  # one bad card must not end the router; it places there by load alone
            self._refuse(card, str(error))

    def _refuse(self, card: WorkerCard, why: str) -> None:
        self._unfollowed.add(card.worker_id)
        log.warning("the KV events of worker %s are not followed: %s", card.worker_id, why)

    def leave(self, worker_id: WorkerId) -> None:
        if self._admission is not None:
            self._admission.let_go(worker_id)
        self._subscriber.remove(worker_id)
        self._unfollowed.discard(worker_id)

    def status_of(self, card: WorkerCard) -> str:
        """Return how a worker's KV events are followed: "none", "broken", "live" or "recovering"."""
        if not card.kv_events:
            return "none"
        if card.worker_id in self._unfollowed:
            return "broken"
        ranks = range(1 + min(len(card.rank_kv_events), card.dp_size - 1))
        return "live" if all(self._subscriber.is_live(card.worker_id, rank) for rank in ranks) else "recovering"

    def facts(self) -> FeedFacts:
        live, recovering = self._subscriber.count_live()
        return FeedFacts(live, recovering, self._subscriber.pending_bytes, self._subscriber.stats)

    async def close(self) -> None:
        if self._admission is not None:
            await self._admission.close()
        await self._subscriber.close()

    async def _snapshot(self, card: WorkerCard, dp_rank: int) -> Snapshot:
        """Ask a worker what its cache holds, because its event ring does not reach back far enough."""
        seq, payloads = -1, list[bytes]()
        room_bytes = most_snapshot_bytes(card)
        rank = KvRank(dp_rank=dp_rank)
        async with self._plane.open(card.address, "kv_snapshot", rank, SNAPSHOT_TIMEOUT_S) as stream:
            async for part in stream.messages(KvSnapshot):
                seq = part.seq
                payloads.append(part.payload)
                room_bytes -= len(part.payload)
                if room_bytes < 0:
                    raise WireError(f"a snapshot of more than the {card.total_blocks} blocks on the worker's card")
        return Snapshot(seq, payloads)

    async def _digest(self, card: WorkerCard, dp_rank: int) -> KvDigest:
        rank = KvRank(dp_rank=dp_rank)
        return await self._plane.ask(card.address, "kv_digest", rank, KvDigest, SNAPSHOT_TIMEOUT_S)


def most_snapshot_bytes(card: WorkerCard) -> int:
    """Return the most bytes that a worker may send for what one of its ranks holds."""
    block_bytes = EVENT_BYTES + TOKEN_BYTES * card.block_size
    return min(MAX_SNAPSHOT_BYTES, most_blocks(card) * block_bytes)


class KvSink:
    """Applies the workers' KV events to the fleet. Implements kvmesh.kvevents.subscriber.Sink."""

    def __init__(self, fleet: WorkerFleet) -> None:
        self._fleet = fleet

    def on_batch(self, worker_id: WorkerId, dp_rank: int, payload: bytes) -> None:
        try:
            EVENTS.inc(self._fleet.on_kv_batch(worker_id, dp_rank, payload))
        except OverfullError:
            OVERFULL.inc()
            raise

    def on_reset(self, worker_id: WorkerId, dp_rank: int, payloads: Sequence[bytes]) -> None:
        self._fleet.forget_kv(worker_id, dp_rank)
        for payload in payloads:
            self.on_batch(worker_id, dp_rank, payload)

    def digest(self, worker_id: WorkerId, dp_rank: int) -> Digest | None:
        return self._fleet.digest(worker_id, dp_rank)
