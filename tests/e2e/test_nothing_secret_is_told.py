"""Prompts, keys and salts of clients appear nowhere but in the answers to these clients, at any level of the log."""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvmesh.frontend.keys.keyfile import KeyLine, hashed, written
from tests.support import mesh_tls
from tests.support.leaky_engine import DEADLY_TOKENS, LEAK
from tests.support.mesh import TRUSTED
from tests.support.services import ROOT, Release, Services

pytestmark = [pytest.mark.e2e, pytest.mark.long]
LEAKY = Release("leaky", (sys.executable, "-m", "tests.support.leaky_engine"), ROOT)
PROMPT, ARGUMENTS, SALT, MEDIA = "LEAKED-prompt", "LEAKED-arguments", "LEAKED-salt", "LEAKED-media"
KEY, WRONG_KEY, TOKEN, SECRET = (
    "sk-LEAKED-key",
    "sk-LEAKED-wrong",
    "LEAKED.jwt.token",
    "LEAKED-secret-of-salts-0123456789",
)
MARK = "LEAKED"
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": ARGUMENTS})}}
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [
        {"role": "user", "content": PROMPT},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": ARGUMENTS},
    ],
    "cache_salt": SALT,
    "max_tokens": 4,
}
IMAGE = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{MEDIA}"}}]
GOOD: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT | {"kvmesh": {"explain": True, "trace": True}}),
    ("/v1/chat/completions", CHAT | {"stream": True}),
    ("/v1/completions", {"model": "tiny", "prompt": PROMPT, "cache_salt": SALT, "max_tokens": 4}),
    ("/v1/responses", {"model": "tiny", "input": PROMPT, "max_output_tokens": 4}),
    ("/v1/responses/input_tokens", {"model": "tiny", "input": PROMPT}),
    ("/v1/messages", {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": PROMPT}]}),
    ("/v1/messages/count_tokens", {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}]}),
    ("/kvmesh/route", CHAT),
    ("/tokenize", {"model": "tiny", "prompt": PROMPT}),
]
BAD: list[tuple[str, Any]] = [
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": IMAGE}]}),
    ("/v1/chat/completions", CHAT | {"temperature": PROMPT}),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": [PROMPT]}]}),
    ("/v1/completions", {"model": "tiny", "prompt": PROMPT * 5000, "max_tokens": 4}),
    ("/v1/completions", {"model": "tiny", "prompt": PROMPT, "cache_salt": SALT * 100}),
    ("/v1/messages", {"model": "tiny", "max_tokens": 0, "messages": [{"role": "user", "content": PROMPT}]}),
    ("/v1/completions", f'{{"prompt": "{PROMPT}'.encode()),
]


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    folder = tmp_path_factory.mktemp("secrets")
    (folder / "keys").write_text(
        written(KeyLine(name="someone", sha256=hashed(KEY), tenant="t", requests_per_minute=1000)) + "\n"
    )
    (folder / "secret").write_text(SECRET)
    debug = ("--log-level", "debug")
    with ExitStack() as stack:
        services = Services(folder, f"file:{folder / 'discovery'}", stack)
        services.start("aggregated", LEAKY, "--mock-speedup", "0", "--kv-transfer", "shm", *debug, name="worker")
        keyed = ("--api-keys-file", str(folder / "keys"), "--salt-secret-file", str(folder / "secret"))
        services.start("frontend", LEAKY, "--access-log", "--responses-store", "memory", *keyed, *debug, name="front")
        services.until_ready("worker", "front")
        services.until_joined("front", 1)
        yield services


def ask(services: Services, path: str, body: Any, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(f"{services.url('front')}{path}", content=content, headers=headers, timeout=30, verify=TRUSTED)


def outputs(services: Services) -> dict[str, str]:
    """Return everything that this mesh says to others than the clients."""
    said = {name: services.log(name) for name in ("worker", "front")}
    for path in ("/metrics", "/health", "/openapi.json"):
        said[path] = httpx.get(f"{services.url('front')}{path}", timeout=30, verify=TRUSTED).text
    for file in Path(services.discovery.removeprefix("file:")).rglob("*"):
        if file.is_file():
            said[str(file)] = file.read_bytes().decode("latin-1")
    return said


def leaks(said: dict[str, str]) -> list[str]:
    return [f"{where}: {line[:300]}" for where, text in said.items() for line in text.splitlines() if MARK in line]


def test_requests_leave_nothing_of_themselves(services: Services) -> None:
    for path, body in GOOD:
        if mesh_tls.IS_ON and path == "/kvmesh/route":  # there it is no path for clients
            continue
        reply = ask(services, path, body, authorization=f"Bearer {KEY}")
        assert reply.status_code == 200, reply.text
        assert SALT not in reply.text
    assert leaks(outputs(services)) == []


def test_errors_repeat_no_secrets(services: Services) -> None:
    bodies = {}
    for path, body in BAD:
        reply = ask(services, path, body, authorization=f"Bearer {KEY}")
        assert reply.status_code == 400, reply.text
        bodies[f"{path} {str(body)[:60]}"] = reply.text
    for headers in ({"x-api-key": WRONG_KEY}, {"authorization": f"Bearer {TOKEN}"}, {"authorization": WRONG_KEY}):
        reply = ask(services, "/v1/completions", GOOD[2][1], **headers)
        assert reply.status_code == 401
        bodies[str(headers)] = reply.text
    said = outputs(services)
    assert leaks(said) == []
    assert leaks(bodies) == []


def test_an_engine_that_breaks_tells_no_prompt(services: Services) -> None:
    """The last of these tests. The exception of the engine has a prompt in its text."""
    body = {"model": "tiny", "prompt": [5] * DEADLY_TOKENS, "max_tokens": 4}
    reply = ask(services, "/v1/completions", body, authorization=f"Bearer {KEY}")
    assert reply.status_code >= 500
    assert LEAK not in reply.text
    log = services.log("worker")
    assert "RuntimeError" in log, "the log says what failed"
    assert leaks({"worker": log, "front": services.log("front")}) == []
