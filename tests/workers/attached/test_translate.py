"""Requests as a server reads them, and answers as the mesh does."""

import json
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.protocol.errors import (
    ContextLengthError,
    DrainingError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
    WireError,
)
from kvmesh.protocol.ids import RequestId
from kvmesh.protocol.messages import (
    Delta,
    EmbedRequest,
    Feature,
    FinishReason,
    GenerateRequest,
    Guide,
    GuideKind,
    SamplingParams,
    StopConditions,
    TokenLogprob,
    pack_tokens,
)
from kvmesh.workers.engines.attached.kinds import KINDS, LLAMACPP, OPENAI, SGLANG, VLLM, structured_outputs
from kvmesh.workers.engines.attached.refusals import failure_in_stream, refusal
from kvmesh.workers.engines.attached.server import AttachedServer, ServerKind
from kvmesh.workers.engines.attached.translate import (
    body_of,
    check_honoured,
    delta_of,
    embedding_body,
    merged,
    prompt_of,
    read_answer,
    read_vector,
)


def ask(**fields: Any) -> GenerateRequest:
    return GenerateRequest(request_id=RequestId("r1"), model="m", prompt=pack_tokens([1, 2, 3]), **fields)


def body(request: GenerateRequest, kind: ServerKind = VLLM, max_tokens: int = 8) -> dict[str, Any]:
    server = AttachedServer(kind, "tiny", loras=("poet",))
    return body_of(request, server, prompt_of(request), max_tokens=max_tokens, stream=True)


# --- requests -----------------------------------------------------------------------------------------


def test_sampling_is_said_and_never_left_to_the_server() -> None:
    said = body(ask())
    assert said["prompt"] == [1, 2, 3]
    assert said["return_token_ids"] is True
    assert {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "seed"} <= set(said)
    assert (said["model"], said["max_tokens"], said["request_id"]) == ("tiny", 8, "r1")


def test_generated_tokens_count_in_prompt_and_seed() -> None:
    request = ask(generated=(9, 10), sampling=SamplingParams(seed=2**64 - 1), stop=StopConditions(min_tokens=5))
    said = body(request)
    assert said["prompt"] == [1, 2, 3, 9, 10]
    assert said["min_tokens"] == 3
    assert said["seed"] != body(ask(sampling=SamplingParams(seed=2**64 - 1)))["seed"]


@given(st.integers(0, 2**64 - 1), st.integers(1, 50))
def test_a_seed_is_one_that_the_server_accepts(seed: int, generated: int) -> None:
    request = ask(generated=tuple(range(generated)), sampling=SamplingParams(seed=seed))
    assert 0 <= body(request)["seed"] < 2**63
    assert 0 <= body(request, LLAMACPP)["seed"] < 2**31


def test_greedy_answers_need_no_seed() -> None:
    assert "seed" not in body(ask(sampling=SamplingParams(temperature=0)))


def test_min_tokens_is_never_more_than_max_tokens() -> None:
    """A prefill leg asks for one token, and vLLM refuses more as a minimum."""
    assert body(ask(stop=StopConditions(min_tokens=9)), max_tokens=1)["min_tokens"] == 1


def test_vllm_is_told_all_there_is() -> None:
    request = ask(
        sampling=SamplingParams(logit_bias=((5, -1.0),), allowed_token_ids=(5, 6), top_logprobs=0),
        stop=StopConditions(stop_token_ids=(7,), ignore_eos=True),
        lora="poet",
        cache_salt="tenant",
        guide=Guide(kind=GuideKind.REGEX, value="a+"),
    )
    said = body(request)
    assert said["model"] == "poet"
    assert said["cache_salt"] == "tenant"
    assert said["logit_bias"] == {"5": -1.0}
    assert said["allowed_token_ids"] == [5, 6]
    assert (said["logprobs"], said["return_tokens_as_token_ids"]) == (0, True)
    assert (said["stop_token_ids"], said["ignore_eos"]) == ([7], True)
    assert said["structured_outputs"] == {"regex": "a+"}


@pytest.mark.parametrize(
    ("guide", "field"),
    [
        (Guide(kind=GuideKind.JSON), {"json_object": True}),
        (Guide(kind=GuideKind.JSON_SCHEMA, value='{"type": "object"}'), {"json": {"type": "object"}}),
        (Guide(kind=GuideKind.CHOICE, value='["a", "b"]'), {"choice": ["a", "b"]}),
        (Guide(kind=GuideKind.GRAMMAR, value="root ::= x"), {"grammar": "root ::= x"}),
    ],
)
def test_guides_have_vllms_names(guide: Guide, field: dict[str, Any]) -> None:
    assert structured_outputs(guide) == field


def test_a_schema_that_is_no_json_is_the_callers_fault() -> None:
    with pytest.raises(InvalidRequestError, match="not JSON"):
        structured_outputs(Guide(kind=GuideKind.JSON_SCHEMA, value="{"))


def test_llama_cpp_shares_no_cache_with_a_salt() -> None:
    assert body(ask(), LLAMACPP)["cache_prompt"] is True
    assert body(ask(cache_salt="t"), LLAMACPP)["cache_prompt"] is False


NOT_PLAIN: list[tuple[str, dict[str, Any]]] = [
    ("top_k", {"sampling": SamplingParams(top_k=5)}),
    ("min_p", {"sampling": SamplingParams(min_p=0.1)}),
    ("repetition_penalty", {"sampling": SamplingParams(repetition_penalty=1.1)}),
    ("ignore_eos", {"stop": StopConditions(ignore_eos=True)}),
    ("min_tokens", {"stop": StopConditions(min_tokens=2)}),
    ("stop_token_ids", {"stop": StopConditions(stop_token_ids=(3,))}),
    ("cache_salt", {"cache_salt": "x"}),
]


@pytest.mark.parametrize(("name", "fields"), NOT_PLAIN)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_parameter_is_sent_or_refused_by_name(kind: ServerKind, name: str, fields: dict[str, Any]) -> None:
    """Servers ignore what they do not know, with status 200."""
    is_sent = body(ask(**fields), kind) != body(ask(), kind)
    refused = pytest.raises(InvalidRequestError, match=name)
    with nullcontext() if is_sent else refused:
        check_honoured(ask(**fields), kind)


def test_only_vllm_is_known_to_do_more_than_generate() -> None:
    assert Feature.GUIDED in AttachedServer(VLLM, "m").features
    assert AttachedServer(OPENAI, "m").features == (Feature.COMPLETIONS,)


def test_a_server_of_embeddings_may_do_nothing_else() -> None:
    assert AttachedServer(VLLM, "m", embeds=True, generates=False).features == (Feature.EMBEDDINGS,)
    assert AttachedServer(OPENAI, "m", embeds=True).features == (Feature.COMPLETIONS, Feature.EMBEDDINGS)


# --- vectors ------------------------------------------------------------------------------------------


def text(**fields: Any) -> EmbedRequest:
    return EmbedRequest(request_id=RequestId("e1"), model="m", prompt=pack_tokens([1, 2, 3]), **fields)


def test_an_adapter_is_the_model_that_embeds() -> None:
    server = AttachedServer(VLLM, "m")
    assert embedding_body(text(), server, [1, 2, 3])["model"] == "m"
    assert embedding_body(text(lora="poet"), server, [1, 2, 3])["model"] == "poet"


def test_a_tenants_text_is_kept_apart_or_refused() -> None:
    assert embedding_body(text(cache_salt="a"), AttachedServer(VLLM, "m"), [1])["cache_salt"] == "a"
    with pytest.raises(InvalidRequestError, match="not known to honour cache_salt"):
        embedding_body(text(cache_salt="a"), AttachedServer(SGLANG, "m"), [1])


@pytest.mark.parametrize("length", [1e-3, 1.0, 1e6])
def test_a_vector_has_length_1_whatever_the_server_gave(length: float) -> None:
    told = json.dumps({"data": [{"embedding": [0.6 * length, -0.8 * length], "index": 0}]}).encode()
    assert np.frombuffer(read_vector(told), "<f4") == pytest.approx([0.6, -0.8])


@pytest.mark.parametrize(
    "told",
    [
        b"",
        b"[]",
        b'{"data": []}',
        b'{"data": [{"embedding": []}]}',
        b'{"data": [{"embedding": "AACAPw=="}]}',
        b'{"data": [{"embedding": [0, 0]}]}',
        b'{"data": [{"embedding": [1e999]}]}',
        b'{"data": [{"embedding": [1e308, 1e308]}]}',
        b'{"data": [{"embedding": [1]}, {"embedding": [1]}]}',
        b'{"data": [{"embedding": [' + b"1," * 70_000 + b"1]}]}",
    ],
)
def test_what_is_no_vector_is_the_servers_failure(told: bytes) -> None:
    with pytest.raises(WireError):
        read_vector(told)


# --- answers ------------------------------------------------------------------------------------------


def chunk(**choice: Any) -> bytes:
    return json.dumps({"id": "cmpl-1", "choices": [{"index": 0, "text": "x", "stop_reason": None} | choice]}).encode()


def read(data: bytes, top_logprobs: int | None = None) -> Delta | None:
    return delta_of(read_answer(data), top_logprobs)


def test_a_chunk_is_a_delta() -> None:
    assert read(chunk(token_ids=[292], finish_reason=None)) == Delta((292,))
    assert read(chunk(token_ids=[5, 6], finish_reason="length")) == Delta((5, 6), FinishReason.LENGTH)
    assert read(chunk(token_ids=[], finish_reason=None)) is None
    assert read(b'{"choices": [], "usage": {"prompt_tokens": 5}}') is None


def test_the_token_that_ended_the_answer_is_told() -> None:
    ended = read(chunk(token_ids=[16, 2], finish_reason="stop"))
    assert ended == Delta((16, 2), FinishReason.STOP, stop_token=2)


def test_texts_become_tokens_where_there_is_nothing_else() -> None:
    ended = delta_of(read_answer(chunk(text="ab", finish_reason="stop")), None, lambda text: [ord(c) for c in text])
    assert ended == Delta((97, 98), FinishReason.STOP)


def test_logprobs_are_read_by_token_id() -> None:
    told = {
        "tokens": ["token_id:14"],
        "token_logprobs": [-0.7],
        "top_logprobs": [{"token_id:14": -0.7, "token_id:3": -0.6}],
    }
    delta = read(chunk(token_ids=[14], logprobs=told), top_logprobs=1)
    assert delta is not None
    assert delta.logprobs == (TokenLogprob(14, -0.7, ((3, -0.6),)),)


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"[]",
        b'{"choices": [{"token_ids": [-1]}]}',
        b'{"choices": [{"token_ids": ["a"]}]}',
        b'{"choices": [{}, {}]}',
        b"\xff",
        b'{"choices":' + b"[" * 100_000,
    ],
)
def test_what_is_no_answer_is_a_wire_error(bad: bytes) -> None:
    with pytest.raises(WireError):
        read_answer(bad)


def test_ids_and_logprobs_that_are_missing_are_not_made_up() -> None:
    with pytest.raises(WireError, match="no token ids"):
        read(chunk(text="hello"))
    with pytest.raises(WireError, match="no logprobs"):
        read(chunk(token_ids=[5]), top_logprobs=0)
    names = {"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": [{"a": -1.0}]}
    with pytest.raises(WireError, match="token_id"):
        read(chunk(token_ids=[5], logprobs=names), top_logprobs=1)


@pytest.mark.parametrize("reason", ["abort", "error", "content_filter"])
def test_an_answer_that_the_server_aborted_is_an_error(reason: str) -> None:
    with pytest.raises(EngineError, match=reason):
        read(chunk(token_ids=[], finish_reason=reason))


def test_deltas_that_came_together_are_one() -> None:
    lp = TokenLogprob(1, -1.0)
    parts = [
        Delta((1,), logprobs=(lp,), cached_tokens=4),
        Delta((2, 3), FinishReason.STOP, logprobs=(lp, lp), stop_token=3),
    ]
    assert merged(parts) == Delta((1, 2, 3), FinishReason.STOP, (lp, lp, lp), 4, stop_token=3)
    assert merged([]) is None


# --- refusals -----------------------------------------------------------------------------------------


def said(**fields: Any) -> bytes:
    return json.dumps({"error": {"message": "no", "type": "T", "param": None, "code": 1} | fields}).encode()


def test_a_refusal_is_the_callers_fault_or_the_servers() -> None:
    assert type(refusal(400, said())) is InvalidRequestError
    assert type(refusal(404, said(param="model"))) is InvalidRequestError
    assert type(refusal(400, said(param="input_tokens"))) is ContextLengthError
    assert type(refusal(500, said())) is EngineError
    assert type(refusal(503, said())) is DrainingError
    assert "KVMESH_ATTACH_API_KEY" in str(refusal(401, b""))


def test_a_busy_server_says_when_to_come_back() -> None:
    busy = refusal(429, said(), "7")
    assert isinstance(busy, OverloadedError)
    assert busy.retry_after_s == 7
    for useless in ("Fri, 31 Dec", "9" * 5000):
        busy = refusal(429, said(), useless)
        assert isinstance(busy, OverloadedError) and busy.retry_after_s is None


@given(st.integers(300, 599), st.binary(max_size=300))
def test_whatever_a_server_says_is_an_error_of_the_mesh(status: int, body: bytes) -> None:
    assert f"{status}" in str(refusal(status, body))


def test_an_error_in_a_stream_has_its_own_status() -> None:
    answer = read_answer(b'{"error": {"message": "gone", "type": "InternalServerError", "code": 500}}')
    assert answer.error is not None
    assert "gone" in str(failure_in_stream(answer.error))
