"""The benchmarks of idle streams and of memory: what they take for a failure, and that they run."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from kvmesh.lab.bench import soak, streams
from kvmesh.lab.bench.__main__ import main
from kvmesh.lab.bench.soak import SoakReport, make_requests
from kvmesh.lab.bench.streams import OpenStream, StreamsReport, check_files, ending_tokens, shut_stream, until_held
from kvmesh.protocol.errors import ConfigError, EngineError
from tests.benchmarks.test_frontend_bench import DONE, END, ROLE, TOKEN, USAGE, chunked, plain, server
from tests.support.patience import PATIENCE_S

REQUEST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"


async def sent(url: str) -> OpenStream:
    host, _, port = url.removeprefix("http://").partition("/")[0].partition(":")
    stream = OpenStream(REQUEST, tokens=2, leaves=False)
    await stream.send(host, int(port))
    return stream


async def after(stream: OpenStream, reply: str) -> None:
    """Wait until it is open, or until it has ended."""
    while not (stream.is_open if reply == "open" else stream.has_ended):
        await asyncio.sleep(0)


# --- streams ----------------------------------------------------------------------------------------------


async def test_a_stream_is_open_from_first_token_to_end() -> None:
    gate = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(REQUEST))
        writer.write(chunked([ROLE], end=False))
        await gate.wait()
        writer.write(b"%x\r\n%b\r\n" % (len(TOKEN), TOKEN))
        await gate_of_end.wait()
        rest = [TOKEN, END, USAGE, DONE]
        writer.write(b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in rest) + b"0\r\n\r\n")
        await reader.read()
        writer.close()

    gate_of_end = asyncio.Event()
    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listener, asyncio.timeout(PATIENCE_S):
        stream = await sent(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/")
        while not stream.answer.body:
            await asyncio.sleep(0)
        assert not stream.is_open, "it may still wait for its turn"
        gate.set()
        await after(stream, "open")
        assert stream.failure(), "it has not come to its end"
        gate_of_end.set()
        await after(stream, "ended")
        assert (stream.is_open, stream.failure()) == (False, "")
        assert shut_stream(stream) == "it ended while the clock ran"
        stream.close()


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (plain(b'{"error":"too many"}', status=429), "status 429: .*too many"),
        (chunked([ROLE, TOKEN], end=False), "the connection was lost"),
        (None, "the connection was lost"),
    ],
)
async def test_a_stream_that_does_not_stay_open_says_why(reply: bytes | None, why: str) -> None:
    async with server([reply]) as url, asyncio.timeout(PATIENCE_S):
        stream = await sent(url)
        await after(stream, "ended")
        assert not stream.is_open
        assert re.search(why, shut_stream(stream))
        stream.close()


async def test_a_server_that_is_not_there_opens_no_stream() -> None:
    async with server([]) as url:
        pass
    stream = await sent(url)
    assert (stream.is_open, stream.has_ended) == (False, True)
    assert "no connection" in shut_stream(stream)


@pytest.mark.parametrize(("window_s", "itl_s", "tokens"), [(20.0, 30.0, 5), (60.0, 30.0, 7), (2.0, 1.0, 8)])
def test_streams_are_given_tokens_for_longer_than_the_window(window_s: float, itl_s: float, tokens: int) -> None:
    assert ending_tokens(window_s, itl_s) == tokens
    assert (tokens - 4) * itl_s >= window_s


@asynccontextmanager
async def counting(texts: Sequence[str]) -> AsyncIterator[str]:
    """/metrics that says these in turn, the last one for ever."""
    left = list(texts)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        text = left.pop(0) if len(left) > 1 else left[0]
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(text) + text.encode())
        writer.close()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listener:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/metrics"


WORKER = (
    '# HELP x y\nkvmesh_worker_running_requests{{worker="w"}} {}.0\n'
    'kvmesh_worker_waiting_requests{{worker="w"}} {}.0\nother 7.0\n'
)


async def test_held_requests_may_be_released_late() -> None:
    async with counting([WORKER.format(2, 1), WORKER.format(1, 1), WORKER.format(0, 1)]) as url:
        assert await until_held([url], 1, "at the end") == []


async def test_each_request_that_stays_held_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "CLEAN_S", 0.0)
    async with counting([WORKER.format(2, 1)]) as worker, counting(["kvmesh_frontend_inflight 4.0\n"]) as frontend:
        failures = await until_held([worker, frontend], 5, "at the end")
    assert len(failures) == 2
    assert "7 requests instead of 5" in failures[0]


async def test_a_process_that_counts_nothing_is_no_proof() -> None:
    async with counting(["other 0.0\n"]) as url:
        with pytest.raises(EngineError, match="does not say"):
            await until_held([url], 0, "at the end")
    with pytest.raises(EngineError, match="does not answer"):
        await until_held([url], 0, "at the end")


def test_more_streams_than_files_are_refused_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "make_room_for_files", lambda wanted: 4096)
    check_files(4096 - streams.SPARE_FILES)
    with pytest.raises(ConfigError, match=r"10512 open files.*--streams 3584.*ulimit -Hn 10512"):
        check_files(10_000)


@pytest.mark.long
@pytest.mark.e2e
def test_the_streams_benchmark_runs_on_its_own_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["streams", "--streams", "20", "--itl-s", "0.5", "--window-s", "0.5", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(report) == {*StreamsReport.__struct_fields__}
    assert (report["streams"], report["errors"]) == (20, 0)
    assert 0 <= report["cpu_share"] < 1
    assert report["rss_mib"] >= report["rss_before_mib"] > 0


# --- soak -------------------------------------------------------------------------------------------------


def plan(requests: int, *, new_words: bool = False) -> soak.SoakPlan:
    return soak.SoakPlan("http://x", "tiny", requests, 1, new_words, (), 0)


def test_new_words_occur_only_on_request() -> None:
    for new_words, most in ((False, 0), (True, 100)):
        requests = make_requests(plan(100, new_words=new_words))
        assert len({word for request in requests for word in re.findall(rb"x\d+", request.data)}) == most


@pytest.mark.parametrize("new_words", [False, True])
def test_requests_differ_and_some_clients_leave(new_words: bool) -> None:
    requests = list(make_requests(plan(1000, new_words=new_words)))
    assert len({request.data for request in requests}) == 1000
    assert sum(request.leaves for request in requests) == 10
    assert {request.stream for request in requests if request.leaves} == {True, False}
    assert 490 <= sum(request.stream for request in requests) <= 510


def test_growth_is_that_of_the_second_half() -> None:
    outcome = soak.SoakOutcome(requests=1000, rss_mib=[50.0, 80.0, 81.0], wall_s=10.0)
    report = soak.report_of(outcome)
    assert (report.rss_10_mib, report.rss_50_mib, report.rss_100_mib) == (50.0, 80.0, 81.0)
    assert report.growth_bytes_per_request == pytest.approx(2**20 / 500, abs=0.1)
    assert report.requests_per_s == 100.0


async def test_a_wrong_answer_is_an_error_and_the_client_continues() -> None:
    whole = chunked([ROLE, *[TOKEN] * 4, END, USAGE.replace(b"2", b"4"), DONE])
    request = soak.SoakRequest(REQUEST, stream=True, leaves=False)
    async with server([whole, chunked([ROLE, TOKEN], end=False), whole]) as url, asyncio.timeout(PATIENCE_S):
        client = soak.Client(url, stream=True)
        assert [await client.ask(request) for _ in range(3)] == ["", "the connection was lost", ""]
        client.close()


@pytest.mark.long
@pytest.mark.e2e
def test_the_soak_benchmark_runs_on_its_own_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["soak", "--requests", "200", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(report) == {*SoakReport.__struct_fields__}
    assert (report["requests"], report["errors"]) == (200, 0)
    assert report["rss_100_mib"] > 0
