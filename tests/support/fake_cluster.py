"""The part of a Kubernetes API server that discovery calls: cards and pods, with lists in pages and watches."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.support.fake_kubernetes import status

POD_FOLDER, CARD_FOLDER = "/api/v1/namespaces/{namespace}/pods", "/apis/kvmesh.dev/v1/namespaces/{namespace}/meshcards"
Key = tuple[str, str, str]  # plural, namespace, name


@dataclass
class FakeCluster:
    """`refuse`: (verb, plural) -> status of the answer. `calls`: (verb, plural) of every request, in order."""

    token: str = "secret-token"
    page_objects: int = 10_000  # at most in one page, whatever the client asks for
    is_installed: bool = True  # the custom resource is known
    refuse: dict[tuple[str, str], int] = field(default_factory=dict)
    calls: list[tuple[str, str]] = field(default_factory=list)
    url: str = ""
    port: int = 0

    def __post_init__(self) -> None:
        self.objects: dict[Key, dict[str, Any]] = {}
        # revision, kind, key, object, the object before
        self.history: list[tuple[int, str, Key, dict[str, Any], dict[str, Any] | None]] = []
        self.oldest = 0  # revisions before this one are forgotten
        self._revision = 100
        self._uids = itertools.count(1)
        self._changed = asyncio.Event()
        self._watches: set[asyncio.Task[Any]] = set()
        self._runner: web.AppRunner | None = None

    # --- running --------------------------------------------------------------------------------------

    @asynccontextmanager
    async def running(self) -> AsyncIterator["FakeCluster"]:
        await self.start()
        try:
            yield self
        finally:
            await self.stop()

    async def start(self) -> None:
        """Answer, on the same port as before."""
        app = web.Application()
        for folder, plural in ((POD_FOLDER, "pods"), (CARD_FOLDER, "meshcards")):
            app.router.add_get(folder, self._collection(plural))
            app.router.add_get(folder + "/{name}", self._handler("get", plural, self._get))
            app.router.add_patch(folder + "/{name}", self._handler("patch", plural, self._apply))
            app.router.add_delete(folder + "/{name}", self._handler("delete", plural, self._delete))
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def stop(self) -> None:
        """Be away: connections are refused, watches break."""
        self.cut()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def cut(self) -> None:
        """Break all watches in the middle."""
        for watch in list(self._watches):
            watch.cancel()

    # --- what a cluster does --------------------------------------------------------------------------

    def put(self, plural: str, namespace: str, content: dict[str, Any]) -> dict[str, Any]:
        """Make an object, or replace it."""
        key = (plural, namespace, content["metadata"]["name"])
        before = self.objects.get(key)
        content = deepcopy(content)
        uid = before["metadata"]["uid"] if before else f"uid-{next(self._uids)}"
        content["metadata"] = {"namespace": namespace, "uid": uid, **content["metadata"]}
        self._record("MODIFIED" if before else "ADDED", key, content)
        self.objects[key] = content
        return content

    def put_pod(self, namespace: str, name: str, mesh: str = "", *, is_ready: bool = True) -> str:
        """Make a pod, or change it, and return its uid."""
        ready = {"type": "Ready", "status": "True" if is_ready else "False"}
        meta = {"name": name, "labels": {"kvmesh.dev/mesh": mesh} if mesh else {}}
        spec = {"containers": [{"name": "kvmesh"}]}
        pod = {"kind": "Pod", "metadata": meta, "spec": spec, "status": {"conditions": [ready]}}
        return str(self.put("pods", namespace, pod)["metadata"]["uid"])

    def begin_to_delete(self, namespace: str, name: str) -> None:
        pod = deepcopy(self.objects["pods", namespace, name])
        pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        self.put("pods", namespace, pod)

    def remove(self, plural: str, namespace: str, name: str) -> None:
        key = (plural, namespace, name)
        content = deepcopy(self.objects.pop(key))
        self._record("DELETED", key, content)

    def cards(self) -> list[dict[str, Any]]:
        return [content for (plural, _, _), content in self.objects.items() if plural == "meshcards"]

    def compact(self) -> None:
        """Forget all revisions: who watches from one of them gets 410."""
        self.oldest = self._revision + 1
        self._revision += 5

    def forget(self) -> None:
        """Lose all data. To be called while nobody is answered."""
        self.objects, self.history, self._revision, self.oldest = {}, [], 1, 0

    def writes(self) -> int:
        return sum(verb in ("patch", "delete") for verb, _ in self.calls)

    def _record(self, kind: str, key: Key, content: dict[str, Any]) -> None:
        self._revision += 1
        content["metadata"]["resourceVersion"] = str(self._revision)
        self.history.append((self._revision, kind, key, content, self.objects.get(key)))
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # --- what it answers ------------------------------------------------------------------------------

    def _handler(self, verb: str, plural: str, answer: Any) -> Any:
        async def handle(request: web.Request) -> web.StreamResponse:
            self.calls.append((verb, plural))
            if request.headers.get("authorization") != f"Bearer {self.token}":
                return status(401, "Unauthorized")
            if (code := self.refuse.get((verb, plural))) is not None:
                return status(code, f"the server refuses to {verb} {plural}, as a test tells it to")
            if plural == "meshcards" and not self.is_installed:
                return status(404, "the server could not find the requested resource")
            namespace = request.match_info["namespace"]
            return await answer(request, (plural, namespace, request.match_info.get("name", "")))  # type: ignore[no-any-return]

        return handle

    def _collection(self, plural: str) -> Any:
        listing, watching = self._handler("list", plural, self._list), self._handler("watch", plural, self._watch)

        async def handle(request: web.Request) -> web.StreamResponse:
            return await (watching if "watch" in request.query else listing)(request)  # type: ignore[no-any-return]

        return handle

    async def _get(self, request: web.Request, key: Key) -> web.Response:
        if key not in self.objects:
            return status(404, f'{key[0]} "{key[2]}" not found')
        return web.json_response(self.objects[key])

    async def _apply(self, request: web.Request, key: Key) -> web.Response:
        if request.content_type != "application/apply-patch+yaml" or not request.query.get("fieldManager"):
            return status(415, "only server-side apply is known here")
        return web.json_response(self.put(key[0], key[1], json.loads(await request.text())))

    async def _delete(self, request: web.Request, key: Key) -> web.Response:
        if key not in self.objects:
            return status(404, f'{key[0]} "{key[2]}" not found')
        wanted = (await request.json()).get("preconditions", {}).get("resourceVersion")
        if wanted not in (None, self.objects[key]["metadata"]["resourceVersion"]):
            return status(409, "the object has been modified")
        self.remove(*key)
        return web.json_response({"kind": "Status", "status": "Success"})

    async def _list(self, request: web.Request, key: Key) -> web.Response:
        found = [content for name, content in sorted(self.objects.items()) if selects(request, key, name, content)]
        begin, revision = 0, self._revision
        if more := request.query.get("continue"):
            begin, revision = (int(part) for part in more.split("-"))
            if revision < self.oldest:
                return status(410, "the provided continue parameter is too old")
        end = begin + min(int(request.query.get("limit", "500")), self.page_objects)
        meta = {"resourceVersion": str(revision), "continue": f"{end}-{revision}" if end < len(found) else ""}
        return web.json_response({"kind": "List", "metadata": meta, "items": found[begin:end]})

    async def _watch(self, request: web.Request, key: Key) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        task = asyncio.ensure_future(self._send_events(request, key, response))
        self._watches.add(task)
        try:
            await asyncio.wait_for(asyncio.shield(task), int(request.query["timeoutSeconds"]))
        except (TimeoutError, asyncio.CancelledError):
            if task.cancelled() and request.transport is not None:
                request.transport.abort()
        finally:
            task.cancel()
            self._watches.discard(task)
        return response

    async def _send_events(self, request: web.Request, key: Key, response: web.StreamResponse) -> None:
        seen = int(request.query["resourceVersion"])
        if seen < self.oldest:
            gone = {"kind": "Status", "code": 410, "message": f"too old resource version: {seen}"}
            await response.write(line("ERROR", gone))
            return
        while True:
            changed = self._changed
            for revision, kind, name, content, before in list(self.history):
                if revision > seen and selects(request, key, name, content):
                    await response.write(line(kind, content))
                elif revision > seen and before is not None and selects(request, key, name, before):
                    await response.write(line("DELETED", before))  # it has lost the labels that were asked for
            seen = self._revision
            if request.query.get("allowWatchBookmarks") == "true":
                await response.write(line("BOOKMARK", {"metadata": {"resourceVersion": str(seen)}}))
            await changed.wait()


def selects(request: web.Request, key: Key, name: Key, content: dict[str, Any]) -> bool:
    if key[:2] != name[:2]:
        return False
    labels = content["metadata"].get("labels", {})
    wanted = [part.split("=") for part in request.query.get("labelSelector", "").split(",") if part]
    return all(labels.get(label) == value for label, value in wanted)


def line(kind: str, content: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": content}).encode() + b"\n"
