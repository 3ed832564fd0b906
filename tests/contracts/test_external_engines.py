"""The promises that every engine of others keeps.

They are the part of tests/contracts/test_engine.py that holds for engines with a cache, a scheduler and a KV transfer
of their own. A new engine joins with a `Kind` of its own. The tests run fakes with the shapes of the published APIs, a
worker attached to a fake server, and vLLM itself where KVMESH_VLLM_PYTHON asks for it.
"""

import asyncio
import itertools
import os
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import psutil
import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.protocol.errors import ContextLengthError, EngineError, InvalidRequestError, PeerLostError
from kvmesh.protocol.events import Cleared, Digest, KvEvent, Removed, Stored
from kvmesh.protocol.hashing import digest_term
from kvmesh.protocol.ids import RequestId, WorkerId, new_worker_id
from kvmesh.protocol.messages import (
    Delta,
    EmbedRequest,
    Feature,
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
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.engine import Engine, EngineInfo
from kvmesh.workers.engines.attached.engine import AttachedEngine
from kvmesh.workers.engines.sglang.engine import SglangEngine
from kvmesh.workers.engines.trtllm.engine import TrtllmEngine
from kvmesh.workers.engines.vllm.engine import VllmEngine
from tests.support.asking import asked
from tests.support.fake_servers import VllmServer, answer_to
from tests.support.fake_sglang import FakeSglang
from tests.support.fake_trtllm import FakeTrtllm
from tests.support.patience import PATIENCE_S
from tests.support.toy_model import next_token
from tests.support.vllm_mesh import ENV, FLAGS, needs_vllm

# vLLM, which takes half a minute to start, serves all tests of this module on one event loop
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

BLOCK = 16
MODEL_PATH = "/models/toy"
numbers = itertools.count()
ask = partial(asked, model="m")


@dataclass
class Started:
    """An engine, and what a test may do to what is behind it."""

    engine: Engine
    info: EngineInfo
    alone: Callable[[list[int], int], Awaitable[list[int]]]  # so many tokens after a prompt, without any of our code
    running: Callable[[], int]  # requests that the engine behind still works on
    seen: Callable[[], int]  # requests that have reached it, the warm-up aside
    transfers: Callable[[], int]  # of those, decode halves that were told to fetch
    hold: Callable[[], None]  # it computes nothing until...
    go_on: Callable[[], None]
    die: Callable[[], None]


class Kind:
    """Starts engines of one kind; they can reach each other."""

    first_token_comes_from = Role.PREFILL
    decodes_alone = True  # a decode worker can compute a prompt
    tells_cached_tokens = True
    fills_its_cache = True  # to the last block
    is_slow_to_start = False  # then one engine serves many tests, for as long as it is healthy

    async def start(self, role: Role) -> Started: ...

    async def close(self) -> None:
        """Free all, after the engines were stopped."""


async def toy(prompt: list[int], number: int) -> list[int]:
    sequence = list(prompt)
    for _ in range(number):
        sequence.append(next_token(sequence))
    return sequence[len(prompt) :]


def config_of(role: Role, **fields: Any) -> WorkerConfig:
    return WorkerConfig(**({"model_path": MODEL_PATH, "role": role, "block_size": BLOCK} | fields))


class SglangKind(Kind):
    first_token_comes_from = Role.DECODE
    decodes_alone = False

    def __init__(self, num_blocks: int, *, incremental: bool = True) -> None:
        self.fake = FakeSglang(num_blocks, incremental=incremental)

    def engine(self, role: Role) -> Engine:
        return SglangEngine(config_of(role, engine_args="--grammar-backend xgrammar"), "m", self.fake.package)

    async def start(self, role: Role) -> Started:
        engine = self.engine(role)
        info = await engine.start(new_worker_id("w"), "127.0.0.1:1")
        fake = self.fake.engines[-1]

        def die() -> None:
            fake.child_pids = [2**22 + 1]

        return Started(
            engine,
            info,
            alone=toy,
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

    def engine(self, role: Role) -> Engine:
        return TrtllmEngine(config_of(role, engine_args="--guided-decoding-backend xgrammar"), "m", self.fake.package)

    async def start(self, role: Role) -> Started:
        engine = self.engine(role)
        info = await engine.start(new_worker_id("w"), "127.0.0.1:1")
        fake = self.fake.llms[-1]
        return Started(
            engine,
            info,
            alone=toy,
            running=lambda: len(fake.running),
            seen=lambda: len(fake.seen),
            transfers=lambda: sum(request.is_generation_only for request in fake.seen),
            hold=fake.gate.clear,
            go_on=fake.gate.set,
            die=fake.die,
        )


class AttachedKind(Kind):
    """A stock vLLM server, as a fake. What it had cached servers tell, if at all, after the answer."""

    first_token_comes_from = Role.DECODE
    tells_cached_tokens = False

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._servers = AsyncExitStack()

    def engine(self, role: Role, url: str = "http://127.0.0.1:1") -> Engine:
        config = config_of(role, engine="attach", attach_url=url, model_path=str(CHECKPOINT_DIR))
        return AttachedEngine(config, poll_s=0.02, registry=CollectorRegistry())

    async def start(self, role: Role) -> Started:
        server = VllmServer("m", max_blocks=self._num_blocks)
        running = await self._servers.enter_async_context(AsyncExitStack())
        await running.enter_async_context(server.running())
        engine = self.engine(role, server.url)
        info = await engine.start(new_worker_id("w"), "127.0.0.1:1")
        probes = len(server.knobs.bodies)
        dying: list[asyncio.Task[None]] = []

        async def alone(prompt: list[int], number: int) -> list[int]:
            return answer_to(prompt, number)

        def hold() -> None:
            server.knobs.hold_after = 0

        def go_on() -> None:
            server.knobs.hold_after = None

        def die() -> None:
            for transport in server.knobs.connections:
                transport.abort()  # type: ignore[attr-defined]
            dying.append(asyncio.create_task(running.aclose()))

        return Started(
            engine,
            info,
            alone=alone,
            running=lambda: server.running_answers,
            seen=lambda: len(server.knobs.bodies) - probes,
            transfers=lambda: len(server.pulled),
            hold=hold,
            go_on=go_on,
            die=die,
        )

    async def close(self) -> None:
        await self._servers.aclose()


class VllmKind(Kind):
    """Real: its processes compute on this machine's CPU."""

    is_slow_to_start = True
    fills_its_cache = False

    def __init__(self, num_blocks: int) -> None:
        self._flags = [*FLAGS, "--num-gpu-blocks-override", str(num_blocks)]
        if num_blocks < 32:
            self._flags += ["--max-model-len", "256"]

    def engine(self, role: Role) -> VllmEngine:
        for name, value in ENV.items():
            os.environ[name] = value
        os.environ.pop("VLLM_NIXL_SIDE_CHANNEL_PORT", None)  # of the engine before: each has its own
        fields = {"engine": "vllm", "model_path": str(CHECKPOINT_DIR), "model": "m", "dtype": "float32"}
        return VllmEngine(WorkerConfig(**fields, role=role, engine_args=" ".join(self._flags)), "m")  # type: ignore[arg-type]

    async def start(self, role: Role) -> Started:
        not_its = set(psutil.Process().children(recursive=True))
        engine = self.engine(role)
        info = await engine.start(new_worker_id("w"), "127.0.0.1:1")
        its = [child for child in psutil.Process().children(recursive=True) if child not in not_its]
        computing = [process for process in its if process.name().startswith("VLLM")]
        assert computing
        driver = engine._driver
        assert driver is not None
        questions: list[Any] = []
        ask_vllm = driver.generate

        def spy(question: Any, *rest: Any) -> Any:
            questions.append(question)
            return ask_vllm(question, *rest)

        driver.generate = spy  # type: ignore[method-assign]
        llm: Any = driver._llm  # type: ignore[attr-defined]

        def send(number: signal.Signals) -> None:
            for process in computing:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)

        return Started(
            engine,
            info,
            alone=lambda prompt, number: vllm_alone(llm, prompt, number),
            running=lambda: int(llm.get_num_unfinished_requests()),
            seen=lambda: len(questions),
            transfers=lambda: sum(one.kv is not None and not one.offers for one in questions),
            hold=lambda: send(signal.SIGSTOP),
            go_on=lambda: send(signal.SIGCONT),
            die=lambda: send(signal.SIGKILL),
        )


async def vllm_alone(llm: Any, prompt: list[int], number: int) -> list[int]:
    """Apart from all that is cached."""
    from vllm import SamplingParams as VllmParams
    from vllm.inputs import TokensPrompt

    params = VllmParams(temperature=0.0, max_tokens=number, ignore_eos=True)
    told: list[int] = []
    inputs = TokensPrompt(prompt_token_ids=prompt, cache_salt=f"alone-{next(numbers)}")
    async for output in llm.generate(inputs, params, f"alone-{next(numbers)}"):
        told = list(output.outputs[0].token_ids)
    return told


KINDS: dict[str, Callable[[int], Any]] = {
    "sglang": SglangKind,
    "sglang-cumulative": lambda num_blocks: SglangKind(num_blocks, incremental=False),
    "trtllm": TrtllmKind,
    "attached": AttachedKind,
    "vllm": VllmKind,
}
NAMES = [pytest.param(name, marks=needs_vllm if name == "vllm" else ()) for name in KINDS]
Make = Callable[..., Awaitable[Started]]
Shared = dict[tuple[int, Role], Started]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Shared]:
    """Engines that are slow to start, by number of blocks and role."""
    engines: Shared = {}
    yield engines
    for started in engines.values():
        started.go_on()
        await started.engine.stop()


@pytest_asyncio.fixture(params=NAMES, loop_scope="module")
async def make(request: pytest.FixtureRequest, shared: Shared) -> AsyncIterator[Make]:
    engines: list[Engine] = []
    kinds: dict[int, Kind] = {}

    async def start(role: Role = Role.AGGREGATED, num_blocks: int = 256) -> Started:
        kind = kinds.setdefault(num_blocks, KINDS[request.param](num_blocks))
        if not kind.is_slow_to_start:
            started = await kind.start(role)
            engines.append(started.engine)
        elif (started := shared.get((num_blocks, role))) is None or not is_healthy(started.engine):
            if started is not None:
                await started.engine.stop()
            started = shared[num_blocks, role] = await kind.start(role)
        return started

    yield start
    for engine in engines:
        await engine.stop()
    for kind in kinds.values():
        await kind.close()


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> Kind:
    made: Kind = KINDS[request.node.callspec.params["make"]](1)
    return made


def is_healthy(engine: Engine) -> bool:
    try:
        engine.check_health()
    except EngineError:
        return False
    return True


def prompt_of(length: int, first: int = 100) -> bytes:
    return pack_tokens(tokens_of(length, first))


def tokens_of(length: int, first: int = 100) -> list[int]:
    return [(first + 7 * i) % 1900 + 10 for i in range(length)]


async def run(started: Started, request: GenerateRequest) -> list[Delta]:
    async with asyncio.timeout(PATIENCE_S), aclosing(started.engine.generate(request)) as deltas:
        return [delta async for delta in deltas]


def tokens(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


# --- answers ----------------------------------------------------------------------------------------------------------


async def test_an_answer_has_its_tokens_and_a_finish_reason(make: Make) -> None:
    started = await make()
    deltas = await run(started, ask(prompt_of(40), 12))
    assert tokens(deltas) == await started.alone(tokens_of(40), 12)
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert all(delta.finish_reason is None for delta in deltas[:-1])


async def test_requests_at_once_get_the_answers_they_get_alone(make: Make) -> None:
    started = await make()
    lengths = [1, 15, 16, 17, 40, 65, 150]
    together = await asyncio.gather(*(run(started, ask(prompt_of(n, n))) for n in lengths * 3))
    assert [tokens(deltas) for deltas in together] == [await started.alone(tokens_of(n, n), 12) for n in lengths] * 3
    assert started.running() == 0


async def test_one_request_id_twice_at_once_is_answered_twice(make: Make) -> None:
    started = await make()
    request = ask(prompt_of(20))
    both = await asyncio.gather(run(started, request), run(started, request))
    assert [tokens(deltas) for deltas in both] == [await started.alone(tokens_of(20), 12)] * 2


async def test_a_prefix_is_computed_once(make: Make, kind: Kind) -> None:
    started = await make()
    first = await run(started, ask(prompt_of(50, 501)))
    second = await run(started, ask(prompt_of(50, 501)))
    assert tokens(first) == tokens(second)
    if kind.tells_cached_tokens:
        full_blocks = 50 // started.info.block_size * started.info.block_size
        assert (first[0].cached_tokens, second[0].cached_tokens) == (0, full_blocks)


async def test_a_tenants_salt_keeps_its_prefixes_apart(make: Make, kind: Kind) -> None:
    started = await make()
    await run(started, ask(prompt_of(50, 502), cache_salt="a"))
    held = started.engine.kv_digest().blocks
    other = await run(started, ask(prompt_of(50, 502), cache_salt="b"))
    await until(lambda: started.engine.kv_digest().blocks > held)
    if kind.tells_cached_tokens:
        assert other[0].cached_tokens == 0


async def test_a_continued_answer_goes_on_as_it_would_have(make: Make) -> None:
    started = await make()
    whole = await started.alone(tokens_of(40), 12)
    rest = await run(started, ask(prompt_of(40), generated=tuple(whole[:5])))
    assert tokens(rest) == whole[5:]


async def test_a_stop_token_is_the_end_of_the_answer(make: Make) -> None:
    started = await make()
    whole = await started.alone(tokens_of(40), 12)
    stop = StopConditions(max_tokens=12, ignore_eos=True, stop_token_ids=(whole[3],))
    deltas = await run(started, ask(prompt_of(40), stop=stop))
    assert tokens(deltas) == whole[:4]
    assert (deltas[-1].finish_reason, deltas[-1].stop_token) == (FinishReason.STOP, whole[3])


@pytest.mark.parametrize("top", [0, 1, 3])
async def test_each_token_has_its_logprob_and_the_top(make: Make, top: int) -> None:
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
    assert tokens(got) == await started.alone(tokens_of(40), 30)


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
    """Answer as kvmesh.frontend.dispatch does: release the ticket with the first delta of the decode worker."""
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
    assert tokens(deltas) == await decoder.alone(tokens_of(length), 12)
    assert deltas[0].ticket is not None
    assert deltas[1].pull is not None
    await until(lambda: prefiller.running() == decoder.running() == prefiller.engine.load().offers == 0)


async def test_an_answer_that_migrates_is_split_like_a_new_one(make: Make) -> None:
    whole = await (await make(Role.PREFILL)).alone(tokens_of(40), 12)
    deltas, _, _ = await split(make, ask(prompt_of(40), generated=tuple(whole[:5])))
    assert tokens(deltas) == whole[5:]


async def test_an_answer_of_one_token_is_whole(make: Make) -> None:
    deltas, prefiller, _ = await split(make, ask(prompt_of(20), 1))
    assert tokens(deltas) == await prefiller.alone(tokens_of(20), 1)
    assert deltas[-1].finish_reason is FinishReason.LENGTH


async def test_the_first_token_comes_from_one_half_alone(make: Make, kind: Kind) -> None:
    deltas, _, _ = await split(make, ask(prompt_of(20)))
    assert bool(deltas[0].token_ids) == (kind.first_token_comes_from is Role.PREFILL)


async def test_a_ticket_that_was_not_delivered_is_taken_back(make: Make) -> None:
    prefiller = await make(Role.PREFILL)
    async with aclosing(prefiller.engine.generate(ask(prompt_of(50), offer_kv=True))) as deltas:
        assert (await anext(deltas)).ticket is not None
    await until(lambda: prefiller.engine.load().offers == prefiller.running() == 0)


async def test_the_two_halves_cards_name_the_same_transfer(make: Make) -> None:
    prefiller, decoder, whole = await make(Role.PREFILL), await make(Role.DECODE), await make()
    assert prefiller.info.transfer == decoder.info.transfer != ""
    assert whole.info.transfer == ""


def bad_tickets(good: Ticket) -> dict[str, Ticket]:
    replace = msgspec.structs.replace
    return {
        "of another engine": replace(good, backend="shm"),
        "empty": replace(good, opaque=b""),
        "no object": replace(good, opaque=b"[]"),
        "cut off": replace(good, opaque=good.opaque[:-3]),
        "huge": replace(good, opaque=good.opaque + b" " * (8 << 20)),
        "not text": replace(good, opaque=b"\xff\xfe\xfd"),
    }


@pytest.mark.parametrize("what", ["of another engine", "empty", "no object", "cut off", "huge", "not text"])
async def test_a_ticket_that_is_none_never_reaches_the_engine(make: Make, kind: Kind, what: str) -> None:
    prefiller, decoder = await make(Role.PREFILL), await make(Role.DECODE)
    seen, transfers = decoder.seen(), decoder.transfers()
    request = ask(prompt_of(30))
    [first] = await run(prefiller, msgspec.structs.replace(request, offer_kv=True))
    assert first.ticket is not None
    request = msgspec.structs.replace(request, generated=first.token_ids, ticket=bad_tickets(first.ticket)[what])
    if kind.decodes_alone:
        rest = await run(decoder, request)
        assert rest[0].pull is not None
        assert re.search("ticket|state|kv_transfer_params", rest[0].pull.error)
        assert tokens([first, *rest]) == await decoder.alone(tokens_of(30), 12)
    else:
        with pytest.raises(EngineError, match=r"ticket|bootstrap"):
            await run(decoder, request)
        assert decoder.seen() == seen
    assert decoder.transfers() == transfers
    decoder.engine.check_health()


async def test_without_a_ticket_a_decoder_computes_or_says_why(make: Make, kind: Kind) -> None:
    decoder = await make(Role.DECODE)
    if kind.decodes_alone:
        assert tokens(await run(decoder, ask(prompt_of(30)))) == await decoder.alone(tokens_of(30), 12)
        return
    with pytest.raises(EngineError, match="prefill worker"):
        await run(decoder, ask(prompt_of(30)))


# --- events -----------------------------------------------------------------------------------------------------------


async def test_events_tell_what_the_engine_caches_through_evictions(make: Make, kind: Kind) -> None:
    started = await make(num_blocks=16)
    followed: list[KvEvent] = []
    started.engine.on_kv_events(followed.extend)
    for i in range(6):
        await run(started, ask(prompt_of(100, 31 * i)))
    await run(started, ask(prompt_of(33, 777)))
    await until(lambda: any(isinstance(event, Removed) for event in followed))
    if kind.fills_its_cache:
        await until(lambda: len(names(followed)) == 16)
    held = names(followed)
    assert 0 < len(held) <= 16
    assert held == names(started.engine.kv_snapshot())
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


async def test_a_missing_feature_is_refused_before_the_engine(make: Make) -> None:
    started = await make()
    seen = started.seen()
    if Feature.ALLOWED_TOKENS not in started.info.features:
        sampling = SamplingParams(allowed_token_ids=(5,))
        with pytest.raises(InvalidRequestError, match="cannot honour allowed_token_ids"):
            await run(started, ask(prompt_of(20), sampling=sampling))
    with pytest.raises(InvalidRequestError, match="no adapter 'painter'"):
        await run(started, ask(prompt_of(20), lora="painter"))
    with pytest.raises(InvalidRequestError, match="empty"):
        await run(started, ask(b""))
    context_tokens = started.info.context_tokens
    with pytest.raises(ContextLengthError, match=f"has {context_tokens} tokens"):
        await run(started, ask(prompt_of(context_tokens)))
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


async def test_a_dead_engine_fails_its_requests_and_its_health(make: Make) -> None:
    started = await make()
    started.hold()
    answer = asyncio.create_task(run(started, ask(prompt_of(50))))
    await until(lambda: started.running() == 1)
    started.die()
    await until(lambda: not is_healthy(started.engine))
    with pytest.raises((EngineError, PeerLostError)):
        await answer
    with pytest.raises(EngineError):
        await run(started, ask(prompt_of(50)))


@pytest.mark.parametrize("name", NAMES)
async def test_an_engine_that_has_not_started_is_not_healthy(name: str) -> None:
    engine = KINDS[name](256).engine(Role.AGGREGATED)
    with pytest.raises(EngineError, match="not started"):
        engine.check_health()
    assert engine.load().running == 0
    assert WorkerId("") not in engine.kv_snapshot()
    await engine.stop()
