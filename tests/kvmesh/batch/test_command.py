"""Tests of `kvmesh batch` against a server: order, resuming, retries, and what it says."""

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kvmesh.commands.batch import command
from kvmesh.commands.batch.command import BatchConfig, run_batch
from kvmesh.commands.batch.lines import check_input
from kvmesh.mesh.http.request import Reply, Request, json_reply
from kvmesh.mesh.http.server import App, HttpLimits, Route, listening
from kvmesh.protocol.errors import ConfigError, UnreachableError

USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}


class Server:
    """Answer each chat with its prompt. `plan` may say otherwise: (prompt, how often it came) -> reply."""

    def __init__(self) -> None:
        self.url = ""
        self.plan: Callable[[str, int], Reply | None] = lambda prompt, times: None
        self.times: Counter[str] = Counter()
        self.headers: list[tuple[str | None, str | None]] = []
        self.first_waits = asyncio.Event()
        self.first_waits.set()

    async def chat(self, request: Request) -> Reply:
        prompt = request.json(dict[str, Any])["messages"][0]["content"]
        self.times[prompt] += 1
        self.headers.append((request.header("x-kvmesh-priority"), request.header("authorization")))
        if prompt == "0":
            await self.first_waits.wait()
        return self.plan(prompt, self.times[prompt]) or json_reply({"echo": prompt, "usage": USAGE})


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    app = App([Route("POST", "/v1/chat/completions", server.chat)], HttpLimits())
    async with listening(app, "127.0.0.1", 0) as server.url:
        yield server


def write_input(folder: Path, prompts: Sequence[str]) -> Path:
    path = folder / "input.jsonl"
    body = {"model": "tiny", "messages": [{"role": "user", "content": ""}]}
    with path.open("w") as file:
        for n, prompt in enumerate(prompts):
            body["messages"] = [{"role": "user", "content": prompt}]
            line = {"custom_id": f"id-{n}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    return path


def results_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def batch(config: BatchConfig, path: Path, stop: asyncio.Event | None = None) -> int:
    output = command.default_output(path)
    return await run_batch(config, path, output, check_input(path, config.model), stop or asyncio.Event())


async def test_results_have_the_order_of_the_input(server: Server, tmp_path: Path) -> None:
    server.first_waits.clear()
    server.plan = lambda prompt, times: server.first_waits.set() if prompt == "19" else None
    path = write_input(tmp_path, [str(n) for n in range(20)])
    assert await batch(BatchConfig(url=server.url, concurrency=4), path) == 0
    results = results_in(tmp_path / "input.results.jsonl")
    assert [result["custom_id"] for result in results] == [f"id-{n}" for n in range(20)]
    assert [result["response"]["body"]["echo"] for result in results] == [str(n) for n in range(20)]
    assert {(result["response"]["status_code"], result["error"]) for result in results} == {(200, None)}
    assert not list(tmp_path.glob("*.part"))


async def test_requests_go_behind_those_of_users(server: Server, tmp_path: Path) -> None:
    await batch(BatchConfig(url=server.url + "/v1/", api_key="k"), write_input(tmp_path, ["a"]))
    assert server.headers == [("-10", "Bearer k")]


async def test_a_refused_request_is_a_result_and_the_exit_code_says_so(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = json_reply({"error": {"message": "no", "type": "invalid_request_error"}}, status=400)
    server.plan = lambda prompt, times: bad if prompt == "b" else None
    path = write_input(tmp_path, ["a", "b", "c"])
    assert await batch(BatchConfig(url=server.url, json=True), path) == command.EXIT_SOME_FAILED
    statuses = [result["response"]["status_code"] for result in results_in(tmp_path / "input.results.jsonl")]
    assert statuses == [200, 400, 200]
    summary = json.loads(capsys.readouterr().out)
    assert (summary["succeeded"], summary["failed"], summary["failures"]) == (2, 1, {"400": 1})
    assert (summary["prompt_tokens"], summary["cached_tokens"], summary["completion_tokens"]) == (10, 8, 4)


async def test_a_busy_server_is_asked_again(server: Server, tmp_path: Path) -> None:
    busy = json_reply({"error": {"message": "full"}}, status=429, headers={"retry-after": "0"})
    server.plan = lambda prompt, times: busy if times < 3 else None
    assert await batch(BatchConfig(url=server.url), write_input(tmp_path, ["a", "b"])) == 0
    assert server.times == {"a": 3, "b": 3}


async def test_a_second_run_sends_only_what_has_not_succeeded(server: Server, tmp_path: Path) -> None:
    bad = json_reply({"error": {"message": "no"}}, status=404)
    server.plan = lambda prompt, times: bad if prompt == "b" and times == 1 else None
    path = write_input(tmp_path, ["a", "b", "c"])
    await batch(BatchConfig(url=server.url), path)
    path = write_input(tmp_path, ["a", "b", "C", "d"])
    assert await batch(BatchConfig(url=server.url), path) == 0
    assert server.times == {"a": 1, "b": 2, "c": 1, "C": 1, "d": 1}
    results = results_in(tmp_path / "input.results.jsonl")
    assert [result["response"]["body"]["echo"] for result in results] == ["a", "b", "C", "d"]


async def test_a_stopped_batch_continues_where_it_was(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = asyncio.Event()
    server.first_waits.clear()
    server.plan = lambda prompt, times: stop.set() if prompt == "5" else None
    path = write_input(tmp_path, [str(n) for n in range(10)])
    assert await batch(BatchConfig(url=server.url, concurrency=2), path, stop) == command.EXIT_STOPPED
    assert "of 10 are done; the same command continues" in capsys.readouterr().err
    assert not (tmp_path / "input.results.jsonl").exists()
    server.first_waits.set()
    assert await batch(BatchConfig(url=server.url), path) == 0
    assert [server.times[str(n)] for n in range(5)] == [2, 1, 1, 1, 1]
    assert len(results_in(tmp_path / "input.results.jsonl")) == 10


async def test_a_line_that_a_killed_run_did_not_complete_is_dropped(server: Server, tmp_path: Path) -> None:
    stop = asyncio.Event()
    server.first_waits.clear()
    server.plan = lambda prompt, times: stop.set() if prompt == "3" else None
    path = write_input(tmp_path, [str(n) for n in range(4)])
    await batch(BatchConfig(url=server.url, concurrency=2), path, stop)
    part = tmp_path / "input.results.jsonl.part"
    part.write_bytes(part.read_bytes()[:-20])
    server.first_waits.set()
    assert await batch(BatchConfig(url=server.url), path) == 0
    echoes = [result["response"]["body"]["echo"] for result in results_in(tmp_path / "input.results.jsonl")]
    assert echoes == ["0", "1", "2", "3"]


async def test_a_mesh_that_stays_away_ends_the_batch(tmp_path: Path) -> None:
    path = write_input(tmp_path, ["a"])
    with pytest.raises(UnreachableError, match=r"failed for .* s, the latest with: Connection refused"):
        await batch(BatchConfig(url="http://127.0.0.1:1", give_up_after_s=0.1), path)
    assert not list(tmp_path.glob("*results*")), "nothing was answered, so nothing is left behind"


async def test_a_wrong_key_ends_the_batch(server: Server, tmp_path: Path) -> None:
    server.plan = lambda prompt, times: json_reply({"error": {"message": "unknown API key"}}, status=401)
    with pytest.raises(UnreachableError, match="unknown API key; set KVMESH_API_KEY, or --api-key"):
        await batch(BatchConfig(url=server.url), write_input(tmp_path, ["a"]))


async def test_a_page_of_a_proxy_becomes_an_error_object(server: Server, tmp_path: Path) -> None:
    server.plan = lambda prompt, times: Reply(b"<html>", 422, "text/html")
    assert await batch(BatchConfig(url=server.url), write_input(tmp_path, ["a"])) == command.EXIT_SOME_FAILED
    [result] = results_in(tmp_path / "input.results.jsonl")
    assert result["response"]["body"]["error"]["message"] == "a page of HTML; is this the API?"


async def test_an_answer_that_nests_too_deep_becomes_an_error_object(server: Server, tmp_path: Path) -> None:
    server.plan = lambda prompt, times: Reply(b"[" * 100_000, 400)
    assert await batch(BatchConfig(url=server.url), write_input(tmp_path, ["a"])) == command.EXIT_SOME_FAILED
    [result] = results_in(tmp_path / "input.results.jsonl")
    assert result["response"]["status_code"] == 400
    assert result["response"]["body"]["error"]["message"].startswith("[[[")


async def test_a_disk_that_is_full_is_one_error(server: Server, tmp_path: Path) -> None:
    path = write_input(tmp_path, ["a" * 600, "b" * 600, "c" * 600])
    argv = [sys.executable, "-m", "kvmesh", "batch", str(path), "--url", server.url]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    limited = f"import os, resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); \
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, {limits[1]})); os.execv(sys.argv[1], sys.argv[1:])"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", limited, *argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    _, told = await process.communicate()
    assert process.returncode == 1
    assert told.decode().startswith(f"error: cannot write {tmp_path / 'input.results.jsonl.part'}: "), told
    assert len(told.decode().splitlines()) == 1
    assert await batch(BatchConfig(url=server.url), path) == 0
    assert len(results_in(tmp_path / "input.results.jsonl")) == 3


async def test_an_input_that_changes_under_way_is_one_error(server: Server, tmp_path: Path) -> None:
    path = write_input(tmp_path, ["a" * 20_000, "b"])
    entries = check_input(path, "")
    write_input(tmp_path, ["c", "b"])
    with pytest.raises(ConfigError, match="line 1 of the input has changed"):
        await run_batch(BatchConfig(url=server.url), path, tmp_path / "out", entries, asyncio.Event())


async def test_an_output_that_is_no_file_is_refused_and_stays(server: Server, tmp_path: Path) -> None:
    path, pipe = write_input(tmp_path, ["a"]), tmp_path / "pipe"
    os.mkfifo(pipe)
    for output in (pipe, tmp_path):
        with pytest.raises(ConfigError, match="is no file"):
            await run_batch(BatchConfig(url=server.url), path, output, check_input(path, ""), asyncio.Event())
    assert pipe.is_fifo()
    assert not server.times


async def test_two_batches_cannot_share_an_output(server: Server, tmp_path: Path) -> None:
    server.first_waits.clear()
    path = write_input(tmp_path, ["0"])
    first = asyncio.create_task(batch(BatchConfig(url=server.url), path))
    while not server.times:
        await asyncio.sleep(0.01)
    with pytest.raises(ConfigError, match="another batch writes"):
        await batch(BatchConfig(url=server.url), path)
    server.first_waits.set()
    assert await first == 0


async def test_a_killed_process_loses_no_result(server: Server, tmp_path: Path) -> None:
    server.first_waits.clear()
    path = write_input(tmp_path, [str(n) for n in range(8)])
    argv = [sys.executable, "-m", "kvmesh", "batch", str(path), "--url", server.url, "--concurrency", "2"]
    process = await asyncio.create_subprocess_exec(*argv, stderr=subprocess.DEVNULL)
    part = tmp_path / "input.results.jsonl.part"
    while not part.exists() or part.read_bytes().count(b"\n") < 7:
        await asyncio.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    server.first_waits.set()
    assert await batch(BatchConfig(url=server.url), path) == 0
    assert server.times == {"0": 2} | {str(n): 1 for n in range(1, 8)}


@pytest.mark.parametrize("argv", [[], ["--json"]])
def test_without_an_input_it_says_how_to_name_one(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"kvmesh batch input\.jsonl"):
        command.main(argv)


def test_the_input_cannot_be_the_output(tmp_path: Path) -> None:
    path = str(write_input(tmp_path, ["a"]))
    with pytest.raises(ConfigError, match="is input and output"):
        command.main([path, "--output", path])
