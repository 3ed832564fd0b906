"""Prompts of 5 MB do not keep the frontend from answering others."""

import http.client
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.mesh import Mesh, running_mesh, until

PROMPT_BYTES = 5_000_000
TEXT = ("the quick brown fox jumps over the lazy dog " * (PROMPT_BYTES // 44 + 1))[:PROMPT_BYTES]
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("/v1/completions", {"prompt": TEXT, "max_tokens": 2}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2}),
    "tokens": ("/v1/completions", {"prompt": random.Random(1).choices(range(10, 2000), k=900_000), "max_tokens": 2}),
}
P99_S = 0.1
REQUESTS = 4
TRIES = 3  # a machine that stands still for a moment is slow once
SPIN_S = 0.3


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    flags = ["--engine", "mock", "--kv-transfer", "shm", "--log-level", "warning"]
    with running_mesh(tmp_path_factory.mktemp("mesh"), *flags) as mesh:
        until(lambda: mesh.workers_seen() == 3, what="all workers")
        mesh.complete([5, 6, 7], max_tokens=2)  # the tokenizer is loaded
        yield mesh


def health_p99_s(mesh: Mesh, goes_on: Callable[[], bool]) -> float:
    """Ask for /health again and again; return the 99th percentile of its times."""
    connection = http.client.HTTPConnection(urlsplit(mesh.url).netloc, timeout=60)
    took_s = []
    while goes_on():
        began_s = time.monotonic()
        connection.request("GET", "/health")
        assert connection.getresponse().read()
        took_s.append(time.monotonic() - began_s)
    connection.close()
    return sorted(took_s)[int(len(took_s) * 0.99)]


def slowdown() -> float:
    """Return how much longer than its CPU time a computation takes here now: 1 on a machine that has time."""
    began_s, began_cpu_s = time.monotonic(), time.thread_time()
    while (cpu_s := time.thread_time() - began_cpu_s) < SPIN_S:
        pass
    return (time.monotonic() - began_s) / cpu_s


@pytest.mark.parametrize("clients", [1, pytest.param(8, marks=pytest.mark.long)])
@pytest.mark.parametrize("shape", SHAPES)
def test_health_answers_within_100_ms_meanwhile(mesh: Mesh, shape: str, clients: int) -> None:
    path, fields = SHAPES[shape]
    body = json.dumps({"model": "tiny", **fields}).encode()
    statuses: list[int] = []

    def send() -> None:
        for _ in range(REQUESTS):
            connection = http.client.HTTPConnection(urlsplit(mesh.url).netloc, timeout=60)
            connection.request("POST", path, body, {"content-type": "application/json"})
            statuses.append(connection.getresponse().status)
            connection.close()

    measured = []
    for _ in range(TRIES):
        limit_s = P99_S * slowdown()
        senders = [threading.Thread(target=send) for _ in range(clients)]
        for sender in senders:
            sender.start()
        p99_s = health_p99_s(mesh, lambda senders=senders: any(sender.is_alive() for sender in senders))
        for sender in senders:
            sender.join()
        measured.append((p99_s, limit_s := max(limit_s, P99_S * slowdown())))
        if p99_s < limit_s:
            break
    assert set(statuses) == {400}, "the tiny model's context is shorter"
    assert any(p99_s < limit_s for p99_s, limit_s in measured), measured
