"""A timeline says what happened to a request, and is made only while somebody looks."""

from pathlib import Path

import pytest

from kvmesh.frontend import dispatch
from kvmesh.frontend.timeline import Phase, RequestTimeline, Timelines, phases
from kvmesh.mesh.trace_context import TraceContext
from kvmesh.protocol.errors import EngineError, PeerLostError
from kvmesh.protocol.ids import RequestId
from kvmesh.protocol.messages import Delta, FinishReason, PullReport
from tests.frontend.serving import CHAT, able_card, serving
from tests.frontend.test_dispatch import PROMPT, Run, decode, prefill


async def recorded(run: Run, timeline: RequestTimeline | None = None) -> RequestTimeline:
    timeline = timeline or RequestTimeline(RequestId("r"), "chat", 0.0)
    run.trace.record = timeline.answer(0)
    timeline.started = dispatch.clock()
    timeline.answers = [run.trace.record]
    await run()
    Timelines().end(timeline, "ok")
    return timeline


def in_order(found: list[Phase]) -> list[tuple[str, str, int]]:
    """Return the names of stages; each ends after it began, and begins after the one before."""
    starts = [phase.start_s for phase in found]
    assert starts == sorted(starts)
    assert all(phase.end_s is not None and phase.end_s >= phase.start_s for phase in found)
    return [(phase.name, phase.worker, phase.attempt) for phase in found]


async def test_one_worker_has_a_queue_a_prefill_and_a_decode() -> None:
    timeline = await recorded(Run(decode()))
    assert in_order(list(phases(timeline))) == [("queue", "", 0), ("prefill", "d0", 0), ("decode", "d0", 0)]
    assert timeline.ttft_s is not None
    assert len(timeline.answers[0].attempts[0].block_hashes) == 8 * (len(PROMPT) // 16)


async def test_two_workers_have_a_pull_between_them() -> None:
    pull = PullReport("shm", 1000, 2, 1e-6)
    script = [Delta((7,), pull=pull), Delta((8,), FinishReason.STOP)]
    timeline = await recorded(Run(prefill(), decode(script)))
    found = in_order(list(phases(timeline)))
    assert found == [("queue", "", 0), ("prefill", "p0", 0), ("pull", "d0", 0), ("decode", "d0", 0)]


async def test_a_migration_is_a_second_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "RETRY_S", 0.005)
    timeline = await recorded(Run(decode([2, PeerLostError("gone")]), decode(name="d1")))
    first, second = timeline.answers[0].attempts
    assert (first.error, second.error) == ("peer_lost", "")
    assert in_order(list(phases(timeline)))[3:] == [("queue", "", 1), ("prefill", "d1", 1), ("decode", "d1", 1)]


async def test_records_are_made_only_while_somebody_looks(able_folder: Path) -> None:
    async with serving(able_card(able_folder)) as served:
        timelines, seen = served.timelines, list[RequestTimeline]()
        await served.post("/v1/chat/completions", CHAT)
        leave = timelines.look(seen.append)
        await served.post("/v1/chat/completions", CHAT)
        await served.post("/v1/chat/completions", b"{")
        leave()
        await served.post("/v1/chat/completions", CHAT)
    assert [timeline.outcome for timeline in seen] == ["ok", "invalid_request"]
    assert not timelines.running
    names = [phase.name for phase in phases(seen[0])]
    assert names == ["parse", "template", "tokenize"]  # what answers is a script here
    assert (seen[0].model, seen[0].isl_tokens > 0, seen[1].answers) == (CHAT["model"], True, ())


class QuietTracer:
    """A tracer that samples nothing and remembers what is given to it at the end."""

    def __init__(self) -> None:
        self.begun = 0
        self.ended_with: list[str] = []

    def begin(self, parent: TraceContext | None) -> tuple[str, bool]:
        self.begun += 1
        return f"00-{'a' * 32}-{'c' * 16}-00", False

    def ended(self, timeline: RequestTimeline) -> bool:
        self.ended_with.append(timeline.outcome)
        return False


async def test_for_traces_alone_a_record_is_dropped_at_the_end_unless_it_is_wanted(able_folder: Path) -> None:
    async with serving(able_card(able_folder)) as served:
        served.timelines.trace(tracer := QuietTracer())
        await served.post("/v1/chat/completions", CHAT)
        served.generator.script = [EngineError("it broke")]
        status, *_ = await served.post("/v1/chat/completions", CHAT)
    assert status == 502
    assert tracer.begun == 2
    assert tracer.ended_with == ["engine"]
    assert not served.timelines.running
