"""Send spans to an OpenTelemetry collector: OTLP over HTTP, as JSON, from a thread of its own.

Encoded here and not by the OpenTelemetry SDK: docs/decisions/0039-traces.md.
"""

import http.client
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct, field

from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.version import RELEASE

log = logging.getLogger(__name__)

INTERNAL, SERVER, CLIENT = 1, 2, 3  # kinds of spans
FAILED = 2  # code of a status
QUEUE_ITEMS = 1024  # that wait to be sent; more are lost
BATCH_ITEMS = 128
BATCH_S = 0.5  # the first of a batch waits so long for others
POST_S = 5.0
REPLY_BYTES = 1 << 16
MESSAGE_CHARS = 200  # of what a collector says, in a line of our log
LONGEST_PAUSE_S = 30.0  # after failures in a row
ItemT = TypeVar("ItemT")
Attributes = Mapping[str, str | int | float | bool | None]


class SpanEvent(Struct, rename="camel"):
    name: str
    time_unix_nano: str


class SpanStatus(Struct, omit_defaults=True):
    code: int = 0
    message: str = ""


class Span(Struct, rename="camel", omit_defaults=True):
    """A span in OTLP's JSON form: ids in hex, times as decimal strings."""

    trace_id: str
    span_id: str
    name: str
    kind: int
    start_time_unix_nano: str
    end_time_unix_nano: str
    parent_span_id: str = ""
    trace_state: str = ""
    attributes: list[dict[str, Any]] = field(default_factory=list)
    events: list[SpanEvent] = field(default_factory=list)
    status: SpanStatus = field(default_factory=SpanStatus)


def attributes_of(values: Attributes) -> list[dict[str, Any]]:
    """Return attributes as OTLP has them; those that are None are left out."""
    return [{"key": key, "value": _value(value)} for key, value in values.items() if value is not None]


def _value(value: str | float | bool) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": value}


def encode_spans(spans: Iterable[tuple[Mapping[str, str], Sequence[Span]]]) -> bytes:
    """Return the body of an export: for each resource, by its attributes, its spans."""
    scope = {"name": "kvmesh", "version": RELEASE}
    resources = [
        {"resource": {"attributes": attributes_of(resource)}, "scopeSpans": [{"scope": scope, "spans": found}]}
        for resource, found in spans
    ]
    return msgspec.json.encode({"resourceSpans": resources})


class PartialSuccess(Struct, rename="camel"):
    """Say how many spans of a batch a collector did not take, though it took the batch."""

    rejected_spans: int = 0
    error_message: str = ""


class ExportReply(Struct, rename="camel"):
    partial_success: PartialSuccess | None = None


def rejected_in(reply: bytes) -> PartialSuccess:
    """Return what a collector says it did not take. A reply that cannot be read says nothing."""
    try:
        found = msgspec.json.decode(reply, type=ExportReply, strict=False).partial_success  # int64 may come as text
    except (msgspec.DecodeError, UnicodeDecodeError):
        return PartialSuccess()
    return found if found is not None and found.rejected_spans > 0 else PartialSuccess()


class Exporter(Generic[ItemT]):
    """Sends what is put into it, in batches, from a thread. What cannot be sent is lost and counted.

    `encode` makes the body of a batch, on that thread. While nothing is put, the thread sleeps.
    """

    def __init__(
        self, endpoint: str, encode: Callable[[list[ItemT]], bytes], count: Callable[[str, int], None]
    ) -> None:
        """Begin. `count` is told `exported`, `dropped` (too many wait) or `failed` (no collector), and how many; of a
        batch that was exported also how many of its spans the collector did not take: `rejected`.

        Raise ConfigError if the endpoint is no URL.
        """
        url = urlsplit(endpoint)
        try:
            port = url.port
        except ValueError:
            port = -1
        if url.scheme not in ("http", "https") or not url.hostname or port == -1:
            raise ConfigError(f"--otlp-endpoint is {endpoint!r}", hint="give a URL such as http://127.0.0.1:4318")
        self._host, self._port, self._secure = url.hostname, port, url.scheme == "https"
        self._path = url.path if url.path.strip("/") else "/v1/traces"
        self._encode, self._count = encode, count
        self._waiting: queue.Queue[ItemT | None] = queue.Queue(QUEUE_ITEMS)
        self._stop = threading.Event()
        self._connection: http.client.HTTPConnection | None = None
        self._is_away = self._is_rejecting = False
        self._thread = threading.Thread(target=self._run, name="otlp export", daemon=True)
        self._thread.start()

    def put(self, item: ItemT) -> bool:
        """Send an item soon; return False if it is lost, because too many wait. This never waits."""
        try:
            self._waiting.put_nowait(item)
        except queue.Full:
            self._count("dropped", 1)
            return False
        return True

    def close(self) -> None:
        """Send what waits, for up to POST_S. Blocks: call it off the event loop."""
        self._stop.set()
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            pass  # it is awake
        self._thread.join(POST_S + 1)

    def _run(self) -> None:
        pause_s = 1.0
        while batch := self._next_batch():
            try:
                reply = self._post(self._encode(batch))
            except Exception as error:  # a span that cannot be encoded must not end the thread
                self._note_failure(error, len(batch))
                self._stop.wait(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                continue
            pause_s, self._is_away = 1.0, False
            self._count("exported", len(batch))
            self._note_rejected(rejected_in(reply))

    def _next_batch(self) -> list[ItemT]:
        """Wait for items; return none when all is sent and the exporter is closed."""
        batch: list[ItemT] = []
        ends = 0.0
        while len(batch) < BATCH_ITEMS:
            try:
                if not batch:
                    item = self._waiting.get(block=not self._stop.is_set())
                else:
                    left_s = 0.0 if self._stop.is_set() else max(0.0, ends - time.monotonic())
                    item = self._waiting.get(timeout=left_s) if left_s else self._waiting.get_nowait()
            except queue.Empty:
                break
            if item is not None:
                batch.append(item)
                ends = ends or time.monotonic() + BATCH_S
        return batch

    def _post(self, body: bytes) -> bytes:
        """Send a batch; return the collector's reply. Raise OSError if the collector did not take it."""
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        if self._connection is None:
            self._connection = kind(self._host, self._port, timeout=POST_S)
        try:
            self._connection.request("POST", self._path, body, {"content-type": "application/json"})
            reply = self._connection.getresponse()
            said = reply.read(REPLY_BYTES)
            if reply.status >= 300:
                raise OSError(f"the collector answered {reply.status}")
            return said
        except BaseException:
            self._connection.close()
            self._connection = None
            raise

    def _note_rejected(self, rejected: PartialSuccess) -> None:
        if rejected.rejected_spans:
            self._count("rejected", rejected.rejected_spans)
        if rejected.rejected_spans and not self._is_rejecting:
            what = rejected.error_message[:MESSAGE_CHARS]
            log.warning("the collector at %s rejects spans: %s", self._host, what or "it does not say why")
        self._is_rejecting = rejected.rejected_spans > 0

    def _note_failure(self, error: Exception, lost: int) -> None:
        self._count("failed", lost)
        if not self._is_away:
            self._is_away = True
            log.warning("traces are lost until the collector at %s answers: %s", self._host, error)
