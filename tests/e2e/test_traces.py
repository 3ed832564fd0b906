"""One request is one trace, over all processes that it passes through, as a collector receives it."""

from collections.abc import Iterator

import pytest

from tests.faults.prompts import prompt_of
from tests.support.mesh import Mesh, running_mesh, until
from tests.support.otlp_receiver import OtlpReceiver, ReceivedSpan, otlp_receiver
from tests.support.streams import Stream, check_mock_answer

pytestmark = [pytest.mark.e2e, pytest.mark.long]

CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
FLAGS = ["--engine", "mock", "--prefill", "1", "--decode", "2", "--kv-transfer", "shm", "--trace-share", "0"]


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as running:
        yield running


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, receiver: OtlpReceiver) -> Iterator[Mesh]:
    """Mock engines at a readable pace: one prefill worker, two decode workers. Nothing is sampled by itself."""
    folder = tmp_path_factory.mktemp("traced")
    with running_mesh(folder, *FLAGS, "--otlp-endpoint", receiver.url, "--log-level", "info") as running:
        yield running


def trace_of(receiver: OtlpReceiver, trace_id: str) -> dict[str, list[ReceivedSpan]]:
    """Return the spans of a trace by name, each list in order of time, once its root has come."""
    with receiver.came:
        assert receiver.came.wait_for(lambda: any(span.trace_id == trace_id for span in receiver.spans), 60)
        found = sorted((span for span in receiver.spans if span.trace_id == trace_id), key=lambda span: span.start_ns)
    by_name: dict[str, list[ReceivedSpan]] = {}
    for span in found:
        by_name.setdefault(span.name, []).append(span)
    return by_name


def check_nesting(spans: dict[str, list[ReceivedSpan]]) -> None:
    """Each span lies within its parent, and one parent is not of this trace: the client's."""
    known = {span.span_id: span for of_name in spans.values() for span in of_name}
    for span in known.values():
        assert span.end_ns >= span.start_ns
        if (parent := known.get(span.parent_id)) is not None:
            assert parent.start_ns <= span.start_ns
            assert span.end_ns <= parent.end_ns
    assert [span.parent_id for span in known.values() if span.parent_id not in known] == [CLIENT[1]]


def test_a_request_over_two_workers_is_one_trace(mesh: Mesh, receiver: OtlpReceiver) -> None:
    trace_id = CLIENT[0]
    headers = {"traceparent": f"00-{trace_id}-{CLIENT[1]}-01"}
    stream = Stream(mesh.url, prompt_of(100, 3), 8, kvmesh={"disaggregate": True, "trace": True}, headers=headers)
    check_mock_answer(stream.join())
    spans = trace_of(receiver, trace_id)
    check_nesting(spans)
    order = ["completions", "parse", "tokenize", "route", "call prefill", "prefill", "call decode", "pull", "decode"]
    starts = [spans[name][0].start_ns for name in order]
    assert starts == sorted(starts)
    worker = {name: spans[name][0].instance for name in ("route", "prefill", "pull", "decode")}
    assert worker["prefill"] == "prefill-0"
    assert worker["pull"] == worker["decode"] == stream.trace["decode_worker"]
    assert [span.service for span in spans["wait"]] == ["kvmesh-worker"] * 2
    route = spans["route"][0].attributes
    assert route["kvmesh.reason"]
    assert "cost" in route["kvmesh.candidates"]
    assert spans["decode"][0].attributes["kvmesh.osl_tokens"] == 8
    assert spans["completions"][0].attributes["gen_ai.usage.output_tokens"] == 8


def test_a_migration_is_in_the_trace_though_it_was_not_sampled(mesh: Mesh, receiver: OtlpReceiver) -> None:
    trace_id = "1" + CLIENT[0][1:]
    headers = {"traceparent": f"00-{trace_id}-{CLIENT[1]}-00"}
    stream = Stream(mesh.url, prompt_of(40, 5), 200, kvmesh={"trace": True}, headers=headers)
    stream.until_tokens(5)
    lost = next(name for name in ("decode-0", "decode-1") if mesh.metric("kvmesh_worker_running_requests", name))
    mesh.kill(lost)
    check_mock_answer(stream.join())
    spans = trace_of(receiver, trace_id)
    check_nesting(spans)
    (migration,) = spans["migration"]
    first, second = spans["call decode"]
    assert (first.failed, second.failed) == (True, False)
    assert second.parent_id == migration.span_id
    assert first.attributes["kvmesh.worker"] == lost != second.attributes["kvmesh.worker"]
    assert second.start_ns >= first.end_ns


def test_a_request_without_a_reason_is_not_exported(mesh: Mesh, receiver: OtlpReceiver) -> None:
    trace_id = "2" + CLIENT[0][1:]
    headers = {"traceparent": f"00-{trace_id}-{CLIENT[1]}-00"}
    check_mock_answer(Stream(mesh.url, prompt_of(20, 6), 3, headers=headers).join())
    last = "3" + CLIENT[0][1:]
    sampled = {"traceparent": f"00-{last}-{CLIENT[1]}-01"}
    check_mock_answer(Stream(mesh.url, prompt_of(20, 6), 3, headers=sampled).join())
    trace_of(receiver, last)
    assert not any(span.trace_id == trace_id for span in receiver.spans)


def test_a_collector_that_is_away_loses_traces_by_count(mesh: Mesh, receiver: OtlpReceiver) -> None:
    def failed() -> float:
        return mesh.metric("kvmesh_frontend_traces_total", outcome="failed")

    before, receiver.answers_with = failed(), 503
    headers = {"traceparent": f"00-4{CLIENT[0][1:]}-{CLIENT[1]}-01"}
    check_mock_answer(Stream(mesh.url, prompt_of(20, 7), 3, headers=headers).join())
    until(lambda: failed() == before + 1)
    receiver.answers_with = 200
