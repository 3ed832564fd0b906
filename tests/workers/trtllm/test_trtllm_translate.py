"""Requests as TensorRT-LLM takes them, its results as deltas, its disaggregation state as tickets."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.protocol.errors import EngineError, TransferError
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
from kvmesh.workers.engines.trtllm.translate import (
    ContextState,
    TrtllmAnswer,
    encode_state,
    guide_fields,
    input_ids,
    read_ticket,
    sampling_fields,
    state_of,
)
from tests.support.fake_trtllm import DisaggregatedParams

STATE = ContextState(opaque_state=b"\x00where\xff", first_gen_tokens=(9,), ctx_request_id=7, disagg_request_id=1 << 50)


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest(request_id=RequestId("r"), model="m", prompt=pack_tokens([5, 6, 7]), **fields)


def ticket(opaque: bytes, backend: str = "trtllm") -> Ticket:
    return Ticket(offer_id=1, worker_id=WorkerId("w"), address="h:1", backend=backend, nonce=1, opaque=opaque)


# --- requests ---------------------------------------------------------------------------------------------------------


def test_generated_tokens_are_prompt_and_count_against_the_limit() -> None:
    asked = request(generated=(8, 9), stop=StopConditions(max_tokens=10))
    assert input_ids(asked, 100, None) == [5, 6, 7, 8, 9]
    assert sampling_fields(asked, None)["max_tokens"] == 8


def test_a_token_from_the_ticket_is_not_prompt() -> None:
    asked = request(generated=(8, 9), stop=StopConditions(max_tokens=10, min_tokens=5))
    assert input_ids(asked, 100, STATE) == [5, 6, 7, 8]
    fields = sampling_fields(asked, STATE)
    assert (fields["max_tokens"], fields["min_tokens"]) == (9, 4)


def test_greedy_is_the_likeliest_token_and_no_temperature() -> None:
    fields = sampling_fields(request(sampling=SamplingParams(temperature=0, top_k=50, top_p=0.5)), None)
    assert "temperature" not in fields
    assert (fields["top_k"], fields["top_p"]) == (1, 1.0)
    assert sampling_fields(request(sampling=SamplingParams(temperature=0.7)), None)["temperature"] == 0.7


def test_stop_tokens_stay_and_one_logprob_is_asked_for() -> None:
    fields = sampling_fields(request(stop=StopConditions(stop_token_ids=(3,))), None)
    assert (fields["stop_token_ids"], fields["include_stop_str_in_output"]) == ([3], True)
    assert "logprobs" not in fields
    for top, wanted in ((0, 1), (1, 1), (5, 5)):
        assert sampling_fields(request(sampling=SamplingParams(top_logprobs=top)), None)["logprobs"] == wanted


@pytest.mark.parametrize(
    ("guide", "fields"),
    [
        (Guide(kind=GuideKind.JSON), {"json_object": True}),
        (Guide(kind=GuideKind.JSON_SCHEMA, value="{}"), {"json": "{}"}),
        (Guide(kind=GuideKind.REGEX, value="a+"), {"regex": "a+"}),
        (Guide(kind=GuideKind.GRAMMAR, value="root ::= x"), {"grammar": "root ::= x"}),
        (Guide(kind=GuideKind.CHOICE, value='["a.b", "c"]'), {"regex": r"(a\.b|c)"}),
    ],
)
def test_each_kind_of_guide_has_its_field(guide: Guide, fields: dict[str, Any]) -> None:
    assert guide_fields(guide) == fields


# --- state ------------------------------------------------------------------------------------------------------------

states = st.builds(
    ContextState,
    opaque_state=st.one_of(st.none(), st.binary(max_size=50)),
    first_gen_tokens=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=4).map(tuple),
    ctx_request_id=st.integers(0, 2**63 - 1),
    disagg_request_id=st.one_of(st.none(), st.integers(0, 2**63 - 1)),
    draft_tokens=st.one_of(st.none(), st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple)),
    ctx_dp_rank=st.one_of(st.none(), st.integers(0, 100)),
    ctx_info_endpoint=st.one_of(st.none(), st.just("tcp://10.0.0.7:9000")),
)


@given(states)
def test_a_state_survives_its_ticket(state: ContextState) -> None:
    assert read_ticket(ticket(encode_state(state)), (1, 2, *state.first_gen_tokens)) == state


@given(st.binary(max_size=200))
def test_unreadable_states_raise_transfer_error_alone(opaque: bytes) -> None:
    with pytest.raises(TransferError):
        read_ticket(ticket(opaque), (9,))


@pytest.mark.parametrize("generated", [(), (8,), (9, 8)])
def test_a_state_of_another_answer_is_refused(generated: tuple[int, ...]) -> None:
    with pytest.raises(TransferError, match="another first token"):
        read_ticket(ticket(encode_state(STATE)), generated)


def test_a_field_that_is_not_known_is_refused() -> None:
    fields = msgspec.to_builtins(STATE, builtin_types=(bytes,)) | {"multimodal_embedding_handles": [{}]}
    with pytest.raises(TransferError, match="unreadable"):
        read_ticket(ticket(msgspec.msgpack.encode(fields)), (9,))


def test_what_a_prefill_engine_gives_becomes_a_state() -> None:
    given_params = DisaggregatedParams(
        request_type="context_only", first_gen_tokens=[9], ctx_request_id=7, opaque_state=b"s", draft_tokens=[1, 2]
    )
    assert state_of(given_params) == ContextState(
        opaque_state=b"s", first_gen_tokens=(9,), ctx_request_id=7, draft_tokens=(1, 2)
    )


@pytest.mark.parametrize(
    "given_params",
    [None, DisaggregatedParams(), DisaggregatedParams(first_gen_tokens=[9], opaque_state=b"s")],
)
def test_a_prefill_engine_that_offers_nothing_fails_the_prefill(given_params: object) -> None:
    with pytest.raises(EngineError, match="offers"):
        state_of(given_params)


# --- results ----------------------------------------------------------------------------------------------------------


def result(tokens: list[int], reason: str | None = None, logprobs: object = ()) -> Any:
    output = SimpleNamespace(token_ids=tokens, finish_reason=reason, logprobs=logprobs)
    return SimpleNamespace(outputs=[output], finished=reason is not None, cached_tokens=32)


@given(st.lists(st.lists(st.integers(0, 2000), max_size=4), min_size=1, max_size=8))
def test_each_step_tells_what_is_new(steps: list[list[int]]) -> None:
    answer = TrtllmAnswer(top_logprobs=None)
    so_far: list[int] = []
    deltas: list[Delta] = []
    for number, step in enumerate(steps):
        so_far = so_far + step
        delta = answer.on_result(result(so_far, "length" if number == len(steps) - 1 else None))
        deltas += [] if delta is None else [delta]
    assert [token for delta in deltas for token in delta.token_ids] == so_far
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert [delta.cached_tokens for delta in deltas] == [32] + [None] * (len(deltas) - 1)


def test_tokens_that_were_given_are_not_told_again() -> None:
    answer = TrtllmAnswer(top_logprobs=None, given=(9,))
    assert answer.on_result(result([])) is None
    second = answer.on_result(result([9, 10]))
    assert second is not None
    assert second.token_ids == (10,)


def test_an_answer_from_another_first_token_is_an_error() -> None:
    with pytest.raises(EngineError, match="another first token"):
        TrtllmAnswer(top_logprobs=None, given=(9,)).on_result(result([8, 10]))


@pytest.mark.parametrize("reason", ["cancelled", "timeout", "odd"])
def test_an_answer_that_was_given_up_is_an_error(reason: str) -> None:
    answer = TrtllmAnswer(top_logprobs=None)
    with pytest.raises(EngineError, match=reason):
        answer.on_result(result([1], reason))
    assert answer.has_ended


def test_the_stop_token_is_the_last_one() -> None:
    delta = TrtllmAnswer(top_logprobs=None).on_result(result([1, 2], "stop"))
    assert delta is not None
    assert (delta.finish_reason, delta.stop_token) == (FinishReason.STOP, 2)


def logprob(value: float) -> Any:
    return SimpleNamespace(logprob=value, rank=1)


def test_logprobs_match_tokens_if_given_ones_have_none() -> None:
    entries = [{10: logprob(-0.5), 11: logprob(-0.1)}]
    delta = TrtllmAnswer(top_logprobs=1, given=(9,)).on_result(result([9, 10], "length", entries))
    assert delta is not None
    assert delta.logprobs == (TokenLogprob(10, -0.5, ((11, -0.1),)),)
    plain = TrtllmAnswer(top_logprobs=0).on_result(result([9], "length", [-0.25]))
    assert plain is not None
    assert plain.logprobs == (TokenLogprob(9, -0.25),)


@pytest.mark.parametrize("entries", [[], [{11: logprob(-0.1)}]])
def test_a_logprob_that_is_missing_fails_the_answer(entries: list[Any]) -> None:
    with pytest.raises(EngineError, match="logprob"):
        TrtllmAnswer(top_logprobs=1).on_result(result([10], "length", entries))
