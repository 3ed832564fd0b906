"""A trace comes in by W3C headers, and goes on by them."""

import asyncio
import logging

import pytest
from aiohttp import web

from kvmesh.mesh.telemetry import JsonFormatter, RequestContext, setup_logging
from kvmesh.mesh.trace_context import (
    STARTS_AT_ONCE,
    TraceContext,
    TraceStarts,
    new_span_id,
    read_context,
    span_id_of,
    trace_headers,
    trace_id_of,
)
from kvmesh.workers.engines.attached.http import ServerHttp

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


def test_each_new_trace_has_ids_of_its_own() -> None:
    starts = TraceStarts(0.5)
    begun = [read_context([("traceparent", starts.begin()[0])]) for _ in range(3 * STARTS_AT_ONCE)]
    assert len({found.trace_id for found in begun if found}) == len({found.parent_id for found in begun if found})
    assert len({found.trace_id for found in begun if found}) == len(begun)
    assert len(new_span_id()) == 16


@pytest.mark.parametrize(("share", "sampled"), [(0, 0), (1, 1000), (0.5, pytest.approx(500, abs=150))])
def test_a_share_of_new_traces_is_sampled(share: float, sampled: int) -> None:
    starts = TraceStarts(share)
    begun = [starts.begin() for _ in range(1000)]
    assert [is_sampled for _, is_sampled in begun] == [parent.endswith("-01") for parent, _ in begun]
    assert sum(is_sampled for _, is_sampled in begun) == sampled


def test_ids_are_read_from_a_traceparent() -> None:
    assert (trace_id_of(PARENT), span_id_of(PARENT), trace_id_of(""), span_id_of("")) == (TRACE, SPAN, "", "")


def test_log_lines_of_a_request_have_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("worker", fmt="json")
    with RequestContext("r1", PARENT):
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
            with RequestContext("r1", PARENT, "a=1"):
                await server.post("/v1/completions", {})
            await server.post("/v1/completions", {})
            assert trace_headers() == {}
        finally:
            await server.close()
            await runner.cleanup()
        return seen

    assert asyncio.run(run()) == [(PARENT, "a=1"), (None, None)]
