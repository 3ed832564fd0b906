"""The record of a request that nobody followed is made at its end, of what its answers keep."""

from dataclasses import dataclass

import pytest

from kvmesh.frontend import dispatch
from kvmesh.frontend.rebuilt import complete
from kvmesh.frontend.spans import TraceSpans
from kvmesh.frontend.timeline import MAX_ATTEMPTS, RequestTimeline, Timelines, now, phases
from kvmesh.mesh.otlp import Span
from kvmesh.protocol.errors import MeshError, NoWorkerError, PeerLostError, UnreachableError
from kvmesh.protocol.ids import RequestId
from kvmesh.protocol.messages import Delta, FinishReason, PullReport, TimedDelta, WorkerTimes
from tests.frontend.test_dispatch import PROMPT, Run, decode, prefill

LATE = WorkerTimes(queued_s=1e-6, first_s=2e-6, total_s=3e-6, preemptions=1)
PULL = PullReport("shm", 1000, 2, 1e-6)


@dataclass
class Rebuilt:
    """A request that ran without a record, and its record of afterwards."""

    timeline: RequestTimeline
    spans: dict[str, list[Span]]

    @property
    def stages(self) -> list[tuple[str, str, int]]:
        """Return the stages in their order; each ends after it began, and begins after the one before."""
        found = list(phases(self.timeline))
        starts = [phase.start_s for phase in found]
        assert starts == sorted(starts)
        assert all(phase.end_s is not None and phase.end_s >= phase.start_s for phase in found)
        return [(phase.name, phase.worker, phase.attempt) for phase in found]


async def rebuilt(run: Run, error: type[MeshError] | None = None) -> Rebuilt:
    timeline = RequestTimeline(RequestId("r"), "chat", now(), is_whole=False)
    timeline.traceparent = run.traceparent = f"00-{'a' * 32}-{'c' * 16}-00"
    timeline.tokenized = now()
    if error is None:
        await run()
    else:
        with pytest.raises(error):
            await run()
    timeline.answers = [timeline.answer(0)]
    complete(timeline.answers[0], run.trace, now(), timeline.tokenized)
    Timelines().end(timeline, "ok" if error is None else error.code)
    spans: dict[str, list[Span]] = {}
    for _, made in TraceSpans(timeline, {}).made():
        for span in made:
            spans.setdefault(span.name, []).append(span)
    return Rebuilt(timeline, spans)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "RETRY_S", 0.0)
    monkeypatch.setattr(dispatch, "LOST_AGAIN_S", 0.0)


async def test_one_worker_has_a_queue_a_prefill_and_a_decode() -> None:
    found = await rebuilt(Run(decode()))
    assert found.stages == [("tokenize", "", 0), ("queue", "", 0), ("prefill", "d0", 0), ("decode", "d0", 0)]
    (attempt,) = found.timeline.answers[0].attempts
    assert (attempt.isl_tokens, attempt.block_size) == (len(PROMPT), 16)
    assert len(attempt.block_hashes) == 8 * (len(PROMPT) // 16)
    assert {"route", "call decode", "prefill", "decode"} <= found.spans.keys()


async def test_two_workers_have_a_pull_between_them() -> None:
    script = [Delta((7,), pull=PULL), Delta((8,), FinishReason.STOP)]
    found = await rebuilt(Run(prefill(), decode(script)))
    assert [name for name, *_ in found.stages] == ["tokenize", "queue", "prefill", "pull", "decode"]
    assert found.timeline.answers[0].attempts[0].decode is not None
    assert found.timeline.answers[0].attempts[0].decode.pull == PULL
    assert {"call prefill", "call decode", "pull"} <= found.spans.keys()


async def test_an_answer_that_ends_at_the_prefill_worker_has_no_decode_leg() -> None:
    last = TimedDelta((7,), FinishReason.STOP, times=LATE)
    found = await rebuilt(Run(prefill([last]), decode()))
    (attempt,) = found.timeline.answers[0].attempts
    assert attempt.decode is None
    assert attempt.prefill is not None
    assert attempt.prefill.times == LATE


async def test_a_worker_that_tells_its_times_is_heard() -> None:
    found = await rebuilt(Run(decode([TimedDelta((7,), FinishReason.STOP, times=LATE)])))
    assert "wait" in found.spans
    assert {"key": "kvmesh.preemptions", "value": {"intValue": "1"}} in found.spans["decode"][0].attributes


async def test_a_migration_is_a_second_attempt() -> None:
    found = await rebuilt(Run(decode([2, PeerLostError("gone")]), decode(name="d1")))
    first, second = found.timeline.answers[0].attempts
    assert (first.error, second.error) == ("peer_lost", "")
    assert second.asked >= (first.ended or 0.0)
    assert [stage for stage in found.stages if stage[2]] == [
        ("queue", "", 1), ("prefill", "d1", 1), ("decode", "d1", 1)
    ]  # fmt: skip
    assert [call.status.message for call in found.spans["call decode"]] == ["peer_lost", ""]


async def test_a_prefill_worker_that_is_lost_has_no_decode_leg() -> None:
    run = Run(prefill([PeerLostError("gone")]), prefill(name="p1"), decode())
    first, second = (await rebuilt(run)).timeline.answers[0].attempts
    assert (first.decode, first.error) == (None, "peer_lost")
    assert second.decode is not None


async def test_a_request_that_is_never_placed_waits_in_its_route() -> None:
    found = await rebuilt(Run(), error=NoWorkerError)
    (attempt,) = found.timeline.answers[0].attempts
    assert attempt.placed is None
    assert found.spans["route"][0].status.message == "not placed"


async def test_a_failure_that_ends_the_request_is_its_last_attempt() -> None:
    found = await rebuilt(Run(decode([PeerLostError("gone")]), wait_s=0.0), error=NoWorkerError)
    assert found.timeline.answers[0].attempts[0].error == "peer_lost"


async def test_of_many_attempts_the_first_and_the_latest_are_kept() -> None:
    away = [UnreachableError("refused")] * (MAX_ATTEMPTS + 3)
    run = Run(decode(*[[error] for error in away], [10]))
    found = await rebuilt(run)
    attempts = found.timeline.answers[0].attempts
    assert len(attempts) == MAX_ATTEMPTS
    assert [attempt.error for attempt in attempts] == ["unreachable"] * (MAX_ATTEMPTS - 1) + [""]


async def test_a_request_that_was_not_tokenized_has_no_attempts() -> None:
    timeline = RequestTimeline(RequestId("r"), "chat", now(), is_whole=False)
    answer = timeline.answer(0)
    complete(answer, Run(decode()).trace, now(), None)
    assert answer.attempts == []
