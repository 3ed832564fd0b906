"""Stock vLLM servers behind `kvmesh attach`: no line of ours runs in their processes.

They are started with the Python that KVMESH_VLLM_PYTHON names; the mesh runs in this one.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from tests.support.mesh import Mesh, until
from tests.support.streams import Stream

PYTHON = os.environ.get("KVMESH_VLLM_PYTHON", "")
START_S = 240.0  # imports alone take a minute on a busy machine
ANSWER_S = 120.0
BLOCK = 32
ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"  # docs/engines.md, "vLLM on a CPU"

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="KVMESH_VLLM_PYTHON names no Python that has vLLM"),
    pytest.mark.timeout(600),
]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class StockServer:
    """A vLLM process and the facts about it that a test reads."""

    def __init__(self, log: Path, *flags: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(CHECKPOINT_DIR)]
        command += ["--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager"]
        command += ["--block-size", str(BLOCK), "--max-model-len", "2048", "--max-num-seqs", "8"]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--distributed-executor-backend", ONE_PROCESS, *flags]
        command += [
            "--kv-events-config",
            '{"enable_kv_cache_events": true, "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}',
        ]
        self._command, self._env = command, server_env()
        self.start()

    @property
    def name(self) -> str:
        """The name of its worker."""
        return f"127.0.0.1-{self.port}"

    def start(self) -> None:
        """Start the process; one that was stopped starts at the same address."""
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command, stdout=output, stderr=output, env=self._env, start_new_session=True
            )

    def until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            assert self._process.poll() is None and time.monotonic() < deadline, self._log.read_text()[-4000:]
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.5)

    def metric(self, name: str, **labels: str) -> float:
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self._process.pid, signal.SIGKILL)  # its engine and worker processes, if they stayed
        except ProcessLookupError:
            pass
        self._process.wait(10)


def server_env() -> dict[str, str]:
    """Two servers share the cores of a small machine: one thread each, unbound."""
    ours = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return ours | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
    }


@contextmanager
def servers(folder: Path, *flags_of_each: Sequence[str]) -> Iterator[list[StockServer]]:
    with ExitStack() as stack:
        running = []
        for number, flags in enumerate(flags_of_each):
            server = StockServer(folder / f"server-{number}.log", *flags)
            stack.callback(server.stop)
            running.append(server)
        for server in running:
            server.until_ready()
        yield running


@contextmanager
def attached(folder: Path, *words: str, workers: int) -> Iterator[Mesh]:
    """Run `kvmesh attach ... --frontend` until the block ends."""
    discovery = ["--discovery", f"file:{folder / 'discovery'}", "--frontend", "--port", "0"]
    with (folder / "attach.log").open("wb") as output:
        command = [sys.executable, "-m", "kvmesh", "attach", *words, *discovery]
        process = subprocess.Popen(command, stdout=output, stderr=output)
    mesh = Mesh(process, folder)
    try:
        until(lambda: len(mesh.workers()) == workers and bool(mesh.entries("frontends/")), 60, "the workers")
        mesh.find_frontend()
        until(lambda: seen_by(mesh) == workers, 30, "the frontend to see the workers")
        yield mesh
    except BaseException:
        print((folder / "attach.log").read_text())
        raise
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def seen_by(mesh: Mesh) -> int:
    with mesh.http as http:
        health = http.get("/health").json()
    return sum(health.get("workers", {}).get("tiny", {}).values())


def prompt_of(length: int, first: int) -> list[int]:
    return [(first + 37 * i) % 1900 + 50 for i in range(length)]


def complete(url: str, prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": list(prompt), "max_tokens": 12, "temperature": 0, **fields}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=ANSWER_S)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def text(answer: dict[str, Any]) -> str:
    told: str = answer["choices"][0]["text"]
    return told


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[StockServer], Mesh]]:
    """Two servers behind one mesh; only the second one reports cached tokens. A test leaves them as it found them."""
    folder = tmp_path_factory.mktemp("two")
    with (
        servers(folder, (), ("--enable-prompt-tokens-details",)) as pair,
        attached(folder, *(s.url for s in pair), workers=2) as mesh,
    ):
        yield pair, mesh


Two = tuple[list[StockServer], Mesh]


def test_a_second_turn_goes_to_its_server(two: Two) -> None:
    """The hits are vLLM's own count, and the answers are those of the server alone."""
    pair, mesh = two
    by_name = {server.name: server for server in pair}
    for number in range(4):
        first = prompt_of(10 * BLOCK + 5, first=211 * number)
        name = complete(mesh.url, first, kvmesh={"trace": True})["kvmesh"]["decode_worker"]
        second = [*first, *prompt_of(40, 1000 + number)]
        until(lambda: overlap(mesh, second) == (name, 10), what="the server's KV events")  # noqa: B023
        before = by_name[name].metric("vllm:prefix_cache_hits_total")
        again = complete(mesh.url, second, kvmesh={"trace": True})
        assert again["kvmesh"]["decode_worker"] == name
        assert by_name[name].metric("vllm:prefix_cache_hits_total") - before == 10 * BLOCK
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 10 * BLOCK
        other = next(server for server in pair if server.name != name)
        assert text(again) == text(complete(other.url, second))


def test_tenants_share_no_cache(two: Two) -> None:
    """The server keeps them apart by the salt, and so does the index: a hit is predicted where there is one."""
    pair, mesh = two
    prompt = prompt_of(5 * BLOCK + 1, first=71)
    for salt in ("ann", "ben"):
        before = sum(server.metric("vllm:prefix_cache_hits_total") for server in pair)
        answer = complete(mesh.url, prompt, cache_salt=salt, kvmesh={"trace": True})
        assert answer["kvmesh"]["overlap_tokens"] == 0
        assert sum(server.metric("vllm:prefix_cache_hits_total") for server in pair) == before
        until(lambda: overlap(mesh, prompt, cache_salt=salt)[1] == 5, what="events of salted blocks")  # noqa: B023
    assert overlap(mesh, prompt)[1] == 0


def test_what_is_asked_for_is_what_the_server_does(two: Two) -> None:
    pair, mesh = two
    prompt = prompt_of(50, first=13)
    plain = text(complete(pair[0].url, prompt))
    told = complete(mesh.url, prompt, logprobs=2)
    assert text(told) == plain
    assert len(told["choices"][0]["logprobs"]["top_logprobs"]) == 12
    drawn = {text(complete(mesh.url, prompt, temperature=1.0, seed=7)) for _ in range(3)}
    assert len(drawn) == 1
    chosen = complete(mesh.url, prompt, allowed_token_ids=[100], max_tokens=3, logprobs=0)
    assert len(set(chosen["choices"][0]["logprobs"]["tokens"])) == 1
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    guided = text(complete(mesh.url, prompt, response_format=schema_format(schema), max_tokens=40))
    assert re.fullmatch(r'\{\s*"a"\s*:\s*(true|false)\s*\}?\s*', guided), "the tiny model may not get to its end"


def test_an_echo_has_the_logprobs_that_the_server_gives(two: Two) -> None:
    pair, mesh = two
    prompt, asked = prompt_of(70, first=17), {"echo": True, "logprobs": 1}
    own, ours = (complete(url, prompt, **asked)["choices"][0]["logprobs"] for url in (pair[0].url, mesh.url))
    assert len(ours["tokens"]) == len(prompt) + 12
    assert ours["token_logprobs"][0] is None
    assert ours["token_logprobs"][1:] == pytest.approx(own["token_logprobs"][1:], abs=1e-3)
    [alone] = complete(mesh.url, prompt, **asked, max_tokens=0)["choices"]
    assert alone["logprobs"]["tokens"] == ours["tokens"][: len(prompt)]


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def test_a_client_that_leaves_frees_the_server(two: Two) -> None:
    pair, mesh = two
    stream = Stream(mesh.url, prompt_of(40, 3), 1900, logprobs=None)
    until(lambda: bool(stream.text), ANSWER_S, "the first token")
    assert sum(server.metric("vllm:num_requests_running") for server in pair) == 1
    stream.leave()
    until(lambda: not sum(server.metric("vllm:num_requests_running") for server in pair), what="the answer to end")


def test_an_answer_goes_on_when_its_server_is_killed(two: Two) -> None:
    """Token by token as the other server would have given it; the worker comes back when the server does."""
    pair, mesh = two
    prompt = prompt_of(60, 17)
    stream = Stream(mesh.url, prompt, 400, logprobs=None)
    until(lambda: bool(stream.text), ANSWER_S, "the first token")
    [dying] = [server for server in pair if server.metric("vllm:num_requests_running")]
    [other] = [server for server in pair if server is not dying]
    before = mesh.pid(dying.name)
    dying.stop(signal.SIGKILL)
    stream.join(ANSWER_S)
    assert (stream.error, stream.broken, stream.finish_reason) == (None, "", "length")
    assert stream.text == text(complete(other.url, prompt, max_tokens=400, ignore_eos=True))
    until(lambda: seen_by(mesh) == 1, 30, "the worker to leave")
    dying.start()
    dying.until_ready()
    mesh.until_replaced(dying.name, before)
    until(lambda: seen_by(mesh) == 2, 60, "the worker to come back")


def overlap(mesh: Mesh, prompt: Sequence[int], **fields: str) -> tuple[str, int]:
    with mesh.http as http:
        placed = http.post("/kvmesh/route", json={"model": "tiny", "prompt": list(prompt), **fields}).json()
    return placed["decode"]["name"], placed["decode"]["overlap_blocks"]


def test_prefill_there_and_decode_here_over_nixl(tmp_path: Path) -> None:
    """The servers' own kv_transfer_params carry it: the decode server computes only the prompt's last token."""

    def role(kv_role: str) -> list[str]:
        connector = f'{{"kv_connector": "NixlConnector", "kv_role": "{kv_role}", "kv_buffer_device": "cpu"'
        return ["--kv-transfer-config", f'{connector}, "kv_connector_extra_config": {{"backends": ["UCX"]}}}}']

    with servers(tmp_path, role("kv_producer"), role("kv_consumer")) as (prefill, decode):
        listed = tmp_path / "servers.toml"
        listed.write_text(
            f'[[server]]\nurl = "{prefill.url}"\nname = "p"\nrole = "prefill"\n'
            f'[[server]]\nurl = "{decode.url}"\nname = "d"\nrole = "decode"\n'
        )
        with attached(tmp_path, "--servers", str(listed), workers=2) as mesh:
            for number, length in enumerate((340, 10 * BLOCK, 10 * BLOCK + 1)):
                prompt = prompt_of(length, first=307 * number)
                answer = complete(mesh.url, prompt, kvmesh={"trace": True, "disaggregate": True})
                assert answer["kvmesh"]["prefill_worker"] == "p"
                assert answer["kvmesh"]["decode_worker"] == "d"
                assert answer["kvmesh"]["transfer"] == "vllm-nixl-http"
                assert not answer["kvmesh"].get("pull_error")
                assert text(answer) == text(complete(prefill.url, prompt))
            pulled = decode.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
            assert pulled == 340 + 10 * BLOCK + 10 * BLOCK + 1
            assert decode.metric("vllm:prompt_tokens_by_source_total", source="local_compute") == 0
            prompt, asked = prompt_of(100, first=41), {"echo": True, "logprobs": 1}
            ours = complete(mesh.url, prompt, **asked, kvmesh={"disaggregate": True})["choices"][0]["logprobs"]
            own = complete(prefill.url, prompt, **asked)["choices"][0]["logprobs"]
            assert len(ours["tokens"]) == len(prompt) + 12
            assert ours["token_logprobs"][1:] == pytest.approx(own["token_logprobs"][1:], abs=1e-3)
            assert decode.metric("vllm:prompt_tokens_by_source_total", source="local_compute") == 0
