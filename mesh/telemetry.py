"""Set up what a service reports: log lines that carry the request's id, and a /metrics endpoint."""

import atexit
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from contextvars import ContextVar, Token
from typing import Annotated, Any, Literal, NamedTuple, TextIO
from wsgiref.simple_server import make_server

import msgspec
from msgspec import Meta
from prometheus_client import REGISTRY, CollectorRegistry, make_wsgi_app

from kvmesh.mesh.address import cannot_listen, join_address
from kvmesh.mesh.exposition import Exposed
from kvmesh.mesh.http.browsers import BrowserPolicy, policy_of
from kvmesh.mesh.http.door import Door, check_member
from kvmesh.mesh.http.errors import ForbiddenError, error_body
from kvmesh.mesh.http.request import JSON
from kvmesh.mesh.log_flood import SUMMARY_S, LogFlood
from kvmesh.mesh.pages import MEMBER, PageServer, QuietHandler, server_class
from kvmesh.mesh.trace_context import outgoing_trace_id, reset_outgoing, set_outgoing
from kvmesh.protocol.errors import ConfigError, InvalidRequestError, shown_error

# Types of settings: the field of each service's config.
LogLevel = Annotated[Literal["debug", "info", "warning", "error"], Meta(description="lowest level that is logged")]
LogFormat = Annotated[Literal["text", "json"], Meta(description="format of the log lines")]
Namespace = Annotated[str, Meta(description="name of the mesh: the label `namespace` of its metrics; empty: no label")]

ACCESS_LOG = "kvmesh.mesh.http.access"
_Wsgi = Callable[[dict[str, Any], Any], Iterable[bytes]]
NO_PAGES: Mapping[str, Callable[[], bytes]] = {}
_request_id: ContextVar[str] = ContextVar("request_id", default="")
_OWN_ATTRIBUTES = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName", "request_id", "trace_id"}


def setup_logging(
    service: str,
    *,
    level: LogLevel = "info",
    fmt: LogFormat = "text",
    stream: TextIO | None = None,
    file: str | None = None,
) -> None:
    """Send all log records to `stream` (default stderr) or append them to `file`, one line each.

    Of too many lines of one kind most are left out, and counted. A second call replaces the first.
    Raises ConfigError for a file that cannot be written.
    """
    handler = _handler(stream, file)
    handler.addFilter(_add_request_id)
    handler.addFilter(FloodFilter(handler))
    handler.setFormatter(JsonFormatter(service) if fmt == "json" else TextFormatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)


class RequestContext:
    """Adds a request's id to log records made inside the block, also in tasks started there, and the id of its trace.

    Servers that are asked there get the trace. Not a generator, which would cost more for each request.
    """

    __slots__ = ("_id_token", "_request_id", "_trace", "_trace_token")

    def __init__(self, request_id: str, traceparent: str = "", tracestate: str = "") -> None:
        self._request_id, self._trace = request_id, (traceparent, tracestate)
        self._trace_token: Token[tuple[str, str]] | None = None

    def __enter__(self) -> None:
        self._id_token = _request_id.set(self._request_id)
        if self._trace[0]:
            self._trace_token = set_outgoing(*self._trace)

    def __exit__(self, *_: object) -> None:
        if self._trace_token is not None:
            reset_outgoing(self._trace_token)
        _request_id.reset(self._id_token)


def log_ready(log: logging.Logger, *, metrics: str, discovery: str, **fields: object) -> None:
    """Log that the service is ready, with the URL of its metrics, its discovery and `fields`."""
    log.info("ready", extra={**fields, "metrics": metrics, "discovery": discovery})


def serve_metrics(
    host: str,
    port: int,
    *,
    advertise_host: str = "",
    registry: CollectorRegistry = REGISTRY,
    problem: Callable[[], str] = lambda: "",
    door: Door | None = None,
    allowed_hosts: str = "",
    pages: Mapping[str, Callable[[], bytes]] = NO_PAGES,
) -> tuple[str, Callable[[], None]]:
    """Serve /metrics on a thread; return its URL and a function that ends it (blocks for up to 0.5 s).

    /health answers 200 while `problem` returns "", else 503 with what it returns. Another thread asks it.
    `pages` are further paths, whose answers are JSON. Port 0 takes a free one. `advertise_host` replaces the host in
    the URL, for scrapers on other hosts. Without `door`, web pages of strangers are refused (mesh/http/browsers.py).
    Raises ConfigError if the address cannot be used.
    """
    own_pages = _with_pages(make_wsgi_app(Exposed(registry)), pages)

    def answer(environ: dict[str, Any], start: Callable[[str, list[tuple[str, str]]], Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO")
        if door is not None and (refused := _refused(environ, path, door, pages)):
            start("403 Forbidden", [("Content-Type", "text/plain"), ("Content-Length", str(len(refused)))])
            return [refused]
        if path != "/health":
            page: Iterable[bytes] = own_pages(environ, start)
            return page
        why = problem()
        status, text = ("503 Service Unavailable" if why else "200 OK"), f"{why or 'ready'}\n".encode()
        if door is not None and environ[MEMBER] is None:
            text = b"not ok\n" if why else b"ok\n"
        start(status, [("Content-Type", "text/plain"), ("Content-Length", str(len(text)))])
        return [text]

    browsers = policy_of(allowed_hosts, (host, advertise_host), None, is_tls=False) if door is None else None
    server = _page_server(host, port, answer if browsers is None else _checked(answer, browsers))
    server.door = door
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    scheme = "http" if door is None else "https"
    return f"{scheme}://{join_address(advertise_host or host, server.server_port)}/metrics", close


def _page_server(host: str, port: int, answer: _Wsgi) -> PageServer:
    """Return a server that listens. Raise ConfigError."""
    try:
        server = make_server(host, port, answer, server_class(host), handler_class=QuietHandler)
    except OSError as error:
        raise cannot_listen(host, port, error) from error
    assert isinstance(server, PageServer)
    return server


def _with_pages(metrics: _Wsgi, pages: Mapping[str, Callable[[], bytes]]) -> _Wsgi:
    """Return an application that serves `pages`, and the metrics at all other paths."""

    def answer(environ: dict[str, Any], start: Callable[[str, list[tuple[str, str]]], Any]) -> Iterable[bytes]:
        page = pages.get(environ.get("PATH_INFO") or "")
        if page is None:
            return metrics(environ, start)
        body = page()
        start("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]

    return answer


def _checked(application: _Wsgi, browsers: BrowserPolicy) -> _Wsgi:
    """Return an application that refuses the web pages of strangers."""

    def answer(environ: dict[str, Any], start: Callable[[str, list[tuple[str, str]]], Any]) -> Iterable[bytes]:
        given = [(key[5:].lower().replace("_", "-"), value) for key, value in environ.items() if key[:5] == "HTTP_"]
        try:
            browsers.check(environ["REQUEST_METHOD"], given)
        except InvalidRequestError as error:
            told = error_body(error)
            start("403 Forbidden", [("Content-Type", JSON), ("Content-Length", str(len(told)))])
            return [told]
        return application(environ, start)

    return answer


def _refused(environ: dict[str, Any], path: Any, door: Door, pages: Collection[str]) -> bytes:
    """Return why a page is not shown to whoever asks, b"" if it is."""
    member = environ[MEMBER]
    if member is None:
        return b"" if path == "/health" else b"this is for members of the mesh\n"
    try:
        route = path if path == "/health" or path in pages else "/metrics"
        check_member(member, door.credentials, environ["REQUEST_METHOD"], route)
    except ForbiddenError as error:
        return f"{error}\n".encode()
    return b""


class FloodFilter(logging.Filter):
    """Leaves out lines of a kind that comes too often, and has its handler write how many they were.

    The lines of the access log are wanted, one for each request, and all pass.
    """

    def __init__(self, handler: logging.Handler) -> None:
        super().__init__()
        self._handler = handler
        self._flood = LogFlood()
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None  # only during a flood: perhaps no other line comes
        atexit.register(self.tell)

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == ACCESS_LOG:
            return True
        kind = _Kind(record.name, record.levelno, record.pathname, record.lineno, _exception_type(record))
        with self._lock:
            passes = self._flood.passes(kind, time.monotonic())
            if self._flood.waits_for_summary and self._timer is None:
                self._timer = threading.Timer(SUMMARY_S, self.tell)
                self._timer.daemon = True
                self._timer.start()
        return passes

    def tell(self) -> None:
        """Write how many lines were left out."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            told = self._flood.summary()
        for kind, count in told:
            assert isinstance(kind, _Kind)
            text = f"{count:,} more of these were left out: {os.path.basename(kind.file)}, line {kind.line}"
            summary = logging.LogRecord(kind.name, kind.level, kind.file, kind.line, text, None, None)
            _add_request_id(summary)
            self._handler.acquire()
            try:
                self._handler.emit(summary)
            finally:
                self._handler.release()


class _Kind(NamedTuple):
    """A place in the code that logs."""

    name: str
    level: int
    file: str
    line: int
    exception: str


def _shown_logger(record: logging.LogRecord) -> str:
    return record.name.removeprefix("kvmesh.")


def _exception_type(record: logging.LogRecord) -> str:
    return record.exc_info[0].__name__ if record.exc_info and record.exc_info[0] else ""


class _TraceFormatter(logging.Formatter):
    """Formats tracebacks without the texts of foreign exceptions: an engine may write the prompt of a request there."""

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's name
        _, error, _ = ei
        if error is None:
            return ""
        whole = traceback.TracebackException.from_exception(error)
        _withhold(whole, error)
        return "".join(whole.format()).rstrip("\n")


def _withhold(trace: traceback.TracebackException, error: BaseException) -> None:
    """Replace the texts of an exception, of what caused it and of what it groups."""
    trace._str = shown_error(error)  # type: ignore[attr-defined]
    trace.__notes__ = None
    for part, cause in ((trace.__cause__, error.__cause__), (trace.__context__, error.__context__)):
        if part is not None and cause is not None:
            _withhold(part, cause)
    if isinstance(error, BaseExceptionGroup):
        for part, inner in zip(getattr(trace, "exceptions", None) or (), error.exceptions, strict=False):
            _withhold(part, inner)


class TextFormatter(_TraceFormatter):
    """Formats `time LEVEL service logger: message key=value`; a traceback follows on lines of its own."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        head = f"{_timestamp(record)} {record.levelname:<7} {self._service} {_shown_logger(record)}: "
        fields = "".join(f" {key}={_shown(value)}" for key, value in _fields(record).items())
        lines = [head + _one_line(record.getMessage()) + fields]
        if record.exc_info:
            lines.append(self.formatException(record.exc_info))
        if record.stack_info:
            lines.append(record.stack_info)
        return "\n".join(lines)


class JsonFormatter(_TraceFormatter):
    """Formats one JSON object per record: ts, level, service, logger, message, request_id, extras, exception."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": _timestamp(record),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": _shown_logger(record),
            "message": record.getMessage(),
        }
        line |= {key: value for key, value in _fields(record).items() if key not in line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        return _encode(line)


def _handler(stream: TextIO | None, file: str | None) -> logging.Handler:
    if file is None:
        return logging.StreamHandler(stream or sys.stderr)
    try:
        return logging.FileHandler(file, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"cannot log to {file}: {error}", hint="choose a writable file") from error


def _add_request_id(record: logging.LogRecord) -> bool:
    if not hasattr(record, "request_id"):
        record.request_id = _request_id.get()
        if trace_id := outgoing_trace_id():
            record.trace_id = trace_id
    return True


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """Return the request's id, if there is one, and the fields that the caller passed by `extra`."""
    request_id = getattr(record, "request_id", "")
    extras = {key: value for key, value in vars(record).items() if key not in _OWN_ATTRIBUTES}
    ids = {"request_id": request_id} if request_id else {}
    if trace_id := getattr(record, "trace_id", ""):
        ids["trace_id"] = trace_id
    return ids | extras


def _timestamp(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


def _one_line(text: str) -> str:
    """Escape control characters, so that data from the network cannot fake a log line."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _shown(value: object) -> str:
    text = str(value)
    return text if text.isprintable() and " " not in text and text else repr(text)


def _encode(line: dict[str, object]) -> str:
    try:
        return msgspec.json.encode(line, enc_hook=str).decode()
    except (TypeError, ValueError, OverflowError):  # keys that are not strings, lone surrogates, huge integers
        return msgspec.json.encode({key: ascii(value) for key, value in line.items()}).decode()
