"""GET /kvmesh/whatif: recent requests again, simulated with other workers, caches or routing policies."""

from typing import Any

from kvmesh.frontend.endpoint import Endpoint, Services, identified
from kvmesh.frontend.operation import ASKED_FAILURES, Operation
from kvmesh.frontend.whatif.runner import WhatIfRunner
from kvmesh.mesh.http.errors import ForbiddenError
from kvmesh.mesh.http.request import JSON, Reply, Request

COUNT: dict[str, Any] = {"type": "string", "maxLength": 400}


async def what_if(services: Services, request: Request) -> Reply:
    """Answer a question about the recent requests of this frontend. Raise MeshError."""
    runner = services.parts.find(WhatIfRunner)
    if runner is None:
        raise ForbiddenError(
            "this port is open to strangers, and the answer tells of everybody's requests",
            hint="start the frontend with --api-keys-file, or ask `kvmesh whatif --access-log`",
        )
    return await runner.handle(request)


ENDPOINT = Endpoint(
    method="GET",
    path="/kvmesh/whatif",
    handler=identified(what_if, "whatif"),
    operation=Operation(
        summary="What recent requests would have seen from other workers, caches or policies, by simulation",
        reply_type=JSON,
        query={
            "last_s": ("Requests of so many seconds before the latest", {"type": "number", "default": 600}),
            "limit": ("Requests at most; the latest count", {"type": "integer", "minimum": 40, "default": 1000}),
            "model": ("Of several models, the one to simulate", {"type": "string"}),
            "prefill": ("Prefill workers: +1, -1 or a count; a list with commas makes several cases", COUNT),
            "decode": ("Decode workers, likewise", COUNT),
            "aggregated": ("Aggregated workers, likewise", COUNT),
            "blocks": ("KV blocks of each worker: a count, or x2; a list", COUNT),
            "policy": ("Routing policies, a list", COUNT),
            "step_tokens": ("Prompt tokens of one step of the workers", {"type": "integer", "default": 512}),
        },
        failures=ASKED_FAILURES,
    ),
)
