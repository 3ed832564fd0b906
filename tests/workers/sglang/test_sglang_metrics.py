"""Metrics that SGLang's scheduler processes leave in files come out of the worker's registry."""

from contextlib import ExitStack
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.values import MultiProcessValue

from kvmesh.workers.engines.sglang.metrics import FOLDER, export_metrics


def test_a_schedulers_metrics_are_exported_under_their_own_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    scheduler = MultiProcessValue(process_identifier=lambda: 4711)
    scheduler("counter", "sglang:requests", "sglang:requests_total", (), (), "Requests.").inc(3)
    registry = CollectorRegistry()
    with ExitStack() as cleanup:
        export_metrics(cleanup, registry)
        assert b"sglang:requests_total 3.0" in generate_latest(registry)
    assert b"sglang" not in generate_latest(registry)


def test_a_metric_of_both_processes_appears_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang 0.5.23 counts CPU time in this way: its processes use the same name."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    scheduler = MultiProcessValue(process_identifier=lambda: 4711)
    for name in ("sglang:requests", "sglang:cpu_seconds"):
        scheduler("counter", name, f"{name}_total", ("component",), ("scheduler",), "").inc(3)
    registry = CollectorRegistry(auto_describe=True)  # as the process's own: it refuses a name that it has
    Counter("sglang:cpu_seconds", "", ["component"], registry=registry).labels("tokenizer").inc(5)
    with ExitStack() as cleanup:
        export_metrics(cleanup, registry)
        page = generate_latest(registry).decode()
    assert 'sglang:cpu_seconds_total{component="tokenizer"} 5.0' in page
    assert 'sglang:requests_total{component="scheduler"} 3.0' in page
    assert page.count("# TYPE sglang:cpu_seconds_total counter") == 1 and page.count("scheduler") == 1


def test_without_such_a_folder_there_is_nothing_to_export(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    registry = CollectorRegistry()
    with ExitStack() as cleanup:
        export_metrics(cleanup, registry)
        assert generate_latest(registry) == b""
