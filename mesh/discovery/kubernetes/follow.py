"""Follow a collection of Kubernetes over HTTP: carry out what `list_watch` decides."""

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import aclosing
from typing import Generic, Protocol, TypeVar

import msgspec

from kvmesh.mesh.discovery.kubernetes.api import ApiTarget, KubernetesApi, KubernetesError
from kvmesh.mesh.discovery.kubernetes.list_watch import ListPart, ListWatch, WaitFor, WatchFrom
from kvmesh.mesh.discovery.kubernetes.objects import WatchEvent, read_event, read_page, read_revision, read_status
from kvmesh.protocol.errors import ConfigError, MeshError, UnreachableError, WireError

log = logging.getLogger(__name__)

PAGE_OBJECTS = 250
OVERTIME_S = 10.0  # granted to a watch that the server should have ended
START_TIMEOUT_S = 10.0  # for the first list
FINAL = {400, 401, 403, 404, 405, 422}
BELIEVED_S = 2.0  # a server that starts knows no rights for a moment, and refuses everybody
GONE = 410

T = TypeVar("T")
S = TypeVar("S")


class CollectionSink(Protocol[S]):
    """Takes what a collection has. Called in the event loop."""

    def on_list(self, found: list[S]) -> None: ...

    def on_object(self, found: S, is_gone: bool) -> None: ...

    def on_away(self, error: MeshError) -> None:
        """Take that the API server does not answer as it should. The next call of `on_list` ends that."""


class CollectionFollower(Generic[T]):
    """CollectionSink until its task is cancelled. `listed` is done with the first list, or with why there is none."""

    def __init__(
        self,
        api: KubernetesApi,
        path: str,
        resource: str,
        selector: str,
        read: Callable[[msgspec.Raw], T],
        follows: CollectionSink[T],
        listed: asyncio.Future[None] | None = None,
    ) -> None:
        """Follow what `selector` names at `path`. `listed`: of the follower that this one replaces.

        `read` raises WireError for an object that cannot be read.
        """
        self._api = api
        self._path = path
        self._resource = resource
        self._selector = selector
        self._read = read
        self._follows = follows
        self.steps = ListWatch(random.random)
        self._found: list[T] = []  # of the pages so far
        self._unreadable = 0
        self.listed: asyncio.Future[None]
        if listed is not None and not listed.done():
            self.listed = listed
        else:
            self.listed = asyncio.get_running_loop().create_future()
            self.listed.add_done_callback(lambda done: done.cancelled() or done.exception())  # perhaps nobody waits

    async def run(self) -> None:
        clock = asyncio.get_running_loop().time
        started_s = clock()
        while True:
            try:
                match self.steps.next(clock()):
                    case WaitFor(seconds):
                        await asyncio.sleep(seconds)
                    case ListPart(more):
                        await self._list(more)
                    case WatchFrom() as watch:
                        await self._watch(watch)
                        self.steps.on_end(clock())
            except (KubernetesError, WireError) as error:
                status = error.status if isinstance(error, KubernetesError) else 0
                self._found = []
                if status == GONE:
                    self.steps.on_gone(clock())
                    continue
                self.steps.on_failure(clock())
                if not self.listed.done() and is_believed(status, clock() - started_s):
                    self.listed.set_exception(no_start(error, status))
                    return
                self._follows.on_away(error)

    async def _list(self, more: str) -> None:
        params = {"labelSelector": self._selector, "limit": str(PAGE_OBJECTS)}
        if more:
            params["continue"] = more
        page = read_page(await self._api.ask("GET", ApiTarget(self._path, "list", self._resource), params=params))
        for content in page.objects:
            self._take(content)
        if self.steps.on_page(page.revision, page.more):
            found, self._found = self._found, []
            self._follows.on_list(found)
            if not self.listed.done():
                self.listed.set_result(None)

    def _take(self, content: msgspec.Raw) -> None:
        try:
            self._found.append(self._read(content))
        except WireError as error:
            self._complain(error)

    async def _watch(self, watch: WatchFrom) -> None:
        params = {
            "labelSelector": self._selector,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": watch.revision,
            "timeoutSeconds": str(watch.seconds),
        }
        target = ApiTarget(self._path, "watch", self._resource)
        async with aclosing(self._api.watch(target, params, watch.seconds + OVERTIME_S)) as lines:
            async for line in lines:
                self._on_event(read_event(line))

    def _on_event(self, event: WatchEvent) -> None:
        if event.kind == "ERROR":
            status, said = read_status(event.content)
            raise KubernetesError(f"the watch of {self._resource} has ended: {said or 'no reason told'}", status)
        revision = read_revision(event.content)
        if event.kind in ("ADDED", "MODIFIED", "DELETED"):
            try:
                self._follows.on_object(self._read(event.content), is_gone=event.kind == "DELETED")
            except WireError as error:
                self._complain(error)
        self.steps.on_heard(revision)

    def _complain(self, error: WireError) -> None:
        self._unreadable += 1
        if self._unreadable == 1:  # the next ones say nothing new
            log.warning("ignoring an object of %s: %s", self._resource, error)


def is_believed(status: int, tried_s: float) -> bool:
    """Return whether an error at the start is told to the caller, after `tried_s` of trying."""
    return tried_s > (BELIEVED_S if status in (401, 403) else 0.0 if status in FINAL else START_TIMEOUT_S)


def no_start(error: MeshError, status: int) -> MeshError:
    """Return what a caller is told when a place cannot be read or written from the start."""
    if status == 404:
        return ConfigError(
            f"the API server knows no meshcards: {error.message}",
            hint="install deploy/helm/kvmesh/crds (helm does with the chart): kubectl apply -f deploy/helm/kvmesh/crds",
        )
    if status in FINAL:
        return ConfigError(error.message, hint=error.hint)
    return UnreachableError(
        f"no Kubernetes API server answers: {error.message}", hint="see --discovery, and the network policies"
    )
