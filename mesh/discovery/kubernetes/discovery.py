"""Discovery through the API server of Kubernetes: a card is a small object that a pod owns.

A card counts while its pod is ready, so nobody renews anything. Services that watch follow the cards and the pods of
their mesh; services that only register follow their own cards, to put them again if somebody takes them away. While
the API server is away everybody keeps the last view.
"""

import asyncio
import contextlib
import hashlib
import logging
import math
import os
import random
import re
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from kvmesh.mesh.discovery.board import Board, Change
from kvmesh.mesh.discovery.kubernetes.api import (
    ACCOUNT_FOLDER,
    Account,
    ApiTarget,
    KubernetesApi,
    KubernetesError,
    account_of,
)
from kvmesh.mesh.discovery.kubernetes.follow import FINAL, CollectionFollower, is_believed, no_start
from kvmesh.mesh.discovery.kubernetes.objects import (
    API_VERSION,
    MAX_KEY_CHARS,
    MAX_VALUE_BYTES,
    MESH_LABEL,
    POD_LABEL,
    CardOwner,
    MeshCard,
    MeshPod,
    UnreadableCard,
    card_object,
    name_of,
    read_card,
    read_pod,
    read_revision,
)
from kvmesh.mesh.discovery.kubernetes.own_cards import FIRST_WAIT_S, DeleteCard, OwnCards, WriteCard
from kvmesh.mesh.discovery.kubernetes.view import RETURN_S, PodView
from kvmesh.mesh.discovery.place import Contact, SearchPlace
from kvmesh.mesh.discovery.store import Registration
from kvmesh.protocol.errors import ConfigError, FeedLostError, MeshError, WireError

log = logging.getLogger(__name__)

USAGE = "kubernetes:<namespace>/<mesh>?api=https://HOST:PORT&token-file=FILE&ca=FILE"
DEFAULT_MESH = "kvmesh"
POD_NAME, POD_UID, CONTAINER = "KVMESH_POD_NAME", "KVMESH_POD_UID", "KVMESH_CONTAINER"
FIELD_MANAGER = "kvmesh"
CLOSE_S = 5.0  # for the withdrawal of all cards at the end
CONFLICT = 409
CARDS = "meshcards.kvmesh.dev"
_LABEL = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class KubernetesSettings:
    account: Account
    mesh: str
    pod_name: str = ""  # of our own pod, "" outside of one
    pod_uid: str = ""
    container: str = ""

    @property
    def label(self) -> str:
        """Return the label of the mesh's pods and cards, with its value."""
        return f"{MESH_LABEL}={self.mesh}"

    @property
    def cards(self) -> str:
        return f"apis/{API_VERSION}/namespaces/{self.account.namespace}/meshcards"

    @property
    def pods(self) -> str:
        return f"api/v1/namespaces/{self.account.namespace}/pods"

    def shown(self) -> str:
        return f"kubernetes:{self.account.namespace}/{self.mesh} at {self.account.url.rpartition('@')[2]}"


def read_settings(rest: str) -> KubernetesSettings:
    """Read what follows `kubernetes:`. Raises ConfigError, also outside of a pod if the URL does not say all."""
    place, _, query = rest.partition("?")
    namespace, _, mesh = place.strip("/").partition("/") if not place.startswith("/") else ("", "", place.strip("/"))
    mesh = mesh or DEFAULT_MESH
    options = dict(parse_qsl(query, keep_blank_values=True))
    if unknown := sorted(options.keys() - {"api", "token-file", "ca"}):
        raise ConfigError(f"unknown option of kubernetes: {', '.join(unknown)}", hint=USAGE)
    if not _LABEL.fullmatch(mesh):
        hint = "its name is the value of a label: letters, digits, - _ and ., at most 63"
        raise ConfigError(f"no mesh {mesh!r} in Kubernetes", hint=hint)
    account = account_of(
        ACCOUNT_FOLDER, options.get("api", ""), namespace, token_file=options.get("token-file", ""),
        ca_file=options.get("ca", ""), setting=f"--discovery {USAGE}",
    )  # fmt: skip
    pod = (os.environ.get(name, "") for name in (POD_NAME, POD_UID, CONTAINER))
    return KubernetesSettings(account, mesh, *pod)


class KubernetesDiscovery:
    def __init__(self, rest: str) -> None:
        """Raises ConfigError for settings that cannot be used. Nothing is connected yet."""
        self._settings = read_settings(rest)
        self._api = KubernetesApi(self._settings.account)
        self._board = Board()
        self._seen = _Seen(self._settings, self._board)
        self._writer: _Writer | None = None
        self._starting = asyncio.Lock()
        self._cards: CollectionFollower[MeshCard | UnreadableCard] | None = None
        self._pods: CollectionFollower[MeshPod] | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def put(self, key: str, value: bytes) -> Registration:
        if len(value) > MAX_VALUE_BYTES or len(key) > MAX_KEY_CHARS:
            raise ConfigError(
                f"the card {key[:100]} has {len(value)} bytes: discovery by Kubernetes takes at most {MAX_VALUE_BYTES}",
                hint="use --discovery etcd:, or a model folder with fewer files",
            )
        writer = await self._started_writer()
        await writer.write(key, value)
        return Registration(key, self._withdraw)

    async def watch(self, prefix: str) -> AsyncIterator[Change]:
        await self._follow_all()
        async for change in self._board.watch(prefix):
            yield change

    def where(self) -> SearchPlace:
        return self._seen.place(has_pods=self._pods is not None)

    async def close(self) -> None:
        if self._writer is not None:
            await self._writer.withdraw_all()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._api.close()
        self._board.close()

    async def _withdraw(self, key: str) -> None:
        if self._writer is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._writer.write(key, b""), CLOSE_S)

    async def _started_writer(self) -> "_Writer":
        """Return the writer of our cards, when our pod is known to be one that counts. Raises MeshError."""
        async with self._starting:
            if self._writer is None:
                owner, cleans_up = await find_owner(self._api, self._settings)
                self._writer = _Writer(self._api, self._settings, owner, cleans_up)
                self._seen.own = self._writer
                self._run("write", self._writer.run())
                all_cards = self._settings.label
                self._follow_cards(all_cards if self._pods is not None else f"{all_cards},{POD_LABEL}={owner.uid}")
        await self._listed()
        return self._writer

    async def _follow_all(self) -> None:
        """Return when all cards and pods were listed once. Raises MeshError if they cannot be."""
        async with self._starting:
            if self._pods is None:
                sink, settings = _PodSink(self._seen), self._settings
                self._pods = CollectionFollower(self._api, settings.pods, "pods", settings.label, read_pod, sink)
                self._run("pods", self._pods.run())
                self._follow_cards(settings.label)
        await self._listed()

    async def _listed(self) -> None:
        for follower in (self._pods, self._cards):
            if follower is not None:
                await asyncio.shield(follower.listed)

    def _follow_cards(self, selector: str) -> None:
        """Follow the cards that a selector names, instead of those before."""
        before, listed = self._tasks.pop("cards", None), None if self._cards is None else self._cards.listed
        mesh = self._settings.mesh
        self._cards = CollectionFollower(
            self._api, self._settings.cards, CARDS, selector, lambda content: read_card(content, mesh),
            _CardSink(self._seen), listed,
        )  # fmt: skip
        if before is not None:
            before.cancel()
        self._run("cards", self._cards.run())

    def _run(self, what: str, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=f"discovery: {what}")
        task.add_done_callback(self._on_end)
        self._tasks[what] = task

    def _on_end(self, task: asyncio.Task[None]) -> None:
        """Let nobody wait for a task that has crashed: who watches learns that the watch has ended."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.critical("%s has crashed: %r", task.get_name(), error, exc_info=error)
        for follower in (self._pods, self._cards):
            if follower is not None and not follower.listed.done():
                follower.listed.set_exception(FeedLostError(f"{task.get_name()} has crashed: {error!r}"))
        self._board.close()


class _Seen:
    """Keeps what was heard from the API server, and tells those who must know."""

    def __init__(self, settings: KubernetesSettings, board: Board) -> None:
        self.view = PodView(settings.label)
        self.own: _Writer | None = None
        self._contact = Contact(settings.shown())
        self._board = board
        self._away: dict[str, str] = {}  # collection -> why it is not followed now

    def place(self, has_pods: bool) -> SearchPlace:
        return replace(self._contact.place, ignored=self.view.ignored()) if has_pods else self._contact.place

    def show(self) -> None:
        self._board.show(self.view.present(), self.view.lapsed())

    def show_at(self, seconds: float) -> None:
        """Let cards lapse that are still missing then."""
        loop = asyncio.get_running_loop()

        def lapse() -> None:
            self.view.on_time(loop.time())
            self.show()

        loop.call_later(seconds, lapse)

    def on_read(self, collection: str) -> None:
        if self._away.pop(collection, "") and not self._away:
            log.info("the API server of Kubernetes answers again")
        if not self._away:
            self._contact.on_read()

    def on_away(self, collection: str, error: MeshError) -> None:
        self._contact.on_failure(time.time())
        if not self._away:
            log.warning("Kubernetes cannot be watched, the last known services stay: %s", error)
        self._away[collection] = error.message
        if collection == CARDS:
            self.view.on_away()


class _CardSink:
    def __init__(self, seen: _Seen) -> None:
        self._seen = seen

    def on_list(self, found: list[MeshCard | UnreadableCard]) -> None:
        now_s = asyncio.get_running_loop().time()
        self._seen.view.on_cards(found, now_s)
        self._seen.on_read(CARDS)
        self._seen.show()
        self._seen.show_at(RETURN_S + 0.1)
        if self._seen.own is not None:
            self._seen.own.on_cards([card for card in found if isinstance(card, MeshCard)])

    def on_object(self, found: MeshCard | UnreadableCard, is_gone: bool) -> None:
        if is_gone:
            self._seen.view.on_card_gone(found.name)
        else:
            self._seen.view.on_card(found)
        self._seen.show()
        if self._seen.own is not None and isinstance(found, MeshCard):
            self._seen.own.on_card(found, is_gone)

    def on_away(self, error: MeshError) -> None:
        self._seen.on_away(CARDS, error)


class _PodSink:
    def __init__(self, seen: _Seen) -> None:
        self._seen = seen

    def on_list(self, found: list[MeshPod]) -> None:
        self._seen.view.on_pods(found)
        self._seen.on_read("pods")
        self._seen.show()

    def on_object(self, found: MeshPod, is_gone: bool) -> None:
        if is_gone:
            self._seen.view.on_pod_gone(found.uid)
        else:
            self._seen.view.on_pod(found)
        self._seen.show()

    def on_away(self, error: MeshError) -> None:
        self._seen.on_away("pods", error)


class _Writer:
    """Writes our cards, in one task."""

    def __init__(self, api: KubernetesApi, settings: KubernetesSettings, owner: CardOwner, cleans_up: bool) -> None:
        self._api = api
        self._settings = settings
        self._owner = owner
        self._own = OwnCards(settings.mesh, owner, random.random, cleans_up)
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self._changed = asyncio.Event()
        self._failure = ""  # of the latest write
        self._started_s = asyncio.get_running_loop().time()
        self._has_written = False

    async def write(self, key: str, value: bytes) -> None:
        """Return when a card is written, or withdrawn if `value` is empty; at once while the API server is away.

        Raises MeshError if it is refused, or if nothing was ever written.
        """
        loop = asyncio.get_running_loop()
        self._own.put(key, value, loop.time())
        if self._own.is_settled(key):
            return
        done: asyncio.Future[None] = loop.create_future()
        self._waiting.setdefault(key, []).append(done)
        self._changed.set()
        await done

    async def withdraw_all(self) -> None:
        keys = self._own.keys()
        with contextlib.suppress(TimeoutError):
            withdrawn = asyncio.gather(*(self.write(key, b"") for key in keys), return_exceptions=True)
            await asyncio.wait_for(withdrawn, CLOSE_S)

    def on_cards(self, found: list[MeshCard]) -> None:
        now_s = asyncio.get_running_loop().time()
        for card in found:
            self.on_card(card, is_gone=False)
        if self._own.on_cards(found, now_s):
            log.warning("Kubernetes has lost cards of this process: they are written again")
        self._changed.set()

    def on_card(self, card: MeshCard, is_gone: bool) -> None:
        now_s = asyncio.get_running_loop().time()
        if is_gone:
            if self._own.on_gone(card.name, now_s):
                log.warning("somebody has taken the card %s away: it is written again", card.key)
        elif other := self._own.on_card(card, now_s):
            log.warning("pod %s has written the card %s too: give services names of their own", other, card.key)
        self._changed.set()

    async def run(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            self._changed.clear()
            if (order := self._own.due(clock())) is not None:
                await self._carry_out(order)
                continue
            wait_s = self._own.due_s() - clock()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), None if wait_s == math.inf else max(0.01, wait_s))

    async def _carry_out(self, order: WriteCard | DeleteCard) -> None:
        try:
            revision = await self._send(order)
        except (KubernetesError, WireError) as error:
            self._on_failure(order, error)
            return
        if self._failure:
            self._failure = ""
            log.info("the card %s is written", order.key)
        self._has_written = True
        self._own.on_done(order, revision)
        if self._own.is_settled(order.key):
            self._release(order.key)

    async def _send(self, order: WriteCard | DeleteCard) -> str:
        name = name_of(self._settings.mesh, order.key)
        path = f"{self._settings.cards}/{name}"
        if isinstance(order, WriteCard):
            content = await self._api.ask(
                "PATCH", ApiTarget(path, "patch", CARDS), params={"fieldManager": FIELD_MANAGER, "force": "true"},
                body=card_object(self._settings.mesh, order.key, order.value, self._owner),
                body_type="application/apply-patch+yaml",
            )  # fmt: skip
            return read_revision(content)
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"resourceVersion": order.revision}}
        try:
            await self._api.ask("DELETE", ApiTarget(path, "delete", CARDS), body=body)
        except KubernetesError as error:
            if error.status not in (404, CONFLICT):  # it is gone already, or another's by now
                raise
        return ""

    def _on_failure(self, order: WriteCard | DeleteCard, error: MeshError) -> None:
        loop = asyncio.get_running_loop()
        status = error.status if isinstance(error, KubernetesError) else 0
        tried_s = loop.time() - self._started_s
        if status in FINAL and not (self._has_written and status in (401, 403)) and is_believed(status, tried_s):
            is_put = isinstance(order, WriteCard) and bool(order.value)
            if not is_put:
                log.warning("the card %s cannot be withdrawn, it goes with its pod: %s", order.key, error)
            self._own.on_refused(order)
            self._release(order.key, no_start(error, status) if is_put else None)
            return
        if error.message != self._failure:
            log.warning("the card %s is not written, tried again: %s", order.key, error)
        self._failure = error.message
        self._own.on_failure(order, loop.time())
        if self._has_written:
            for key in list(self._waiting):
                self._release(key)
        elif is_believed(status, tried_s):
            self._release(order.key, no_start(error, status))

    def _release(self, key: str, error: MeshError | None = None) -> None:
        for future in self._waiting.pop(key, ()):
            if not future.done():
                future.set_result(None) if error is None else future.set_exception(error)


async def find_owner(api: KubernetesApi, settings: KubernetesSettings) -> tuple[CardOwner, bool]:
    """Return our pod as the owner of cards, and whether what an earlier run of our container left is ours to remove.

    Raises ConfigError outside of a pod, and for a pod whose cards would not count.
    """
    name, uid = settings.pod_name, settings.pod_uid
    if not name or not uid:
        raise ConfigError(
            f"this process is in no pod that it knows: {POD_NAME} and {POD_UID} are not set",
            hint="set them from metadata.name and metadata.uid (downward API), as the Helm chart does",
        )
    pod = await own_pod(api, settings, name)
    if pod.uid != uid:
        raise ConfigError(f"the pod {name} has the uid {pod.uid}, not {uid}", hint=f"see {POD_NAME} and {POD_UID}")
    if pod.mesh != settings.mesh:
        raise ConfigError(
            f"the pod {name} has {f'the label {MESH_LABEL}={pod.mesh}' if pod.mesh else f'no label {MESH_LABEL}'}, "
            f"so that nobody in the mesh {settings.mesh} would see it",
            hint=f"give the pod the label {settings.label}, or set --discovery kubernetes:<namespace>/<its mesh>",
        )
    cleans_up = bool(settings.container) or pod.containers == 1
    return CardOwner(name, uid, settings.container, run_id()), cleans_up


async def own_pod(api: KubernetesApi, settings: KubernetesSettings, name: str) -> MeshPod:
    """Raises ConfigError if there is no such pod or it may not be read, UnreachableError if nobody answers."""
    clock = asyncio.get_running_loop().time
    started_s, wait_s = clock(), FIRST_WAIT_S
    while True:
        try:
            return read_pod(await api.ask("GET", ApiTarget(f"{settings.pods}/{name}", "get", "pods")))
        except (KubernetesError, WireError) as error:
            status = error.status if isinstance(error, KubernetesError) else 0
            if status == 404:
                place = f"the namespace {settings.account.namespace}"
                hint = f"see {POD_NAME}, and the namespace in --discovery"
                raise ConfigError(f"there is no pod {name} in {place}: {error.message}", hint=hint) from error
            if is_believed(status, clock() - started_s):
                raise no_start(error, status) from error
        await asyncio.sleep(wait_s * (0.5 + random.random()))
        wait_s = min(2 * wait_s, 4.0)


def run_id() -> str:
    """Return a name for this start of our container: that of its first process, "" where this is not told."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        started = Path("/proc/1/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
    return hashlib.sha256(f"{boot} {started}".encode()).hexdigest()[:16]
