"""The engine seam over servers that know nothing of it."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio
from aiohttp import web
from prometheus_client import CollectorRegistry, Gauge
from tokenizers import Tokenizer

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.kvevents.formats import decode_payload, encode_payload
from kvmesh.protocol.errors import (
    ConfigError,
    ContextLengthError,
    DrainingError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
    PeerLostError,
    UnreachableError,
)
from kvmesh.protocol.events import Digest, KvEvent, Removed, Stored
from kvmesh.protocol.hashing import digest_term, hash_seed, sequence_hashes
from kvmesh.protocol.ids import RequestId, WorkerId, new_worker_id
from kvmesh.protocol.messages import (
    Delta,
    EmbedRequest,
    Feature,
    FinishReason,
    GenerateRequest,
    Role,
    SamplingParams,
    StopConditions,
    Ticket,
    pack_tokens,
)
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.engines.attached import asking
from kvmesh.workers.engines.attached.engine import AttachedEngine
from kvmesh.workers.engines.attached.metrics import ServerMetrics
from kvmesh.workers.engines.opening import open_engine
from kvmesh.workers.membership import make_card
from tests.support.fake_servers import (
    BLOCK,
    CONTEXT,
    EOS,
    EmbeddingServer,
    LlamaCppServer,
    OpenAiServer,
    Server,
    SglangServer,
    VllmServer,
    answer_to,
    vector_of,
)
from tests.support.patience import PATIENCE_S

TOKENIZER: Tokenizer = Tokenizer.from_file(str(CHECKPOINT_DIR / "tokenizer.json"))
POLL_S = 0.02
numbers = itertools.count()
Attach = Callable[..., Awaitable[AttachedEngine]]


@pytest_asyncio.fixture
async def attach() -> AsyncIterator[Attach]:
    """Starts a server and an engine in front of it."""
    async with AsyncExitStack() as stack:

        async def start(
            server: Server,
            role: Role = Role.AGGREGATED,
            *,
            poll_s: float = POLL_S,
            registry: CollectorRegistry | None = None,
            **settings: Any,
        ) -> AttachedEngine:
            await stack.enter_async_context(server.running())
            config = config_of(server, role, **settings)
            engine = AttachedEngine(config, poll_s=poll_s, registry=registry or CollectorRegistry())
            stack.push_async_callback(engine.stop)
            await engine.start(new_worker_id("w"), "127.0.0.1:1")
            return engine

        yield start


def config_of(server: Server, role: Role = Role.AGGREGATED, **settings: Any) -> WorkerConfig:
    fields = {"engine": "attach", "attach_url": server.url, "role": role, "model_path": str(CHECKPOINT_DIR), **settings}
    return msgspec.convert(fields, WorkerConfig)


def prompt_of(length: int, first: int = 100) -> list[int]:
    return [(first + 7 * i) % 1900 + 50 for i in range(length)]


def ask(prompt: Sequence[int], max_tokens: int = 8, **fields: Any) -> GenerateRequest:
    sampling = fields.pop("sampling", SamplingParams(temperature=0))
    return GenerateRequest(
        request_id=RequestId(f"r{next(numbers)}"),
        model="tiny",
        prompt=pack_tokens(prompt),
        sampling=sampling,
        stop=StopConditions(max_tokens=max_tokens),
        **fields,
    )


async def run(engine: AttachedEngine, request: GenerateRequest) -> list[Delta]:
    async with asyncio.timeout(PATIENCE_S):
        return [delta async for delta in engine.generate(request)]


async def collect(deltas: AsyncIterator[Delta], into: list[Delta]) -> None:
    """Return the deltas that came, also those before a failure."""
    async for delta in deltas:
        into.append(delta)  # noqa: PERF401


def tokens(deltas: Sequence[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


# --- answers ------------------------------------------------------------------------------------------


async def test_vllm_answers_in_token_ids(attach: Attach) -> None:
    server = VllmServer()
    deltas = await run(await attach(server), ask(prompt_of(40)))
    assert tokens(deltas) == answer_to(prompt_of(40), 8)
    assert [delta.finish_reason for delta in deltas][-1] is FinishReason.LENGTH
    assert all(delta.finish_reason is None for delta in deltas[:-1])
    assert server.knobs.bodies[0]["prompt"] == prompt_of(40)


async def test_the_token_that_ends_an_answer_is_part_of_it(attach: Attach) -> None:
    server = VllmServer()
    server.knobs.stop_after = 3
    deltas = await run(await attach(server), ask(prompt_of(40)))
    assert tokens(deltas)[-1] == EOS
    assert (deltas[-1].finish_reason, deltas[-1].stop_token) == (FinishReason.STOP, EOS)


async def test_a_continued_answer_goes_on_as_it_would_have(attach: Attach) -> None:
    engine = await attach(VllmServer())
    whole = tokens(await run(engine, ask(prompt_of(40))))
    assert tokens(await run(engine, ask(prompt_of(40), generated=tuple(whole[:5])))) == whole[5:]
    assert await run(engine, ask(prompt_of(40), generated=tuple(whole))) == [Delta(finish_reason=FinishReason.LENGTH)]


async def test_logprobs_come_with_their_tokens(attach: Attach) -> None:
    engine = await attach(VllmServer())
    deltas = await run(engine, ask(prompt_of(20), sampling=SamplingParams(temperature=0, top_logprobs=2)))
    told = [one for delta in deltas for one in delta.logprobs or ()]
    assert [one.token_id for one in told] == tokens(deltas)
    assert all(len(one.top) == 2 for one in told)


@pytest.mark.parametrize("role", [Role.AGGREGATED, Role.PREFILL])
async def test_logprobs_of_the_prompt_come_before_the_answer(attach: Attach, role: Role) -> None:
    engine, prompt = await attach(VllmServer(), role=role), prompt_of(20)
    request = ask(prompt, sampling=SamplingParams(temperature=0, top_logprobs=2, prompt_logprobs=2))
    deltas = await run(engine, msgspec.structs.replace(request, offer_kv=role is Role.PREFILL))
    told = [one for delta in deltas for one in delta.logprobs or ()]
    expected = prompt[1:] if role is Role.PREFILL else [*prompt[1:], *tokens(deltas)]
    assert [one.token_id for one in told] == expected
    assert all(len(one.top) == 2 for one in told)


@pytest.mark.parametrize("server", [LlamaCppServer(), OpenAiServer()])
async def test_texts_are_tokenized_by_the_models_own_tokenizer(attach: Attach, server: Server) -> None:
    """The tokens mean the text that came, whatever they were at the server."""
    prompt = TOKENIZER.encode("Tell me a story about a small robot.").ids
    deltas = await run(await attach(server), ask(prompt, 30))
    expected = "".join(server.text(token) for token in answer_to(prompt, 30))
    assert TOKENIZER.decode(tokens(deltas)) == expected
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    [body] = server.knobs.bodies
    takes_ids = isinstance(server, LlamaCppServer)
    assert body["prompt"] == (prompt if takes_ids else TOKENIZER.decode(prompt, skip_special_tokens=False))


async def test_a_parameter_that_a_server_drops_is_refused_first(attach: Attach) -> None:
    server = OpenAiServer()
    engine = await attach(server)
    with pytest.raises(InvalidRequestError, match="logprobs"):
        await run(engine, ask([5], sampling=SamplingParams(top_logprobs=1)))
    with pytest.raises(InvalidRequestError, match="top_k"):
        await run(engine, ask([5], sampling=SamplingParams(top_k=3)))
    with pytest.raises(InvalidRequestError, match="embeddings"):
        await engine.embed(EmbedRequest(request_id=RequestId("e"), model="tiny", prompt=pack_tokens([1])))
    assert server.knobs.bodies == []


async def test_an_adapter_is_the_model_of_the_request(attach: Attach) -> None:
    server = VllmServer(loras=["poet"])
    await run(await attach(server), ask(prompt_of(20), lora="poet"))
    assert server.knobs.bodies[0]["model"] == "poet"


async def test_answers_one_after_the_other_share_a_connection(attach: Attach) -> None:
    server = VllmServer()
    engine = await attach(server, poll_s=60.0)
    for _ in range(3):
        await run(engine, ask(prompt_of(20)))
    assert len(server.knobs.connections) == 1


async def test_closing_the_answer_closes_the_connection(attach: Attach) -> None:
    server = VllmServer()
    server.knobs.hold_after = 2
    engine = await attach(server)
    async with aclosing(engine.generate(ask(prompt_of(20), 100))) as deltas:
        assert (await anext(deltas)).token_ids
        assert engine.load().running == 1
    await until(lambda: len(server.knobs.left) == 1)
    assert engine.load().running == 0


# --- vectors ------------------------------------------------------------------------------------------


def text(tokens: Sequence[int], **fields: Any) -> EmbedRequest:
    return EmbedRequest(request_id=RequestId(f"e{next(numbers)}"), model="tiny", prompt=pack_tokens(tokens), **fields)


@pytest.mark.parametrize(("told", "max_tokens"), [(48, 8), (None, 8), (48, 1), (0, 8)])
async def test_the_cached_tokens_of_a_servers_usage_come_with_the_last_delta(
    attach: Attach, told: int | None, max_tokens: int
) -> None:
    server = VllmServer()
    engine = await attach(server)
    server.knobs.cached_tokens = told
    deltas = await run(engine, ask(prompt_of(60), max_tokens))
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert deltas[-1].cached_tokens == told
    assert all(delta.cached_tokens in (None, 0) for delta in deltas[:-1])


async def test_without_them_the_first_delta_tells_what_the_kv_events_say(attach: Attach) -> None:
    engine = await attach(VllmServer())
    prompt = prompt_of(3 * BLOCK)
    assert (await run(engine, ask(prompt)))[0].cached_tokens == 0
    await until(lambda: engine.kv_digest().blocks >= 3)
    assert (await run(engine, ask(prompt)))[0].cached_tokens == 2 * BLOCK, "the last token is always computed"
    assert (await run(engine, ask(prompt, cache_salt="other")))[0].cached_tokens == 0


async def test_an_embedding_server_is_asked_for_vectors_only(attach: Attach) -> None:
    server = EmbeddingServer()
    engine = await attach(server)
    assert engine._life.info is not None
    assert engine._life.info.features == (Feature.EMBEDDINGS,)
    told = np.frombuffer((await engine.embed(text([5, 6, 7], cache_salt="a"))).vector, "<f4")
    vector = np.array(vector_of([5, 6, 7]))
    assert told == pytest.approx(vector / np.linalg.norm(vector), abs=1e-6)
    assert (server.knobs.bodies[-1]["input"], server.knobs.bodies[-1]["cache_salt"]) == ([5, 6, 7], "a")
    with pytest.raises(InvalidRequestError, match="no completions"):
        await run(engine, ask([5]))


async def test_who_embeds_and_answers_is_asked_for_both(attach: Attach) -> None:
    class Both(EmbeddingServer):
        def routes(self) -> list[Any]:
            return [*super().routes(), web.post("/v1/completions", self.completions)]

    engine = await attach(Both())
    assert engine._life.info is not None
    assert {Feature.EMBEDDINGS, Feature.COMPLETIONS} <= set(engine._life.info.features)


async def test_a_refused_or_garbled_vector_is_the_right_error(attach: Attach) -> None:
    server = EmbeddingServer()
    engine = await attach(server)
    for refusal, error in (((400, {"error": {"message": "no"}}), InvalidRequestError), ((200, {}), EngineError)):
        server.knobs.refuse_with = refusal
        with pytest.raises(error):
            await engine.embed(text([5]))
    assert engine.load().running == 0
    with pytest.raises(InvalidRequestError, match="no adapter 'poet'"):
        await engine.embed(text([5], lora="poet"))


# --- metrics ------------------------------------------------------------------------------------------


async def test_a_servers_metrics_stand_beside_ours_under_their_own_names(attach: Attach) -> None:
    registry = CollectorRegistry()
    engine = await attach(VllmServer(), registry=registry)
    labels = {"engine": "0", "model_name": "tiny"}
    await until(lambda: registry.get_sample_value("vllm:generation_tokens_total", labels) == 42.0)
    assert registry.get_sample_value("vllm:kv_cache_usage_perc", labels) == 0.25
    assert registry.get_sample_value("process_open_fds") is None
    await engine.stop()
    assert list(registry.collect()) == []


@pytest.mark.parametrize("told", ["vllm:x{", "vllm:x 1 2 3 4\n", "\x00" * 100, "# TYPE vllm:x nonsense\nvllm:x 1\n"])
def test_metrics_that_cannot_be_read_leave_ours_alone(told: str) -> None:
    registry = CollectorRegistry()
    metrics = ServerMetrics("vllm:")
    registry.register(metrics)
    Gauge("ours", "Ours.", registry=registry).set(1)
    metrics.told(told)
    assert registry.get_sample_value("ours") == 1


def test_metrics_beyond_all_measure_are_not_kept() -> None:
    metrics = ServerMetrics("vllm:")
    metrics.told("vllm:x 1\n")
    assert [family.name for family in metrics.collect()] == ["vllm:x"]
    metrics.told("vllm:x 1\n" * 1_000_000)
    assert list(metrics.collect()) == []


# --- failures -----------------------------------------------------------------------------------------


async def test_who_is_to_blame_is_told(attach: Attach) -> None:
    server = VllmServer()
    engine = await attach(server)
    with pytest.raises(ContextLengthError, match="2048"):
        await run(engine, ask(prompt_of(CONTEXT)))
    for status, kind in ((400, InvalidRequestError), (429, OverloadedError), (500, EngineError), (503, DrainingError)):
        server.knobs.refuse_with = (status, {"error": {"message": "because", "code": status}})
        with pytest.raises(kind, match="because"):
            await run(engine, ask(prompt_of(20)))
    assert engine.load().running == 0


@pytest.mark.parametrize("count", [0, 3])
async def test_a_server_that_dies_midway_is_a_lost_peer(attach: Attach, count: int) -> None:
    """The mesh then continues on another worker, after the tokens that came."""
    server = VllmServer()
    server.knobs.die_after = count
    seen: list[Delta] = []
    with pytest.raises(PeerLostError):
        await collect((await attach(server)).generate(ask(prompt_of(20))), seen)
    assert tokens(seen) == answer_to(prompt_of(20), count)


async def test_a_failure_in_the_stream_is_the_engines(attach: Attach) -> None:
    server = VllmServer()
    server.knobs.fail_after = 2
    with pytest.raises(EngineError, match="it broke"):
        await run(await attach(server), ask(prompt_of(20)))


@pytest.mark.parametrize("said", [{"choices": [{}, {}]}, [], "text"])
async def test_an_answer_nobody_understands_is_the_engines_failure(attach: Attach, said: Any) -> None:
    server = VllmServer()
    server.knobs.refuse_with = (200, said)
    with pytest.raises((EngineError, PeerLostError)):
        await run(await attach(server), ask(prompt_of(20)))


async def test_a_workers_health_fails_when_its_server_is_gone() -> None:
    server = VllmServer()
    async with AsyncExitStack() as stack:
        context = server.running()
        await context.__aenter__()
        engine = AttachedEngine(config_of(server), poll_s=POLL_S)
        stack.push_async_callback(engine.stop)
        await engine.start(new_worker_id("w"), "127.0.0.1:1")
        engine.check_health()
        await context.__aexit__(None, None, None)
        with pytest.raises(UnreachableError):
            await run(engine, ask(prompt_of(20)))
        await until(lambda: is_ill(engine))


async def test_a_server_that_says_it_is_ill_is_gone_too(attach: Attach) -> None:
    server = VllmServer()
    engine = await attach(server)
    server.knobs.is_healthy = False
    await until(lambda: is_ill(engine))
    with pytest.raises(EngineError, match="503"):
        await run(engine, ask(prompt_of(20)))


def is_ill(engine: AttachedEngine) -> bool:
    try:
        engine.check_health()
    except EngineError:
        return True
    return False


# --- starting -----------------------------------------------------------------------------------------


async def test_the_mesh_knows_what_the_server_says_of_itself(attach: Attach) -> None:
    server = VllmServer(loras=["poet"])
    async with server.running():
        engine = AttachedEngine(config_of(server, model_path=""), poll_s=POLL_S)
        info = await engine.start(new_worker_id("w"), "127.0.0.1:1")
        await engine.stop()
    assert (info.model, info.block_size, info.total_blocks, info.context_tokens) == ("tiny", BLOCK, 1000, CONTEXT)
    assert (info.loras, info.tells_events, info.transfer) == (("poet",), True, "")
    assert info.model_path == str(CHECKPOINT_DIR.resolve()), "the folder that the server has its model from"
    assert Feature.GUIDED in info.features


async def test_a_server_without_events_says_so(attach: Attach) -> None:
    for server in (LlamaCppServer(), OpenAiServer(), VllmServer(tells_events=False)):
        engine = await attach(server)
        assert not engine._life.check().tells_events
        assert engine.kv_snapshot() == []


@pytest.mark.parametrize("kind", [VllmServer, LlamaCppServer, OpenAiServer])
async def test_the_mesh_is_told_whose_tokens_are_made_of_texts(attach: Attach, kind: type[Server]) -> None:
    server = kind()
    info = (await attach(server))._life.check()
    publisher: Any = SimpleNamespace(endpoint="", replay_endpoint="")
    card = make_card(config_of(server), WorkerId("w"), Role.DECODE, info, "h:1", [publisher], "")
    assert card.target(0).retokenizes is (kind is not VllmServer)


async def test_a_server_that_is_not_there_yet_is_waited_for(unused_tcp_port: int) -> None:
    server = VllmServer()
    server._port = unused_tcp_port
    server.url = f"http://127.0.0.1:{unused_tcp_port}"
    engine = AttachedEngine(config_of(server), poll_s=POLL_S)
    starting = asyncio.create_task(engine.start(new_worker_id("w"), "127.0.0.1:1"))
    await asyncio.sleep(3 * POLL_S)
    assert not starting.done()
    async with server.running():
        assert (await starting).model == "tiny"
        await engine.stop()


async def test_it_is_not_waited_for_without_end(unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "START_S", 0.05)
    server = VllmServer()
    server.url = f"http://127.0.0.1:{unused_tcp_port}"
    engine = AttachedEngine(config_of(server), poll_s=POLL_S)
    with pytest.raises(EngineError, match="is it running there"):
        await engine.start(new_worker_id("w"), "127.0.0.1:1")
    await engine.stop()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"attach_url": ""}, "http://host:port"),
        ({"attach_url": "localhost:8000"}, "http://host:port"),
        ({"attach_kv_replay": "tcp://h:1"}, "--attach-kv-events"),
        ({"attach_kv_events": "h:1"}, "tcp://host:port"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, str], said: str) -> None:
    fields = {"engine": "attach", "attach_url": "http://h:1", "model_path": "x", **settings}
    with pytest.raises(ConfigError, match=said):
        open_engine(msgspec.convert(fields, WorkerConfig))


async def test_what_the_server_cannot_be_is_refused_at_the_start(attach: Attach) -> None:
    with pytest.raises(ConfigError, match="vLLM's and SGLang's"):
        await attach(LlamaCppServer(), Role.PREFILL)
    with pytest.raises(ConfigError, match="no model 'big'"):
        await attach(VllmServer(), model="big")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        await attach(OpenAiServer(), model_path="/nowhere")
    with pytest.raises(ConfigError, match=r"and the server names no folder: no tokenizer\.json is found"):
        await attach(OpenAiServer(), model_path="")
    without = VllmServer()
    without.has_connector = False
    with pytest.raises(ConfigError, match="--kv-transfer-config"):
        await attach(without, Role.PREFILL)


async def test_a_server_may_want_a_key() -> None:
    server = VllmServer()
    server.knobs.api_key = "secret"
    async with server.running():
        knowing = AttachedEngine(config_of(server), api_key="secret", poll_s=POLL_S)
        await knowing.start(new_worker_id("w"), "127.0.0.1:1")
        assert tokens(await run(knowing, ask(prompt_of(20), 3))) == answer_to(prompt_of(20), 3)
        await knowing.stop()
        without = AttachedEngine(config_of(server), poll_s=POLL_S)
        with pytest.raises(ConfigError, match="KVMESH_ATTACH_API_KEY"):
            await without.start(new_worker_id("w"), "127.0.0.1:1")
        await without.stop()


# --- prefill there, decode here -----------------------------------------------------------------------


async def pair(attach: Attach) -> tuple[VllmServer, AttachedEngine, VllmServer, AttachedEngine]:
    prefill, decode = VllmServer(), VllmServer()
    return prefill, await attach(prefill, Role.PREFILL), decode, await attach(decode, Role.DECODE)


async def offered(engine: AttachedEngine, prompt: Sequence[int], **fields: Any) -> Ticket:
    [delta] = await run(engine, ask(prompt, offer_kv=True, **fields))
    assert delta.ticket is not None
    assert delta.token_ids == ()
    return delta.ticket


async def test_a_prompt_is_computed_there_and_the_answer_here(attach: Attach) -> None:
    prefill, prefiller, decode, decoder = await pair(attach)
    ticket = await offered(prefiller, prompt_of(40))
    body = prefill.knobs.bodies[-1]
    assert (body["max_tokens"], body["stream"]) == (1, False)
    deltas = await run(decoder, ask(prompt_of(40), ticket=ticket))
    assert tokens(deltas) == answer_to(prompt_of(40), 8)
    assert deltas[0].pull is not None
    assert (deltas[0].pull.backend, deltas[0].pull.num_blocks, deltas[0].pull.error) == ("vllm-nixl-http", 3, "")
    assert all(delta.pull is None for delta in deltas[1:])
    assert len(decode.pulled) == 1


@pytest.mark.parametrize("opaque", [b"", b"{}", b'{"do_remote_prefill": true, "remote_block_ids": null}'])
async def test_a_malformed_ticket_never_reaches_a_server(attach: Attach, opaque: bytes) -> None:
    """A stock engine would be gone. The prompt is computed anew, and the report says why."""
    _, prefiller, decode, decoder = await pair(attach)
    ticket = msgspec.structs.replace(await offered(prefiller, prompt_of(40)), opaque=opaque)
    deltas = await run(decoder, ask(prompt_of(40), ticket=ticket))
    assert tokens(deltas) == answer_to(prompt_of(40), 8)
    assert deltas[0].pull is not None
    assert "kv_transfer_params" in deltas[0].pull.error
    assert decode.knobs.is_healthy
    assert "kv_transfer_params" not in decode.knobs.bodies[-1]


async def test_what_cannot_be_pulled_is_computed(attach: Attach) -> None:
    _, prefiller, decode, decoder = await pair(attach)
    ticket = await offered(prefiller, prompt_of(40))
    decode.can_pull = False
    deltas = await run(decoder, ask(prompt_of(40), ticket=ticket))
    assert tokens(deltas) == answer_to(prompt_of(40), 8)
    assert deltas[0].pull is not None
    assert "500" in deltas[0].pull.error


async def test_a_failure_after_the_first_token_is_not_tried_again(attach: Attach) -> None:
    _, prefiller, decode, decoder = await pair(attach)
    ticket = await offered(prefiller, prompt_of(40))
    decode.knobs.fail_after = 2
    with pytest.raises(EngineError, match="it broke"):
        await run(decoder, ask(prompt_of(40), ticket=ticket))
    assert len(decode.knobs.bodies) == 1


# --- the same with SGLang's rooms ---------------------------------------------------------------------


def text_of(token_ids: Sequence[int]) -> str:
    return TOKENIZER.decode(list(token_ids))


async def test_sglangs_halves_are_asked_together_and_meet(attach: Attach) -> None:
    rooms: dict[int, asyncio.Future[list[int]]] = {}
    prefill, decode = SglangServer("prefill", rooms), SglangServer("decode", rooms)
    prefiller, decoder = await attach(prefill, Role.PREFILL), await attach(decode, Role.DECODE)
    assert prefiller._life.info is not None
    assert decoder._life.info is not None
    assert prefiller._life.info.transfer == decoder._life.info.transfer == "sglang-nixl"
    request = ask(prompt_of(40))
    [offer] = await run(prefiller, msgspec.structs.replace(request, offer_kv=True))
    assert (offer.token_ids, offer.finish_reason) == ((), None)
    deltas = await run(decoder, msgspec.structs.replace(request, ticket=offer.ticket))
    assert text_of(tokens(deltas)) == text_of(answer_to(prompt_of(40), 8))
    assert [delta.pull is not None for delta in deltas] == [True, *[False] * (len(deltas) - 1)]
    [asked_first], [asked_then] = prefill.knobs.bodies, decode.knobs.bodies
    assert asked_first["bootstrap_room"] == asked_then["bootstrap_room"]
    await until(lambda: prefiller.load().offers == 0)


async def test_a_prefill_that_nobody_takes_up_is_ended(attach: Attach) -> None:
    engine = await attach(SglangServer("prefill"), Role.PREFILL)
    async with aclosing(engine.generate(ask(prompt_of(40), offer_kv=True))) as deltas:
        assert (await anext(deltas)).ticket is not None
        assert engine.load().offers == 1
    await until(lambda: engine.load().offers == 0)


async def test_a_sglang_decode_server_is_not_asked_without_a_room(attach: Attach) -> None:
    server = SglangServer("decode")
    engine = await attach(server, Role.DECODE)
    ticket = Ticket(offer_id=1, worker_id=WorkerId("w"), address="127.0.0.1:1", backend="sglang-nixl", nonce=1)
    rooms = (b"{}", b"[]", b'{"host": "h", "port": 0, "room": 1}')
    bad = [None, ticket, msgspec.structs.replace(ticket, backend="vllm-nixl-http")]
    bad += [msgspec.structs.replace(ticket, opaque=opaque) for opaque in rooms]
    for one in bad:
        with pytest.raises(EngineError):
            await run(engine, ask(prompt_of(40), ticket=one))
    assert server.knobs.bodies == []
    engine.check_health()


@pytest.mark.parametrize(
    ("mode", "role", "says"),
    [
        ("null", Role.PREFILL, "--disaggregation-mode prefill"),
        ("decode", Role.PREFILL, "runs as decode"),
        ("prefill", Role.DECODE, "runs as prefill"),
        ("prefill", Role.AGGREGATED, "attach it with --role prefill"),
    ],
)
async def test_a_sglang_server_has_the_role_it_was_started_with(
    attach: Attach, mode: str, role: Role, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        await attach(SglangServer(mode), role)


async def test_older_sglang_servers_tell_their_role_at_another_path(attach: Attach) -> None:
    server = SglangServer("prefill")
    server.info_path = "/get_server_info"
    engine = await attach(server, Role.PREFILL)
    assert engine._life.info is not None
    assert engine._life.info.transfer == "sglang-nixl"


async def test_a_sglang_server_that_does_both_answers_alone(attach: Attach) -> None:
    engine = await attach(SglangServer())
    assert text_of(tokens(await run(engine, ask(prompt_of(40))))) == text_of(answer_to(prompt_of(40), 8))


# --- KV events ----------------------------------------------------------------------------------------


def replayed(payloads: Sequence[bytes]) -> set[int]:
    held: set[int] = set()
    for payload in payloads:
        for event in decode_payload(payload).events:
            if isinstance(event, Stored):
                held |= set(event.hashes)
            elif isinstance(event, Removed):
                held -= set(event.hashes)
            else:
                held.clear()
    return held


async def test_what_the_server_caches_is_told_under_our_names(attach: Attach) -> None:
    server = VllmServer()
    engine = await attach(server)
    told: list[bytes] = []

    def listen(events: Sequence[KvEvent]) -> None:
        told.append(encode_payload(events, 1.0))

    engine.on_kv_events(listen)
    prompts = [prompt_of(50), prompt_of(80), prompt_of(64, 900)]
    for prompt in prompts:
        await run(engine, ask(prompt))
    expected = {name for prompt in prompts for name in sequence_hashes(prompt, BLOCK)}
    await until(lambda: replayed(told) == expected)
    total = sum(digest_term(name) for name in expected) % 2**64
    assert engine.kv_digest() == Digest(len(expected), total)
    assert replayed([encode_payload(engine.kv_snapshot(), 1.0)]) == expected
    server.evict(prompts[2])
    await until(lambda: replayed(told) == expected - set(sequence_hashes(prompts[2], BLOCK)))


async def test_what_was_cached_before_we_came_is_known_too(attach: Attach) -> None:
    server = VllmServer()
    async with server.running():
        server.cache(prompt_of(64), None)
        engine = AttachedEngine(config_of(server), poll_s=POLL_S)
        await engine.start(new_worker_id("w"), "127.0.0.1:1")
        await until(lambda: engine.kv_digest().blocks == 4)
        await engine.stop()


async def test_tenants_are_told_apart(attach: Attach) -> None:
    engine = await attach(VllmServer())
    await run(engine, ask(prompt_of(40), cache_salt="a"))
    names = sequence_hashes(prompt_of(40), BLOCK, hash_seed(None, "a"))
    await until(lambda: engine.kv_digest() == Digest(2, sum(map(digest_term, names)) % 2**64))


async def test_load_is_the_servers_own(attach: Attach) -> None:
    server = VllmServer()
    server.knobs.hold_after = 1
    engine = await attach(server)
    async with aclosing(engine.generate(ask(prompt_of(20)))) as deltas:
        await anext(deltas)
        await until(lambda: engine.load().used_blocks == 250)
        assert (engine.load().running, engine.load().waiting, engine.load().total_blocks) == (1, 0, 1000)
    assert engine.load().running == 0
