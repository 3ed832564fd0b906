"""Stands for vLLM behind workers.engines.vllm.driver.Driver: deterministic tokens, real KV events on its endpoints."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

from kvmesh.kvevents.publisher import KvEventPublisher
from kvmesh.protocol.errors import EngineError, InvalidRequestError
from kvmesh.protocol.events import KvEvent
from kvmesh.workers.engines.vllm.driver import LoadedAdapter, RankLoad, VllmFacts
from kvmesh.workers.engines.vllm.translate import VllmQuestion, VllmStep

CONTEXT = 512
BLOCK = 32
EOS = 2


def token_after(tokens: Sequence[int]) -> int:
    """A function of all tokens before it, so that an answer that goes on elsewhere goes on as it would have."""
    return 3 + sum((i + 1) * token for i, token in enumerate(tokens)) % 997


class FakeVllm:
    """Implements kvmesh.workers.engines.vllm.driver.Driver."""

    def __init__(self, flags: Sequence[str], environ: Mapping[str, str]) -> None:
        self.flags = list(flags)
        tasks = frozenset({"generate", "embed"})
        self.facts = VllmFacts(BLOCK, 64, 1024, CONTEXT, 8, frozenset({EOS}), tasks, kept_adapters=8)
        self.num_ranks = int(self._value("--data-parallel-size", "1"))
        self.loads: Sequence[RankLoad] = [RankLoad() for _ in range(self.num_ranks)]
        self.ranks: list[int] = []  # of the questions
        self.asked: list[VllmQuestion] = []
        self.adapters: list[LoadedAdapter | None] = []  # of the questions
        self.closed_early = 0
        self.pull_fails = False
        self.first_pulled: int | None = None  # what it draws after a pull, instead of the right token
        self.unloadable = ""  # path of an adapter
        self.dead = ""
        self.calls: list[str] = []
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.pull_may_end = asyncio.Event()
        self.pull_may_end.set()
        self._publishers: list[KvEventPublisher] = []

    async def prepare(self) -> None:
        """Open the sockets as vLLM does: one rank binds what it is given, several take any port of their node."""
        told = json.loads(self._value("--kv-events-config"))
        endpoints = (told["endpoint"], told["replay_endpoint"])
        if self.num_ranks > 1:
            assert endpoints == ("tcp://*:0", "tcp://*:0")
            endpoints = ("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
        self._publishers = [KvEventPublisher(*endpoints, dp_rank=rank) for rank in range(self.num_ranks)]

    def event_endpoints(self) -> list[tuple[str, str]]:
        return [(one.endpoint, one.replay_endpoint) for one in self._publishers]

    def tell(self, *events: KvEvent, rank: int = 0) -> None:
        self._publishers[rank].publish(events)

    async def generate(
        self, question: VllmQuestion, request_id: str, salt: str | None, adapter: LoadedAdapter | None, rank: int
    ) -> AsyncGenerator[VllmStep, None]:
        self.asked.append(question)
        self.ranks.append(rank)
        self.adapters.append(adapter)
        pulls = question.kv is not None and bool(question.kv["do_remote_prefill"])
        if pulls and self.pull_fails:
            yield VllmStep([], "error")
            return
        tokens = list(question.prompt)
        ended = False
        try:
            for number in range(question.sampling["max_tokens"]):
                if number:
                    await self.may_go_on.wait()
                elif pulls:
                    await self.pull_may_end.wait()
                if self.dead:
                    raise EngineError(self.dead)
                drawn = self.first_pulled if pulls and number == 0 else None
                tokens.append(token_after(tokens) if drawn is None else drawn)
                ended = number + 1 == question.sampling["max_tokens"]
                kv = self._offered(question) if question.offers else None
                yield VllmStep([tokens[-1]], "length" if ended else None, cached_tokens=0, kv=kv)
        finally:
            self.closed_early += not ended

    async def embed(
        self, prompt: Sequence[int], request_id: str, salt: str | None, adapter: LoadedAdapter | None
    ) -> bytes:
        return bytes(4)

    async def reset_prefix_cache(self) -> bool:
        self.calls.append("reset")
        return True

    async def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    async def wake(self) -> None:
        self.calls.append("wake")

    async def profile(self, start: bool) -> None:
        raise InvalidRequestError("vLLM cannot profile")

    async def add_adapter(self, adapter: LoadedAdapter) -> None:
        if adapter.path == self.unloadable:
            raise InvalidRequestError("no adapter there")

    async def remove_adapter(self, adapter: LoadedAdapter) -> None:
        self.calls.append(f"remove {adapter.number}")

    def failure(self) -> str:
        return self.dead

    async def close(self) -> None:
        self.calls.append("close")
        for publisher in self._publishers:
            await publisher.close()

    def _value(self, flag: str, default: str = "") -> str:
        return self.flags[self.flags.index(flag) + 1] if flag in self.flags else default

    def _offered(self, question: VllmQuestion) -> dict[str, object]:
        num_tokens = len(question.prompt)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(1, 1 - (-num_tokens // BLOCK)))],
            "remote_engine_id": "engine",
            "remote_request_id": "request",
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "remote_num_tokens": num_tokens,
        }


OpenFake = Callable[[Sequence[str], Mapping[str, str]], FakeVllm]
