"""A trace comes in by W3C headers, and goes on by them."""

import asyncio
import logging

import pytest
from aiohttp import web

from mesh.telemetry import JsonFormatter, request_context, setup_logging
from mesh.trace_context import SAMPLES, TraceContext, new_context, new_span_id, read_context, trace_headers
from workers.engines.attached.http import ServerHttp

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"


def test_a_client_names_its_trace() -> None:
    found = read_context([("traceparent", PARENT), ("tracestate", "a=1"), ("tracestate", "b=2")])
    assert found == TraceContext(TRACE, SPAN, True, "a=1,b=2")
    assert found.header("1" * 16) == f"00-{TRACE}-{'1' * 16}-01"


@pytest.mark.parametrize(
    "parent",
    ["", "00", PARENT.upper(), PARENT + "-more", PARENT.replace("00-", "ff-", 1), f"00-{'0' * 32}-{SPAN}-01",
     f"00-{TRACE}-{'0' * 16}-01", "x" * 10_000],
)  # fmt: skip
def test_a_trace_that_cannot_be_read_is_none(parent: str) -> None:
    assert read_context([("traceparent", parent)]) is None


def test_a_later_version_may_have_more_fields() -> None:
    found = read_context([("traceparent", PARENT.replace("00-", "01-", 1) + "-more")])
    assert found is not None
    assert found.trace_id == TRACE


@pytest.mark.parametrize("state", ["x" * 513, "a=\x01"])
def test_a_bad_state_is_left_out(state: str) -> None:
    found = read_context([("traceparent", PARENT), ("tracestate", state)])
    assert found is not None
    assert found.state == ""


def test_new_ids_have_their_lengths() -> None:
    assert len({new_context(0).trace_id for _ in range(100)}) == 100
    assert (len(new_context(0).trace_id), len(new_span_id())) == (32, 16)


@pytest.mark.parametrize(
    ("threshold", "sampled"), [(0, 0), (SAMPLES, 1000), (SAMPLES // 2, pytest.approx(500, abs=150))]
)
def test_a_share_of_new_traces_is_sampled(threshold: int, sampled: int) -> None:
    assert sum(new_context(threshold).is_sampled for _ in range(1000)) == sampled


def test_log_lines_of_a_request_have_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("worker", fmt="json")
    with request_context("r1", PARENT):
        logging.getLogger("x").warning("here")
    assert f'"request_id":"r1","trace_id":"{TRACE}"' in capsys.readouterr().err
    assert isinstance(logging.getLogger().handlers[0].formatter, JsonFormatter)


def test_an_attached_server_gets_the_trace() -> None:
    async def run() -> list[tuple[str | None, str | None]]:
        seen = []

        async def answer(request: web.Request) -> web.Response:
            seen.append((request.headers.get("traceparent"), request.headers.get("tracestate")))
            return web.json_response({})

        app = web.Application()
        app.router.add_post("/v1/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server = ServerHttp(f"http://127.0.0.1:{runner.addresses[0][1]}")
        try:
            with request_context("r1", PARENT, "a=1"):
                await server.post("/v1/completions", {})
            await server.post("/v1/completions", {})
            assert trace_headers() == {}
        finally:
            await server.close()
            await runner.cleanup()
        return seen

    assert asyncio.run(run()) == [(PARENT, "a=1"), (None, None)]
