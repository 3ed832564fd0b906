"""A worker pulls the beginning of a prompt from a peer; whatever the peer does, the answer is right."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from kvmesh.kvcache.transfer.shm import ShmBackend
from kvmesh.protocol.errors import InvalidRequestError, TransferError, UnreachableError
from kvmesh.protocol.hashing import pack_hashes, sequence_hashes
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.messages import (
    Delta,
    GenerateRequest,
    OfferedPrefix,
    OfferPrefix,
    PrefixSource,
    SamplingParams,
    StopConditions,
    pack_tokens,
)
from kvmesh.workers.engines.mock.executor import MockExecutor, mock_token
from kvmesh.workers.peer_pulls import PrefixFetcher
from kvmesh.workers.step_engine import StepEngine, StepEngineConfig
from kvmesh.workers.tiers import TierSettings
from tests.support.patience import PATIENCE_S
from tests.support.transfer import HangingBackend

BLOCK = 16
PROMPT = list(range(10, 10 + 10 * BLOCK + 3))  # 10 full blocks
BLOCK_BYTES = 2 * 4 * BLOCK


class Pair:
    """A worker that has computed prompts, and one that pulls from it."""

    def __init__(
        self,
        pull_timeout_s: float = 30.0,
        host_blocks: int = 0,
        model_path: str = "",
        transfer: ShmBackend | None = None,
    ) -> None:
        def config(**fields: Any) -> StepEngineConfig:
            return StepEngineConfig("m", model_path, 64, 8, 512, 30.0, pull_timeout_s, shares_prefixes=True, **fields)

        self.source = StepEngine(MockExecutor(block_size=BLOCK, speedup=0), ShmBackend(), config())
        tiers = TierSettings(host_blocks * BLOCK_BYTES)
        self.transfer = transfer or ShmBackend()
        self.puller = StepEngine(MockExecutor(block_size=BLOCK, speedup=0), self.transfer, config(tiers=tiers))
        self.asked: list[OfferPrefix] = []
        self.change: Callable[[OfferedPrefix], OfferedPrefix] = lambda offered: offered
        self.puller.ask_prefix = self.ask_source
        self._number = 0

    async def start(self) -> "Pair":
        for name, engine in (("source", self.source), ("puller", self.puller)):
            await engine.start(WorkerId(name), "127.0.0.1:1")
        return self

    async def stop(self) -> None:
        await self.puller.stop()
        await self.source.stop()

    def ask_source(self, source: PrefixSource, asked: OfferPrefix) -> AbstractAsyncContextManager[OfferedPrefix]:
        return self._ask(asked)

    @asynccontextmanager
    async def _ask(self, asked: OfferPrefix) -> AsyncIterator[OfferedPrefix]:
        self.asked.append(asked)
        offered = self.source.offer_prefix(asked)
        try:
            yield self.change(offered)
        finally:
            if offered.ticket is not None:
                self.source.release(offered.ticket.offer_id, offered.ticket.nonce)

    def request(self, prompt: Sequence[int], blocks: int = 0, **fields: Any) -> GenerateRequest:
        self._number += 1
        source = PrefixSource(worker_id="source", name="source", address="127.0.0.1:1", blocks=blocks)
        return GenerateRequest(
            request_id=RequestId(f"r{self._number}"),
            model="m",
            prompt=pack_tokens(prompt),
            sampling=SamplingParams(temperature=0),
            stop=StopConditions(max_tokens=4, ignore_eos=True),
            source=source if blocks else None,
            **fields,
        )

    async def ask(self, engine: StepEngine, prompt: Sequence[int], blocks: int = 0, **fields: Any) -> Delta:
        """Return the first delta of an answer, which is the right one."""
        async with asyncio.timeout(PATIENCE_S):
            deltas = [delta async for delta in engine.generate(self.request(prompt, blocks, **fields))]
        answer = [token for delta in deltas for token in delta.token_ids]
        assert answer == [mock_token(prompt, i, 2048) for i in range(4)]
        return deltas[0]

    async def all_free(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.source.load().used_blocks or self.puller.load().used_blocks:
                await asyncio.sleep(0)
        assert self.source.load().offers == 0


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = await Pair().start()
    yield pair
    await pair.stop()


async def test_a_prefix_comes_from_the_peer(pair: Pair) -> None:
    await pair.ask(pair.source, PROMPT)
    first = await pair.ask(pair.puller, PROMPT, blocks=10)
    assert first.cached_tokens == 10 * BLOCK
    assert first.pull is not None
    assert (first.pull.num_blocks, first.pull.num_bytes, first.pull.error) == (10, 10 * BLOCK_BYTES, "")
    await pair.all_free()
    again = await pair.ask(pair.puller, PROMPT, blocks=10)
    assert (again.cached_tokens, again.pull, len(pair.asked)) == (10 * BLOCK, None, 1), "it is here now"


async def test_only_what_is_missing_is_asked_for(pair: Pair) -> None:
    await pair.ask(pair.source, PROMPT)
    await pair.ask(pair.puller, PROMPT[: 4 * BLOCK + 1])
    first = await pair.ask(pair.puller, PROMPT, blocks=10)
    assert first.pull is not None
    assert (pair.asked[0].first, first.pull.num_blocks, first.cached_tokens) == (4, 6, 10 * BLOCK)


async def test_a_prompt_that_goes_on_computes_the_rest(pair: Pair) -> None:
    await pair.ask(pair.source, PROMPT)
    longer = [*PROMPT[: 8 * BLOCK], *range(500, 600)]
    assert (await pair.ask(pair.puller, longer, blocks=8)).cached_tokens == 8 * BLOCK


@pytest.mark.parametrize("has_some", [True, False])
async def test_a_peer_that_has_less_gives_what_it_has(pair: Pair, has_some: bool) -> None:
    if has_some:
        await pair.ask(pair.source, PROMPT[: 3 * BLOCK])
    first = await pair.ask(pair.puller, PROMPT, blocks=10)
    assert first.cached_tokens == 3 * BLOCK * has_some
    assert first.pull is not None
    assert first.pull.error == ""
    await pair.all_free()


def _changes() -> dict[str, Callable[[OfferedPrefix], OfferedPrefix]]:
    def ticket(**fields: Any) -> Callable[[OfferedPrefix], OfferedPrefix]:
        def change(offered: OfferedPrefix) -> OfferedPrefix:
            assert offered.ticket is not None
            return msgspec.structs.replace(offered, ticket=msgspec.structs.replace(offered.ticket, **fields))

        return change

    return {
        "offers KV of another prompt": lambda offered: msgspec.structs.replace(offered, address=b"x" * 32),
        "offers 11 blocks where 10": ticket(block_ids=tuple(range(11))),
        "offers 0 blocks where 10": ticket(block_ids=()),
        "offers 3 tokens in 10 blocks": ticket(num_tokens=3),
        "names slot 99999": ticket(slot=99999),
        "ended before it was fetched": ticket(nonce=77),
        "has an id of 0 characters": ticket(worker_id=WorkerId("")),
        "offers KV over 'nixl'": ticket(backend="nixl"),
    }


@pytest.mark.parametrize("problem", list(_changes()))
async def test_an_offer_that_is_not_right_is_not_used(pair: Pair, problem: str) -> None:
    pair.change = _changes()[problem]
    await pair.ask(pair.source, PROMPT)
    first = await pair.ask(pair.puller, PROMPT, blocks=10)
    assert first.pull is not None
    assert problem in first.pull.error
    assert (first.pull.num_blocks, first.cached_tokens) == (0, 0)
    await pair.all_free()


async def test_a_peer_that_is_gone_costs_the_prompt_alone(pair: Pair) -> None:
    def refuse(source: PrefixSource, asked: OfferPrefix) -> AbstractAsyncContextManager[OfferedPrefix]:
        raise UnreachableError("nobody answers")

    fetcher = pair.puller._pulls._fetcher
    assert isinstance(fetcher, PrefixFetcher)
    fetcher._ask = refuse
    first = await pair.ask(pair.puller, PROMPT, blocks=10)
    assert first.pull is not None
    assert first.pull.error == "nobody answers"


async def test_what_came_before_a_peer_died_is_kept(pair: Pair) -> None:
    await pair.ask(pair.source, PROMPT)
    fetcher, fetch = pair.puller._pulls._fetcher, pair.transfer.fetch
    assert isinstance(fetcher, PrefixFetcher)
    fetcher._piece_blocks = 3
    asked: list[int] = []

    async def dying(ticket: Any, skip: int, into: Sequence[int]) -> int:
        asked.append(len(into))
        if len(asked) == 3:
            raise TransferError("the peer is gone")
        return await fetch(ticket, skip, into)

    pair.transfer.fetch = dying  # type: ignore[method-assign]
    first = await pair.ask(pair.puller, PROMPT, blocks=10)
    assert first.pull is not None
    assert (first.pull.num_blocks, first.pull.error, first.cached_tokens) == (6, "the peer is gone", 6 * BLOCK)
    await pair.all_free()


async def test_equal_prompts_pull_once(pair: Pair) -> None:
    await pair.ask(pair.source, PROMPT)
    answers = await asyncio.gather(*[pair.ask(pair.puller, PROMPT, blocks=10) for _ in range(8)])
    assert [delta.cached_tokens for delta in answers] == [10 * BLOCK] * 8
    assert len(pair.asked) == 1


async def test_a_pull_that_hangs_holds_up_nobody_and_is_given_up() -> None:
    hanging = HangingBackend()
    pair = await Pair(pull_timeout_s=0.3, transfer=hanging).start()
    await pair.ask(pair.source, PROMPT)
    pulling = asyncio.create_task(pair.ask(pair.puller, PROMPT, blocks=10))
    await hanging.fetching.wait()
    await pair.ask(pair.puller, PROMPT[5:])
    assert not pulling.done()
    first = await pulling
    assert first.pull is not None
    assert "longer than 0.3 s" in first.pull.error
    assert pair.puller.load().used_blocks == 10, "the pull may still write into them"
    hanging.go_on.set()
    await pair.all_free()
    await pair.stop()


async def test_an_aborted_request_lets_the_peer_go() -> None:
    hanging = HangingBackend()
    pair = await Pair(transfer=hanging).start()
    await pair.ask(pair.source, PROMPT)
    async with aclosing(pair.puller.generate(pair.request(PROMPT, 10))) as deltas:
        taking = asyncio.create_task(anext(deltas))
        await hanging.fetching.wait()
        taking.cancel()
        await asyncio.wait([taking])
    assert pair.puller.load().running == 0
    hanging.go_on.set()
    await pair.all_free()
    await pair.stop()


async def test_a_lower_tier_that_has_as_much_is_read_instead() -> None:
    pair = await Pair(host_blocks=400).start()
    await pair.ask(pair.source, PROMPT)
    await pair.ask(pair.puller, PROMPT)
    for number in range(12):
        await pair.ask(pair.puller, [number, *range(400, 400 + 9 * BLOCK)])
        await asyncio.sleep(0.01)  # its copies to host memory
    first = await pair.ask(pair.puller, PROMPT, blocks=10)
    assert first.cached_tokens
    assert (first.pull, pair.asked) == (None, [])
    await pair.stop()


async def test_a_worker_that_shares_nothing_offers_nothing() -> None:
    config = StepEngineConfig("m", "", 64, 8, 512, 30.0, 5.0)
    engine = StepEngine(MockExecutor(block_size=BLOCK, speedup=0), ShmBackend(), config)
    info = await engine.start(WorkerId("w"), "127.0.0.1:1")
    assert info.kv_print == ""
    asked = OfferPrefix(model="m", worker_id="w", names=pack_hashes(sequence_hashes(PROMPT, BLOCK)))
    with pytest.raises(InvalidRequestError, match="--kv-peers"):
        engine.offer_prefix(asked)
    await engine.stop()
