"""Requests as SGLang takes them, and its outputs as deltas."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.protocol.errors import ContextLengthError, EngineError, InvalidRequestError, OverloadedError, TransferError
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.messages import (
    Delta,
    FinishReason,
    GenerateRequest,
    Guide,
    GuideKind,
    SamplingParams,
    StopConditions,
    Ticket,
    TokenLogprob,
    pack_tokens,
)
from kvmesh.workers.engines.sglang.bootstrap import MAX_ROOM, Bootstrap, bootstrap_of, encode_bootstrap
from kvmesh.workers.engines.sglang.translate import SglangAnswer, generate_kwargs, guide_params

BOOTSTRAP = Bootstrap("10.0.0.7", 8998, 42)


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest(request_id=RequestId("r"), model="m", prompt=pack_tokens([5, 6, 7]), **fields)


def kwargs(asked: GenerateRequest, *, has_tokenizer: bool = False, **more: Any) -> dict[str, Any]:
    return generate_kwargs(asked, context_tokens=100, has_tokenizer=has_tokenizer, **more)


def params(asked: GenerateRequest, *, has_tokenizer: bool = False) -> dict[str, Any]:
    sampling: dict[str, Any] = kwargs(asked, has_tokenizer=has_tokenizer)["sampling_params"]
    return sampling


# --- requests ---------------------------------------------------------------------------------------------------------


def test_generated_tokens_are_prompt_and_count_against_the_limit() -> None:
    asked = request(generated=(8, 9), stop=StopConditions(max_tokens=10))
    assert kwargs(asked)["input_ids"] == [5, 6, 7, 8, 9]
    assert params(asked)["max_new_tokens"] == 8


def test_top_k_and_biases_are_in_sglangs_form() -> None:
    asked = request(sampling=SamplingParams(logit_bias=((5, 1.5),)))
    assert params(asked)["top_k"] == -1
    assert params(asked)["logit_bias"] == {"5": 1.5}
    assert params(request(sampling=SamplingParams(top_k=7)))["top_k"] == 7


@given(st.integers(0, 2**64 - 1))
def test_a_seed_is_one_that_sglang_takes(seed: int) -> None:
    assert 0 <= params(request(sampling=SamplingParams(seed=seed)))["sampling_seed"] < 2**63


def test_the_chosen_tokens_logprob_is_asked_for_without_others() -> None:
    asked = kwargs(request(sampling=SamplingParams(top_logprobs=0)))
    assert (asked["return_logprob"], asked["top_logprobs_num"]) == (True, 0)
    assert "return_logprob" not in kwargs(request())


def test_adapter_salt_and_bootstrap_go_along() -> None:
    asked = kwargs(request(lora="poet", cache_salt="a"), adapter="poet@1", bootstrap=BOOTSTRAP)
    assert (asked["lora_path"], asked["cache_salt"]) == ("poet@1", "a")
    assert (asked["bootstrap_host"], asked["bootstrap_port"], asked["bootstrap_room"]) == ("10.0.0.7", 8998, 42)


def test_min_tokens_are_refused_without_a_tokenizer() -> None:
    asked = request(generated=(8,), stop=StopConditions(max_tokens=10, min_tokens=4))
    assert params(asked, has_tokenizer=True)["min_new_tokens"] == 3
    with pytest.raises(InvalidRequestError, match="--grammar-backend") as refused:
        params(asked)
    assert refused.value.param == "min_tokens"
    reached = request(generated=(8, 9), stop=StopConditions(max_tokens=10, min_tokens=2))
    assert "min_new_tokens" not in params(reached)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(presence_penalty=2.5),
        SamplingParams(frequency_penalty=-3),
        SamplingParams(repetition_penalty=2.1),
        SamplingParams(repetition_penalty=0),
    ],
)
def test_a_penalty_beyond_sglangs_range_is_refused(sampling: SamplingParams) -> None:
    with pytest.raises(InvalidRequestError, match="SGLang takes") as refused:
        params(request(sampling=sampling))
    assert refused.value.param in ("presence_penalty", "frequency_penalty", "repetition_penalty")


def test_a_prompt_without_room_for_an_answer_is_refused() -> None:
    long = msgspec.structs.replace(request(), prompt=pack_tokens(range(100)))
    with pytest.raises(ContextLengthError, match="has 100 tokens"):
        kwargs(long)


@pytest.mark.parametrize(
    ("guide", "field"),
    [
        (Guide(kind=GuideKind.JSON), {"json_schema": '{"type": "object"}'}),
        (Guide(kind=GuideKind.JSON_SCHEMA, value="{}"), {"json_schema": "{}"}),
        (Guide(kind=GuideKind.REGEX, value="a+"), {"regex": "a+"}),
        (Guide(kind=GuideKind.GRAMMAR, value="root ::= x"), {"ebnf": "root ::= x"}),
        (Guide(kind=GuideKind.CHOICE, value='["a.b", "c"]'), {"regex": r"(a\.b|c)"}),
    ],
)
def test_each_kind_of_guide_has_its_field(guide: Guide, field: dict[str, str]) -> None:
    assert guide_params(guide) == field


# --- tickets ----------------------------------------------------------------------------------------------------------


def ticket(opaque: bytes, backend: str = "sglang-nixl") -> Ticket:
    return Ticket(offer_id=1, worker_id=WorkerId("w"), address="h:1", backend=backend, nonce=1, opaque=opaque)


@given(st.integers(1, 65535), st.integers(0, MAX_ROOM))
def test_a_bootstrap_survives_its_ticket(port: int, room: int) -> None:
    bootstrap = Bootstrap("node-3.example", port, room)
    assert bootstrap_of(ticket(encode_bootstrap(bootstrap)), "sglang-nixl") == bootstrap


@given(st.binary(max_size=200))
def test_unreadable_bootstraps_raise_transfer_error_alone(opaque: bytes) -> None:
    with pytest.raises(TransferError):
        bootstrap_of(ticket(opaque), "sglang-nixl")


@pytest.mark.parametrize(
    "opaque",
    [
        b'{"host": "a", "port": 0, "room": 1}',
        b'{"host": "a", "port": 1, "room": -1}',
        b'{"host": "a", "port": 1, "room": 9223372036854775808}',
        b'{"host": "a b", "port": 1, "room": 1}',
        b'{"host": "", "port": 1, "room": 1}',
        b'{"host": "a", "port": 1, "room": 1, "more": 1}',
        b'{"host": "a", "port": 1}',
        b" " * 2000,
    ],
)
def test_a_bootstrap_out_of_bounds_is_refused(opaque: bytes) -> None:
    with pytest.raises(TransferError):
        bootstrap_of(ticket(opaque), "sglang-nixl")


def test_engines_with_other_transfer_backends_do_not_meet() -> None:
    with pytest.raises(TransferError, match="the same engine and transfer backend"):
        bootstrap_of(ticket(encode_bootstrap(BOOTSTRAP), "sglang-mooncake"), "sglang-nixl")


# --- outputs ----------------------------------------------------------------------------------------------------------


def output(ids: list[int], finish: object = None, **meta: object) -> dict[str, Any]:
    return {"output_ids": ids, "meta_info": {"finish_reason": finish, "cached_tokens": 16} | meta}


def read(outputs: list[dict[str, Any]], *, incremental: bool, top: int | None = None) -> list[Delta]:
    answer = SglangAnswer(is_incremental=incremental, top_logprobs=top)
    return [delta for one in outputs if (delta := answer.on_output(one)) is not None]


LENGTH = {"type": "length", "length": 3}


@given(st.lists(st.lists(st.integers(0, 2000), max_size=4), min_size=1, max_size=8), st.booleans())
def test_the_tokens_are_the_same_however_sglang_tells_them(steps: list[list[int]], incremental: bool) -> None:
    growing: list[int] = []
    outputs: list[dict[str, Any]] = []
    for step in steps:
        growing = growing + step
        outputs.append(output(step if incremental else growing))
    outputs[-1]["meta_info"]["finish_reason"] = LENGTH
    deltas = read(outputs, incremental=incremental)
    assert [token for delta in deltas for token in delta.token_ids] == growing
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert [delta.cached_tokens for delta in deltas] == [16] + [None] * (len(deltas) - 1)


def test_a_list_that_grows_is_read_from_its_end() -> None:
    ids = [1]
    answer = SglangAnswer(is_incremental=False, top_logprobs=None)
    first = answer.on_output(output(ids))
    ids += [2, 3]
    second = answer.on_output(output(ids, LENGTH))
    assert first is not None and second is not None
    assert (first.token_ids, second.token_ids) == ((1,), (2, 3))


def test_an_output_with_nothing_new_is_no_delta() -> None:
    assert read([output([])], incremental=True) == []


@pytest.mark.parametrize(
    ("finish", "token"),
    [
        ({"type": "stop", "matched": 7}, 7),
        ({"type": "stop", "matched": [6, 7]}, 7),
        ({"type": "stop", "matched": 9}, None),
        ({"type": "stop", "matched": "text"}, None),
    ],
)
def test_a_stop_token_is_reported_if_it_is_last(finish: dict[str, Any], token: int | None) -> None:
    [delta] = read([output([6, 7], finish)], incremental=True)
    assert (delta.finish_reason, delta.stop_token) == (FinishReason.STOP, token)


@pytest.mark.parametrize("incremental", [True, False])
def test_logprobs_go_with_their_tokens(incremental: bool) -> None:
    chosen = [(-0.5, 6, None), (-0.25, 7, None)]
    tops = [[(-2.0, 9, None), (-0.5, 6, None)], None]
    first = output([6], output_token_logprobs=chosen[:1], output_top_logprobs=tops[:1])
    second = output([7], LENGTH, output_token_logprobs=chosen[1:], output_top_logprobs=tops[1:])
    if not incremental:
        second = output([6, 7], LENGTH, output_token_logprobs=chosen, output_top_logprobs=tops)
    deltas = read([first, second], incremental=incremental, top=2)
    assert deltas[0].logprobs == (TokenLogprob(6, -0.5, ((6, -0.5), (9, -2.0))),)
    assert deltas[1].logprobs == (TokenLogprob(7, -0.25),)


def test_a_missing_logprob_fails_the_answer() -> None:
    with pytest.raises(EngineError, match="1 logprobs for 2 tokens"):
        read([output([6, 7], output_token_logprobs=[(-0.5, 6, None)])], incremental=True, top=0)


@pytest.mark.parametrize(
    ("status", "kind"), [(400, InvalidRequestError), (503, OverloadedError), (500, EngineError), (None, EngineError)]
)
def test_an_abort_is_an_error_and_repeats_no_tokens(status: int | None, kind: type[Exception]) -> None:
    answer = SglangAnswer(is_incremental=True, top_logprobs=None)
    answer.on_output(output([6]))
    with pytest.raises(kind, match="too bad"):
        answer.on_output(output([6], {"type": "abort", "message": "too bad", "status_code": status}))
    assert answer.has_ended


def test_an_unknown_finish_reason_is_an_error() -> None:
    with pytest.raises(EngineError, match="unknown reason: 'beam'"):
        read([output([6], {"type": "beam"})], incremental=True)
