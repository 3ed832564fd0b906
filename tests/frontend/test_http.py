"""The HTTP application, over real sockets: what clients see."""

import asyncio
import json
import re
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from msgspec.structs import asdict, replace
from prometheus_client import REGISTRY

from kvmesh.frontend.generator import Hints, Trace
from kvmesh.frontend.http import HttpSettings
from kvmesh.frontend.prompts import LONG_TURNS
from kvmesh.frontend.responses.store import StorageError
from kvmesh.frontend.templates import ChatTemplate
from kvmesh.mesh.http.server import log_line
from kvmesh.mesh.telemetry import TextFormatter
from kvmesh.protocol.errors import (
    ConfigError,
    DeadlineExceededError,
    DrainingError,
    EngineError,
    MeshError,
    NoWorkerError,
    OverloadedError,
    PeerLostError,
    TransferError,
    WireError,
)
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import Delta, FinishReason, Placed, Role, Target, TokenLogprob, unpack_tokens
from tests.frontend import tiny
from tests.frontend.serving import BACKEND, CHAT, TEXT, Served, ids, read_events, serving, words
from tests.support.counted import counted_in
from tests.support.fake_mesh import explanation_of
from tests.support.patience import PATIENCE_S

PLACED = Placed(
    decode=Target(worker_id=WorkerId("d1-id"), name="d1", address="a:1"),
    prefill=Target(worker_id=WorkerId("p0-id"), name="p0", address="a:2", dp_rank=1, overlap_blocks=1),
    reason="cheapest é\n",
)
CANDIDATE = {
    "leg": "whole", "worker": "d1", "dp_rank": 0, "overlap_blocks": [1, 1, 1, 1], "queued_tokens": 0,
    "held_blocks": 2, "requests": 1, "capacity": 1.0, "cost": 1.5, "terms": {"compute": 1.5}, "note": "chosen",
    "unbooked_tokens": 0, "unbooked_blocks": 0, "unbooked_requests": 0,
}  # fmt: skip


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture
def settings() -> HttpSettings:
    return HttpSettings(max_body_bytes=64 * 1024, max_inflight=2, max_request_timeout_s=60)


@pytest.fixture
async def served(model_folder: Path, settings: HttpSettings) -> AsyncIterator[Served]:
    async with serving(tiny.card("w", path=model_folder), settings) as served:
        yield served


async def open_raw(
    served: Served, body: dict[str, Any], header: str = "x-nothing: 1"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a chat request over a connection that the test holds in its own hands."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", served.port))
    reader, writer = await asyncio.open_connection(sock=connection, limit=1024)
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n{header}\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    return reader, writer


# --- answers ------------------------------------------------------------------------------------------


async def test_a_chat_completion(served: Served) -> None:
    def trace(trace: Trace) -> None:
        trace.cached_tokens = 4

    served.generator.script.insert(0, trace)
    status, _, body = await served.post("/v1/chat/completions", CHAT)
    assert status == 200
    request = served.generator.requests[0]
    prompt = unpack_tokens(request.prompt)
    assert BACKEND.decode(prompt, skip_special_tokens=False) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    osl = len(ids("Once")) + len(ids(" upon")) + len(ids(" a time")) + 1
    assert body == {
        "id": request.request_id,
        "object": "chat.completion",
        "created": body["created"],
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Once upon a time", "refusal": None, "annotations": []},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": osl,
            "total_tokens": len(prompt) + osl,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }


async def test_a_chat_stream_is_exactly_openais(served: Served) -> None:
    body = CHAT | {"stream_options": {"include_usage": True}}
    *chunks, usage, done = await served.events("/v1/chat/completions", body)
    assert done == "[DONE]"
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": "", "refusal": None},
        {"content": "Once"},
        {"content": " upon"},
        {"content": " a time"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 4 + ["stop"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert {chunk["id"] for chunk in [*chunks, usage]} == {served.generator.requests[0].request_id}
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] > 3


async def test_a_text_stream_without_usage(served: Served) -> None:
    *chunks, done = await served.events("/v1/completions", TEXT)
    assert done == "[DONE]"
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["Once", " upon", " a time", ""]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert all("usage" not in chunk for chunk in chunks)
    assert served.generator.closed_early == 0


async def test_a_text_completion_from_tokens_and_from_text(served: Served) -> None:
    status, _, body = await served.post("/v1/completions", TEXT | {"prompt": [5, 6, 7]})
    assert (status, body["object"], body["choices"][0]["text"]) == (200, "text_completion", "Once upon a time")
    assert unpack_tokens(served.generator.requests[0].prompt) == [5, 6, 7]
    await served.post("/v1/completions", TEXT)
    assert unpack_tokens(served.generator.requests[1].prompt) == [BACKEND.token_to_id("<s>"), *ids("hi")]


async def test_text_is_escaped_and_characters_stay_whole(served: Served) -> None:
    text = 'say "hi"\n\\ 🦊 é \u2028'
    served.generator.script = [*[Delta((token,)) for token in ids(text)], Delta((), FinishReason.LENGTH)]
    *chunks, _ = await served.events("/v1/chat/completions", CHAT)
    pieces = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_a_stop_string_ends_the_stream_and_cancels_the_generator(served: Served) -> None:
    served.generator.script = [Delta(ids("one two ST")), Delta(ids("OP three")), asyncio.Event()]
    *chunks, done = await served.events("/v1/chat/completions", CHAT | {"stop": "STOP"})
    assert done == "[DONE]"
    assert "".join([chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]) == "one two "
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert served.generator.ended.is_set()
    assert served.generator.closed_early == 1


async def test_logprobs_of_a_chat(served: Served) -> None:
    tokens = ids("Once")
    entries = tuple(TokenLogprob(token, -0.5, ((token, -0.5), (5, float("-inf")))) for token in tokens)
    served.generator.script = [Delta(tokens, logprobs=entries), Delta((), FinishReason.LENGTH)]
    body = CHAT | {"logprobs": True, "top_logprobs": 2}
    _, _, whole = await served.post("/v1/chat/completions", body)
    content = whole["choices"][0]["logprobs"]["content"]
    assert "".join([entry["token"] for entry in content]) == "Once"
    assert bytes(content[0]["bytes"]).decode() == content[0]["token"]
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.5, -9999.0]
    assert served.generator.requests[0].sampling.top_logprobs == 2
    *chunks, _ = await served.events("/v1/chat/completions", body)
    assert chunks[1]["choices"][0]["logprobs"]["content"] == content


async def test_logprobs_of_a_completion(served: Served) -> None:
    tokens = ids("Once upon")
    entries = tuple(TokenLogprob(token, -0.25) for token in tokens)
    served.generator.script = [Delta(tokens, logprobs=entries), Delta((), FinishReason.LENGTH)]
    _, _, body = await served.post("/v1/completions", TEXT | {"logprobs": 0})
    logprobs = body["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == "Once upon"
    assert logprobs["token_logprobs"] == [-0.25] * len(tokens)
    assert logprobs["top_logprobs"] == [{token: -0.25} for token in logprobs["tokens"]]
    assert [("Once upon" + "$")[at] for at in logprobs["text_offset"]] == [t[0] for t in logprobs["tokens"]]


@pytest.mark.parametrize("include_usage", [False, True])
async def test_the_trace_comes_on_request_in_the_last_chunk(served: Served, include_usage: bool) -> None:
    def trace(trace: Trace) -> None:
        trace.prefill_worker, trace.decode_worker, trace.transfer, trace.placed = "p0", "d1", "nixl", PLACED
        trace.kv_bytes_pulled, trace.overlap_tokens, trace.cached_tokens, trace.waited_s = 4096, 4, 3, 0.25

    served.generator.script.insert(1, trace)
    body = CHAT | {"kvmesh": {"trace": True, "disaggregate": True, "worker": "d1"}}
    body |= {"stream_options": {"include_usage": include_usage}}
    *chunks, last, _ = await served.events("/v1/chat/completions", body)
    assert not any("kvmesh" in chunk for chunk in chunks)
    report = last["kvmesh"]
    assert report.pop("ttft_ms") > 0
    assert report.pop("itl_ms") >= 0
    assert report == {
        "prefill_worker": "p0", "decode_worker": "d1", "transfer": "nixl", "kv_bytes_pulled": 4096,
        "overlap_tokens": 4, "cached_tokens": 3, "waited_ms": 250, "route_reason": "cheapest é\n",
        "migrations": 0, "pull_error": "",
    }  # fmt: skip
    assert served.generator.hints == [Hints(True, "d1")]
    del body["stream_options"]
    _, _, whole = await served.post("/v1/chat/completions", body)
    assert whole["kvmesh"]["prefill_worker"] == "p0"


def explain(trace: Trace) -> None:
    trace.placed, trace.overlap_tokens = PLACED, 4
    trace.explanations.append(explanation_of("d1"))


@pytest.mark.parametrize("stream", [False, True])
async def test_with_explain_the_answer_says_where_it_ran_and_why(served: Served, stream: bool) -> None:
    served.generator.script.insert(0, explain)
    body = CHAT | {"kvmesh": {"explain": True}, "stream": stream}
    for asked, headers in ((body, {}), (CHAT | {"stream": stream}, {"x_kvmesh_explain": "1"})):
        _, got, reply = await served.post("/v1/chat/completions", asked, **headers)
        assert {name: got[name] for name in got if name.startswith("x-kvmesh-")} == {
            "x-kvmesh-worker": "d1",
            "x-kvmesh-prefill-worker": "p0",
            "x-kvmesh-overlap-tokens": "4",
            "x-kvmesh-route-reason": "cheapest ??",
        }
        report = (read_events(reply)[-2] if stream else reply)["kvmesh"]
        assert report["migrations"] == 0, "explain is a trace with reasons"
        [explanation] = report["explanations"]
        assert explanation == asdict(explanation_of("d1")) | {"candidates": [CANDIDATE]}
        assert (explanation["waited_s"], CANDIDATE["note"]) == (0.0, "chosen"), "all fields are there"


async def test_without_explain_nothing_of_it_is_sent(served: Served) -> None:
    served.generator.script.insert(0, explain)
    for body in (CHAT, CHAT | {"kvmesh": {"trace": True}}):
        _, headers, reply = await served.post("/v1/chat/completions", body, x_kvmesh_explain="0")
        assert not [name for name in headers if name.startswith("x-kvmesh-")]
        assert "explanations" not in reply.get("kvmesh", {})


async def test_headers_reach_the_router(served: Served) -> None:
    headers = {"worker": "d1", "prefill-worker": "p1", "dp-rank": "2", "session": "s", "tenant": "t", "priority": "-7"}
    given = {f"X-KVMESH-{name}": value for name, value in headers.items()}
    await served.post("/v1/chat/completions", CHAT, **given)
    assert served.generator.hints == [Hints(None, "d1", "p1", 2, "s", "t", -7)]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/kvmesh/route"])
async def test_bad_headers_are_refused_by_name(served: Served, path: str) -> None:
    status, _, body = await served.post(path, CHAT, x_kvmesh_priority="101")
    assert (status, body["error"]["param"]) == (400, "x-kvmesh-priority")
    assert served.generator.requests == []


# --- where would it run -------------------------------------------------------------------------------


async def test_a_preview_goes_through_template_and_tokenizer_and_runs_nothing(served: Served) -> None:
    served.generator.placed = replace(PLACED, explanation=explanation_of("d1"))
    status, _, body = await served.post("/kvmesh/route", CHAT | {"user": "me"}, x_kvmesh_tenant="t")
    assert status == 200
    [(request, hints)] = served.generator.previewed
    await served.post("/v1/chat/completions", CHAT)
    assert request.prompt == served.generator.requests[0].prompt
    assert (hints.session, hints.tenant) == ("me", "t")
    explanation = body.pop("explanation")
    assert explanation["candidates"] == [CANDIDATE]
    assert body == {
        "booking": None,
        "lease_s": None,
        "model": "tiny",
        "block_size": 16,
        "isl_tokens": len(unpack_tokens(request.prompt)),
        "decode": asdict(PLACED.decode),
        "prefill": asdict(PLACED.prefill),
        "reason": "cheapest é\n",
    }


async def test_a_preview_of_a_text_and_of_tokens(served: Served) -> None:
    served.generator.placed = PLACED
    for prompt in ("hi", [5, 6, 7] * 20):
        status, _, body = await served.post("/kvmesh/route", TEXT | {"prompt": prompt, "stream": True})
        assert (status, body["explanation"]) == (200, None)
    assert served.generator.requests == []
    assert served.admission.inflight == 0


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (CHAT | {"model": "gpt"}, 404, "model"),
        (CHAT | {"prompt": "hi"}, 400, "prompt"),
        (TEXT | {"prompt": [5] * 512}, 400, "prompt"),
        (TEXT, 503, None),
        (b"[]", 400, None),
    ],
    ids=lambda value: str(value)[:24],
)
async def test_a_preview_fails_as_the_request_would(served: Served, body: Any, status: int, param: str | None) -> None:
    got, _, reply = await served.post("/kvmesh/route", body)
    assert (got, reply["error"]["param"]) == (status, param), reply
    assert served.admission.inflight == 0


async def test_a_frontend_that_drains_previews_nothing(served: Served) -> None:
    served.generator.placed = PLACED
    served.admission.drain()
    status, _, body = await served.post("/kvmesh/route", CHAT)
    assert (status, body["error"]["code"]) == (503, "draining")


# --- what the engine gets -----------------------------------------------------------------------------


async def test_limits_seed_and_salt_reach_the_engine(served: Served) -> None:
    for body in (CHAT, CHAT | {"seed": 7, "max_tokens": 3, "min_tokens": 2, "cache_salt": "a"}, CHAT):
        await served.post("/v1/chat/completions", body | {"max_tokens": body.get("max_tokens")})
    first, second, third = served.generator.requests
    assert first.stop.max_tokens == 512 - len(unpack_tokens(first.prompt))
    assert (second.stop.max_tokens, second.stop.min_tokens, second.sampling.seed) == (3, 2, 7)
    assert second.cache_salt == "a"
    assert first.sampling.seed != third.sampling.seed  # drawn anew for each
    await served.post("/v1/completions", TEXT | {"prompt": [5] * 510, "max_tokens": 100})
    assert served.generator.requests[3].stop.max_tokens == 2


async def test_the_official_client(served: Served) -> None:
    async with served.openai() as client:
        whole = await client.chat.completions.create(model="tiny", messages=CHAT["messages"])
        assert whole.choices[0].message.content == "Once upon a time"
        assert whole.usage is not None
        stream = await client.chat.completions.create(
            model="tiny", messages=CHAT["messages"], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(texts) == "Once upon a time"
        assert chunks[-1].usage == whole.usage
        text = await client.completions.create(model="tiny", prompt="hi")
        assert text.choices[0].text == "Once upon a time"
        pieces = [
            c.choices[0].text async for c in await client.completions.create(model="tiny", prompt="hi", stream=True)
        ]
        assert "".join(pieces) == "Once upon a time"
        assert [model.id async for model in client.models.list()] == ["tiny"]
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="gpt", messages=CHAT["messages"])
        assert missing.value.code == "model_not_found"
        served.generator.script = [Delta(ids("Once")), PeerLostError("worker w died")]
        stream = await client.chat.completions.create(model="tiny", messages=CHAT["messages"], stream=True)
        with pytest.raises(openai.APIError, match="worker w died"):
            _ = [chunk async for chunk in stream]


# --- failures -----------------------------------------------------------------------------------------

FAILURES: list[tuple[BaseException, int, str | None, str | None]] = [
    (OverloadedError("full"), 429, "overloaded", "1"),
    (OverloadedError("busy", retry_after_s=6.2), 429, "overloaded", "7"),
    (NoWorkerError("none"), 503, "no_worker", "2"),
    (DrainingError("bye"), 503, "draining", "2"),
    (DeadlineExceededError("late"), 504, "deadline_exceeded", None),
    (PeerLostError("gone"), 502, "peer_lost", None),
    (EngineError("broken"), 502, "engine", None),
    (TransferError("lost"), 502, "transfer", None),
    (MeshError("odd"), 500, "internal", None),
    (RuntimeError("a bug"), 500, "internal", None),
    (ConnectionResetError("a bug too"), 500, "internal", None),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status", "code", "retry_after"), FAILURES, ids=lambda value: str(value)[:9])
async def test_failures_before_the_first_token_have_a_status(
    served: Served, error: BaseException, status: int, code: str | None, retry_after: str | None, stream: bool
) -> None:
    served.generator.script = [error]
    got, headers, body = await served.post("/v1/chat/completions", CHAT | {"stream": stream})
    assert (got, body["error"]["code"], headers.get("Retry-After")) == (status, code, retry_after)
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "a bug" not in body["error"]["message"]


@pytest.mark.parametrize(("error", "status", "code", "retry_after"), FAILURES, ids=lambda value: str(value)[:9])
async def test_failures_after_the_headers_are_the_last_event(
    served: Served, error: BaseException, status: int, code: str | None, retry_after: str | None
) -> None:
    served.generator.script = [Delta(ids("Once")), error]
    *_, text, last = await served.events("/v1/chat/completions", CHAT)
    assert text["choices"][0]["delta"] == {"content": "Once"}
    assert last["error"]["code"] == code


PLACES = [
    ConfigError("/srv/models/tiny/tokenizer.json is no tokenizer: EOF while parsing"),
    WireError("127.0.0.1:4000 sends beyond its credit"),
    MeshError("KeyError in generate, see the log of 10.0.0.7:4000"),
    EngineError("the server at http://gpu-3.internal:8000/v1 is gone: no /dev/shm/kvmesh/weights-7"),
    OverloadedError("4 calls run on [::1]:4000 already"),
    StorageError("no space left: '/var/lib/responses/a'"),
]


@pytest.mark.parametrize("started", [False, True], ids=["status", "event"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("error", PLACES, ids=lambda value: str(value)[:9])
async def test_clients_see_no_paths_and_addresses(
    served: Served, error: MeshError, path: str, started: bool, caplog: pytest.LogCaptureFixture
) -> None:
    served.generator.script = [Delta(ids("Once")), error] if started else [error]
    content: dict[str, Any] = {"prompt": "Once"} if path == "/v1/completions" else {"input": "Once"}
    if path in ("/v1/chat/completions", "/v1/messages"):
        content = {"messages": CHAT["messages"], "max_tokens": 5}
    body = {"model": "tiny", "stream": started} | content
    async with served.session.post(served.url + path, json=body) as reply:
        shown = await reply.text()
    assert "error" in shown and reply.status == 200 if started else reply.status >= 429
    for place in ("/srv", "127.0", "10.0.0", "gpu-3", "/dev", "::1", "/var", "KeyError"):
        assert place not in shown
    assert str(error) in caplog.text or isinstance(error, OverloadedError)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_breaks_off_never_looks_whole(served: Served, stream: bool) -> None:
    served.generator.script = [Delta(ids("Once"))]
    _, _, body = await served.post("/v1/chat/completions", CHAT | {"stream": stream})
    if stream:
        body = read_events(body)[-1]
    assert body["error"]["code"] == "engine"
    assert "broke off" in body["error"]["message"]


async def test_the_clients_timeout_ends_the_request(served: Served) -> None:
    served.generator.script = [asyncio.Event()]
    status, _, body = await served.post("/v1/chat/completions", CHAT, x_request_timeout_s="0.05")
    assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
    assert served.generator.closed_early == 1
    served.generator.script.insert(0, Delta(ids("Once")))
    events = await served.events("/v1/chat/completions", CHAT, x_request_timeout_s="0.05")
    assert events[-1]["error"]["code"] == "deadline_exceeded"


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "61", "soon", ""])
async def test_a_bad_timeout_is_refused(served: Served, text: str) -> None:
    status, _, body = await served.post("/v1/chat/completions", CHAT, x_request_timeout_s=text)
    assert (status, body["error"]["param"]) == (400, "x-request-timeout-s")


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        ("/v1/chat/completions", b"no json", 400, None, None),
        ("/v1/chat/completions", b"", 400, None, None),
        ("/v1/chat/completions", [], 400, None, None),
        ("/v1/chat/completions", {"messages": CHAT["messages"]}, 400, None, "model"),
        ("/v1/chat/completions", CHAT | {"model": "gpt"}, 404, "model_not_found", "model"),
        ("/v1/chat/completions", CHAT | {"bogus": 1}, 400, None, "bogus"),
        ("/v1/chat/completions", CHAT | {"n": 129}, 400, None, "n"),
        ("/v1/chat/completions", CHAT | {"temperature": 3}, 400, None, "temperature"),
        ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "word " * 600}]}, 400,
         "context_length_exceeded", "messages"),
        ("/v1/completions", {"model": "tiny", "prompt": [5] * 512}, 400, "context_length_exceeded", "prompt"),
        ("/v1/completions", {"model": "tiny", "prompt": [10**6]}, 400, None, "prompt"),
        ("/v1/completions", {"model": "tiny", "prompt": [[]]}, 400, None, "prompt"),
        ("/v1/completions", b"x" * 70_000, 413, "body_too_large", None),
        ("/v1/nothing", {}, 404, "not_found", None),
        ("/v1/models", {}, 405, "method_not_allowed", None),
    ],
    ids=lambda value: str(value)[:24],
)  # fmt: skip
async def test_bad_requests_get_openais_error_body(
    served: Served, path: str, body: Any, status: int, code: str | None, param: str | None
) -> None:
    got, _, reply = await served.post(path, body)
    assert (got, reply["error"]["code"], reply["error"]["param"]) == (status, code, param), reply
    assert reply["error"]["type"] == "invalid_request_error"
    assert served.generator.requests == []


async def test_the_context_error_names_the_numbers(served: Served) -> None:
    _, _, reply = await served.post("/v1/completions", TEXT | {"prompt": [5] * 600})
    assert "512" in reply["error"]["message"]
    assert "600" in reply["error"]["message"]


async def test_a_text_that_cannot_fit_is_refused_in_openais_words(served: Served) -> None:
    _, _, reply = await served.post("/v1/completions", TEXT | {"prompt": "word " * 9000})
    assert reply["error"]["code"] == "context_length_exceeded"
    assert reply["error"]["message"].startswith("This model's maximum context length is 512 tokens. However, your ")


async def test_a_model_without_a_template_says_what_to_do(served: Served, tmp_path: Path) -> None:
    served.models.add(tiny.card("b", model="base", path=tiny.save_model(tmp_path, template=None)))
    status, _, reply = await served.post("/v1/chat/completions", CHAT | {"model": "base"})
    assert (status, reply["error"]["param"]) == (400, "model")
    assert "/v1/completions" in reply["error"]["message"]


async def test_a_long_conversation_is_rendered_beside_the_event_loop(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def render(template: ChatTemplate, messages: Any, **options: Any) -> str:
        threads.append(threading.get_ident())
        return "hi"

    monkeypatch.setattr(ChatTemplate, "render", render)
    for count in (LONG_TURNS, LONG_TURNS + 1):
        status, _, _ = await served.post("/v1/chat/completions", CHAT | {"messages": CHAT["messages"] * count})
        assert status == 200
    assert [thread == threading.get_ident() for thread in threads] == [True, False]


async def test_a_chat_of_many_bytes_is_rendered_beside_the_event_loop(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def render(template: ChatTemplate, messages: Any, **options: Any) -> str:
        threads.append(threading.get_ident())
        return "hi"

    monkeypatch.setattr(ChatTemplate, "render", render)
    monkeypatch.setattr("kvmesh.frontend.prompts.LONG_CHAT_BYTES", 20_000)
    long = "x" * 20_000
    for more in ({}, {"messages": [{"role": "user", "content": long}]}, {"chat_template_kwargs": {"rows": long}}):
        status, _, _ = await served.post("/v1/chat/completions", CHAT | more)
        assert status == 200
    assert [thread == threading.get_ident() for thread in threads] == [True, False, False]


@pytest.mark.parametrize("field", ["model", "user", "cache_salt", "stop", "tool_choice", "metadata"])
async def test_line_breaks_of_a_client_reach_neither_headers_nor_log_lines(
    served: Served, caplog: pytest.LogCaptureFixture, field: str
) -> None:
    evil = "x\r\nset-cookie: a=b\n2026 ERROR fake"
    caplog.set_level("DEBUG")
    status, headers, _ = await served.post("/v1/chat/completions", CHAT | {field: evil})
    assert status in (200, 400, 404)
    assert "set-cookie" not in headers
    formatter = TextFormatter("frontend")
    assert all("\n" not in formatter.format(record) for record in caplog.records if not record.exc_info)


# --- leaving, limits, draining ------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_its_request(served: Served, stream: bool) -> None:
    served.generator.script = [Delta(ids("Once")), asyncio.Event()]
    reader, writer = await open_raw(served, CHAT | {"stream": stream})
    async with asyncio.timeout(PATIENCE_S):
        if stream:
            await reader.readuntil(b"Once")
        else:
            await served.generator.started.wait()
        writer.close()
        await served.generator.ended.wait()
        await served.admission.wait_idle()
    assert served.generator.closed_early == 1
    assert served.admission.inflight == 0


async def test_a_client_that_does_not_read_holds_the_generator_back(served: Served) -> None:
    served.generator.script = [Delta(ids("fox " * 1000))] * 20_000
    _, writer = await open_raw(served, CHAT | {"stream": True}, "x-request-timeout-s: 0.3")
    async with asyncio.timeout(PATIENCE_S):
        await served.generator.ended.wait()  # by the deadline: nothing is left behind
    assert served.generator.closed_early == 1
    assert served.generator.deltas_taken < 200  # of about 5 KiB each
    writer.transport.abort()
    async with asyncio.timeout(PATIENCE_S):
        await served.admission.wait_idle()


async def test_beyond_max_inflight_requests_are_refused_at_once(served: Served) -> None:
    gate = asyncio.Event()
    served.generator.script = [gate, *words("Once")]
    held = [asyncio.create_task(served.post("/v1/chat/completions", CHAT)) for _ in range(2)]
    async with asyncio.timeout(PATIENCE_S):
        while len(served.generator.requests) < 2:
            await asyncio.sleep(0)
    status, headers, body = await served.post("/v1/chat/completions", CHAT)
    assert (status, headers["Retry-After"], body["error"]["code"]) == (429, "1", "overloaded")
    gate.set()
    assert [status for status, _, _ in await asyncio.gather(*held)] == [200, 200]
    assert served.admission.inflight == 0


async def test_a_frontend_that_leaves_answers_and_tells_load_balancers(served: Served) -> None:
    served.generator.script = words("Once")
    served.admission.leave()
    status, body = await served.get("/health")
    assert (status, body["status"]) == (503, "draining")
    assert (await served.post("/v1/chat/completions", CHAT))[0] == 200


async def test_draining_refuses_new_requests_and_finishes_running_ones(served: Served) -> None:
    gate = asyncio.Event()
    served.generator.script = [gate, *words("Once")]
    running = asyncio.create_task(served.post("/v1/chat/completions", CHAT))
    await served.generator.started.wait()
    served.admission.drain()
    status, headers, body = await served.post("/v1/chat/completions", CHAT)
    assert (status, headers["Retry-After"], body["error"]["code"]) == (503, "2", "draining")
    assert (await served.get("/health"))[0] == 503
    assert (await served.get("/live"))[0] == 200
    gate.set()
    assert (await running)[0] == 200
    await served.admission.wait_idle()


# --- the rest -----------------------------------------------------------------------------------------


async def test_models_and_health_follow_the_workers(served: Served) -> None:
    status, body = await served.get("/v1/models")
    assert (status, [model["id"] for model in body["data"]]) == (200, ["tiny"])
    assert body["data"][0]["max_model_len"] == 512
    assert (await served.get("/v1/models/tiny"))[1] == body["data"][0]
    assert (await served.get("/v1/models/a/b"))[0] == 404
    status, body = await served.get("/health")
    assert (status, body["status"], body["ready_models"]) == (200, "ready", ["tiny"])
    served.models.add(tiny.card("p", Role.PREFILL))
    served.models.remove(WorkerId("w"))
    status, body = await served.get("/health")
    assert (status, body["workers"]["tiny"]["prefill"]) == (503, 1)
    status, headers, reply = await served.post("/v1/chat/completions", CHAT)
    assert (status, reply["error"]["code"], headers["Retry-After"]) == (503, "no_worker", "2")
    assert (await served.get("/v1/models"))[1]["data"] == []


async def test_request_ids_go_in_and_out(served: Served) -> None:
    _, headers, body = await served.post("/v1/chat/completions", CHAT, x_request_id="my-1.x_Y")
    assert headers["x-request-id"] == "my-1.x_Y"
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{24}-my-1\.x_Y", body["id"])
    for insane in ("a b", "x" * 129, "é"):
        _, headers, body = await served.post("/v1/chat/completions", CHAT, x_request_id=insane)
        assert headers["x-request-id"] == body["id"]
        assert re.fullmatch(r"chatcmpl-[0-9a-f]{24}", body["id"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", TEXT),
        ("/tokenize", {}),
        ("/detokenize", {"model": "tiny", "tokens": [1]}),
        ("/detokenize", {"model": "none", "tokens": [1]}),
        ("/kvmesh/route", TEXT),
        ("/v1/messages/count_tokens", CHAT),
        ("/v1/messages/count_tokens", {}),
    ],
)
async def test_what_runs_nothing_tells_a_request_id_too(served: Served, path: str, body: Any) -> None:
    _, headers, _ = await served.post(path, body)
    assert re.fullmatch(r"[a-z]+-[0-9a-f]{24}", headers["x-request-id"])
    assert headers["request-id"] == headers["x-request-id"]
    _, headers, _ = await served.post(path, body, x_request_id="mine")
    assert headers["x-request-id"] == "mine"


async def test_a_bug_is_reported_with_the_request_id_alone(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.models, "names", lambda: 1 / 0)
    async with served.session.get(served.url + "/v1/models") as reply:
        error = (await reply.json())["error"]
    assert (reply.status, error["code"]) == (500, "internal")
    assert "see its log" in error["message"]
    assert reply.headers["x-request-id"].startswith("models-")


async def test_the_deadline_is_the_loops_time(served: Served) -> None:
    now = asyncio.get_running_loop().time()
    await served.post("/v1/chat/completions", CHAT, x_request_timeout_s="10")
    await served.post("/v1/chat/completions", CHAT)
    assert now + 10 <= served.generator.deadlines[0] < now + 10 + PATIENCE_S
    assert served.generator.deadlines[1] >= now + 600


def counted(outcome: str) -> float:
    return counted_in(REGISTRY, "kvmesh_frontend_requests_total", endpoint="chat", outcome=outcome)


async def test_metrics_count_by_outcome(served: Served) -> None:
    before = {outcome: counted(outcome) for outcome in ("ok", "invalid_request", "engine")}
    await served.post("/v1/chat/completions", CHAT)
    await served.post("/v1/chat/completions", CHAT | {"bogus": 1})
    served.generator.script = [Delta(ids("Once")), EngineError("broken")]
    await served.events("/v1/chat/completions", CHAT)
    assert {outcome: counted(outcome) - n for outcome, n in before.items()} == dict.fromkeys(before, 1.0)
    status, text = await served.get("/metrics")
    assert status == 200
    for name in ("ttft_seconds", "itl_seconds", "request_duration_seconds", "inflight 0.0"):
        assert f"kvmesh_frontend_{name}" in text


@pytest.mark.parametrize("is_stream", [False, True])
async def test_the_access_log_tells_the_tokens_of_a_request(
    model_folder: Path, caplog: pytest.LogCaptureFixture, is_stream: bool
) -> None:
    """The simulator replays it."""
    caplog.set_level("INFO", "kvmesh.mesh.http.access")
    async with serving(tiny.card("w", path=model_folder), access_log=log_line) as served:
        _, _, answer = await served.post("/v1/chat/completions", CHAT)
        usage = answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]
        caplog.clear()
        await served.post("/v1/chat/completions", CHAT | {"stream": is_stream})
        await served.post("/v1/chat/completions", b"{")
    whole, refused = (vars(record) for record in caplog.records if record.name == "kvmesh.mesh.http.access")
    assert (whole["model"], whole["cached_tokens"]) == (CHAT["model"], 0)
    assert (whole["isl_tokens"], whole["osl_tokens"]) == usage
    assert (refused["status"], "isl_tokens" in refused) == (400, False)
