"""Set up what a service reports: log lines that carry the request's id, and a /metrics endpoint."""

import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated, Any, Literal, TextIO
from wsgiref.simple_server import WSGIRequestHandler, make_server

import msgspec
from msgspec import Meta
from prometheus_client import REGISTRY, CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from mesh.address import cannot_listen, join_address
from protocol.errors import ConfigError

# Types of settings: the field of each service's config.
LogLevel = Annotated[Literal["debug", "info", "warning", "error"], Meta(description="lowest level that is logged")]
LogFormat = Annotated[Literal["text", "json"], Meta(description="format of the log lines")]

_request_id: ContextVar[str] = ContextVar("request_id", default="")
_OWN_ATTRIBUTES = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName", "request_id"}


def setup_logging(
    service: str,
    *,
    level: LogLevel = "info",
    fmt: LogFormat = "text",
    stream: TextIO | None = None,
    file: str | None = None,
) -> None:
    """Send all log records to `stream` (default stderr) or append them to `file`, one line each.

    A second call replaces the first. Raises ConfigError for a file that cannot be written.
    """
    handler = _handler(stream, file)
    handler.addFilter(_add_request_id)
    handler.setFormatter(JsonFormatter(service) if fmt == "json" else TextFormatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)


@contextmanager
def request_context(request_id: str) -> Iterator[None]:
    """Add `request_id` to log records made inside the block, also in tasks started there."""
    token = _request_id.set(request_id)
    try:
        yield
    finally:
        _request_id.reset(token)


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
) -> tuple[str, Callable[[], None]]:
    """Serve /metrics on a thread; return its URL and a function that ends it (blocks for up to 0.5 s).

    /health answers 200 while `problem` returns "", else 503 with what it returns. Another thread asks it.
    Port 0 takes a free one. `advertise_host` replaces the host in the URL, for scrapers on other hosts.
    Raises ConfigError if the address cannot be used.
    """
    pages = make_wsgi_app(registry)

    def answer(environ: dict[str, Any], start: Callable[[str, list[tuple[str, str]]], Any]) -> Iterable[bytes]:
        if environ.get("PATH_INFO") != "/health":
            page: Iterable[bytes] = pages(environ, start)
            return page
        why = problem()
        status, text = ("503 Service Unavailable" if why else "200 OK"), f"{why or 'ready'}\n".encode()
        start(status, [("Content-Type", "text/plain"), ("Content-Length", str(len(text)))])
        return [text]

    server_class = _MetricsServerV6 if ":" in host else ThreadingWSGIServer
    try:
        server = make_server(host, port, answer, server_class, handler_class=_QuietHandler)
    except OSError as error:
        raise cannot_listen(host, port, error) from error
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return f"http://{join_address(advertise_host or host, server.server_port)}/metrics", close


class _MetricsServerV6(ThreadingWSGIServer):
    address_family = socket.AF_INET6


class _QuietHandler(WSGIRequestHandler):
    """Answers without a log line for each request."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


class TextFormatter(logging.Formatter):
    """Formats `time LEVEL service logger: message key=value`; a traceback follows on lines of its own."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        head = f"{_timestamp(record)} {record.levelname:<7} {self._service} {record.name}: "
        fields = "".join(f" {key}={_shown(value)}" for key, value in _fields(record).items())
        lines = [head + _one_line(record.getMessage()) + fields]
        if record.exc_info:
            lines.append(self.formatException(record.exc_info))
        if record.stack_info:
            lines.append(record.stack_info)
        return "\n".join(lines)


class JsonFormatter(logging.Formatter):
    """Formats one JSON object per record: ts, level, service, logger, message, request_id, extras, exception."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": _timestamp(record),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
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
    return True


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """Return the request's id, if there is one, and the fields that the caller passed by `extra`."""
    request_id = getattr(record, "request_id", "")
    extras = {key: value for key, value in vars(record).items() if key not in _OWN_ATTRIBUTES}
    return ({"request_id": request_id} if request_id else {}) | extras


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
