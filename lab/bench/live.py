"""Run `kvmesh lab bench live`: measure what one viewer of the live page costs the frontend, and what nobody costs.

A router with many workers runs in this process. All of their loads change all the time, and requests are in flight.
The CPU time of the event loop's thread is compared in pairs: without a viewer, and with one that reads the feed.
"""

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Annotated

import msgspec
from msgspec import Meta

from kvmesh.frontend.live.hub import LiveHub
from kvmesh.frontend.live.looking import local_look
from kvmesh.frontend.live.pages import EVENTS, routes
from kvmesh.frontend.live.picture import Picture
from kvmesh.frontend.timeline import Timelines
from kvmesh.lab.settings import LabConfig
from kvmesh.mesh.config import load as load_config
from kvmesh.mesh.http.server import App, listening
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.messages import Role, RouteRequest, WorkerCard
from kvmesh.router.config import RouterConfig
from kvmesh.router.feeds import WorkerFeed
from kvmesh.router.local import LocalRouter

SETTLE_S = 1.0
CHURN_S = 0.125
PROMPT_BLOCKS = 20
BLOCK_SIZE = 16
VIEWER = "import sys, urllib.request as u\nr = u.urlopen(sys.argv[1])\nwhile r.read1(65536): pass"


class LiveConfig(LabConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_BENCH_LIVE_<NAME>`, that over the default."""

    workers: Annotated[int, Meta(ge=1, le=5000, description="workers of the mesh")] = 1000
    requests: Annotated[int, Meta(ge=1, le=10_000, description="requests in flight, in records of their stages")] = 256
    pairs: Annotated[int, Meta(ge=1, le=100, description="pairs of measurements")] = 5
    seconds: Annotated[float, Meta(gt=0, le=600, description="length of one measurement")] = 6.0


class IdleDispatcher:
    """A dispatcher whose requests are placed by the benchmark."""

    wants_reasons: Callable[[], bool] | None = None


class LiveBench:
    """A router with workers and requests, and the live page in front of it."""

    def __init__(self, config: LiveConfig) -> None:
        self.config = config
        self.stop = asyncio.Event()
        self.timelines = Timelines()
        feed = WorkerFeed()
        self.router = LocalRouter(RouterConfig(), PlaneClient(None), feed)
        self.hub = LiveHub(Picture({}), feed, IdleDispatcher(), self.timelines, lambda: config.requests, self.stop)
        self.hub.look = local_look(self.router)
        for number in range(config.workers):
            feed.tell_joined(card_of(number))
        random = Random(1)
        for number in range(3 * config.workers):
            self.router.state.place(request_of(number, random), time.monotonic())

    async def churn(self) -> None:
        """Change the load of every worker between two messages, and let the requests grow."""
        count, turn = self.config.workers, 0
        while True:
            now, part = time.monotonic(), max(1, count // 4)
            for number in range(part):
                name = RequestId(f"r{(turn * part + number) % (3 * count)}")
                self.router.state.progress(name, BLOCK_SIZE * (turn % 60), now)
            for timeline in self.timelines.running.values():
                for answer in timeline.answers:
                    answer.osl_tokens += 1
            turn += 1
            await asyncio.sleep(CHURN_S)

    def begin_requests(self) -> None:
        """Begin the requests that a viewer sees: there are records while somebody looks."""
        placed = self.router.state.preview(request_of(0, Random(2)), time.monotonic())
        for number in range(self.config.requests):
            timeline = self.timelines.begin(RequestId(f"q{number}"), "chat")
            if timeline is not None:
                answer = timeline.answer(0, 100)
                attempt = answer.begin(PROMPT_BLOCKS * BLOCK_SIZE, BLOCK_SIZE, b"")
                attempt.placed, attempt.placed_at = msgspec.structs.replace(placed, explanation=None), time.monotonic()
                attempt.begin_leg(placed.decode, answer, is_prefill=False).first = time.monotonic()
                timeline.answers = [answer]

    async def pair(self, url: str) -> tuple[float, float]:
        """Return the share of a core without a viewer, and with one."""
        alone = await self.share()
        viewer = await asyncio.create_subprocess_exec(sys.executable, "-P", "-c", VIEWER, url + EVENTS)
        try:
            while not self.hub.num_viewers:  # noqa: ASYNC110 - once in a pair
                await asyncio.sleep(0.05)
            self.begin_requests()
            await asyncio.sleep(SETTLE_S)
            watched = await self.share()
        finally:
            viewer.kill()
            await viewer.wait()
        while not self.hub.is_at_rest:  # noqa: ASYNC110 - once in a pair
            await asyncio.sleep(0.05)
        self.timelines.running.clear()
        return alone, watched

    async def share(self) -> float:
        cpu, began = time.thread_time(), time.monotonic()
        await asyncio.sleep(self.config.seconds)
        return (time.thread_time() - cpu) / (time.monotonic() - began)


def card_of(number: int) -> WorkerCard:
    return WorkerCard(
        worker_id=WorkerId(f"w{number}"),
        name=f"decode-{number}",
        role=Role.DECODE,
        model="tiny",
        model_path="/",
        address=f"127.0.0.1:{number % 60_000 + 1}",
        block_size=BLOCK_SIZE,
        total_blocks=2048,
        context_tokens=4096,
    )


def request_of(number: int, random: Random) -> RouteRequest:
    return RouteRequest(
        request_id=RequestId(f"r{number}"),
        model="tiny",
        isl_tokens=PROMPT_BLOCKS * BLOCK_SIZE,
        sequence_hashes=random.randbytes(8 * PROMPT_BLOCKS),
    )


async def measure(config: LiveConfig) -> dict[str, float]:
    bench = LiveBench(config)
    churn = asyncio.create_task(bench.churn(), name="bench: change loads")
    try:
        async with listening(App(routes(bench.hub)), "127.0.0.1", 0) as url:
            await asyncio.sleep(SETTLE_S)
            pairs = [await bench.pair(url) for _ in range(config.pairs)]
            bench.stop.set()
    finally:
        churn.cancel()
        with suppress(asyncio.CancelledError):
            await churn
        await bench.router.close()
    return {
        "workers": config.workers,
        "requests": config.requests,
        "core_share_nobody": round(statistics.median(alone for alone, _ in pairs), 4),
        "core_share_one_viewer": round(statistics.median(watched for _, watched in pairs), 4),
        "core_share_of_viewer": round(statistics.median(watched - alone for alone, watched in pairs), 4),
    }


def main(argv: list[str]) -> int:
    config = load_config(
        LiveConfig,
        argv,
        os.environ,
        prefix="KVMESH_BENCH_LIVE_",
        prog="kvmesh lab bench live",
        description="Measure what a viewer of the live page costs the frontend: CPU of the event loop, in pairs.",
        section="bench_live",
    )
    found = asyncio.run(measure(config))
    if config.json:
        print(json.dumps(found))
    else:
        print(
            f"{config.workers} workers, {config.requests} requests: one viewer takes "
            f"{found['core_share_of_viewer']:.2%} of a core"
        )
    return 0
