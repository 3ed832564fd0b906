"""The oracle tells answers apart, and measures what faults cost."""

from typing import Any

import pytest
from msgspec.structs import replace

from kvmesh.lab.faults.clients import note_body, note_event
from kvmesh.lab.faults.oracle import Answered, Oracle, Verdict
from kvmesh.lab.faults.recovery import (
    Happened,
    hits_of,
    is_excused,
    percentile,
    recovery_of,
    stopped_s,
    story,
    usual_waits,
)
from kvmesh.lab.faults.run import unprovoked
from kvmesh.lab.faults.schedule import PlannedFault
from kvmesh.lab.faults.traffic import SHAPES, Ask, ask
from kvmesh.lab.faults.weights import ROLLED_OUT
from kvmesh.protocol.errors import ConfigError

ORACLE = Oracle(lambda token: f"<{token}>", {})
ASK = Ask(number=1, shape="stream", frontend=0, max_tokens=3, prompt=(10, 20, 30), deadline_s=10)


def answered(tokens: list[str] | None = None, **fields: Any) -> Answered:
    made = Answered(ASK, sent_s=1.0, ended_s=2.0, status=200, is_done=True)
    made.tokens[0] = ORACLE.right(ASK) if tokens is None else tokens
    made.finished[0] = "length"
    made.trace = {"decode_worker": "decode-1", "migrations": 0}
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def happened(
    kind: str = "kill", role: str = "decode", index: int = 1, began_s: float = 1.5, ended_s: float = 1.5
) -> Happened:
    return Happened(PlannedFault(at_s=began_s, kind=kind, role=role, index=index), began_s, ended_s)


@pytest.mark.parametrize(
    ("verdict", "answer"),
    [
        (Verdict.RIGHT, answered()),
        (Verdict.WRONG, answered(["<1>", "<2>", "<3>"])),
        (Verdict.WRONG, answered([*ORACLE.right(ASK), "<9>"])),
        (Verdict.TRUNCATED, answered(ORACLE.right(ASK)[:2])),
        (Verdict.TRUNCATED, answered(ORACLE.right(ASK)[:2], is_done=False)),
        (Verdict.TRUNCATED, answered(ORACLE.right(ASK)[:2], error={"code": "peer_lost"})),
        (Verdict.ERROR, answered([], error={"code": "peer_lost"})),
        (Verdict.ERROR, answered([], status=503, error={"code": "no_worker"})),
        (Verdict.ERROR, answered([], status=0, is_done=False, broken="reset")),
        (Verdict.EMPTY, answered([])),
        (Verdict.LEFT, answered(ORACLE.right(ASK)[:1], has_left=True, is_done=False)),
        (Verdict.WRONG, answered(["<1>"], has_left=True)),
        (Verdict.HUNG, answered(ended_s=13.0)),
        (Verdict.HUNG, answered(is_hung=True)),
    ],
)
def test_the_oracle_tells_answers_apart(verdict: Verdict, answer: Answered) -> None:
    assert ORACLE.judge(answer).verdict is verdict


def test_a_stopped_frontend_may_answer_late() -> None:
    late = answered(ended_s=13.0)
    stop = happened("stop", "frontend", 0, began_s=5.0, ended_s=8.0)
    assert ORACLE.judge(late, stopped_s(late, [stop])).verdict is Verdict.RIGHT


def test_a_repeated_token_is_a_wrong_token() -> None:
    first, second, _ = ORACLE.right(ASK)
    assert ORACLE.judge(answered([first, second, second])).verdict is Verdict.WRONG


def test_the_same_number_gives_the_same_request() -> None:
    assert ask(5, 17, 2) == ask(5, 17, 2)
    assert {ask(5, number, 2).shape for number in range(400)} == {name for name, shape in SHAPES.items() if shape.share}
    with pytest.raises(ConfigError, match="no shape"):
        ask(5, 1, 2, ["strem"])


def test_events_of_a_stream_are_noted_with_their_gaps() -> None:
    stream = Answered(ASK, sent_s=0.0)
    for at_s, token in ((0.2, "a"), (0.3, "b"), (2.3, "c")):
        event = f'{{"choices": [{{"index": 0, "logprobs": {{"tokens": ["{token}"]}}, "finish_reason": null}}]}}'
        note_event(stream, event.encode(), at_s)
    note_event(stream, b"[DONE]", 2.4)
    assert (stream.tokens, stream.is_done, stream.events) == ({0: ["a", "b", "c"]}, True, 3)
    assert stream.wait == pytest.approx((0.3, 2.3))
    note_event(stream, b"{}", 2.5)
    assert stream.broken


def test_a_body_that_is_no_json_is_a_broken_answer() -> None:
    whole = Answered(ASK, sent_s=0.0, status=200)
    note_body(whole, b'{"choices": [', 1.0)
    whole.ended_s = 1.0
    assert ORACLE.judge(whole).verdict is Verdict.TRUNCATED


def test_a_fault_hits_requests_that_use_its_target() -> None:
    assert hits_of(answered(), [happened()])
    assert not hits_of(answered(), [happened(index=2)])
    assert not hits_of(answered(), [happened(began_s=2.5)])
    assert hits_of(answered(), [happened(kind="discovery_away", role="discovery", index=0)])
    assert hits_of(answered(trace={"migrations": 1}), [happened(index=2)])


def test_recovery_is_the_longest_wait_beyond_the_usual() -> None:
    slow = answered(first_s=1.1, last_s=1.9, gap_from_s=1.2, gap_s=0.7)
    recovery = recovery_of(slow, [happened()], usual_s=0.2)
    assert recovery is not None and recovery.cost_s == pytest.approx(0.5)
    assert "decode-1" in story(recovery) and "kill decode-1" in story(recovery)


def test_a_stopped_frontend_does_not_count_as_recovery() -> None:
    slow = answered(first_s=1.1, last_s=1.9, gap_from_s=1.2, gap_s=0.7)
    recovery = recovery_of(slow, [happened("stop", "frontend", 0, began_s=1.2, ended_s=1.7)], usual_s=0.1)
    assert recovery is not None and recovery.cost_s == pytest.approx(0.1)


def test_usual_waits_are_those_without_any_fault() -> None:
    calm, hit = answered(sent_s=10.0, ended_s=10.4, first_s=10.3), answered(first_s=1.9)
    assert usual_waits([calm, hit], [happened()]) == {"stream": pytest.approx(0.3)}


def test_only_a_killed_frontend_excuses_a_broken_connection() -> None:
    broken = answered(broken="reset")
    assert is_excused(broken, [happened(role="frontend", index=0)])
    assert not is_excused(broken, [happened(role="frontend", index=1)])
    assert not is_excused(broken, [happened(role="decode", index=0)])


@pytest.mark.parametrize(("share", "value"), [(0.5, 50.0), (0.99, 99.0), (1.0, 100.0)])
def test_percentiles_are_nearest_ranks(share: float, value: float) -> None:
    assert percentile([float(number) for number in range(1, 101)], share) == value
    assert percentile([], share) == 0.0


def test_processes_may_end_as_often_as_faults_made_them() -> None:
    lines = [
        "decode-0 ended with signal SIGKILL, starting it again",
        "decode-0 ended with exit code 1, starting it again",
    ]
    assert unprovoked(lines, {"decode-0": 2}) == []
    assert unprovoked(lines, {"decode-0": 1}) == lines[1:]


def other_answer(weights: int, count: int = 3) -> list[str]:
    return ORACLE.right(ASK, weights)[:count]


def judged_with_others(answer: Answered, from_s: float = 0.0, until_s: float = 9.0) -> Verdict:
    """Judge an answer while decode-1 has other weights, and nothing but these from 1 s on."""
    oracle = Oracle(lambda token: f"<{token}>", {})
    served = oracle.weights.begin("decode-1", ROLLED_OUT, from_s)
    only = oracle.weights.loaded(served, from_s + 0.5)
    served.until_s = only.until_s = until_s
    return oracle.judge(answer).verdict


def test_an_answer_of_the_weights_that_its_decode_worker_has_is_right() -> None:
    assert judged_with_others(answered(other_answer(ROLLED_OUT))) is Verdict.RIGHT


def test_an_answer_of_weights_that_its_decode_worker_has_not_is_wrong() -> None:
    assert judged_with_others(answered()) is Verdict.WRONG
    elsewhere = answered(other_answer(ROLLED_OUT), trace={"decode_worker": "decode-0", "migrations": 0})
    assert judged_with_others(elsewhere) is Verdict.WRONG


def test_an_answer_that_begins_with_one_model_and_goes_on_with_another_is_wrong() -> None:
    mixed = [*other_answer(ROLLED_OUT, 1), *ORACLE.right(ASK)[1:]]
    assert judged_with_others(answered(mixed)) is Verdict.WRONG
    migrated = answered(mixed, trace={"decode_worker": "decode-0", "migrations": 1})
    assert judged_with_others(migrated) is Verdict.WRONG


def test_while_weights_change_the_answer_may_be_of_either() -> None:
    for tokens in (other_answer(ROLLED_OUT), ORACLE.right(ASK)):
        assert judged_with_others(answered(tokens), from_s=1.2) is Verdict.RIGHT


def test_after_the_change_back_the_answer_is_of_the_old_weights() -> None:
    assert judged_with_others(answered(), until_s=0.9) is Verdict.RIGHT
    assert judged_with_others(answered(other_answer(ROLLED_OUT)), until_s=0.9) is Verdict.WRONG


def test_a_right_request_that_is_told_to_be_wrong_is_a_problem() -> None:
    assert ORACLE.judge(answered([], status=400, error={"code": None})).verdict is Verdict.REFUSED
    said = {"type": "invalid_request_error", "code": None}
    assert ORACLE.judge(answered([], error=said)).verdict is Verdict.REFUSED


@pytest.mark.parametrize(
    ("verdict", "text", "reason"),
    [
        (Verdict.RIGHT, '{"option":"fox 1"}', "stop"),
        (Verdict.WRONG, '{"option":"fox 2"}', "stop"),
        (Verdict.WRONG, "fox 1", "stop"),
        (Verdict.TRUNCATED, '{"option":"fo', "length"),
        (Verdict.EMPTY, "", "stop"),
    ],
)
def test_a_guided_answer_holds_one_of_the_options(verdict: Verdict, text: str, reason: str) -> None:
    answer = answered(list(text))
    answer.ask, answer.finished = replace(ASK, options=("fox 1", "river 1")), {0: reason}
    assert ORACLE.judge(answer).verdict is verdict
