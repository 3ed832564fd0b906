"""A frontend's dispatcher and router in the process of the test, over workers in processes of their own."""

import asyncio
from contextlib import aclosing

from kvmesh.frontend.dispatch import Dispatcher
from kvmesh.frontend.generator import Hints, Trace
from kvmesh.mesh.discovery import Discovery
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.protocol.ids import RequestId
from kvmesh.protocol.messages import GenerateRequest, SamplingParams, StopConditions, WorkerCard, pack_tokens
from kvmesh.router.config import RouterConfig
from kvmesh.router.feeds import WorkerFeed
from kvmesh.router.local import LocalRouter
from tests.support.deltas import deltas_of
from tests.support.patience import PATIENCE_S


class OwnFrontend:
    """A dispatcher over worker processes. `longest_gap_s`: between two deltas of an answer, or before its first."""

    def __init__(self, discovery: Discovery) -> None:
        self.plane, workers = PlaneClient(), WorkerFeed()
        self.router = LocalRouter(RouterConfig(), self.plane, workers)
        self.cards: dict[str, WorkerCard] = {}
        workers.listen(lambda card: self.cards.update({card.name: card}), lambda worker_id: None)
        self.dispatcher = Dispatcher(self.router, self.plane, lambda model: 16)
        self.following = asyncio.create_task(workers.run(discovery))
        self.longest_gap_s = 0.0

    async def until_workers(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.cards) < count:
                await asyncio.sleep(0.01)

    async def answer(self, prompt: list[int], count: int, trace: Trace, pace: asyncio.Event) -> list[int]:
        """Sets `pace` with the third token."""
        request = GenerateRequest(
            request_id=RequestId(f"r{prompt}"),
            model="tiny",
            prompt=pack_tokens(prompt),
            sampling=SamplingParams(temperature=0),
            stop=StopConditions(max_tokens=count, ignore_eos=True),
        )
        now = asyncio.get_running_loop().time
        heard_s = now()
        tokens: list[int] = []
        async with aclosing(deltas_of(self.dispatcher, request, Hints(), trace, now() + PATIENCE_S)) as deltas:
            async for delta in deltas:
                self.longest_gap_s, heard_s = max(self.longest_gap_s, now() - heard_s), now()
                tokens += delta.token_ids
                if len(tokens) >= 3:
                    pace.set()
        return tokens

    async def close(self) -> None:
        self.following.cancel()
        await asyncio.wait([self.following])
        await self.dispatcher.close()
        await self.router.close()
        await self.plane.close()
