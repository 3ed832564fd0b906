"""Traces of a frontend with real workers: those of embeddings, and those that histograms name."""

import json
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from tests.frontend.whole_mesh import MODEL, WORKER, whole_mesh
from tests.support.otlp_receiver import OtlpReceiver, otlp_receiver
from tests.support.patience import PATIENCE_S
from tests.support.prometheus_server import WHY_NONE, PrometheusProcess

OPEN = {"accept": "application/openmetrics-text; version=1.0.0"}
TRACE, SPAN = "5bd1e0a2c3f44b6f9a7e1d2c3b4a5968", "b7ad6b7169203331"  # histograms are those of all tests' meshes
UNSAMPLED = f"1{TRACE[1:]}"


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as running:
        yield running


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, receiver: OtlpReceiver) -> Iterator[str]:
    """A mesh that samples nothing by itself, after one request that its client has sampled and one that it has not."""
    settings = {"otlp_endpoint": receiver.url, "trace_share": 0.0, "gen_ai_metrics": True}
    with whole_mesh(tmp_path_factory.mktemp("mesh"), Path(CHECKPOINT_DIR), 1024, **settings) as found:
        ask(found, f"00-{TRACE}-{SPAN}-01")
        ask(found, f"00-{UNSAMPLED}-{SPAN}-00")
        yield found


def ask(url: str, parent: str) -> None:
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 4}
    reply = httpx.post(f"{url}/v1/completions", json=body, headers={"traceparent": parent}, timeout=PATIENCE_S)
    assert reply.status_code == 200, reply.text


def exemplars(page: str) -> dict[str, set[str]]:
    """Return the traces that each metric of an OpenMetrics page names."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.exemplar is not None:
                found.setdefault(family.name, set()).add(sample.exemplar.labels["trace_id"])
    return found


def test_histograms_name_the_trace_that_was_exported(url: str, receiver: OtlpReceiver) -> None:
    page = httpx.get(f"{url}/metrics", headers=OPEN)
    assert page.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    named = exemplars(page.text)
    ours = {f"kvmesh_frontend_{name}_seconds" for name in ("ttft", "itl", "request_duration")}
    times = ("time_to_first_token", "time_per_output_token", "request_duration")
    assert ours | {f"gen_ai_server_{name}_seconds" for name in times} == named.keys()
    assert all(TRACE in traces and UNSAMPLED not in traces for traces in named.values())
    assert receiver.wait_for_trace(TRACE)


def test_a_page_of_text_names_no_trace(url: str) -> None:
    page = httpx.get(f"{url}/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    assert "kvmesh_frontend_ttft_seconds_bucket" in page.text
    assert TRACE not in page.text


@pytest.mark.long
@pytest.mark.skipif(bool(WHY_NONE), reason=WHY_NONE)
def test_a_real_prometheus_stores_the_trace_and_the_labels(url: str, tmp_path: Path) -> None:
    (tmp_path / "prometheus").mkdir()
    server = PrometheusProcess(tmp_path / "prometheus", "frontends", url, features="exemplar-storage")
    try:
        labels = labels_of_exemplar(server.url, "kvmesh_frontend_ttft_seconds_bucket", TRACE)
    finally:
        server.stop()
    assert (labels["component"], labels["model"], labels["endpoint"]) == ("frontend", MODEL, "completions")


def labels_of_exemplar(url: str, series: str, trace_id: str) -> Any:
    """Return the labels of the series that names the trace, once Prometheus has it."""
    now = time.time()
    query = urllib.parse.urlencode({"query": series, "start": now - 600, "end": now + 600})
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with urllib.request.urlopen(f"{url}/api/v1/query_exemplars?{query}", timeout=PATIENCE_S) as reply:
            data = json.load(reply)["data"]
        for found in data:
            if {"trace_id": trace_id} in [one["labels"] for one in found["exemplars"]]:
                return found["seriesLabels"]
        time.sleep(0.1)
    raise AssertionError(f"Prometheus has no exemplar of {series} for trace {trace_id}")


def embed(url: str, inputs: list[str], parent: str) -> None:
    body = {"model": MODEL, "input": inputs}
    reply = httpx.post(f"{url}/v1/embeddings", json=body, headers={"traceparent": parent}, timeout=PATIENCE_S)
    assert reply.status_code == 200, reply.text


def test_embeddings_are_traced(url: str, receiver: OtlpReceiver) -> None:
    trace_id = f"2{TRACE[1:]}"
    embed(url, ["Once upon", "a time"], f"00-{trace_id}-{SPAN}-01")
    spans = [span for span in receiver.wait_for_trace(trace_id) if span.trace_id == trace_id]
    by_id = {span.span_id: span for span in spans}
    (root,) = [span for span in spans if span.parent_id == SPAN]
    assert root.name == "embeddings"
    assert sorted(span.name for span in spans if span.parent_id == root.span_id) == [
        "call embed", "call embed", "parse", "route", "route", "tokenize",
    ]  # fmt: skip
    computed = [span for span in spans if span.name == "embed"]
    assert [by_id[span.parent_id].name for span in computed] == ["call embed"] * 2
    assert {span.instance for span in computed} == {WORKER}
    assert all("cost" in span.attributes["kvmesh.candidates"] for span in spans if span.name == "route")


def test_embeddings_that_nobody_sampled_are_not_exported(url: str, receiver: OtlpReceiver) -> None:
    unsampled, sampled = (f"{digit}{TRACE[1:]}" for digit in "34")
    embed(url, ["Once upon"], f"00-{unsampled}-{SPAN}-00")
    embed(url, ["Once upon"], f"00-{sampled}-{SPAN}-01")
    assert unsampled not in {span.trace_id for span in receiver.wait_for_trace(sampled)}
