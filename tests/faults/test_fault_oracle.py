"""The oracle tells answers apart, and measures what faults cost."""

from typing import Any

import pytest

from faults.clients import note_body, note_event
from faults.oracle import Answered, Oracle, Verdict
from faults.recovery import Happened, hits_of, is_excused, percentile, recovery_of, stopped_s, story, usual_waits
from faults.run import unprovoked
from faults.schedule import PlannedFault
from faults.traffic import SHAPES, Ask, ask
from protocol.errors import ConfigError

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
