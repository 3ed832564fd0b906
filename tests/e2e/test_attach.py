"""Tests of `kvmesh attach`: servers that run no code of ours, behind our frontend and router."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.frontend.tokenizer import Tokenizer
from kvmesh.protocol.messages import Role, unpack_tokens
from tests.support.fake_servers import (
    BLOCK,
    LlamaCppServer,
    OpenAiServer,
    Server,
    SglangServer,
    VllmServer,
    answer_to,
    served,
)
from tests.support.mesh import Mesh, until
from tests.support.patience import PATIENCE_S
from tests.support.streams import Stream, check_answer

pytestmark = [pytest.mark.e2e, pytest.mark.long]


@contextmanager
def attached(folder: Path, *words: str, workers: int) -> Iterator[Mesh]:
    """Run `kvmesh attach ... --frontend` until the block ends; then it must end well and by itself."""
    flags = ["--frontend", "--port", "0", "--discovery", f"file:{folder / 'discovery'}"]
    command = [sys.executable, "-m", "kvmesh", "attach", *words, *flags]
    (folder / "logs").mkdir()
    with (folder / "logs" / "attach.log").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    mesh = Mesh(process, folder)
    try:
        until(lambda: bool(mesh.entries("frontends/")), 30, "the frontend")
        mesh.find_frontend()
        until(lambda: mesh.workers_seen() == workers, 30, "the workers")
        yield mesh
    except BaseException:
        print(mesh.logs())
        raise
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert process.returncode == 0, mesh.logs()


def prompt_of(length: int, first: int = 100) -> list[int]:
    return [(first + 7 * i) % 1900 + 50 for i in range(length)]


def name_of(server: Server) -> str:
    return server.url.removeprefix("http://").replace(":", "-")


def names_of(tokens: Sequence[int]) -> list[str]:
    """Return the workers as the API shows them."""
    tokenizer = Tokenizer.load(CHECKPOINT_DIR)
    return [tokenizer.token_bytes(token).decode(errors="replace") for token in tokens]


def complete(mesh: Mesh, prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
    return mesh.complete(prompt, max_tokens=8, **{"kvmesh": {"trace": True}} | fields)


def overlap(mesh: Mesh, prompt: Sequence[int]) -> tuple[str, int]:
    placed = mesh.route(prompt)["decode"]
    return placed["name"], placed["overlap_blocks"]


def test_a_second_turn_goes_to_its_server(tmp_path: Path) -> None:
    servers = [VllmServer(), VllmServer()]
    with served(*servers), attached(tmp_path, *(server.url for server in servers), workers=2) as mesh:
        by_name = {name_of(server): server for server in servers}
        for number in range(6):
            prompt = prompt_of(5 * BLOCK + 3, first=331 * number)
            name = complete(mesh, prompt)["kvmesh"]["decode_worker"]
            until(lambda: overlap(mesh, prompt) == (name, 5), what="KV events")  # noqa: B023
            hits = by_name[name].hit_tokens
            assert complete(mesh, [*prompt, 77, 78])["kvmesh"]["decode_worker"] == name
            assert by_name[name].hit_tokens - hits == 5 * BLOCK


def unbooked(mesh: Mesh) -> dict[str, tuple[int, int]]:
    """Requests and blocks of callers outside the mesh, by worker, as the frontend's router knows them."""
    reply = mesh.route(prompt_of(40))
    return {c["worker"]: (c["unbooked_requests"], c["unbooked_blocks"]) for c in reply["explanation"]["candidates"]}


def test_a_server_that_other_callers_use_gets_fewer_requests(tmp_path: Path) -> None:
    busy, idle = VllmServer(), VllmServer()  # each with a quarter of its 1,000 blocks in use
    with served(busy, idle), attached(tmp_path, busy.url, idle.url, workers=2) as mesh:
        for number in range(4):
            complete(mesh, prompt_of(3 * BLOCK, first=331 * number))
        assert (len(busy.knobs.bodies), len(idle.knobs.bodies)) == (2, 2)
        assert unbooked(mesh) == {name_of(busy): (0, 0), name_of(idle): (0, 0)}
        busy.knobs.other_requests = 5
        until(lambda: unbooked(mesh)[name_of(busy)] == (5, 250), what="the load of other callers")
        for number in range(4, 12):
            complete(mesh, prompt_of(3 * BLOCK, first=331 * number))
        assert (len(busy.knobs.bodies), len(idle.knobs.bodies)) == (2, 10)
        busy.knobs.other_requests = 0
        until(lambda: unbooked(mesh)[name_of(busy)] == (0, 0), what="the other callers to leave")


def test_the_cache_of_a_silent_server_is_predicted(tmp_path: Path) -> None:
    servers = [LlamaCppServer(), LlamaCppServer()]
    folder = ["--model-path", str(CHECKPOINT_DIR)]
    with served(*servers), attached(tmp_path, *(s.url for s in servers), *folder, workers=2) as mesh:
        assert {card.kv_events for card in mesh.workers().values()} == {""}
        for number in range(4):
            prompt = prompt_of(5 * BLOCK + 3, first=331 * number)
            name = complete(mesh, prompt)["kvmesh"]["decode_worker"]
            assert complete(mesh, [*prompt, 77, 78])["kvmesh"]["decode_worker"] == name


def test_an_answer_goes_on_when_its_server_dies(tmp_path: Path) -> None:
    """The stream loses and repeats no token; the worker comes back when the server does."""
    servers = [VllmServer(), VllmServer()]
    with served(*servers) as loop, attached(tmp_path, *(server.url for server in servers), workers=2) as mesh:
        for server in servers:
            server.knobs.hold_after = 5
        stream = Stream(mesh.url, prompt_of(40), 12, kvmesh={"trace": True}).until_tokens(5)
        [dying] = [server for server in servers if server.knobs.bodies]
        [other] = [server for server in servers if server is not dying]
        other.knobs.hold_after = None
        dying.knobs.die_after, dying.knobs.hold_after = 5, None
        stream.join()
        check_answer(stream, names_of(answer_to(prompt_of(40), 12)))
        before = mesh.pid(name_of(dying))
        loop.stop(dying)
        until(lambda: mesh.workers_seen() == 1, 30, "the worker to leave")
        dying.knobs.die_after = None
        loop.start(dying)
        mesh.until_replaced(name_of(dying), before)
        until(lambda: mesh.workers_seen() == 2, 30, "the worker to come back")


def test_prefill_there_and_decode_here(tmp_path: Path) -> None:
    prefill, decode = VllmServer(), VllmServer()
    with served(prefill, decode):
        listed = tmp_path / "servers.toml"
        listed.write_text(
            f'[[server]]\nurl = "{prefill.url}"\nname = "p"\nrole = "prefill"\n'
            f'[[server]]\nurl = "{decode.url}"\nname = "d"\nrole = "decode"\n'
        )
        with attached(tmp_path, "--servers", str(listed), workers=2) as mesh:
            assert {card.role for card in mesh.workers().values()} == {Role.PREFILL, Role.DECODE}
            answer = complete(mesh, prompt_of(40), logprobs=0, kvmesh={"trace": True, "disaggregate": True})
            report = answer["kvmesh"]
            assert (report["prefill_worker"], report["decode_worker"]) == ("p", "d")
            assert (report["transfer"], report.get("pull_error") or "") == ("vllm-nixl-http", "")
            assert answer["choices"][0]["logprobs"]["tokens"] == names_of(answer_to(prompt_of(40), 8))
            assert [params["remote_num_tokens"] for params in decode.pulled] == [40]


def test_sglangs_halves_meet_through_the_frontend(tmp_path: Path) -> None:
    rooms: dict[int, asyncio.Future[list[int]]] = {}
    prefill, decode = SglangServer("prefill", rooms), SglangServer("decode", rooms)
    with served(prefill, decode):
        listed = tmp_path / "servers.toml"
        listed.write_text(
            f'[[server]]\nurl = "{prefill.url}"\nname = "p"\nrole = "prefill"\n'
            f'[[server]]\nurl = "{decode.url}"\nname = "d"\nrole = "decode"\n'
        )
        with attached(tmp_path, "--servers", str(listed), workers=2) as mesh:
            answer = complete(mesh, prompt_of(40), kvmesh={"trace": True, "disaggregate": True})
            report = answer["kvmesh"]
            assert (report["prefill_worker"], report["decode_worker"]) == ("p", "d")
            assert (report["transfer"], report.get("pull_error") or "") == ("sglang-nixl", "")
            expected = "".join(decode.text(token) for token in answer_to(prompt_of(40), 8))
            assert answer["choices"][0]["text"] == expected
            assert [body["bootstrap_room"] for body in prefill.knobs.bodies] == list(rooms)


def test_a_chat_client_that_leaves_frees_the_server(tmp_path: Path) -> None:
    server = VllmServer()
    server.knobs.hold_after = 3
    with served(server), attached(tmp_path, server.url, workers=1) as mesh:
        Stream(mesh.url, prompt_of(40), 100).until_tokens(3).leave()
        until(lambda: len(server.knobs.left) == 1, what="the connection to close")


def test_a_chat_with_a_server_that_speaks_in_texts(tmp_path: Path) -> None:
    """The template's special tokens reach it as they are written; its answer reaches the client as it was."""
    server = OpenAiServer()
    flags = ["--model-path", str(CHECKPOINT_DIR)]
    with served(server), attached(tmp_path, server.url, *flags, workers=1) as mesh:
        answer = mesh.chat([{"role": "user", "content": "What does the router do?"}], max_tokens=20)
        [body] = server.knobs.bodies
        prompt = Tokenizer.load(CHECKPOINT_DIR).encode_now(body["prompt"])
        expected = "".join(server.text(token) for token in answer_to(unpack_tokens(prompt), 20))
        assert answer["choices"][0]["message"]["content"] == expected


def test_a_server_is_attached_while_it_is_announced(tmp_path: Path) -> None:
    server = VllmServer()
    with served(server), attached(tmp_path, "--discover", workers=0) as mesh:
        command = [sys.executable, "-m", "kvmesh", "announce", server.url, "--name", "gpu-1"]
        announcing = subprocess.Popen([*command, "--discovery", f"file:{tmp_path / 'discovery'}"])
        try:
            until(lambda: mesh.workers_seen() == 1, what="its worker")
            assert complete(mesh, prompt_of(20))["kvmesh"]["decode_worker"] == "gpu-1"
            announcing.send_signal(signal.SIGINT)
            assert announcing.wait(PATIENCE_S) == 0
            until(lambda: mesh.workers_seen() == 0, what="its worker to leave")
        finally:
            announcing.kill()
            announcing.wait()


def test_waiting_for_a_server_can_be_stopped(tmp_path: Path) -> None:
    server = VllmServer()
    with served(server) as loop:
        loop.stop(server)
        command = [sys.executable, "-m", "kvmesh", "attach", server.url, "--discovery", f"file:{tmp_path}"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        assert process.stderr is not None
        assert b"waiting for the server" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
        process.stderr.close()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no server to attach to"),
        (["localhost:8000"], "http://host:port"),
        (["http://h:1", "http://h:1"], "given twice"),
        (["http://h:1", "http://h:2", "--kv-events", "tcp://h:3"], "one server's"),
        (["--servers", "/nowhere.toml"], "cannot read"),
    ],
)
def test_a_contradiction_is_refused_at_once(words: list[str], said: str) -> None:
    command = [sys.executable, "-m", "kvmesh", "attach", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert said in done.stderr
