"""Requests, answers and tickets are translated to and from vLLM's words."""

import json
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.protocol.errors import ContextLengthError, EngineError, InvalidRequestError, TransferError
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.messages import (
    Delta,
    FinishReason,
    GenerateRequest,
    Guide,
    GuideKind,
    PullReport,
    SamplingParams,
    StopConditions,
    Ticket,
    TokenLogprob,
    pack_tokens,
)
from kvmesh.workers.engines.vllm.translate import (
    DivergedError,
    PullFailedError,
    VllmAnswer,
    VllmStep,
    offering,
    pulling,
    read_ticket,
    unpulled,
    whole,
    write_ticket,
)

BLOCK = 32
CONTEXT = 1024
EOS = frozenset({2})
PROMPT = list(range(100, 440))

PARAMS: dict[str, Any] = {  # as vLLM 0.32 answered a prefill of 340 tokens in blocks of 32
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12]],
    "remote_engine_id": "0f5d3c1e-5a0e-4c5a-9b3b-2f5f6f0b8a11",
    "remote_request_id": "cmpl-94fe675cbfd62f93-0-b9407613",
    "remote_host": "127.0.0.1",
    "remote_port": 5601,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 340,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
    "remote_prefill_cached_tokens": 320,
}


def ask(**fields: Any) -> GenerateRequest:
    return GenerateRequest(**{"request_id": RequestId("r"), "model": "m", "prompt": pack_tokens(PROMPT)} | fields)


def ticket(opaque: bytes | None = None, num_tokens: int = 340, **changes: Any) -> Ticket:
    return Ticket(
        offer_id=1,
        worker_id=WorkerId("p"),
        address="127.0.0.1:1",
        backend="vllm-nixl",
        nonce=5,
        num_tokens=num_tokens,
        opaque=json.dumps(PARAMS | changes).encode() if opaque is None else opaque,
    )


# --- questions --------------------------------------------------------------------------------------------


def test_every_parameter_is_sent_so_that_no_model_default_counts() -> None:
    sampling = SamplingParams(
        temperature=0.5, top_p=0.9, top_k=7, seed=3, top_logprobs=2, logit_bias=((4, 1.5),), allowed_token_ids=(4, 5)
    )
    stop = StopConditions(max_tokens=20, min_tokens=3, stop_token_ids=(9,), ignore_eos=True)
    assert whole(ask(sampling=sampling, stop=stop), CONTEXT).sampling == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": 3,
        "logprobs": 2,
        "prompt_logprobs": None,
        "logit_bias": {4: 1.5},
        "allowed_token_ids": [4, 5],
        "stop_token_ids": [9],
        "ignore_eos": True,
        "detokenize": False,
        "max_tokens": 20,
        "min_tokens": 3,
    }


def test_tokens_that_exist_are_part_of_the_prompt_and_count() -> None:
    question = whole(ask(generated=(7, 8), stop=StopConditions(max_tokens=10, min_tokens=5)), CONTEXT)
    assert question.prompt == [*PROMPT, 7, 8]
    assert (question.sampling["max_tokens"], question.sampling["min_tokens"]) == (8, 3)


def test_a_continued_answer_does_not_repeat_its_first_draws() -> None:
    seeds = [
        whole(ask(generated=(7,) * n, sampling=SamplingParams(seed=2**64 - 1)), CONTEXT).sampling["seed"]
        for n in (0, 1, 2)
    ]
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_greedy_answers_need_no_seed() -> None:
    assert whole(ask(sampling=SamplingParams(temperature=0)), CONTEXT).sampling["seed"] is None


def test_no_more_tokens_are_asked_for_than_the_context_holds() -> None:
    assert whole(ask(stop=StopConditions(max_tokens=5000)), CONTEXT).sampling["max_tokens"] == CONTEXT - 340


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (ask(prompt=b""), InvalidRequestError, "the prompt is empty"),
        (ask(generated=(1,) * 16), InvalidRequestError, "16 of at most 16"),
        (ask(prompt=pack_tokens([1] * CONTEXT)), ContextLengthError, "1024 tokens"),
    ],
)
def test_what_cannot_be_asked_is_refused(request_: GenerateRequest, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        whole(request_, CONTEXT)


@pytest.mark.parametrize(
    ("guide", "fields"),
    [
        (Guide(kind=GuideKind.JSON), {"json_object": True}),
        (Guide(kind=GuideKind.JSON_SCHEMA, value="{}"), {"json": "{}"}),
        (Guide(kind=GuideKind.REGEX, value="a+"), {"regex": "a+"}),
        (Guide(kind=GuideKind.GRAMMAR, value="g"), {"grammar": "g"}),
        (Guide(kind=GuideKind.CHOICE, value='["a", "b"]'), {"choice": ["a", "b"]}),
    ],
)
def test_each_kind_of_guide_has_its_field(guide: Guide, fields: dict[str, Any]) -> None:
    assert whole(ask(guide=guide), CONTEXT).guide == fields


def test_choices_that_are_none_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="choices"):
        whole(ask(guide=Guide(kind=GuideKind.CHOICE, value="{}")), CONTEXT)


def test_a_guided_answer_is_not_taken_up_in_the_middle() -> None:
    with pytest.raises(EngineError, match="from its middle"):
        whole(ask(generated=(7,), guide=Guide(kind=GuideKind.JSON)), CONTEXT)


def test_a_prefill_leg_asks_for_one_token_and_an_offer() -> None:
    question = offering(ask(offer_kv=True, stop=StopConditions(max_tokens=20, min_tokens=4)), CONTEXT)
    assert question.offers
    assert question.kv == {"do_remote_decode": True, "do_remote_prefill": False}
    assert (question.sampling["max_tokens"], question.sampling["min_tokens"]) == (1, 1)


def test_an_answer_of_one_token_needs_no_offer() -> None:
    assert not offering(ask(offer_kv=True, stop=StopConditions(max_tokens=1)), CONTEXT).offers


def test_a_decode_leg_expects_the_known_first_token() -> None:
    guide = Guide(kind=GuideKind.JSON)
    request = ask(generated=(7,), stop=StopConditions(max_tokens=20), sampling=SamplingParams(seed=4), guide=guide)
    question = pulling(request, ticket(), BLOCK, CONTEXT)
    assert (question.prompt, question.expected, question.sampling["max_tokens"]) == (PROMPT, (7,), 20)
    assert question.kv == PARAMS
    assert question.sampling["seed"] == offering(ask(sampling=SamplingParams(seed=4)), CONTEXT).sampling["seed"]


def test_the_same_is_asked_without_the_kv_of_others() -> None:
    question = pulling(ask(generated=(7,)), ticket(), BLOCK, CONTEXT)
    assert (unpulled(question).kv, unpulled(question).expected) == (None, (7,))


@pytest.mark.parametrize("generated", [(), (7, 8)])
def test_a_ticket_for_another_length_is_not_used(generated: tuple[int, ...]) -> None:
    with pytest.raises(TransferError):
        pulling(ask(generated=generated), ticket(), BLOCK, CONTEXT)


# --- tickets ----------------------------------------------------------------------------------------------


def test_a_ticket_is_carried_as_it_was_given() -> None:
    opaque, num_tokens = write_ticket(PARAMS)
    assert num_tokens == 340
    assert read_ticket(ticket(opaque), BLOCK) == PARAMS


@pytest.mark.parametrize(
    "missing",
    ["remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port", "remote_num_tokens"],
)
def test_an_incomplete_ticket_never_reaches_an_engine(missing: str) -> None:
    with pytest.raises(TransferError, match=missing):
        read_ticket(ticket(json.dumps({k: v for k, v in PARAMS.items() if k != missing}).encode()), BLOCK)


@pytest.mark.parametrize(
    "changes",
    [
        {"remote_block_ids": None},
        {"remote_block_ids": []},
        {"remote_block_ids": [[]]},
        {"remote_block_ids": [[-1] * 11]},
        {"remote_block_ids": [[1 << 31] * 11]},
        {"remote_block_ids": [[1, 2]]},
        {"remote_port": 0},
        {"remote_host": ""},
        {"do_remote_prefill": False},
        {"do_remote_decode": True},
        {"transfer_mode": "push"},
        {"remote_num_tokens": 341},
        {"tp_size": 0},
        {"tp_size": 2**31},
        {"dcp_size": 2**31},
        {"pp_size": 2**31},
    ],
)
def test_a_ticket_that_could_harm_an_engine_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(TransferError):
        read_ticket(ticket(**changes), BLOCK)


def test_what_is_not_known_is_not_passed_on() -> None:
    assert read_ticket(ticket(surprise=1), BLOCK) == PARAMS


@given(
    st.binary(max_size=60)
    | st.dictionaries(st.sampled_from(list(PARAMS)), st.integers() | st.none()).map(msgspec.json.encode)
)
def test_any_bytes_are_read_or_refused(opaque: bytes) -> None:
    with pytest.raises(TransferError):
        read_ticket(ticket(opaque), BLOCK)


# --- answers ----------------------------------------------------------------------------------------------


@dataclass
class Entry:
    logprob: float
    rank: int


def answer(**fields: Any) -> VllmAnswer:
    return VllmAnswer(whole(ask(**fields), CONTEXT), EOS)


def test_only_the_first_delta_has_the_cached_tokens() -> None:
    reading = answer()
    assert reading.take(VllmStep([5], cached_tokens=64)) == Delta(token_ids=(5,), cached_tokens=64)
    assert reading.take(VllmStep([6, 7], cached_tokens=64)) == Delta(token_ids=(6, 7))
    assert reading.take(VllmStep([])) is None
    assert reading.take(VllmStep([8], "length")) == Delta(token_ids=(8,), finish_reason=FinishReason.LENGTH)


@pytest.mark.parametrize(("reason", "token", "stop_token"), [(9, 9, 9), (None, 2, 2), (None, 5, None)])
def test_the_token_that_ended_an_answer_is_named(reason: int | None, token: int, stop_token: int | None) -> None:
    delta = answer().take(VllmStep([token], "stop", reason))
    assert delta == Delta(token_ids=(token,), finish_reason=FinishReason.STOP, stop_token=stop_token)


def test_logprobs_are_ordered_and_the_top_has_its_size() -> None:
    reading = answer(sampling=SamplingParams(top_logprobs=1))
    delta = reading.take(VllmStep([5], logprobs=[{5: Entry(-3.0, 4), 8: Entry(-0.1, 1)}]))
    assert delta is not None
    assert delta.logprobs == (TokenLogprob(5, -3.0, ((8, -0.1),)),)


@pytest.mark.parametrize("offer_kv", [False, True])
def test_logprobs_of_the_prompt_go_before_those_of_the_first_token(offer_kv: bool) -> None:
    request = ask(
        prompt=pack_tokens([4, 5, 6]), offer_kv=offer_kv, sampling=SamplingParams(top_logprobs=1, prompt_logprobs=1)
    )
    question = offering(request, CONTEXT) if offer_kv else whole(request, CONTEXT)
    assert question.sampling["prompt_logprobs"] == 1
    told = [None, {5: Entry(-3.0, 4), 8: Entry(-0.1, 1)}, {6: Entry(-0.2, 1)}]
    reading = VllmAnswer(question, EOS)
    delta = reading.take(VllmStep([7], logprobs=[{7: Entry(-1.0, 1)}], prompt_logprobs=told))
    assert delta is not None
    assert delta.token_ids == (7,)
    first, *rest = delta.logprobs or ()
    assert first == TokenLogprob(5, -3.0, ((8, -0.1),))
    assert rest == [TokenLogprob(6, -0.2, ((6, -0.2),)), TokenLogprob(7, -1.0, ((7, -1.0),))]
    assert reading.take(VllmStep([8], logprobs=[{8: Entry(-1.0, 1)}])) == Delta(
        (8,), logprobs=(TokenLogprob(8, -1.0, ((8, -1.0),)),)
    )


def test_a_prefill_leg_has_no_finish_reason_if_it_continues() -> None:
    reading = VllmAnswer(offering(ask(offer_kv=True), CONTEXT), EOS)
    assert reading.take(VllmStep([5], "length")) == Delta(token_ids=(5,))


def test_a_prefill_leg_whose_token_ends_the_answer_says_so() -> None:
    delta = VllmAnswer(offering(ask(offer_kv=True), CONTEXT), EOS).take(VllmStep([2], "stop"))
    assert delta is not None
    assert delta.finish_reason is FinishReason.STOP


def decoding() -> VllmAnswer:
    return VllmAnswer(pulling(ask(generated=(7,)), ticket(), BLOCK, CONTEXT), EOS)


def test_a_known_token_is_left_out_with_its_logprob() -> None:
    request = ask(generated=(7,), sampling=SamplingParams(top_logprobs=0))
    report = PullReport("vllm-nixl", 1, 1, 0.1)
    reading = VllmAnswer(pulling(request, ticket(), BLOCK, CONTEXT), EOS, report)
    assert reading.take(VllmStep([7], logprobs=[{7: Entry(-1.0, 1)}])) is None
    delta = reading.take(VllmStep([8], logprobs=[{8: Entry(-2.0, 1)}]))
    assert delta == Delta(token_ids=(8,), logprobs=(TokenLogprob(8, -2.0),), pull=report)


def test_the_known_token_may_come_with_others() -> None:
    assert decoding().take(VllmStep([7, 8], "length")) == Delta(token_ids=(8,), finish_reason=FinishReason.LENGTH)


def test_another_first_token_is_noticed_before_anything_is_said() -> None:
    with pytest.raises(DivergedError):
        decoding().take(VllmStep([9]))


def test_a_failed_pull_is_not_a_failed_answer() -> None:
    with pytest.raises(PullFailedError):
        decoding().take(VllmStep([], "error"))


def test_an_answer_that_vllm_gives_up_fails_loudly() -> None:
    with pytest.raises(EngineError, match="'abort'"):
        answer().take(VllmStep([], "abort"))


tokens_ = st.lists(st.integers(0, 50), min_size=1, max_size=12)


@given(tokens_, st.data())
def test_known_tokens_are_left_out_however_steps_are_cut(tokens: list[int], data: st.DataObject) -> None:
    reading = VllmAnswer(pulling(ask(generated=(tokens[0],)), ticket(), BLOCK, CONTEXT), EOS)
    got: list[int] = []
    left = list(tokens)
    while left:
        size = data.draw(st.integers(1, len(left)))
        step, left = left[:size], left[size:]
        delta = reading.take(VllmStep(step, None if left else "length"))
        got += [] if delta is None else delta.token_ids
    assert got == tokens[1:]
