"""The mesh gets what vLLM computes and is spared its quirks: with a fake in vLLM's place."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from kvmesh.protocol.errors import ConfigError, DrainingError, EngineError, InvalidRequestError
from kvmesh.protocol.events import Cleared, Digest, KvEvent, Removed, Stored
from kvmesh.protocol.hashing import hash_seed, sequence_hashes
from kvmesh.protocol.ids import EngineHash, RequestId, WorkerId
from kvmesh.protocol.kv_content import PENDING
from kvmesh.protocol.messages import (
    Control,
    ControlAction,
    Delta,
    EmbedRequest,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    StopConditions,
    pack_tokens,
)
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.engine import Controllable, EngineInfo
from kvmesh.workers.engines.vllm.driver import LoadedAdapter
from kvmesh.workers.engines.vllm.engine import VllmEngine
from tests.support.fake_vllm import BLOCK, FakeVllm, token_after
from tests.support.patience import PATIENCE_S

PROMPT = list(range(100, 170))


@dataclass
class Running:
    engine: VllmEngine
    vllm: FakeVllm
    info: EngineInfo
    events: list[KvEvent] = field(default_factory=list)


Start = Callable[..., Awaitable[Running]]


@pytest_asyncio.fixture
async def start() -> AsyncIterator[Start]:
    started: list[VllmEngine] = []

    async def start(**settings: Any) -> Running:
        fakes: list[FakeVllm] = []
        guesses = settings.pop("guesses", False)

        def open_fake(flags: Sequence[str], environ: Mapping[str, str]) -> FakeVllm:
            fakes.append(FakeVllm(flags, environ))
            fakes[0].facts = replace(fakes[0].facts, guesses=guesses)
            return fakes[0]

        config = msgspec.convert({"model_path": "/models/m", **settings}, WorkerConfig)
        engine = VllmEngine(config, "m", open_fake)
        started.append(engine)
        info = await engine.start(WorkerId("w"), "127.0.0.1:1")
        running = Running(engine, fakes[0], info)
        running.vllm.asked.clear()
        engine.on_kv_events(running.events.extend)
        return running

    yield start
    for engine in started:
        await engine.stop()


def ask(max_tokens: int = 6, **fields: Any) -> GenerateRequest:
    defaults: dict[str, Any] = {
        "request_id": RequestId("r"),
        "model": "m",
        "prompt": pack_tokens(PROMPT),
        "sampling": SamplingParams(temperature=0),
        "stop": StopConditions(max_tokens=max_tokens, ignore_eos=True),
    }
    return GenerateRequest(**(defaults | fields))


async def run(engine: VllmEngine, request: GenerateRequest) -> list[Delta]:
    async with asyncio.timeout(PATIENCE_S):
        return [delta async for delta in engine.generate(request)]


def tokens(deltas: Sequence[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def answer_to(prompt: Sequence[int], count: int) -> list[int]:
    all_tokens = list(prompt)
    for _ in range(count):
        all_tokens.append(token_after(all_tokens))
    return all_tokens[len(prompt) :]


async def test_an_answer_is_streamed_and_has_a_finish_reason(start: Start) -> None:
    running = await start()
    deltas = await run(running.engine, ask(6))
    assert tokens(deltas) == answer_to(PROMPT, 6)
    assert [delta.finish_reason for delta in deltas] == [None] * 5 + [FinishReason.LENGTH]
    assert running.engine.load().running == running.engine.load().waiting == 0


async def test_speculative_vllm_refuses_a_logit_bias_by_name(start: Start) -> None:
    """Routers read it on the card, where vLLM itself would refuse a request only once it is there."""
    biased = ask(6, sampling=SamplingParams(temperature=0, logit_bias=((100, 5.0),)))
    assert len(await run((await start()).engine, biased)) == 6
    guessing = await start(guesses=True)
    with pytest.raises(InvalidRequestError, match="logit_bias"):
        await run(guessing.engine, biased)
    assert not guessing.vllm.asked


async def test_closing_the_answer_aborts_it(start: Start) -> None:
    running = await start()
    async with aclosing(running.engine.generate(ask(6))) as deltas:
        await anext(deltas)
        running.vllm.may_go_on.clear()
        assert running.engine.load().waiting == 1
    assert running.vllm.closed_early == 1
    assert running.engine.load().waiting == 0


async def test_a_decode_leg_uses_a_prefill_legs_ticket(start: Start) -> None:
    prefill, decode = await start(role="prefill"), await start(role="decode")
    [first] = await run(prefill.engine, ask(6, offer_kv=True))
    assert first.ticket is not None
    assert (first.finish_reason, first.ticket.backend, first.ticket.num_tokens) == (None, "vllm-nixl", len(PROMPT))
    assert prefill.info.transfer == "vllm-nixl"
    deltas = await run(decode.engine, ask(6, generated=first.token_ids, ticket=first.ticket))
    assert [*first.token_ids, *tokens(deltas)] == answer_to(PROMPT, 6)
    [question] = decode.vllm.asked
    assert question.kv is not None
    assert question.kv["remote_engine_id"] == "engine"
    assert deltas[0].pull is not None
    assert (deltas[0].pull.num_blocks, deltas[0].pull.num_bytes, deltas[0].pull.error) == (3, 3 * 1024, "")


async def test_an_offer_stands_until_its_holder_releases_it(start: Start) -> None:
    running = await start(role="prefill")
    [delta] = await run(running.engine, ask(6, offer_kv=True))
    assert delta.ticket is not None
    running.engine.release(delta.ticket.offer_id, delta.ticket.nonce + 1)
    assert running.engine.load().offers == 1
    running.engine.release(delta.ticket.offer_id, delta.ticket.nonce)
    assert running.engine.load().offers == 0


async def test_a_pull_that_fails_costs_time_alone(start: Start) -> None:
    prefill, decode = await start(role="prefill"), await start(role="decode")
    [first] = await run(prefill.engine, ask(6, offer_kv=True))
    decode.vllm.pull_fails = True
    deltas = await run(decode.engine, ask(6, generated=first.token_ids, ticket=first.ticket))
    assert [*first.token_ids, *tokens(deltas)] == answer_to(PROMPT, 6)
    assert deltas[0].pull is not None
    assert "'error'" in deltas[0].pull.error
    assert [question.kv is None for question in decode.vllm.asked] == [False, True]


async def test_a_pull_that_does_not_end_is_given_up(start: Start) -> None:
    prefill, decode = await start(role="prefill"), await start(role="decode", pull_timeout_s=0.05)
    [first] = await run(prefill.engine, ask(6, offer_kv=True))
    decode.vllm.pull_may_end.clear()
    deltas = await run(decode.engine, ask(6, generated=first.token_ids, ticket=first.ticket))
    assert [*first.token_ids, *tokens(deltas)] == answer_to(PROMPT, 6)
    assert deltas[0].pull is not None
    assert "longer than 0.05 s" in deltas[0].pull.error
    assert decode.vllm.closed_early == 1, "vLLM was told that nobody waits for it"
    assert [question.kv is None for question in decode.vllm.asked] == [False, True]


async def test_a_client_that_leaves_ends_its_pull(start: Start) -> None:
    prefill, decode = await start(role="prefill"), await start(role="decode")
    [first] = await run(prefill.engine, ask(6, offer_kv=True))
    decode.vllm.pull_may_end.clear()
    answer = asyncio.create_task(run(decode.engine, ask(6, generated=first.token_ids, ticket=first.ticket)))
    while not decode.vllm.asked:
        await asyncio.sleep(0)
    answer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answer
    assert decode.vllm.closed_early == 1
    assert [question.kv is None for question in decode.vllm.asked] == [False]


@pytest.mark.parametrize(
    "harm",
    [
        {"opaque": b'{"do_remote_prefill": true}'},
        {"opaque": b"\xff"},
        {"num_tokens": 5},
        {"backend": "nixl"},
    ],
)
async def test_a_ticket_that_could_kill_vllm_never_reaches_it(start: Start, harm: dict[str, Any]) -> None:
    prefill, decode = await start(role="prefill"), await start(role="decode")
    [first] = await run(prefill.engine, ask(6, offer_kv=True))
    assert first.ticket is not None
    ticket = msgspec.structs.replace(first.ticket, **harm)
    deltas = await run(decode.engine, ask(6, generated=first.token_ids, ticket=ticket))
    assert [*first.token_ids, *tokens(deltas)] == answer_to(PROMPT, 6)
    assert [question.kv for question in decode.vllm.asked] == [None]
    assert deltas[0].pull is not None
    assert deltas[0].pull.error


async def test_another_first_token_continues_after_the_given_one(start: Start) -> None:
    prefill, decode = await start(role="prefill"), await start(role="decode")
    [first] = await run(prefill.engine, ask(6, offer_kv=True))
    decode.vllm.first_pulled = 1
    deltas = await run(decode.engine, ask(6, generated=first.token_ids, ticket=first.ticket))
    assert [*first.token_ids, *tokens(deltas)] == answer_to(PROMPT, 6)
    assert decode.vllm.closed_early == 1


async def test_an_aggregated_worker_offers_nothing(start: Start) -> None:
    with pytest.raises(InvalidRequestError, match="no KV transfer"):
        await run((await start()).engine, ask(offer_kv=True))


async def test_the_death_of_vllm_is_the_death_of_the_worker(start: Start) -> None:
    running = await start()
    running.vllm.dead = "it was killed"
    with pytest.raises(EngineError, match="it was killed"):
        running.engine.check_health()
    with pytest.raises(EngineError):
        await run(running.engine, ask())


async def test_stopping_ends_vllm_once_and_leaves_no_files(start: Start) -> None:
    running = await start()
    folder = Path(
        json.loads(running.vllm.flags[running.vllm.flags.index("--kv-events-config") + 1])["endpoint"][6:]
    ).parent
    assert folder.is_dir()
    await running.engine.stop()
    await running.engine.stop()
    assert running.vllm.calls.count("close") == 1
    assert not folder.exists()


async def test_a_vector_comes_from_where_there_are_embeddings(start: Start) -> None:
    request = EmbedRequest(request_id=RequestId("e"), model="m", prompt=pack_tokens(PROMPT))
    assert (await (await start()).engine.embed(request)).vector == bytes(4)


# --- what it caches ---------------------------------------------------------------------------------------


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0)


async def test_what_vllm_stores_is_announced_under_our_names_once(start: Start) -> None:
    running = await start()
    [first, second] = sequence_hashes(PROMPT, BLOCK)
    copies = Stored((EngineHash(1), EngineHash(2)), None, tuple(PROMPT[:64]), BLOCK)
    running.vllm.tell(copies, copies, Removed((EngineHash(2),)))
    await until(lambda: bool(running.events))
    assert running.events == [Stored((EngineHash(first), EngineHash(second)), None, tuple(PROMPT[:64]), BLOCK)]
    assert running.engine.kv_digest().blocks == 2
    assert running.engine.kv_snapshot() == running.events
    running.vllm.tell(Removed((EngineHash(2),)))
    await until(lambda: len(running.events) == 2)
    assert running.events[1] == Removed((EngineHash(second),))
    running.vllm.tell(Cleared())
    await until(lambda: running.engine.kv_digest() == Digest(0, 0))


# --- what operators ask -----------------------------------------------------------------------------------


def control(action: ControlAction, **arguments: str) -> Control:
    return Control(action=action, arguments=arguments)


async def test_operators_can_control_it(start: Start) -> None:
    running = await start()
    assert isinstance(running.engine, Controllable)
    with pytest.raises(InvalidRequestError, match="reset together"):
        await running.engine.control(control(ControlAction.RESET_PREFIX_CACHE, tiers="host"))
    await running.engine.control(control(ControlAction.RESET_PREFIX_CACHE))
    assert running.vllm.calls == ["reset"]


async def test_a_worker_that_sleeps_takes_no_request_until_it_wakes(start: Start) -> None:
    running = await start()
    await running.engine.control(control(ControlAction.SLEEP, level="2"))
    with pytest.raises(DrainingError, match="wake"):
        await run(running.engine, ask())
    await running.engine.control(control(ControlAction.WAKE))
    assert len(tokens(await run(running.engine, ask(6)))) == 6
    assert running.vllm.calls == ["sleep 2", "wake"]


def write_adapter(folder: Path, weights: bytes = b"weights") -> str:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return str(folder)


async def load(running: Running, path: str) -> LoadedAdapter:
    """Load the adapter as `poet`; return what vLLM is asked with."""
    reply = await running.engine.control(control(ControlAction.LOAD_LORA, name="poet", path=path))
    assert reply.loras == ("poet",)
    await run(running.engine, ask(lora="poet"))
    adapter = running.vllm.adapters[-1]
    assert adapter is not None
    return adapter


async def unload(running: Running) -> None:
    assert (await running.engine.control(control(ControlAction.UNLOAD_LORA, name="poet"))).loras == ()


async def test_adapters_come_and_go(start: Start, tmp_path: Path) -> None:
    running = await start()
    adapter = await load(running, write_adapter(tmp_path / "poet"))
    assert adapter.name.startswith("poet@")
    assert adapter.path == str(tmp_path / "poet")
    await unload(running)
    assert running.vllm.calls == [f"remove {adapter.number}"]
    with pytest.raises(InvalidRequestError, match="no adapter 'poet'"):
        await run(running.engine, ask(lora="poet"))


async def test_an_adapter_that_cannot_be_loaded_is_never_asked_for(start: Start, tmp_path: Path) -> None:
    running = await start()
    running.vllm.unloadable = write_adapter(tmp_path / "nope")
    for path, message in ((running.vllm.unloadable, "no adapter there"), ("/nowhere", "cannot load adapter 'poet'")):
        with pytest.raises(InvalidRequestError, match=message):
            await running.engine.control(control(ControlAction.LOAD_LORA, name="poet", path=path))
    with pytest.raises(InvalidRequestError, match="no adapter 'poet'"):
        await run(running.engine, ask(lora="poet"))


async def test_the_card_tells_adapters_of_one_name_apart(start: Start, tmp_path: Path) -> None:
    found = []
    for weights in (b"one", b"one", b"two"):
        engine = (await start()).engine
        path = write_adapter(tmp_path / "poet", weights)
        await engine.control(control(ControlAction.LOAD_LORA, name="poet", path=path))
        found.append(engine.kv_content())
    assert found[0] == found[1]
    assert found[0].of("poet") != found[2].of("poet")
    assert found[0].of(None) == found[2].of(None) not in ("", PENDING)
    await engine.control(control(ControlAction.UNLOAD_LORA, name="poet"))
    assert engine.kv_content().adapters == ()


@pytest.mark.parametrize("level", ["1", "2"])
async def test_weights_are_read_again_after_a_deep_sleep_alone(start: Start, tmp_path: Path, level: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"one")
    engine = (await start(model_path=str(tmp_path))).engine
    before = engine.kv_content().fingerprint
    await engine.control(control(ControlAction.SLEEP, level=level))
    (tmp_path / "model.safetensors").write_bytes(b"two")
    await engine.control(control(ControlAction.WAKE))
    assert (engine.kv_content().fingerprint != before) == (level == "2")
    assert engine.kv_content().fingerprint != PENDING


async def test_kv_of_other_weights_never_reaches_vllm(start: Start, tmp_path: Path) -> None:
    tickets = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.safetensors").write_text(name)
        prefill = await start(role="prefill", model_path=str(folder))
        [first] = await run(prefill.engine, ask(6, offer_kv=True))
        assert first.ticket is not None
        tickets.append(msgspec.structs.replace(first.ticket, content=prefill.engine.kv_content().of(None)))
    decode = await start(role="decode", model_path=str(tmp_path / "one"))
    for ticket, error in zip(tickets, ("", "offers KV of another content"), strict=True):
        deltas = await run(decode.engine, ask(6, generated=first.token_ids, ticket=ticket))
        assert [*first.token_ids, *tokens(deltas)] == answer_to(PROMPT, 6)
        assert deltas[0].pull is not None
        assert error in deltas[0].pull.error
    assert [question.kv is None for question in decode.vllm.asked] == [False, True]


async def test_vllm_knows_an_adapter_by_its_content(start: Start, tmp_path: Path) -> None:
    """Other weights in the same folder and under the same name are another adapter; the same weights are the same."""
    running, folder = await start(), tmp_path / "poet"
    adapters = []
    for weights in (b"old", b"new", b"old"):
        adapters.append(await load(running, write_adapter(folder, weights)))
        await unload(running)
    old, new, again = adapters
    assert old.name == again.name != new.name
    assert len({adapter.number for adapter in adapters}) == 3, "vLLM reads the files again"


async def test_blocks_of_an_adapters_old_weights_are_not_announced(start: Start, tmp_path: Path) -> None:
    running, folder = await start(), tmp_path / "poet"
    [name] = sequence_hashes(PROMPT[:BLOCK], BLOCK, hash_seed("poet"))

    def stored(adapter: LoadedAdapter, key: int) -> Stored:
        return Stored((EngineHash(key),), None, tuple(PROMPT[:BLOCK]), BLOCK, lora=adapter.name)

    old = await load(running, write_adapter(folder, b"old"))
    running.vllm.tell(stored(old, 1))
    announced = Stored((EngineHash(name),), None, tuple(PROMPT[:BLOCK]), BLOCK, lora="poet")
    await until(lambda: running.events == [announced])
    await unload(running)
    new = await load(running, write_adapter(folder, b"new"))
    assert running.events[1:] == [Removed((EngineHash(name),))]
    assert running.engine.kv_snapshot() == []
    running.vllm.tell(stored(old, 2))  # late
    running.vllm.tell(stored(new, 3))
    await until(lambda: running.events[-1] == announced)
    assert [event for event in running.engine.kv_snapshot() if isinstance(event, Stored) and event.lora == "poet"] == [
        announced
    ]


async def test_an_answer_keeps_its_adapter_until_it_ends(start: Start, tmp_path: Path) -> None:
    running = await start()
    adapter = await load(running, write_adapter(tmp_path / "poet"))
    async with aclosing(running.engine.generate(ask(6, lora="poet"))) as deltas:
        await anext(deltas)
        await unload(running)
        assert running.vllm.calls == []
        with pytest.raises(InvalidRequestError, match="no adapter 'poet'"):
            await run(running.engine, ask(lora="poet"))
    await until(lambda: running.vllm.calls == [f"remove {adapter.number}"])


async def test_vllm_reads_no_adapter_again_whose_files_have_changed(start: Start, tmp_path: Path) -> None:
    running, folder = await start(), tmp_path / "poet"
    await load(running, write_adapter(folder, b"old"))
    write_adapter(folder, b"new")
    await run(running.engine, ask(lora="poet"))
    running.vllm.facts = replace(running.vllm.facts, kept_adapters=0)
    with pytest.raises(InvalidRequestError, match="have changed since it was loaded"):
        await run(running.engine, ask(lora="poet"))


async def test_no_kv_is_pulled_for_an_adapter_with_other_weights(start: Start, tmp_path: Path) -> None:
    prefill, decode = await start(role="prefill"), await start(role="decode")
    await load(prefill, write_adapter(tmp_path / "poet", b"old"))
    await load(decode, write_adapter(tmp_path / "poet", b"new"))
    [first] = await run(prefill.engine, ask(6, offer_kv=True, lora="poet"))
    assert first.ticket is not None
    ticket = msgspec.structs.replace(first.ticket, content=prefill.engine.kv_content().of("poet"))
    deltas = await run(decode.engine, ask(6, generated=first.token_ids, ticket=ticket, lora="poet"))
    assert deltas[0].pull is not None
    assert "offers KV of another content" in deltas[0].pull.error
    assert decode.vllm.asked[-1].kv is None


async def test_thousands_of_loads_leave_nothing_behind(start: Start, tmp_path: Path) -> None:
    running, folder = await start(), tmp_path / "poet"
    write_adapter(folder)
    adapters = running.engine._loaded
    for number in range(2000):
        (folder / "adapter_model.safetensors").write_bytes(b"%d" % number)
        await adapters.load("poet", str(folder))
        await adapters.unload("poet")
    assert not (adapters._served or adapters._requests or adapters._unloaded or adapters._removals)
    assert len(running.engine._caches[0]._cache._served) == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "request_",
    [
        control(ControlAction.SLEEP, level="3"),
        control(ControlAction.LOAD_LORA, name="poet"),
        control(ControlAction.LOAD_LORA, name="m", path="/m"),
        control(ControlAction.UNLOAD_LORA, name="poet"),
        control(ControlAction.START_PROFILE),
    ],
)
async def test_what_cannot_be_done_is_refused(start: Start, request_: Control) -> None:
    with pytest.raises(InvalidRequestError):
        await (await start()).engine.control(request_)


def test_an_adapter_says_its_rank_before_vllm_is_started(tmp_path: Path) -> None:
    config = WorkerConfig(model_path="/m", engine="vllm", loras=f"poet={tmp_path}")
    with pytest.raises(ConfigError, match="'poet' cannot be read"):
        VllmEngine(config, "m")


async def test_who_is_served_when_it_stops_is_told_so(start: Start) -> None:
    running = await start()
    running.vllm.may_go_on.clear()
    answer = asyncio.create_task(run(running.engine, ask(6)))
    async with asyncio.timeout(PATIENCE_S):
        while not running.vllm.asked:
            await asyncio.sleep(0)
    await running.engine.stop()
    with pytest.raises(EngineError, match="stopping"):
        await answer


async def test_a_ticket_that_nobody_took_is_no_offer(start: Start) -> None:
    running = await start(role="prefill")
    async with aclosing(running.engine.generate(ask(6, offer_kv=True))) as deltas:
        assert (await anext(deltas)).ticket is not None
        assert running.engine.load().offers == 1
    assert running.engine.load().offers == 0


# --- data-parallel ranks --------------------------------------------------------------------------------


def stored(name: int, first: int) -> Stored:
    return Stored((EngineHash(name),), None, tuple(range(first, first + BLOCK)), BLOCK)


async def test_a_request_runs_on_the_rank_that_the_router_chose(start: Start) -> None:
    running = await start(dp_size=2)
    assert (running.info.dp_size, running.info.total_blocks, running.engine.load().total_blocks) == (2, 64, 128)
    assert running.vllm.ranks == [0, 1], "each is warmed up"
    await run(running.engine, ask(2, dp_rank=1))
    await run(running.engine, ask(2))
    assert running.vllm.ranks[2:] == [1, 0]
    with pytest.raises(InvalidRequestError, match="there is no rank 2 here; there are 2"):
        await run(running.engine, ask(2, dp_rank=2))


async def test_each_rank_tells_what_it_caches_itself(start: Start) -> None:
    running = await start(dp_size=2)
    first, second = running.engine.ranks
    heard: dict[int, list[KvEvent]] = {0: [], 1: []}
    first.on_kv_events(heard[0].extend)
    second.on_kv_events(heard[1].extend)
    running.vllm.tell(stored(1, 100), rank=1)
    await until(lambda: len(heard[1]) == 1)
    assert (heard[0], first.kv_digest().blocks, second.kv_digest().blocks) == ([], 0, 1)
    assert second.kv_snapshot() == heard[1]
    running.vllm.tell(stored(2, 300), rank=0)
    await until(lambda: len(heard[0]) == 1)
    assert running.events == heard[0], "who knows of no ranks hears the first"
    assert running.engine.load().cached_blocks == 2


async def test_the_load_of_all_ranks_is_the_workers(start: Start) -> None:
    running = await start(dp_size=2)
    running.vllm.may_go_on.clear()
    async with (
        aclosing(running.engine.generate(ask(6, dp_rank=0))) as one,
        aclosing(running.engine.generate(ask(6, dp_rank=1))) as other,
    ):
        await asyncio.gather(anext(one), anext(other))
        for told, share in zip(running.vllm.loads, (0.25, 0.5), strict=True):
            told.running, told.used_share = 1, share
        load = running.engine.load()
        assert (load.running, load.waiting, load.used_blocks) == (2, 0, 16 + 32)
