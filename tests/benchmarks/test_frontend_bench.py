"""The frontend benchmark: its prompts, what its load takes for a failure, and that it runs."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.commands.bench.prompts import PromptMaker, load_tokenizer, make_prompts
from kvmesh.lab.bench.__main__ import main
from kvmesh.lab.bench.frontend import GOALS, FrontendReport, quantile_ms
from kvmesh.lab.bench.load import ClientLoad, LoadOutcome, TimedAnswer, drive, drive_in_turn, note_events
from kvmesh.protocol.errors import ConfigError
from tests.support.budget import examples

TOKENIZER = load_tokenizer(str(CHECKPOINT_DIR))


def size(text: str) -> int:
    return len(TOKENIZER.encode(text, add_special_tokens=False).ids)


# --- prompts ----------------------------------------------------------------------------------------------


@given(num_tokens=st.integers(8, 400), seed=st.integers(0, 5))
@settings(max_examples=examples(40))
def test_a_prompt_has_exactly_the_tokens_asked_for(num_tokens: int, seed: int) -> None:
    assert size(PromptMaker(TOKENIZER, seed).prompt(num_tokens)) == num_tokens


def test_prompts_of_a_group_share_their_beginning() -> None:
    prompts = [p for seed in (1, 2) for p in make_prompts(TOKENIZER, seed, 6, 100, shared_tokens=90, groups=3)]
    assert {size(prompt) for prompt in prompts} == {100}
    assert len(set(prompts)) == len(prompts)
    beginnings = [tuple(TOKENIZER.encode(prompt, add_special_tokens=False).ids[:90]) for prompt in prompts]
    assert beginnings == 4 * beginnings[:3]
    assert len(set(beginnings)) == 3


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: object) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(str(tmp_path))


# --- load -------------------------------------------------------------------------------------------------

TOKEN = b'data: {"choices":[{"delta":{"content":"x"},"finish_reason":null}]}\n\n'
ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
END = b'data: {"choices":[{"delta":{},"finish_reason":"length"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"
WHOLE = [ROLE, TOKEN, TOKEN, END, USAGE, DONE]


def chunked(events: Sequence[bytes], end: bool = True) -> bytes:
    """A streamed reply; without its `end` it is cut off."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(e), e) for e in events) + (b"0\r\n\r\n" if end else b"")


def plain(body: bytes, status: int = 200) -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body


@asynccontextmanager
async def server(
    replies: Sequence[bytes | None], on_request: Callable[[], object] = lambda: None
) -> AsyncIterator[str]:
    """Gives these replies in turn; one that is not whole, or None, is followed by the end of the connection."""
    left = iter(replies)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                await reader.readexactly(length)
                on_request()
                reply = next(left)
                writer.write(reply or b"")
                if reply is None or not reply.endswith((b"0\r\n\r\n", b"}")):
                    break
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listener:
        host, port = listener.sockets[0].getsockname()
        yield f"http://{host}:{port}/v1/chat/completions"


async def load_on(replies: Sequence[bytes | None], *, stream: bool = True, warmup: int = 0) -> LoadOutcome:
    async with server(replies) as url:
        return await drive(
            ClientLoad(url, [b"{}"] * len(replies), warmup, concurrency=1, stream=stream, output_tokens=2)
        )


async def test_whole_streams_are_no_failures_and_have_a_first_token() -> None:
    outcome = await load_on([chunked(WHOLE)] * 3, warmup=1)
    assert (outcome.requests, len(outcome.ttft_s), outcome.failures) == (2, 2, [])
    assert all(ttft_s > 0 for ttft_s in outcome.ttft_s)


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (chunked([ROLE, TOKEN, TOKEN, END, USAGE]), "no [DONE]"),
        (chunked([*WHOLE, TOKEN]), "no [DONE]"),
        (chunked([ROLE, TOKEN, TOKEN, USAGE, DONE]), "finish reasons []"),
        (chunked([ROLE, TOKEN, END, DONE]), "0 tokens instead of 2"),
        (chunked([ROLE, b'data: {"error":{"message":"lost"}}\n\n', DONE]), "choices"),
        (chunked([ROLE, b"nonsense\n\n", DONE]), "not an event"),
        (chunked([ROLE, TOKEN], end=False), "connection was lost"),
        (None, "connection was lost"),
        (plain(b'{"error":"full"}', status=503), "status 503"),
        (b"nonsense\r\n\r\n", "not HTTP"),
    ],
)
async def test_a_broken_stream_fails_and_the_next_succeeds(reply: bytes | None, why: str) -> None:
    outcome = await load_on([chunked(WHOLE), reply, chunked(WHOLE)])
    assert outcome.requests == 3
    [failure] = outcome.failures
    assert why in failure


async def test_failures_of_the_warm_up_count_too() -> None:
    outcome = await load_on([plain(b"{}", status=500), chunked(WHOLE)], warmup=1)
    assert (outcome.requests, len(outcome.failures)) == (1, 1)


async def test_answers_in_one_piece_are_judged_by_their_length() -> None:
    def reply(tokens: int) -> bytes:
        choice = {"message": {"content": "xx"}, "finish_reason": "length"}
        return plain(json.dumps({"choices": [choice], "usage": {"completion_tokens": tokens}}).encode())

    outcome = await load_on([reply(2), reply(1), reply(2)], stream=False)
    assert outcome.failures == ["1 tokens instead of 2"]


async def test_a_server_that_is_not_there_fails_every_request() -> None:
    async with server([]) as url:
        pass
    outcome = await drive(ClientLoad(url, [b"{}"] * 5, 0, concurrency=2, stream=True, output_tokens=1))
    assert (outcome.requests, len(outcome.failures)) == (5, 5)


async def test_a_late_answer_is_a_failure() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the client gives up
        writer.close()

    listener = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with listener:
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/"
        outcome = await drive(ClientLoad(url, [b"{}"] * 5, 2, 2, stream=True, output_tokens=1, timeout_s=0.05))
    assert (outcome.requests, len(outcome.failures)) == (3, 5)


async def test_compared_servers_take_turns_at_being_first() -> None:
    asked: list[str] = []
    replies = {"a": [chunked(WHOLE)] * 4, "b": [chunked(WHOLE), plain(b"{}", status=500), *[chunked(WHOLE)] * 2]}
    async with (
        server(replies["a"], lambda: asked.append("a")) as first,
        server(replies["b"], lambda: asked.append("b")) as second,
    ):
        loads = [ClientLoad(url, [b"{}"] * 4, 1, 1, stream=True, output_tokens=2) for url in (first, second)]
        a, b = await drive_in_turn(loads)
    assert asked == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert (len(a.ttft_s), len(a.failures), len(b.failures)) == (3, 0, 1)
    assert all(value is not None and value > 0 for value in a.ttft_s)
    assert all(value is not None and value >= 0 for value in a.itl_s)
    assert [value is None for value in b.ttft_s] == [value is None for value in b.itl_s] == [True, False, False]


def test_the_role_chunk_is_no_first_token() -> None:
    answer = TimedAnswer(sent_s=1.0)
    for read, now_s in ((ROLE, 1.5), (TOKEN + TOKEN, 2.0), (TOKEN, 2.25)):
        note_events(answer, read, now_s)
    assert answer.first_token_s == 2.0
    assert answer.gaps_s == [0.25]


def test_quantiles() -> None:
    assert quantile_ms([], 0.5) is None
    assert quantile_ms([0.003, 0.001, 0.002], 0.5) == 2
    assert quantile_ms([0.001] * 99 + [0.5], 0.99) == 500


# --- the whole ----------------------------------------------------------------------------------------------


@pytest.mark.e2e
@pytest.mark.long
def test_the_frontend_benchmark_measures_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["frontend", "--scale", "0.002", "--runs", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(report) == {*FrontendReport.__struct_fields__} == {*GOALS, "machine", "others_cores", "vocabulary"}
    assert report["errors"] == 0
    assert report["rss_mib"] > 0
    assert report["c1s_ttft_p50_ms"] > 0
    assert report["b64_paced_itl_p99_ms"] > 0
    assert report["vocabulary"] == TOKENIZER.get_vocab_size()


def test_a_server_is_measured_only_with_its_process() -> None:
    with pytest.raises(ConfigError, match="--pid"):
        main(["frontend", "--url", "http://127.0.0.1:1"])
