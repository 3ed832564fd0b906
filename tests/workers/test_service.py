"""A worker tells what it is, answers its calls, and can be stopped while it starts."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import generate_latest

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.mesh.config import load
from kvmesh.mesh.lifecycle import unless_stopped
from kvmesh.protocol.errors import ConfigError, InvalidRequestError
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.kv_content import PENDING
from kvmesh.protocol.messages import (
    Delta,
    Embedding,
    EmbedRequest,
    Feature,
    GenerateRequest,
    Role,
    SamplingParams,
    StopConditions,
    Ticket,
    WorkerCard,
    decode,
    encode,
    pack_tokens,
)
from kvmesh.protocol.profile import DecodeTable, PrefillTable, Profile
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.engine import Engine, EngineInfo
from kvmesh.workers.engines.mock.answers import mock_token, mock_vector
from kvmesh.workers.engines.opening import open_engine
from kvmesh.workers.loaded_content import KnowsContent, with_ticket_content
from kvmesh.workers.membership import make_card
from kvmesh.workers.metrics import forget_load, watch_load
from kvmesh.workers.names import with_name
from kvmesh.workers.service import Readiness, Worker, configs_of
from tests.support.patience import PATIENCE_S
from tests.support.place import FakePlace

PROMPT = [5, 6, 7]


class Call:
    """A call as the request plane hands it over."""

    def __init__(self, message: object) -> None:
        self.body = encode(message)
        self.sent: list[Any] = []

    async def send(self, message: object) -> None:
        self.sent.append(message)

    def offer(self, message: object) -> bool:
        self.sent.append(message)
        return True


def config(**settings: Any) -> WorkerConfig:
    values = {"engine": "mock", "model_path": str(CHECKPOINT_DIR), "model": "tiny", "mock_speedup": 0.0}
    return WorkerConfig(**{**values, "kv_transfer": "shm", **settings})


@pytest.fixture
async def engine() -> Any:
    made = open_engine(config(loras="poet, critic"))
    yield made
    await made.stop()


async def ready(engine: Engine, role: Role = Role.AGGREGATED) -> Worker:
    worker = Worker(engine, FakePlace(role))
    worker.info = await engine.start(WorkerId("w"), "127.0.0.1:1")
    return worker


def text(**fields: Any) -> EmbedRequest:
    return EmbedRequest(**{"request_id": RequestId("e"), "model": "tiny", "prompt": pack_tokens(PROMPT), **fields})


def question(**fields: Any) -> GenerateRequest:
    values = {"request_id": RequestId("r"), "model": "tiny", "prompt": pack_tokens(PROMPT)}
    return GenerateRequest(**{**values, "stop": StopConditions(max_tokens=3), **fields})


async def test_the_card_has_the_engines_features_and_the_models_parsers(engine: Engine) -> None:
    settings = config(name="n", loras="poet, critic", tool_parser="hermes", reasoning_parser="qwen3")
    info = await engine.start(WorkerId("w"), "127.0.0.1:1")
    publisher: Any = SimpleNamespace(endpoint="tcp://h:1", replay_endpoint="tcp://h:2")
    card = make_card(settings, WorkerId("w"), Role.DECODE, info, "h:3", [publisher], "")
    assert (card.name, card.role, card.kv_events, card.rank_kv_events) == ("n", Role.DECODE, "tcp://h:1", ())
    assert set(card.features) == {
        Feature.COMPLETIONS, Feature.LOGPROBS, Feature.PROMPT_LOGPROBS, Feature.EMBEDDINGS
    }  # fmt: skip
    assert card.loras == ("poet", "critic")
    assert (card.tool_parser, card.reasoning_parser) == ("hermes", "qwen3")


async def test_capacity_comes_from_the_settings_or_else_the_profile(tmp_path: Path) -> None:
    tables = {"isl_tokens": [1, 9], "ttft_s": [0.0, 0.0]}, {"kv_tokens": [1], "context_tokens": [1], "itl_s": [[0.0]]}
    profile = Profile(
        model="tiny",
        engine="mock",
        device="none",
        prefill=msgspec.convert(tables[0], PrefillTable),
        decode=msgspec.convert(tables[1], DecodeTable),
        total_kv_tokens=1024,
        capacity=4.0,
    )
    file = tmp_path / "profile.json"
    file.write_bytes(msgspec.json.encode(profile))

    async def capacity(**settings: Any) -> float:
        engine = open_engine(config(**settings))
        info = await engine.start(WorkerId("w"), "127.0.0.1:1")
        await engine.stop()
        publisher: Any = SimpleNamespace(endpoint="tcp://h:1", replay_endpoint="tcp://h:2")
        card = make_card(config(**settings), WorkerId("w"), Role.DECODE, info, "h:3", [publisher], "")
        return decode(encode(card), WorkerCard).capacity

    assert await capacity() == 1.0
    assert await capacity(mock_profile=str(file)) == 4.0
    assert await capacity(mock_profile=str(file), capacity=2.0) == 2.0


@pytest.mark.parametrize("given", ["0", "-1", "1000", "nan", "fast"])
def test_a_capacity_out_of_bounds_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="--capacity"):
        load(WorkerConfig, ["--model-path", "m", "--capacity", given], {}, prefix="X_", prog="workers")


async def test_embed_is_answered_with_one_vector(engine: Engine) -> None:
    worker = await ready(engine)
    plain, poetic = Call(text()), Call(text(lora="poet"))
    await worker.handlers()["embed"](plain)  # type: ignore[arg-type]
    await worker.handlers()["embed"](poetic)  # type: ignore[arg-type]
    assert plain.sent == [Embedding(vector=mock_vector(PROMPT))]
    assert poetic.sent == [Embedding(vector=mock_vector(PROMPT, "poet"))]


async def test_generate_is_answered_by_the_adapter_that_is_named(engine: Engine) -> None:
    worker = await ready(engine)
    call = Call(question(lora="critic"))
    await worker.generate(call)  # type: ignore[arg-type]
    said = [token for delta in call.sent if isinstance(delta, Delta) for token in delta.token_ids]
    assert said == [mock_token(PROMPT, i, 2048, "critic") for i in range(3)]


async def test_a_request_that_is_asked_again_ends_its_earlier_call() -> None:
    slow = open_engine(config(mock_speedup=1.0, mock_itl_ms=1000.0))
    worker = await ready(slow)
    asked = [Call(question()), Call(question())]
    earlier, again = [asyncio.create_task(worker.generate(call)) for call in asked]  # type: ignore[arg-type]
    await asyncio.wait([earlier], timeout=PATIENCE_S)
    assert earlier.cancelled()
    assert not again.done()
    again.cancel()
    await asyncio.wait([again])
    assert slow.load().running == slow.load().waiting == 0
    await slow.stop()


async def test_a_missing_feature_is_refused_before_anything_is_sent(engine: Engine) -> None:
    worker = await ready(engine)
    biased = question(sampling=SamplingParams(logit_bias=((5, 1.0),)))
    refused = ((question(lora="x"), "no adapter 'x' .*: poet, critic"), (biased, "cannot honour logit_bias"))
    for request, says in refused:
        call = Call(request)
        with pytest.raises(InvalidRequestError, match=says):
            await worker.generate(call)  # type: ignore[arg-type]
        assert call.sent == []
    for asked, says in ((text(lora="x"), "no adapter 'x'"), (text(model="y"), "model 'y' is not served here")):
        with pytest.raises(InvalidRequestError, match=says):
            await worker.embed(Call(asked))  # type: ignore[arg-type]


def test_torch_takes_no_adapters_and_the_mocks_have_unique_names() -> None:
    with pytest.raises(ConfigError, match="--loras is for mock, vllm, sglang, not for --engine torch; leave it out"):
        open_engine(config(engine="torch", loras="poet"))
    for names in ("poet,poet", "poet, tiny"):
        with pytest.raises(ConfigError, match="which is taken"):
            open_engine(config(loras=names))


# --- starting ---------------------------------------------------------------------------------------------------------


def test_workers_without_a_name_are_not_taken_for_one() -> None:
    one, other = with_name(config(role=Role.DECODE)), with_name(config(role=Role.DECODE))
    assert one.name.startswith("decode-")
    assert one.name != other.name
    assert with_name(config(name="d0")).name == "d0"


async def test_the_gauges_have_used_cached_and_all_blocks(engine: Engine) -> None:
    await engine.start(WorkerId("w"), "127.0.0.1:1")
    watch_load("gauges", lambda: ("tiny", "decode"), engine.load, lambda: 0.0)
    page = generate_latest().decode()
    forget_load("gauges")
    for name in ("total", "used", "cached"):
        assert f'kvmesh_worker_{name}_blocks{{model="tiny",role="decode",worker="gauges"}}' in page
    assert "gauges" not in generate_latest().decode()


def test_workers_of_one_process_differ_in_name_and_port() -> None:
    one = config(role=Role.DECODE)
    assert configs_of(one) == [one]
    many = configs_of(config(role=Role.DECODE, count=3, port=7000, kv_transfer="auto"))
    assert [(c.name, c.port, c.kv_transfer, c.count) for c in many] == [
        (f"decode-{i}", 7000 + i, "shm", 1) for i in range(3)
    ]
    assert {c.port for c in configs_of(config(count=2))} == {0}
    with pytest.raises(ConfigError, match="--count is for mock, not for --engine"):
        configs_of(config(engine="torch", count=2))


def test_a_mock_without_a_tokenizer_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        open_engine(config(model_path=str(tmp_path)))


class SlowEngine:
    """An engine whose start ends when it is let go, or given up."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.has_begun = asyncio.Event()
        self.was_given_up = False
        self.failure: Exception | None = None

    async def start(self, worker_id: WorkerId, address: str) -> EngineInfo:
        self.has_begun.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.was_given_up = True
            raise
        if self.failure is not None:
            raise self.failure
        return SimpleNamespace()  # type: ignore[return-value]


async def start_of(engine: Any, stop: asyncio.Event) -> "asyncio.Task[EngineInfo | None]":
    task = asyncio.create_task(unless_stopped(engine.start(WorkerId("w"), "127.0.0.1:1"), stop))
    await engine.has_begun.wait()
    return task


async def test_a_stop_during_the_start_ends_it_at_once() -> None:
    engine, stop = SlowEngine(), asyncio.Event()
    task = await start_of(engine, stop)
    stop.set()
    assert await asyncio.wait_for(task, PATIENCE_S) is None
    assert engine.was_given_up


def test_a_process_is_ready_from_its_last_join_to_its_first_leave() -> None:
    readiness = Readiness(2)
    seen = [not readiness.problem()]
    for step in (readiness.on_ready, readiness.on_ready, readiness.on_leaving):
        step()
        seen.append(not readiness.problem())
    assert seen == [False, False, True, False]


async def test_a_ready_or_failed_engine_ends_the_wait() -> None:
    engine, broken = SlowEngine(), SlowEngine()
    broken.failure = ConfigError("no such model")
    tasks = [await start_of(one, asyncio.Event()) for one in (engine, broken)]
    engine.go_on.set()
    broken.go_on.set()
    assert await asyncio.wait_for(tasks[0], PATIENCE_S) is not None
    with pytest.raises(ConfigError, match="no such model"):
        await asyncio.wait_for(tasks[1], PATIENCE_S)


async def test_a_start_that_is_cancelled_gives_the_engine_up_too() -> None:
    engine = SlowEngine()
    task = await start_of(engine, asyncio.Event())
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert engine.was_given_up


async def test_tickets_say_what_their_kv_was_computed_with(engine: Engine) -> None:
    worker = await ready(engine, Role.PREFILL)
    assert isinstance(engine, KnowsContent)
    call: Any = Call(question(offer_kv=True))
    await worker.generate(call)
    [delta] = call.sent
    assert delta.ticket.content == engine.kv_content().fingerprint
    assert len(delta.ticket.content) == 32


def test_an_adapter_replaced_during_a_prefill_leaves_no_usable_ticket() -> None:
    ticket = Ticket(offer_id=1, worker_id=WorkerId("w"), address="", backend="shm", nonce=1)
    delta = with_ticket_content(Delta(ticket=ticket), "before", "now")
    assert delta.ticket is not None
    assert delta.ticket.content == PENDING
    assert with_ticket_content(Delta(), "before", "now") == Delta()


async def test_the_card_is_written_again_when_the_weights_are_known(engine: Engine) -> None:
    worker = await ready(engine)
    place: Any = worker._place
    assert isinstance(engine, KnowsContent)
    await worker.tell_content()
    [info] = place.infos
    assert info.content_fingerprint == engine.kv_content().fingerprint
    assert info.kv_print == engine.kv_content().kv_print != ""
    place.content = engine.kv_content()
    await worker.tell_content()
    assert len(place.infos) == 1
