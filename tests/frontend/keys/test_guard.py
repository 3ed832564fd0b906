"""API keys: who gets through, and what the others are told."""

import logging
from pathlib import Path

import aiohttp
import pytest

from kvmesh.frontend.callers import caller_of
from kvmesh.frontend.keys import guard as guarding
from kvmesh.frontend.keys.guard import ApiKeyGuard
from kvmesh.frontend.keys.keyfile import MAX_KEYS, hashed, read_key_file
from kvmesh.mesh.http.errors import UnauthorizedError
from kvmesh.mesh.http.request import Reply, Request, json_reply
from kvmesh.mesh.http.server import App, Route, listening
from kvmesh.protocol.errors import ConfigError

KEYS = """
# people
sk-first    # of the first
sk-second  acme
"""


def request(*headers: tuple[str, str]) -> Request:
    return Request(None, "POST", "/", "", list(headers), 0.0)  # type: ignore[arg-type]


def tenant_of(request: Request) -> str:
    caller = caller_of(request)
    assert caller is not None
    return caller.tenant


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(KEYS)
    return path


@pytest.fixture
def guard(keys_file: Path) -> ApiKeyGuard:
    return ApiKeyGuard(str(keys_file))


# --- keys ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "value", "tenant"),
    [
        ("authorization", "Bearer sk-first", ""),
        ("authorization", "bearer  sk-second", "acme"),
        ("x-api-key", "sk-second", "acme"),
    ],
)
def test_a_request_with_a_key_passes_and_has_its_tenant(
    guard: ApiKeyGuard, header: str, value: str, tenant: str
) -> None:
    asking = request(("x-kvmesh-tenant", "mine"), (header, value))
    guard(asking)
    assert tenant_of(asking) == tenant


@pytest.mark.parametrize(
    "headers",
    [
        (),
        (("authorization", ""),),
        (("authorization", "sk-first"),),
        (("authorization", "Basic sk-first"),),
        (("authorization", "Bearer sk-firs"),),
        (("authorization", "Bearer sk-first2"),),
        (("authorization", "Bearer sk-first acme"),),
        (("authorization", "Bearer #"),),
        (("authorization", "Bearer é\xff"),),
        (("x-api-key", ""),),
        (("x-api-key", "sk-third"),),
        (("authorization", "Bearer sk-third"), ("x-api-key", "sk-first")),  # what a proxy checks must be what we check
        (("authorization", "Bearer sk-first"), ("authorization", "Bearer sk-second")),  # ... and here it may be either
        (("x-api-key", "sk-first"), ("x-api-key", "sk-first")),
    ],
)
def test_all_others_do_not_and_the_key_is_not_repeated(
    guard: ApiKeyGuard, headers: tuple[tuple[str, str], ...]
) -> None:
    with pytest.raises(UnauthorizedError, match=r"Authorization: Bearer KEY") as refused:
        guard(request(*headers))
    assert "sk-" not in str(refused.value)


def test_a_found_key_is_compared_in_constant_time(guard: ApiKeyGuard, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return left == right

    monkeypatch.setattr(guarding.hmac, "compare_digest", compare)
    guard(request(("x-api-key", "sk-first")))
    assert {len(side) for pair in compared for side in pair} == {32}


def test_a_key_is_found_without_a_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time to find a key does not grow: 10,000 keys need as many comparisons as one."""
    path = tmp_path / "many"
    path.write_text("".join([f"sk-{number}\n" for number in range(MAX_KEYS)]))
    guard, compared = ApiKeyGuard(str(path)), 0

    def compare(left: bytes, right: bytes) -> bool:
        nonlocal compared
        compared += 1
        return left == right

    monkeypatch.setattr(guarding.hmac, "compare_digest", compare)
    guard(request(("x-api-key", f"sk-{MAX_KEYS - 1}")))
    assert compared == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds 0 API keys"),
        ("# nothing\n\n", "holds 0 API keys"),
        ("sk-a\n\nsk-b acme more\n", "line 3"),
        ("sk-ä\n", "line 1"),
        ("sk-a acmé\n", "line 1"),
        ("k" * 1025, "line 1"),
        ("sk-a one\nsk-a two", "line 2 .* same key"),
    ],
)
def test_a_bad_key_file_is_refused_without_showing_keys(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        read_key_file(text, "FILE")
    assert "sk-" not in str(refused.value)
    assert "FILE" in str(refused.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing.*No such file.*--api-keys-file"):
        ApiKeyGuard(str(tmp_path / "missing"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary.*UTF-8"):
        ApiKeyGuard(str(tmp_path / "binary"))


def test_changed_keys_count_and_a_broken_file_does_not(keys_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    guard = ApiKeyGuard(str(keys_file), clock=lambda: now)
    first, third = request(("x-api-key", "sk-first")), request(("x-api-key", "sk-third"))
    keys_file.write_text("sk-third other")
    guard(first)  # too early to look
    now = 3.0
    with pytest.raises(UnauthorizedError):
        guard(first)
    guard(third)
    assert tenant_of(third) == "other"
    for spoil in (lambda: keys_file.write_text(""), keys_file.unlink):
        spoil()
        now += 3.0
        guard(third)
    assert caplog.text.count("the API keys stay as they were") == 2


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o640, False), (0o644, True)])
def test_keys_that_everybody_can_read_are_warned_of(
    keys_file: Path, caplog: pytest.LogCaptureFixture, mode: int, warns: bool
) -> None:
    keys_file.chmod(mode)
    ApiKeyGuard(str(keys_file))
    assert (f"can read the secrets in --api-keys-file {keys_file}" in caplog.text) is warns


def test_a_file_into_which_everybody_can_write_keys_is_refused(
    keys_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    guard = ApiKeyGuard(str(keys_file), clock=lambda: now)
    keys_file.write_text("sk-third")
    keys_file.chmod(0o666)
    now = 3.0
    guard(request(("x-api-key", "sk-first")))
    assert "the API keys stay as they were: every user" in caplog.text
    with pytest.raises(ConfigError, match="chmod o-w"):
        ApiKeyGuard(str(keys_file))


async def echo(request: Request) -> Reply:
    return json_reply({"tenant": tenant_of(request) if request.caller is not None else None})


def app(guard: ApiKeyGuard) -> App:
    return App([Route("POST", "/v1/x", echo), Route("GET", "/health", echo, is_open=True)], guard=guard)


async def test_over_http_a_missing_key_is_openais_401(guard: ApiKeyGuard, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with listening(app(guard), "127.0.0.1", 0) as url, aiohttp.ClientSession() as session:
        async with session.post(url + "/v1/x", data=b"body", headers={"x-api-key": "sk-wrong"}) as reply:
            error = (await reply.json())["error"]
            assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
        assert error["message"].startswith("Incorrect API key provided; "), "clients look for OpenAI's words"
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "invalid_api_key")
        async with session.get(url + "/health") as reply:
            assert reply.status == 200
        async with session.post(url + "/v1/x", headers={"Authorization": "Bearer sk-second"}) as reply:
            assert (reply.status, await reply.json()) == (200, {"tenant": "acme"})
    assert "sk-" not in caplog.text


# --- lines with hashes --------------------------------------------------------------------------------


def test_a_line_holds_the_hash_of_a_key_and_what_it_may_do(tmp_path: Path) -> None:
    line = (
        f'{{"name":"alice","sha256":"{hashed("sk-a")}","tenant":"t","models":["tiny*","a?"],"max_priority":3,'
        '"requests_per_minute":5,"tokens_per_minute":100,"streams":2,"expires":"2030-01-01T00:00:00Z"}'
    )
    path = tmp_path / "keys"
    path.write_text(f"# comment\n\n{line}\n")
    now = 0.0
    guard = ApiKeyGuard(str(path), wall_clock=lambda: now)
    asking = request(("x-api-key", "sk-a"))
    guard(asking)
    caller = caller_of(asking)
    assert caller is not None
    assert (caller.tenant, caller.priority(100), caller.priority(-5)) == ("t", 3, -5)
    assert [caller.may_use(model) for model in ("tiny", "tiny-2", "ab", "abc", "big")] == [
        True,
        True,
        True,
        False,
        False,
    ]
    now = 1.9e9
    with pytest.raises(UnauthorizedError, match="expired"):
        guard(asking)


@pytest.mark.parametrize(
    "line",
    [
        '{"name":"a"}',
        '{"name":"a","sha256":"12"}',
        '{"name":"a b","sha256":"' + "0" * 64 + '"}',
        '{"name":"a","sha256":"' + "0" * 64 + '","streams":0}',
        '{"name":"a","sha256":"' + "0" * 64 + '","key":"sk-secret"}',
        '{"name":"a","sha256":"' + "0" * 64 + '","expires":"2030-01-01T00:00:00"}',
        '{"name":"a","sha256":"sk-secret',
    ],
)
def test_a_line_that_is_no_key_is_refused_by_its_number(line: str) -> None:
    with pytest.raises(ConfigError, match="line 2 of FILE is no API key") as refused:
        read_key_file(f"# first\n{line}\n", "FILE")
    assert "sk-secret" not in str(refused.value)


def test_two_keys_of_one_name_are_refused() -> None:
    lines = [f'{{"name":"a","sha256":"{hashed(key)}"}}' for key in ("sk-a", "sk-b")]
    with pytest.raises(ConfigError, match=r"line 2 .* same name"):
        read_key_file("\n".join(lines), "FILE")


def test_keys_that_stand_in_the_file_are_warned_of(keys_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    ApiKeyGuard(str(keys_file))
    assert "kvmesh keys hash" in caplog.text
    assert "sk-" not in caplog.text
