"""The part of a Kubernetes API server that the planner calls: workloads and their scale subresource."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class Workload:
    replicas: int
    ready: int
    going: int = 0

    def shown(self) -> dict[str, Any]:
        status: dict[str, Any] = {"replicas": self.replicas + self.going}
        if self.ready:  # the real one leaves zeros out
            status["readyReplicas"] = self.ready
        return {"spec": {"replicas": self.replicas}, "status": status}


@dataclass
class FakeKubernetes:
    """`workloads`: by path under the server. `refuse_with`: status of every answer, None for none."""

    token: str = "secret-token"
    workloads: dict[str, Workload] = field(default_factory=dict)
    refuse_with: int | None = None
    conflicts: int = 0  # patches that meet another's change before one goes through
    patches: list[tuple[str, int]] = field(default_factory=list)
    url: str = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        app = web.Application()
        app.add_routes([web.get("/{path:.+}", self.get), web.patch("/{path:.+}", self.patch)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield
        finally:
            await runner.cleanup()

    def refusal(self, request: web.Request, path: str) -> web.Response | None:
        if self.refuse_with is not None:
            return status(self.refuse_with, "the server does as it is told by a test")
        if request.headers.get("authorization") != f"Bearer {self.token}":
            return status(401, "Unauthorized")
        if path not in self.workloads:
            return status(404, f"{path} not found")
        return None

    async def get(self, request: web.Request) -> web.Response:
        path = request.match_info["path"]
        return self.refusal(request, path) or web.json_response(self.workloads[path].shown())

    async def patch(self, request: web.Request) -> web.Response:
        path, _, sub = request.match_info["path"].rpartition("/")
        if (refusal := self.refusal(request, path)) is not None:
            return refusal
        if sub != "scale" or request.content_type != "application/merge-patch+json":
            return status(415, "only the scale is patched here, by a merge patch")
        if self.conflicts:
            self.conflicts -= 1
            return status(409, "the object has been modified")
        count = (await request.json())["spec"]["replicas"]
        self.patches.append((path, count))
        workload = self.workloads[path]
        fewer = max(0, workload.replicas - count)
        kept_ready = max(0, workload.ready - max(0, fewer - (workload.replicas - workload.ready)))  # others go first
        workload.going += workload.ready - kept_ready
        workload.replicas, workload.ready = count, kept_ready
        return web.json_response({"kind": "Scale", "spec": {"replicas": count}, "status": {"replicas": count}})


def status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "code": code, "message": message}, status=code)
