"""A real OpenTelemetry collector understands what a frontend exports. `make test-otlp` runs it.

The collector is Rotel. It writes every span that it has read to its log, in words of its own.
"""

import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from tests.frontend.whole_mesh import MODEL, PREFILL_WORKER, WORKER, whole_mesh
from tests.support.patience import PATIENCE_S

ROTEL = Path(__file__).parents[2] / ".venv-otlp/rotel/rotel-agent"
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(autouse=True, scope="module")
def _asked_for() -> None:
    if not os.environ.get("KVMESH_TEST_OTLP"):
        pytest.skip("needs a real collector: make test-otlp")
    assert ROTEL.exists(), "make test-otlp installs it"


@dataclass
class LoggedSpan:
    """A span as the collector writes it."""

    service: str
    instance: str
    fields: dict[str, str]
    attributes: dict[str, str] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> str:
        return self.fields[name]


@dataclass
class Collector:
    url: str
    log: Path

    def spans_of(self, trace_id: str, count: int) -> list[LoggedSpan]:
        """Return the spans of a trace once there are `count`."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            found = [span for span in read_spans(self.log.read_text()) if span.trace_id == trace_id]
            if len(found) >= count:
                return found
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)


@contextmanager
def running_collector(folder: Path) -> Iterator[Collector]:
    http, grpc = (free_address() for _ in range(2))
    log = folder / "rotel.log"
    command = [
        str(ROTEL), "start", "--exporter", "blackhole", "--debug-log", "traces", "--debug-log-verbosity", "detailed",
        "--otlp-http-endpoint", http, "--otlp-grpc-endpoint", grpc, "--pid-file", str(folder / "rotel.pid"),
    ]  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        until_listening(process, http, log)
        yield Collector(f"http://{http}", log)
    finally:
        process.terminate()
        process.wait()


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


def until_listening(process: "subprocess.Popen[bytes]", address: str, log: Path) -> None:
    host, _, port = address.partition(":")
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            with socket.create_connection((host, int(port)), 1):
                return
        except OSError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, "the collector does not listen"
            time.sleep(0.02)


def read_spans(log: str) -> list[LoggedSpan]:
    """Return the spans of a log of Rotel: sections of lines `Name : value` and `-> key: Kind(value)`."""
    spans: list[LoggedSpan] = []
    resource: dict[str, str] = {}
    section: dict[str, str] = {}
    for line in log.splitlines():
        if line.startswith("ResourceSpans #"):
            resource = section = {}
        elif re.match(r"Span #", line):
            fields: dict[str, str] = {}
            spans.append(LoggedSpan(resource.get("service.name", ""), resource.get("service.instance.id", ""), fields))
            section = spans[-1].attributes
        elif (found := re.match(r"\s+-> ([\w.]+): \w+\((.*)\)$", line)) is not None:
            section[found[1]] = found[2]
        elif (found := re.match(r"\s+-> Name: (.*)$", line)) is not None:
            spans[-1].events.append(found[1])
        elif spans and (found := re.match(r"\s*([\w ]+?)\s*: (.*)$", line)) is not None:
            spans[-1].fields.setdefault(found[1].lower().replace(" ", "_"), found[2])
    return spans


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    with running_collector(tmp_path_factory.mktemp("rotel")) as running:
        yield running


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[str]:
    settings = {"otlp_endpoint": collector.url, "trace_share": 0.0, "namespace": "traced", "slo_itl_s": 1e-9}
    with whole_mesh(tmp_path_factory.mktemp("mesh"), Path(CHECKPOINT_DIR), 1024, **settings) as found:
        yield found


def ask(url: str, path: str, parent: str, **body: object) -> None:
    given = {"model": MODEL, **body}
    reply = httpx.post(f"{url}/v1/{path}", json=given, headers={"traceparent": parent}, timeout=PATIENCE_S)
    assert reply.status_code == 200, reply.text


def test_a_collector_reads_every_span_of_a_request(url: str, collector: Collector) -> None:
    prompt = "The same long prompt, which fills several blocks. " * 8
    ask(
        url, "completions", f"00-{TRACE}-{SPAN}-01", prompt=prompt, max_tokens=4, ignore_eos=True,
        kvmesh={"disaggregate": True},
    )  # fmt: skip
    spans = {span.name: span for span in collector.spans_of(TRACE, 11)}
    assert set(spans) == {
        "completions", "parse", "tokenize", "route", "call prefill", "wait", "prefill", "call decode", "pull", "decode",
    }  # fmt: skip
    root, decode = spans["completions"], spans["decode"]
    assert (root.parent_id, root.kind, root.service) == (SPAN, "SPAN_KIND_SERVER", "kvmesh-frontend")
    assert root.attributes["gen_ai.request.model"] == MODEL
    assert root.attributes["gen_ai.usage.output_tokens"] == "4"
    assert spans["call decode"].parent_id == spans["route"].parent_id == root.id
    assert (decode.parent_id, decode.service, decode.instance) == (spans["call decode"].id, "kvmesh-worker", WORKER)
    assert decode.events == ["first token"]
    assert spans["prefill"].instance == PREFILL_WORKER
    assert "cost" in spans["route"].attributes["kvmesh.candidates"]
    for span in spans.values():
        assert int(root.start_time) <= int(span.start_time) <= int(span.end_time) <= int(root.end_time)


def test_a_collector_reads_what_missed_the_slo(url: str, collector: Collector) -> None:
    trace_id = f"1{TRACE[1:]}"
    ask(url, "completions", f"00-{trace_id}-{SPAN}-00", prompt="Once", max_tokens=4, ignore_eos=True)
    (root,) = [span for span in collector.spans_of(trace_id, 6) if span.parent_id == SPAN]
    assert root.attributes["kvmesh.slo_missed"] == "itl"


def test_a_collector_reads_embeddings(url: str, collector: Collector) -> None:
    trace_id = f"2{TRACE[1:]}"
    ask(url, "embeddings", f"00-{trace_id}-{SPAN}-01", input="Once upon a time")
    names = sorted(span.name for span in collector.spans_of(trace_id, 6))
    assert names == ["call embed", "embed", "embeddings", "parse", "route", "tokenize"]
