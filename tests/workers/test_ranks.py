"""Data-parallel ranks of one worker: each request runs in the rank that it names, and each rank has its own cache."""

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.protocol.errors import ConfigError, InvalidRequestError
from kvmesh.protocol.events import KvEvent
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.messages import (
    Delta,
    EmbedRequest,
    GenerateRequest,
    KvDigest,
    KvRank,
    KvSnapshot,
    Role,
    StopConditions,
    encode,
    pack_tokens,
)
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.engine import EngineInfo
from kvmesh.workers.engines.mock.answers import mock_token, mock_vector
from kvmesh.workers.engines.opening import open_engine
from kvmesh.workers.load_reports import reporting_ranks
from kvmesh.workers.membership import make_card
from kvmesh.workers.ranks import RankedEngine
from kvmesh.workers.service import Worker
from tests.support.place import FakePlace

PROMPT = list(range(10, 60))  # 3 full blocks


def config(**settings: Any) -> WorkerConfig:
    values = {"engine": "mock", "model_path": str(CHECKPOINT_DIR), "model": "tiny", "mock_speedup": 0.0, "dp_size": 3}
    return WorkerConfig(**{**values, "kv_transfer": "shm", **settings})


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[RankedEngine]:
    made = open_engine(config())
    assert isinstance(made, RankedEngine)
    await made.start(WorkerId("w"), "127.0.0.1:1")
    yield made
    await made.stop()


async def ask(engine: RankedEngine, rank: int, **fields: Any) -> list[Delta]:
    request = GenerateRequest(
        request_id=RequestId("r"),
        model="tiny",
        prompt=pack_tokens(PROMPT),
        stop=StopConditions(max_tokens=4),
        dp_rank=rank,
        **fields,
    )
    return [delta async for delta in engine.generate(request)]


async def test_a_request_runs_in_the_rank_that_it_names(engine: RankedEngine) -> None:
    said = await ask(engine, 1)
    assert [token for delta in said for token in delta.token_ids] == [mock_token(PROMPT, i, 2048) for i in range(4)]
    assert [rank.load().cached_blocks for rank in engine.ranks] == [0, 3, 0]
    assert [(await ask(engine, rank))[0].cached_tokens for rank in (1, 2)] == [48, 0]
    vector = await engine.embed(
        EmbedRequest(request_id=RequestId("e"), model="tiny", prompt=pack_tokens([5]), dp_rank=2)
    )
    assert vector.vector == mock_vector([5])


@pytest.mark.parametrize("rank", [-1, 3])
async def test_a_rank_that_there_is_not_is_refused(engine: RankedEngine, rank: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"no rank {rank} here; there are 3, from 0"):
        await ask(engine, rank)


async def test_offers_are_released_in_the_rank_that_made_them(engine: RankedEngine) -> None:
    tickets = [(await ask(engine, rank, offer_kv=True))[-1].ticket for rank in (0, 2)]
    assert engine.load().offers == 2
    for ticket, left in zip(tickets, ([0, 0, 1], [0, 0, 0]), strict=True):
        assert ticket is not None
        engine.release(ticket.offer_id, ticket.nonce)
        assert [rank.load().offers for rank in engine.ranks] == left
    assert engine.load().used_blocks == 0


async def test_load_is_that_of_all_ranks(engine: RankedEngine) -> None:
    for rank in range(3):
        await ask(engine, rank)
    assert (engine.load().cached_blocks, engine.load().total_blocks, engine.load().queued_tokens) == (9, 3 * 2048, 0)


async def test_each_rank_reports_its_own_load(engine: RankedEngine) -> None:
    assert [number for number, _ in reporting_ranks(engine.ranks, 0.5)] == [0, 1, 2]
    assert reporting_ranks(engine.ranks, 0.0) == [], "reports are switched off"


async def test_each_rank_tells_its_own_events_and_snapshots(engine: RankedEngine) -> None:
    told: dict[int, list[KvEvent]] = {0: [], 1: [], 2: []}
    for number, rank in enumerate(engine.ranks):
        rank.on_kv_events(told[number].extend)
    await ask(engine, 1)
    assert [bool(told[number]) for number in range(3)] == [False, True, False]
    publishers = [SimpleNamespace(last_seq=number) for number in range(3)]
    worker = Worker(engine, FakePlace(Role.DECODE, *publishers))
    worker.info = EngineInfo("tiny", "", 16, 1, 1, 1, None, "")  # type: ignore[arg-type]
    for rank, blocks in ((0, 0), (1, 3), (2, 0)):
        call = Call(KvRank(dp_rank=rank))
        await worker.kv_digest(call)
        await worker.kv_snapshot(call)
        digest, snapshot = call.sent
        assert isinstance(digest, KvDigest)
        assert isinstance(snapshot, KvSnapshot)
        assert (digest.seq, digest.blocks, snapshot.seq) == (rank, blocks, rank)
    first = Call(None)
    await worker.kv_digest(first)
    assert first.sent[0].seq == 0, "who does not name a rank means the first"
    with pytest.raises(InvalidRequestError, match="no rank 3"):
        await worker.kv_digest(Call(KvRank(dp_rank=3)))


class Call:
    def __init__(self, message: object) -> None:
        self.body = encode(message)
        self.sent: list[Any] = []

    async def send(self, message: object) -> None:
        self.sent.append(message)


async def test_the_card_says_where_each_rank_publishes() -> None:
    engine = open_engine(config())
    info = await engine.start(WorkerId("w"), "127.0.0.1:1")
    publishers: Any = [SimpleNamespace(endpoint=f"tcp://h:{i}", replay_endpoint=f"tcp://h:9{i}") for i in range(3)]
    card = make_card(config(), WorkerId("w"), Role.DECODE, info, "h:3", publishers, "")
    assert (card.dp_size, card.kv_events, card.kv_replay) == (3, "tcp://h:0", "tcp://h:90")
    assert card.rank_kv_events == (("tcp://h:1", "tcp://h:91"), ("tcp://h:2", "tcp://h:92"))
    assert card.total_blocks == 2048, "of each rank"
    await engine.stop()


@pytest.mark.parametrize("engine", ["torch", "sglang", "trtllm", "attach"])
def test_ranks_are_for_mock_and_vllm(engine: str) -> None:
    with pytest.raises(ConfigError, match="--dp-size is for mock, vllm"):
        open_engine(config(engine=engine))
