"""Metrics that SGLang's scheduler processes leave in files come out of the worker's registry."""

from contextlib import ExitStack
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.values import MultiProcessValue

from workers.sglang_engine.metrics import FOLDER, export_metrics


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


def test_without_such_a_folder_there_is_nothing_to_export(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    registry = CollectorRegistry()
    with ExitStack() as cleanup:
        export_metrics(cleanup, registry)
        assert generate_latest(registry) == b""
