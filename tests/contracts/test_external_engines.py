"""What every engine that this project does not contain promises, whatever it is made of.

The part of tests/contracts/test_engine.py that holds for engines with a cache, a scheduler and a KV transfer of their
own. Another one joins with a `Kind` of its own; here all run against fakes with the shapes of their published APIs.
"""

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
import pytest
import pytest_asyncio

from protocol.errors import ContextLengthError, EngineError, InvalidRequestError
from protocol.events import Cleared, Digest, KvEvent, Removed, Stored
from protocol.hashing import digest_term
from protocol.ids import RequestId, WorkerId, new_worker_id
from protocol.messages import (
    Delta,
    EmbedRequest,
    FinishReason,
    GenerateRequest,
    Guide,
    GuideKind,
    Role,
    SamplingParams,
    StopConditions,
    Ticket,
    pack_tokens,
)
from tests.support.fake_sglang import CONTEXT_TOKENS, FakeSglang
from tests.support.fake_trtllm import FakeTrtllm
from tests.support.toy_model import next_token
from workers.config import WorkerConfig
from workers.engine import Engine, EngineInfo
from workers.sglang_engine.engine import SglangEngine
from workers.trtllm_engine.engine import TrtllmEngine

BLOCK = 16
MODEL_PATH = "/models/toy"
numbers = itertools.count()


@dataclass
class Started:
    """An engine, and what a test may do to what is behind it."""

    engine: Engine
    info: EngineInfo
    running: Callable[[], int]  # requests that the engine behind still works on
    seen: Callable[[], int]  # requests that have reached it, the warm-up aside
    transfers: Callable[[], int]  # of those, decode halves that were told to fetch
    hold: Callable[[], None]  # it computes nothing until...
    go_on: Callable[[], None]
    die: Callable[[], None]


class Kind:
    """How to start an engine; those of one `Kind` can reach each other."""

    first_token_comes_from = Role.PREFILL
    decodes_alone = True  # a decode worker can compute a prompt

    def start(self, config: WorkerConfig) -> Engine: ...

    def started(self, engine: Engine, info: EngineInfo) -> Started: ...


class SglangKind(Kind):
    first_token_comes_from = Role.DECODE
    decodes_alone = False

    def __init__(self, num_blocks: int, *, incremental: bool = True) -> None:
        self.fake = FakeSglang(num_blocks, incremental=incremental)

    def start(self, config: WorkerConfig) -> Engine:
        config = msgspec.structs.replace(config, engine_args="--grammar-backend xgrammar")
        return SglangEngine(config, "m", self.fake.package)

    def started(self, engine: Engine, info: EngineInfo) -> Started:
        fake = self.fake.engines[-1]

        def die() -> None:
            fake.child_pids = [2**22 + 1]

        return Started(
            engine,
            info,
            running=lambda: len(fake.requests.running),
            seen=lambda: len(fake.seen),
            transfers=lambda: len(fake.seen),
            hold=fake.gate.clear,
            go_on=fake.gate.set,
            die=die,
        )


class TrtllmKind(Kind):
    def __init__(self, num_blocks: int) -> None:
        self.fake = FakeTrtllm(num_blocks)

    def start(self, config: WorkerConfig) -> Engine:
        config = msgspec.structs.replace(config, engine_args="--guided-decoding-backend xgrammar")
        return TrtllmEngine(config, "m", self.fake.package)

    def started(self, engine: Engine, info: EngineInfo) -> Started:
        fake = self.fake.llms[-1]
        return Started(
            engine,
            info,
            running=lambda: len(fake.running),
            seen=lambda: len(fake.seen),
            transfers=lambda: sum(request.is_generation_only for request in fake.seen),
            hold=fake.gate.clear,
            go_on=fake.gate.set,
            die=fake.die,
        )


KINDS: dict[str, Callable[[int], Kind]] = {
    "sglang": SglangKind,
    "sglang-cumulative": lambda num_blocks: SglangKind(num_blocks, incremental=False),
    "trtllm": TrtllmKind,
}
Make = Callable[..., Awaitable[Started]]


@pytest_asyncio.fixture(params=list(KINDS))
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Make]:
    engines: list[Engine] = []
    kinds: dict[int, Kind] = {}

    async def start(role: Role = Role.AGGREGATED, num_blocks: int = 256) -> Started:
        kind = kinds.setdefault(num_blocks, KINDS[request.param](num_blocks))
        config = WorkerConfig(model_path=MODEL_PATH, role=role, block_size=BLOCK)
        engine = kind.start(config)
        engines.append(engine)
        info = await engine.start(new_worker_id("w"), "127.0.0.1:1")
        return kind.started(engine, info)

    yield start
    for engine in engines:
        await engine.stop()


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.node.callspec.params["make"]](1)


def prompt_of(length: int, first: int = 100) -> bytes:
    return pack_tokens(tokens_of(length, first))


def tokens_of(length: int, first: int = 100) -> list[int]:
    return [(first + 7 * i) % 1900 + 10 for i in range(length)]


def expected(prompt: list[int], number: int) -> list[int]:
    sequence = list(prompt)
    for _ in range(number):
        sequence.append(next_token(sequence))
    return sequence[len(prompt) :]


def ask(prompt: bytes, max_tokens: int = 12, **fields: object) -> GenerateRequest:
    values = {
        "sampling": SamplingParams(temperature=0),
        "stop": StopConditions(max_tokens=max_tokens, ignore_eos=True),
    } | fields
    return GenerateRequest(
        request_id=RequestId(f"r{next(numbers)}"),
        model="m",
        prompt=prompt,
        **values,  # type: ignore[arg-type]
    )


async def run(started: Started, request: GenerateRequest) -> list[Delta]:
    async with asyncio.timeout(20), aclosing(started.engine.generate(request)) as deltas:
        return [delta async for delta in deltas]


def tokens(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


# --- answers ----------------------------------------------------------------------------------------------------------


async def test_an_answer_has_the_tokens_asked_for_and_ends_with_a_reason(make: Make) -> None:
    deltas = await run(await make(), ask(prompt_of(40), 12))
    assert tokens(deltas) == expected(tokens_of(40), 12)
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert all(delta.finish_reason is None for delta in deltas[:-1])


async def test_requests_at_once_get_the_answers_they_get_alone(make: Make) -> None:
    started = await make()
    lengths = [1, 15, 16, 17, 40, 65, 150]
    together = await asyncio.gather(*(run(started, ask(prompt_of(n, n))) for n in lengths * 3))
    assert [tokens(deltas) for deltas in together] == [expected(tokens_of(n, n), 12) for n in lengths] * 3
    assert started.running() == 0


async def test_one_request_id_twice_at_once_is_answered_twice(make: Make) -> None:
    started = await make()
    request = ask(prompt_of(20))
    both = await asyncio.gather(run(started, request), run(started, request))
    assert [tokens(deltas) for deltas in both] == [expected(tokens_of(20), 12)] * 2


async def test_a_prefix_is_computed_once(make: Make) -> None:
    started = await make()
    first = await run(started, ask(prompt_of(50)))
    second = await run(started, ask(prompt_of(50)))
    assert (first[0].cached_tokens, second[0].cached_tokens) == (0, 48)
    assert tokens(first) == tokens(second)


async def test_a_tenants_salt_keeps_its_prefixes_apart(make: Make) -> None:
    started = await make()
    await run(started, ask(prompt_of(50), cache_salt="a"))
    other = await run(started, ask(prompt_of(50), cache_salt="b"))
    assert other[0].cached_tokens == 0


async def test_a_continued_answer_goes_on_as_it_would_have(make: Make) -> None:
    started = await make()
    whole = expected(tokens_of(40), 12)
    rest = await run(started, ask(prompt_of(40), generated=tuple(whole[:5])))
    assert tokens(rest) == whole[5:]


async def test_a_stop_token_ends_the_answer_and_is_part_of_it(make: Make) -> None:
    started = await make()
    whole = expected(tokens_of(40), 12)
    stop = StopConditions(max_tokens=12, ignore_eos=True, stop_token_ids=(whole[3],))
    deltas = await run(started, ask(prompt_of(40), stop=stop))
    assert tokens(deltas) == whole[:4]
    assert (deltas[-1].finish_reason, deltas[-1].stop_token) == (FinishReason.STOP, whole[3])


@pytest.mark.parametrize("top", [0, 1, 3])
async def test_each_token_has_its_logprob_and_as_many_others_as_asked_for(make: Make, top: int) -> None:
    started = await make()
    deltas = await run(started, ask(prompt_of(20), sampling=SamplingParams(temperature=0, top_logprobs=top)))
    logprobs = [entry for delta in deltas for entry in delta.logprobs or ()]
    assert [entry.token_id for entry in logprobs] == tokens(deltas)
    assert all(len(entry.top) == top for entry in logprobs)
    assert all(entry.top == tuple(sorted(entry.top, key=lambda one: -one[1])) for entry in logprobs)


async def test_a_slow_consumer_loses_nothing(make: Make) -> None:
    started = await make()
    async with aclosing(started.engine.generate(ask(prompt_of(40), 30))) as deltas:
        got = [await anext(deltas)]
        await run(started, ask(prompt_of(40), 60))  # time passes: the other answer is longer
        got += [delta async for delta in deltas]
    assert tokens(got) == expected(tokens_of(40), 30)


# --- leaving ----------------------------------------------------------------------------------------------------------


async def test_leaving_an_answer_ends_it_in_the_engine(make: Make) -> None:
    started = await make()
    async with aclosing(started.engine.generate(ask(prompt_of(50), 500))) as deltas:
        await anext(deltas)
        started.hold()
        assert started.running() == 1
    await until(lambda: started.running() == 0)
    started.go_on()
    assert len(tokens(await run(started, ask(prompt_of(50))))) == 12


async def test_leaving_before_the_first_token_ends_it_too(make: Make) -> None:
    started = await make()
    started.hold()
    asked = asyncio.create_task(run(started, ask(prompt_of(50))))
    await until(lambda: started.running() == 1)
    asked.cancel()
    await asyncio.wait([asked])
    await until(lambda: started.running() == 0)
    started.go_on()


# --- prefill and decode -----------------------------------------------------------------------------------------------


async def split(make: Make, request: GenerateRequest) -> tuple[list[Delta], Started, Started]:
    """As frontend.dispatch does it: the ticket is released with the first delta of the decode worker."""
    prefiller, decoder = await make(Role.PREFILL), await make(Role.DECODE)
    [first] = await run(prefiller, msgspec.structs.replace(request, offer_kv=True))
    if first.ticket is None:
        return [first], prefiller, decoder
    rest: list[Delta] = []
    body = msgspec.structs.replace(request, generated=request.generated + first.token_ids, ticket=first.ticket)
    async with aclosing(decoder.engine.generate(body)) as deltas:
        async for delta in deltas:
            if not rest:
                prefiller.engine.release(first.ticket.offer_id, first.ticket.nonce)
            rest.append(delta)
    return [first, *rest], prefiller, decoder


@pytest.mark.parametrize("length", [1, 15, 16, 17, 130])
async def test_prefill_here_and_decode_there_gives_the_answer_of_one(make: Make, length: int) -> None:
    deltas, prefiller, decoder = await split(make, ask(prompt_of(length)))
    assert tokens(deltas) == expected(tokens_of(length), 12)
    assert deltas[0].ticket is not None
    assert deltas[1].pull is not None
    await until(lambda: prefiller.running() == decoder.running() == prefiller.engine.load().offers == 0)


async def test_an_answer_that_migrates_is_split_like_a_new_one(make: Make) -> None:
    whole = expected(tokens_of(40), 12)
    deltas, _, _ = await split(make, ask(prompt_of(40), generated=tuple(whole[:5])))
    assert tokens(deltas) == whole[5:]


async def test_an_answer_of_one_token_is_whole_wherever_that_comes_from(make: Make) -> None:
    deltas, _, _ = await split(make, ask(prompt_of(20), 1))
    assert tokens(deltas) == expected(tokens_of(20), 1)
    assert deltas[-1].finish_reason is FinishReason.LENGTH


async def test_the_first_token_comes_from_one_half_alone(make: Make, kind: Kind) -> None:
    deltas, _, _ = await split(make, ask(prompt_of(20)))
    assert bool(deltas[0].token_ids) == (kind.first_token_comes_from is Role.PREFILL)


async def test_a_ticket_that_was_not_delivered_is_taken_back(make: Make) -> None:
    prefiller = await make(Role.PREFILL)
    async with aclosing(prefiller.engine.generate(ask(prompt_of(50), offer_kv=True))) as deltas:
        assert (await anext(deltas)).ticket is not None
    await until(lambda: prefiller.engine.load().offers == prefiller.running() == 0)


async def test_cards_of_the_two_halves_name_the_same_transfer_and_others_none(make: Make) -> None:
    prefiller, decoder, whole = await make(Role.PREFILL), await make(Role.DECODE), await make()
    assert prefiller.info.transfer == decoder.info.transfer != ""
    assert whole.info.transfer == ""


def bad_tickets(good: Ticket) -> dict[str, Ticket]:
    replace = msgspec.structs.replace
    return {
        "of another engine": replace(good, backend="vllm-nixl"),
        "empty": replace(good, opaque=b""),
        "no object": replace(good, opaque=b"[]"),
        "cut off": replace(good, opaque=good.opaque[:-3]),
        "huge": replace(good, opaque=good.opaque + b" " * (8 << 20)),
        "not text": replace(good, opaque=b"\xff\xfe\xfd"),
    }


@pytest.mark.parametrize("what", ["of another engine", "empty", "no object", "cut off", "huge", "not text"])
async def test_a_ticket_that_is_none_never_reaches_the_engine(make: Make, kind: Kind, what: str) -> None:
    prefiller, decoder = await make(Role.PREFILL), await make(Role.DECODE)
    request = ask(prompt_of(30))
    [first] = await run(prefiller, msgspec.structs.replace(request, offer_kv=True))
    assert first.ticket is not None
    request = msgspec.structs.replace(request, generated=first.token_ids, ticket=bad_tickets(first.ticket)[what])
    if kind.decodes_alone:
        rest = await run(decoder, request)
        assert rest[0].pull is not None
        assert re.search("ticket|state", rest[0].pull.error)
        assert tokens([first, *rest]) == expected(tokens_of(30), 12)
    else:
        with pytest.raises(EngineError, match=r"ticket|bootstrap"):
            await run(decoder, request)
        assert decoder.seen() == 0
    assert decoder.transfers() == 0
    decoder.engine.check_health()


async def test_a_decode_worker_without_a_ticket_computes_the_prompt_or_says_who_does(make: Make, kind: Kind) -> None:
    decoder = await make(Role.DECODE)
    if kind.decodes_alone:
        assert tokens(await run(decoder, ask(prompt_of(30)))) == expected(tokens_of(30), 12)
        return
    with pytest.raises(EngineError, match="prefill worker"):
        await run(decoder, ask(prompt_of(30)))


# --- events -----------------------------------------------------------------------------------------------------------


async def test_events_tell_what_the_engine_caches_through_evictions(make: Make) -> None:
    started = await make(num_blocks=16)
    followed: list[KvEvent] = []
    started.engine.on_kv_events(followed.extend)
    for i in range(6):
        await run(started, ask(prompt_of(100, 31 * i)))
    last = ask(prompt_of(33, 777))
    await run(started, last)
    await until(lambda: names(followed) == names(started.engine.kv_snapshot()) and len(names(followed)) == 16)
    assert any(isinstance(event, Removed) for event in followed)
    held = names(followed)
    assert started.engine.kv_digest() == Digest(len(held), sum(map(digest_term, held)) % 2**64)


def names(events: list[KvEvent]) -> set[int]:
    held: set[int] = set()
    for event in events:
        match event:
            case Stored():
                held |= set(event.hashes)
            case Removed():
                held -= set(event.hashes)
            case Cleared():
                held.clear()
    return held


# --- what it cannot do ------------------------------------------------------------------------------------------------


async def test_what_it_cannot_do_is_refused_by_name_and_does_not_reach_it(make: Make) -> None:
    started = await make()
    seen = started.seen()
    sampling = SamplingParams(allowed_token_ids=(5,))
    with pytest.raises(InvalidRequestError, match="cannot honour allowed_token_ids"):
        await run(started, ask(prompt_of(20), sampling=sampling))
    with pytest.raises(InvalidRequestError, match="no adapter 'painter'"):
        await run(started, ask(prompt_of(20), lora="painter"))
    with pytest.raises(InvalidRequestError, match="empty"):
        await run(started, ask(b""))
    with pytest.raises(ContextLengthError, match=f"has {CONTEXT_TOKENS} tokens"):
        await run(started, ask(prompt_of(CONTEXT_TOKENS)))
    with pytest.raises(InvalidRequestError, match="choices"):
        await run(started, ask(prompt_of(20), guide=Guide(kind=GuideKind.CHOICE, value="{}")))
    with pytest.raises(InvalidRequestError, match="no embeddings"):
        await started.engine.embed(EmbedRequest(request_id=RequestId("e"), model="m", prompt=prompt_of(4)))
    assert started.seen() == seen
    assert len(tokens(await run(started, ask(prompt_of(20))))) == 12


# --- failures ---------------------------------------------------------------------------------------------------------


async def test_an_engine_that_stops_says_so_to_whom_it_served(make: Make) -> None:
    started = await make()
    started.hold()
    answer = asyncio.create_task(run(started, ask(prompt_of(50))))
    await until(lambda: started.running() == 1)
    await started.engine.stop()
    with pytest.raises(EngineError, match="stopping"):
        await answer
    with pytest.raises(EngineError, match="stopping"):
        started.engine.check_health()
    await started.engine.stop()


async def test_an_engine_that_dies_fails_whom_it_served_and_its_health(make: Make) -> None:
    started = await make()
    started.hold()
    answer = asyncio.create_task(run(started, ask(prompt_of(50))))
    await until(lambda: started.running() == 1)
    started.die()
    with pytest.raises(EngineError):
        started.engine.check_health()
    with pytest.raises(EngineError):
        await answer
    with pytest.raises(EngineError):
        await run(started, ask(prompt_of(50)))


def test_an_engine_that_has_not_started_is_not_healthy() -> None:
    for kind in KINDS.values():
        engine = kind(1).start(WorkerConfig(model_path=MODEL_PATH, block_size=BLOCK))
        with pytest.raises(EngineError, match="not started"):
            engine.check_health()
        assert engine.load().running == 0
        assert WorkerId("") not in engine.kv_snapshot()
