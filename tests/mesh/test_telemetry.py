"""Log lines and the /metrics endpoint."""

import asyncio
import io
import logging
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter

from kvmesh.mesh.config import load
from kvmesh.mesh.log_flood import BURST
from kvmesh.mesh.telemetry import (
    ACCESS_LOG,
    FloodFilter,
    LogFormat,
    LogLevel,
    RequestContext,
    log_ready,
    serve_metrics,
    setup_logging,
)
from kvmesh.protocol.errors import ConfigError, EngineError

log = logging.getLogger("kvmesh.router.service")


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = []  # basicConfig(force=True) closes what it replaces
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)


def lines_of(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def json_lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [msgspec.json.decode(line) for line in lines_of(stream)]


def test_text_lines_have_time_level_service_logger_message_and_extras() -> None:
    out = io.StringIO()
    setup_logging("router", stream=out)
    log.info("placed %d", 3, extra={"worker_id": "w 1", "blocks": 2})
    assert lines_of(out)[0].split(" ", 1)[1] == "INFO    router router.service: placed 3 worker_id='w 1' blocks=2"


def test_json_lines_have_one_object_per_record() -> None:
    out = io.StringIO()
    setup_logging("router", fmt="json", stream=out)
    log.warning("placed", extra={"blocks": 2, "path": Path("/x")})
    (line,) = json_lines(out)
    assert str(line.pop("ts")).endswith("Z")
    assert line == {
        "level": "warning",
        "service": "router",
        "logger": "router.service",
        "message": "placed",
        "blocks": 2,
        "path": "/x",
    }


async def test_the_request_id_reaches_tasks_and_ends_with_its_context() -> None:
    out = io.StringIO()
    setup_logging("router", fmt="json", stream=out)

    async def work() -> None:
        log.info("inside")

    with RequestContext("req-1"):
        await asyncio.create_task(work())
    log.info("outside")
    inside, outside = json_lines(out)
    assert inside["request_id"] == "req-1"
    assert "request_id" not in outside


def test_an_explicit_request_id_wins_over_the_context() -> None:
    out = io.StringIO()
    setup_logging("router", fmt="json", stream=out)
    with RequestContext("req-1"):
        log.info("other", extra={"request_id": "req-2"})
    assert json_lines(out)[0]["request_id"] == "req-2"


def test_a_newline_from_outside_fakes_no_log_line() -> None:
    out = io.StringIO()
    setup_logging("router", stream=out)
    log.info("model %s", "x\n2026 ERROR fake\x1b[2J", extra={"key": "a\nb"})
    (line,) = lines_of(out)
    assert line.endswith(r"model x\n2026 ERROR fake\x1b[2J key='a\nb'")


@pytest.mark.parametrize("fmt", ["text", "json"])
def test_exceptions_come_with_their_traceback(fmt: str) -> None:
    out = io.StringIO()
    setup_logging("router", fmt=fmt, stream=out)
    try:
        raise KeyError("gone")
    except KeyError:
        log.exception("failed")
    text = "\n".join(lines_of(out)) if fmt == "text" else str(json_lines(out)[0]["exception"])
    assert "Traceback" in text
    assert "KeyError: (a text of 6 characters is left out)" in text


@pytest.mark.parametrize("fmt", ["text", "json"])
def test_tracebacks_hold_no_texts_of_foreign_exceptions(fmt: str) -> None:
    """An engine may write a prompt there; our own errors and those of the system say what is wrong."""
    out = io.StringIO()
    setup_logging("router", level="debug", fmt=fmt, stream=out)
    secret = "SEC" + "RET"  # the lines of the source are shown

    def fail() -> None:
        try:
            raise ValueError(secret)
        except ValueError as error:
            error.add_note(secret)
            raise ExceptionGroup(secret, [RuntimeError(secret), EngineError("it broke")]) from error

    try:
        fail()
    except ExceptionGroup:
        log.exception("failed")
    try:
        open("/nonexistent").close()
    except OSError:
        log.exception("failed")
    assert "SECRET" not in out.getvalue()
    for told in ("ValueError", "RuntimeError", "it broke", "No such file or directory", "in fail"):
        assert told in out.getvalue()


@pytest.mark.parametrize("value", ["\ud800", 2**70, {1: object()}, {("a",): 1}])
def test_no_value_breaks_a_json_line(value: object) -> None:
    out = io.StringIO()
    setup_logging("router", fmt="json", stream=out)
    log.info("odd", extra={"value": value})
    assert json_lines(out)[0]["value"]


def test_the_ready_line_has_metrics_and_discovery() -> None:
    out = io.StringIO()
    setup_logging("router", stream=out)
    log_ready(log, metrics="http://127.0.0.1:9100/metrics", discovery="file:.run/discovery", worker="w1")
    assert lines_of(out)[0].endswith(
        "ready worker=w1 metrics=http://127.0.0.1:9100/metrics discovery=file:.run/discovery"
    )


def test_levels_below_the_wanted_one_are_left_out() -> None:
    out = io.StringIO()
    setup_logging("router", level="warning", stream=out)
    log.info("no")
    log.warning("yes")
    assert len(lines_of(out)) == 1


def test_logs_go_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "router.log"
    setup_logging("router", file=str(path))
    log.info("kept")
    assert "kept" in path.read_text()


def test_a_second_setup_replaces_the_first() -> None:
    first, second = io.StringIO(), io.StringIO()
    setup_logging("router", stream=first)
    setup_logging("router", stream=second)
    log.info("once")
    assert (len(lines_of(first)), len(lines_of(second))) == (0, 1)


def test_a_log_file_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(ConfigError, match="choose a writable file"):
        setup_logging("router", file="/does/not/exist/x.log")


class LogConfig(msgspec.Struct):
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"


@pytest.mark.parametrize("flag", ["--log-level=loud", "--log-format=xml"])
def test_a_service_refuses_unknown_log_settings(flag: str) -> None:
    with pytest.raises(ConfigError, match=flag.partition("=")[0]):
        load(LogConfig, [flag], {}, prefix="X_", prog="x")


def test_metrics_are_served_on_a_free_port_until_closed() -> None:
    registry = CollectorRegistry()
    Counter("router_requests", "Requests answered.", registry=registry).inc(3)
    url, close = serve_metrics("127.0.0.1", 0, registry=registry)
    with urllib.request.urlopen(url, timeout=5) as answer:
        assert b"router_requests_total 3.0" in answer.read()
    close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=5)


def test_health_is_503_until_the_service_is_ready() -> None:
    problem = ["1 of 1 workers have not joined yet"]
    url, close = serve_metrics("127.0.0.1", 0, registry=CollectorRegistry(), problem=lambda: problem[0])
    health = url.replace("/metrics", "/health")
    with pytest.raises(urllib.error.HTTPError, match="503") as refused:
        urllib.request.urlopen(health, timeout=5)
    assert refused.value.read() == b"1 of 1 workers have not joined yet\n"
    problem[0] = ""
    with urllib.request.urlopen(health, timeout=5) as answer:
        assert (answer.status, answer.read()) == (200, b"ready\n")
    close()


def test_a_taken_metrics_port_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            serve_metrics("127.0.0.1", port, registry=CollectorRegistry())


def test_the_metrics_url_names_the_host_that_others_use() -> None:
    url, close = serve_metrics("127.0.0.1", 0, advertise_host="prefill-0", registry=CollectorRegistry())
    close()
    assert url.startswith("http://prefill-0:")


def test_a_flood_of_one_kind_is_cut_and_counted() -> None:
    out = io.StringIO()
    setup_logging("router", stream=out)
    for n in range(1000):
        log.warning("replied 503: %d", n)
    log.warning("something else")
    (flood,) = [one for one in logging.getLogger().handlers[0].filters if isinstance(one, FloodFilter)]
    flood.tell()
    lines = lines_of(out)
    assert len([line for line in lines if "replied 503" in line]) in range(BURST, BURST + 5)
    assert len([line for line in lines if "something else" in line]) == 1
    assert "more of these were left out: test_telemetry.py, line" in lines[-1]
    before = len(lines)
    flood.tell()
    assert len(lines_of(out)) == before, "nothing was left out since"


def test_exceptions_of_two_types_are_two_kinds() -> None:
    out = io.StringIO()
    setup_logging("router", stream=out)
    for n in range(200):
        try:
            raise ValueError(n) if n < 199 else KeyError(n)
        except Exception:
            log.exception("failed")
    assert "KeyError: (a text" in out.getvalue()


def test_each_line_of_the_access_log_is_written() -> None:
    out = io.StringIO()
    setup_logging("frontend", stream=out)
    for _ in range(500):
        logging.getLogger(ACCESS_LOG).info("request")
    assert len(lines_of(out)) == 500


def test_a_process_that_ends_says_what_it_left_out() -> None:
    code = (
        "import logging; from kvmesh.mesh.telemetry import setup_logging; setup_logging('x')\n"
        "for n in range(300): logging.getLogger('a').warning('again')"
    )
    lines = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr.splitlines()
    assert len(lines) in range(BURST, BURST + 10)
    assert "more of these were left out" in lines[-1]
