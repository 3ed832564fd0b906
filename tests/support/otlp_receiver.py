"""A receiver of traces: takes OTLP as JSON over HTTP, checks its form, and keeps the spans."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.patience import PATIENCE_S


@dataclass(frozen=True)
class ReceivedSpan:
    service: str
    instance: str
    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    failed: bool


@dataclass
class OtlpReceiver:
    url: str
    answers_with: int = 200
    says: bytes = b"{}"
    spans: list[ReceivedSpan] = field(default_factory=list)
    came: threading.Condition = field(default_factory=threading.Condition)

    def wait_for(self, count: int) -> list[ReceivedSpan]:
        """Return the spans once there are so many roots."""
        with self.came:
            assert self.came.wait_for(lambda: len(self.roots()) >= count, PATIENCE_S), self.spans
            return list(self.spans)

    def wait_for_trace(self, trace_id: str) -> list[ReceivedSpan]:
        """Return the spans of all traces once one of this trace has come. The spans of a trace come together."""
        with self.came:
            found = self.came.wait_for(lambda: any(span.trace_id == trace_id for span in self.spans), PATIENCE_S)
            assert found, f"no span of trace {trace_id}"
            return list(self.spans)

    def roots(self) -> list[ReceivedSpan]:
        known = {span.span_id for span in self.spans}
        return [span for span in self.spans if span.parent_id not in known]

    def take(self, body: bytes) -> None:
        found = [span for part in json.loads(body)["resourceSpans"] for span in _spans(part)]
        with self.came:
            self.spans += found
            self.came.notify_all()


def _spans(part: dict[str, Any]) -> Iterator[ReceivedSpan]:
    resource = _attributes(part["resource"]["attributes"])
    for scope in part["scopeSpans"]:
        for span in scope["spans"]:
            assert re.fullmatch(r"[0-9a-f]{32}", span["traceId"])
            assert re.fullmatch(r"[0-9a-f]{16}", span["spanId"])
            assert isinstance(span["startTimeUnixNano"], str)
            assert 1 <= span["kind"] <= 5
            yield ReceivedSpan(
                resource["service.name"],
                resource["service.instance.id"],
                span["traceId"],
                span["spanId"],
                span.get("parentSpanId", ""),
                span["name"],
                int(span["startTimeUnixNano"]),
                int(span["endTimeUnixNano"]),
                _attributes(span.get("attributes", [])),
                span.get("status", {}).get("code") == 2,
            )


def _attributes(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    found = {}
    for pair in pairs:
        ((kind, value),) = pair["value"].items()
        found[pair["key"]] = int(value) if kind == "intValue" else value
    return found


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            return

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            if receiver.answers_with == 200:
                receiver.take(body)
            self.send_response(receiver.answers_with)
            self.send_header("content-length", str(len(receiver.says)))
            self.end_headers()
            self.wfile.write(receiver.says)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver = OtlpReceiver(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, name="otlp receiver", daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
