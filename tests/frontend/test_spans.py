"""Spans are made of a timeline after its end, with the times that workers report."""

import json

from kvmesh.frontend.spans import TraceSpans
from kvmesh.frontend.timeline import RequestTimeline, now
from kvmesh.frontend.tracing import is_wanted
from kvmesh.mesh.otlp import Span, encode_spans
from kvmesh.mesh.trace_context import TraceContext
from kvmesh.protocol.errors import PeerLostError
from kvmesh.protocol.ids import RequestId
from kvmesh.protocol.messages import FinishReason, TimedDelta, WorkerTimes
from tests.frontend.test_dispatch import Run, decode, prefill
from tests.frontend.test_timeline import recorded

CONTEXT = TraceContext("a" * 32, "b" * 16, is_sampled=True, state="x=1")


def opened(*, is_sampled: bool) -> RequestTimeline:
    """Return the record of a request to which the client has given a trace."""
    parent = CONTEXT._replace(is_sampled=is_sampled)
    timeline = RequestTimeline(RequestId("r"), "chat", now(), parent=parent, is_sampled=is_sampled)
    timeline.traceparent = parent.header("c" * 16)
    return timeline


async def traced(run: Run, *, is_sampled: bool = True) -> tuple[RequestTimeline, list[Span]]:
    timeline = await recorded(run, opened(is_sampled=is_sampled))
    made = TraceSpans(timeline, {"service.name": "kvmesh-frontend"}).made()
    assert json.loads(encode_spans(made))["resourceSpans"]
    return timeline, [span for _, spans in made for span in spans]


async def test_the_root_has_the_clients_span_as_its_parent() -> None:
    _, spans = await traced(Run(decode()))
    root = spans[0]
    assert (root.span_id, root.parent_span_id, root.trace_state) == ("c" * 16, "b" * 16, "x=1")
    assert {span.trace_id for span in spans} == {"a" * 32}


async def test_a_leg_is_asked_with_its_own_span() -> None:
    run = Run(prefill(), decode())
    _, spans = await traced(run)
    asked = {span.name: span.span_id for span in spans if span.name.startswith("call")}
    sent = [request.traceparent.split("-")[2] for worker in run.mesh.workers for request in worker.requests]
    assert sorted(sent) == sorted(asked.values())


async def test_an_unsampled_leg_is_asked_with_the_span_of_the_request() -> None:
    run = Run(prefill(), decode())
    _, spans = await traced(run, is_sampled=False)
    sent = [request.traceparent for worker in run.mesh.workers for request in worker.requests]
    assert sent == [f"00-{'a' * 32}-{'c' * 16}-00"] * 2
    assert len({span.span_id for span in spans}) == len(spans)


async def test_a_workers_times_are_set_into_its_call() -> None:
    times = WorkerTimes(queued_s=1e-6, first_s=2e-6, total_s=3e-6, preemptions=2)
    last = TimedDelta((7,), FinishReason.STOP, times=times)
    _, spans = await traced(Run(decode([last])))
    found = {span.name: span for span in spans}
    call, wait, answered = found["call decode"], found["wait"], found["decode"]
    assert wait.parent_span_id == answered.parent_span_id == call.span_id
    assert int(call.start_time_unix_nano) <= int(wait.start_time_unix_nano) <= int(answered.start_time_unix_nano)
    assert {"key": "kvmesh.preemptions", "value": {"intValue": "2"}} in answered.attributes


def test_what_went_wrong_is_wanted_without_being_sampled() -> None:
    timeline = opened(is_sampled=False)
    assert not is_wanted(timeline)
    timeline.slo_missed = "ttft"
    assert is_wanted(timeline)


async def test_a_migrated_request_is_wanted() -> None:
    timeline = await recorded(Run(decode()), opened(is_sampled=False))
    assert not is_wanted(timeline)
    run = Run(decode([2, PeerLostError("gone")]), decode(name="d1"))
    timeline = await recorded(run, opened(is_sampled=False))
    assert run.trace.migrations
    timeline.has_migrated = True
    assert is_wanted(timeline)
