"""The exporter of traces loses by count what no collector takes, and costs its callers nothing."""

import threading
from collections import Counter

import pytest

from kvmesh.mesh import otlp
from kvmesh.mesh.otlp import INTERNAL, Exporter, Span, attributes_of, encode_spans
from kvmesh.protocol.errors import ConfigError
from tests.support.otlp_receiver import otlp_receiver


def encoded(names: list[str]) -> bytes:
    resource = {"service.name": "kvmesh-frontend", "service.instance.id": "a"}
    values = attributes_of({"text": "x", "count": 3, "share": 0.5, "is": True, "none": None})
    spans = [Span("1" * 32, "2" * 16, name, INTERNAL, "1", "2", attributes=values) for name in names]
    return encode_spans([(resource, spans)])


def test_what_is_put_comes_to_the_collector() -> None:
    counts: Counter[str] = Counter()
    with otlp_receiver() as receiver:
        exporter = Exporter(receiver.url, encoded, lambda outcome, count: counts.update({outcome: count}))
        for name in ("a", "b"):
            exporter.put(name)
        exporter.close()
    assert [span.name for span in receiver.spans] == ["a", "b"]
    assert receiver.spans[0].attributes == {"text": "x", "count": 3, "share": 0.5, "is": True}
    assert counts == {"exported": 2}


def test_what_no_collector_takes_is_counted() -> None:
    counts: Counter[str] = Counter()
    exporter = Exporter("http://127.0.0.1:9", encoded, lambda outcome, count: counts.update({outcome: count}))
    exporter.put("a")
    exporter.close()
    assert counts == {"failed": 1}


@pytest.mark.parametrize(
    ("reply", "rejected"),
    [
        (b'{"partialSuccess":{"rejectedSpans":"2","errorMessage":"too old"}}', 2),
        (b'{"partialSuccess":{"rejectedSpans":2}}', 2),
        (b'{"partialSuccess":{}}', 0),
        (b'{"partialSuccess":{"rejectedSpans":-2}}', 0),
        (b'{"partialSuccess":7}', 0),
        (b"", 0),
        (b"\xff", 0),
    ],
)
def test_spans_that_a_collector_rejects_are_counted(
    reply: bytes, rejected: int, caplog: pytest.LogCaptureFixture
) -> None:
    counts: Counter[str] = Counter()
    with otlp_receiver() as receiver:
        receiver.says = reply
        exporter = Exporter(receiver.url, encoded, lambda outcome, count: counts.update({outcome: count}))
        exporter.put("a")
        exporter.close()
    assert counts == Counter(exported=1, rejected=rejected)
    assert ("rejects spans" in caplog.text) == bool(rejected)


def test_a_full_queue_loses_and_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "QUEUE_ITEMS", 2)
    began, go_on = threading.Event(), threading.Event()
    counts: Counter[str] = Counter()

    def slow(names: list[str]) -> bytes:
        began.set()
        go_on.wait(60)
        return encoded(names)

    with otlp_receiver() as receiver:
        exporter = Exporter(receiver.url, slow, lambda outcome, count: counts.update({outcome: count}))
        exporter.put("first")
        assert began.wait(60)
        for name in "abcde":
            exporter.put(name)
        assert counts == {"dropped": 3}
        go_on.set()
        exporter.close()
    assert [span.name for span in receiver.spans] == ["first", "a", "b"]


@pytest.mark.parametrize("endpoint", ["", "collector:4318", "ftp://x", "http://x:port"])
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-endpoint"):
        Exporter(endpoint, encoded, lambda outcome, count: None)
