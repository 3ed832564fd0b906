"""Answer what-if questions: recent requests again, simulated with other workers, caches or policies."""

from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

from kvmesh.frontend.config import FrontendConfig
from kvmesh.frontend.extension import FrontendExtension, FrontendParts, Run
from kvmesh.frontend.service_level import ServiceLevel
from kvmesh.frontend.whatif.endpoint import ENDPOINT
from kvmesh.frontend.whatif.fleet import KnownFleet
from kvmesh.frontend.whatif.recent import RecentRequests
from kvmesh.frontend.whatif.runner import WhatIfRunner


def prepare(config: FrontendConfig) -> Run:
    return answer_questions


@asynccontextmanager
async def answer_questions(parts: FrontendParts) -> AsyncIterator[None]:
    """Answer those who may see all requests. Remember requests while the access log is written."""
    config = parts.config
    if not parts.is_shown:
        yield
        return
    slo = ServiceLevel(config.slo_ttft_s, config.slo_itl_s)
    fleet = KnownFleet(parts.workers, parts.router, slo, has_siblings=bool(config.shares_port_with))
    runner = WhatIfRunner(RecentRequests(parts.timelines), fleet.meshes)
    parts.shared.add(runner)
    with ExitStack() as watching:
        if config.access_log or config.access_log_file:
            watching.callback(runner.recent.watch())
        yield


EXTENSION = FrontendExtension(endpoints=(ENDPOINT,), prepare=prepare)
