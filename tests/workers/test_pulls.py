"""A pull that hangs holds up neither its request nor the engine, and its blocks are not used before it lets go."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import msgspec
import pytest
import pytest_asyncio

from kvmesh.kvcache.transfer.offers import with_content
from kvmesh.kvcache.transfer.shm import ShmBackend
from kvmesh.protocol.ids import RequestId, new_worker_id
from kvmesh.protocol.kv_content import PENDING
from kvmesh.protocol.messages import Delta, GenerateRequest, PullReport, SamplingParams, StopConditions, pack_tokens
from kvmesh.workers.engines.mock.executor import MockExecutor, mock_token
from kvmesh.workers.step_engine import StepEngine, StepEngineConfig
from tests.support.patience import PATIENCE_S
from tests.support.transfer import HangingBackend

PROMPT = list(range(10, 60))
BLOCKS = 4  # of 16 tokens


class Pair:
    def __init__(self, pull_timeout_s: float, pull_s_per_token: float = 0.0) -> None:
        self.transfer = HangingBackend()
        config = StepEngineConfig("m", "", 64, 8, 512, offer_lease_s=30.0, pull_timeout_s=pull_timeout_s)
        self.prefiller = StepEngine(MockExecutor(block_size=16, speedup=0), ShmBackend(), config)
        decoder = MockExecutor(block_size=16, speedup=0, pull_s_per_token=pull_s_per_token)
        self.decoder = StepEngine(decoder, self.transfer, config)

    async def start(self) -> "Pair":
        for engine in (self.prefiller, self.decoder):
            await engine.start(new_worker_id("w"), "127.0.0.1:1")
        return self

    async def stop(self) -> None:
        self.transfer.go_on.set()
        await self.decoder.stop()
        await self.prefiller.stop()

    async def decode_leg(self) -> GenerateRequest:
        request = GenerateRequest(
            request_id=RequestId("r"),
            model="m",
            prompt=pack_tokens(PROMPT),
            sampling=SamplingParams(temperature=0),
            stop=StopConditions(max_tokens=6, ignore_eos=True),
            offer_kv=True,
        )
        [first] = [delta async for delta in self.prefiller.generate(request)]
        return msgspec.structs.replace(request, offer_kv=False, generated=first.token_ids, ticket=first.ticket)


@pytest_asyncio.fixture
async def impatient() -> AsyncIterator[Pair]:
    pair = await Pair(pull_timeout_s=0.05).start()
    yield pair
    await pair.stop()


@pytest_asyncio.fixture
async def patient() -> AsyncIterator[Pair]:
    pair = await Pair(pull_timeout_s=30.0).start()
    yield pair
    await pair.stop()


def tokens(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


async def test_a_pull_that_takes_too_long_is_computed_instead(impatient: Pair) -> None:
    leg = await impatient.decode_leg()
    async with asyncio.timeout(PATIENCE_S):
        deltas = [delta async for delta in impatient.decoder.generate(leg)]
    assert tokens(deltas) == [mock_token(PROMPT, i, 2048) for i in range(1, 6)]
    assert deltas[0].pull is not None
    assert "longer than 0.05 s" in deltas[0].pull.error
    assert impatient.decoder.load().used_blocks == BLOCKS, "those that the hanging pull may still write into"
    impatient.transfer.go_on.set()
    await all_free(impatient.decoder)


async def test_an_abort_frees_the_place_at_once_and_blocks_later(patient: Pair) -> None:
    leg = await patient.decode_leg()
    async with aclosing(patient.decoder.generate(leg)) as deltas:
        taking = asyncio.create_task(anext(deltas))
        await patient.transfer.fetching.wait()
        taking.cancel()
        await asyncio.wait([taking])
    assert (patient.decoder.load().running, patient.decoder.load().used_blocks) == (0, BLOCKS)
    patient.transfer.go_on.set()
    await all_free(patient.decoder)


async def test_others_go_on_beside_a_pull_that_hangs(patient: Pair) -> None:
    leg = await patient.decode_leg()
    hanging = asyncio.create_task(anext(patient.decoder.generate(leg)))
    await patient.transfer.fetching.wait()
    other = msgspec.structs.replace(leg, request_id=RequestId("other"), ticket=None, generated=())
    async with asyncio.timeout(PATIENCE_S):
        deltas = [delta async for delta in patient.decoder.generate(other)]
    assert len(tokens(deltas)) == 6
    patient.transfer.go_on.set()
    delta = await hanging
    assert delta.pull is not None
    assert delta.pull.error == ""


async def test_a_pull_is_no_faster_than_the_modelled_bandwidth() -> None:
    """The rule holds for tokens that are not cached: a second pull of the same prompt brings the two tokens of its last
    block.
    """
    pair = await Pair(pull_timeout_s=30.0, pull_s_per_token=0.02).start()
    pair.transfer.go_on.set()
    durations_s = []
    for _ in range(2):
        deltas = [delta async for delta in pair.decoder.generate(await pair.decode_leg())]
        assert tokens(deltas) == [mock_token(PROMPT, i, 2048) for i in range(1, 6)]
        assert deltas[0].pull is not None
        assert deltas[0].pull.error == ""
        durations_s.append(deltas[0].pull.duration_s)
    await pair.stop()
    assert durations_s[0] >= 50 * 0.02
    assert 2 * 0.02 <= durations_s[1] < durations_s[0]


async def all_free(engine: StepEngine) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while engine.load().used_blocks:
            await asyncio.sleep(0)


async def test_a_late_pull_from_a_peer_that_does_not_answer_is_given_up() -> None:
    pair, asked = Pair(pull_timeout_s=PATIENCE_S), list[str]()

    async def answers(address: str, timeout_s: float) -> bool:
        asked.append(address)
        return len(asked) < 2

    pair.decoder.peer_answers = answers
    await pair.start()
    leg = await pair.decode_leg()
    began_s = asyncio.get_running_loop().time()
    async with asyncio.timeout(PATIENCE_S):
        deltas = [delta async for delta in pair.decoder.generate(leg)]
    assert asyncio.get_running_loop().time() - began_s < PATIENCE_S / 2
    assert tokens(deltas) == [mock_token(PROMPT, i, 2048) for i in range(1, 6)]
    assert deltas[0].pull is not None
    assert "127.0.0.1:1 does not answer" in deltas[0].pull.error
    assert asked == ["127.0.0.1:1"] * 2
    assert pair.decoder.load().used_blocks == BLOCKS, "those that the hanging pull may still write into"
    pair.transfer.go_on.set()
    await all_free(pair.decoder)
    await pair.stop()


async def pulled(pair: Pair, content: str, *, is_stripped: bool = False) -> PullReport:
    """Return how the pull of a ticket with this content ended. The answer must be right.

    `is_stripped`: a frontend of the release before has passed the ticket on.
    """
    pair.transfer.go_on.set()
    leg = await pair.decode_leg()
    assert leg.ticket is not None
    ticket = with_content(leg.ticket, content)
    if is_stripped:
        ticket = msgspec.structs.replace(ticket, content="")
    deltas = [delta async for delta in pair.decoder.generate(msgspec.structs.replace(leg, ticket=ticket))]
    assert tokens(deltas) == [mock_token(PROMPT, i, 2048) for i in range(1, 6)]
    assert deltas[0].pull is not None
    return deltas[0].pull


@pytest.mark.parametrize(
    ("content", "why"), [("of other weights", "of another content"), (PENDING, "not hashed yet: it exchanges no KV")]
)
@pytest.mark.parametrize("is_stripped", [False, True])
async def test_kv_of_other_weights_is_not_pulled(patient: Pair, content: str, why: str, is_stripped: bool) -> None:
    report = await pulled(patient, content, is_stripped=is_stripped)
    assert report.num_bytes == 0
    assert why in report.error


async def test_kv_of_equal_weights_is_pulled(patient: Pair) -> None:
    report = await pulled(patient, patient.prefiller.kv_content().fingerprint)
    assert report.error == ""
    assert report.num_bytes > 0
