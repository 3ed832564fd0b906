"""Tokens of an issuer are verified offline, and never by what they say of themselves."""

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

pytest.importorskip("cryptography")
jwt = pytest.importorskip("jwt")
from cryptography.hazmat.primitives import serialization  # noqa: E402
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa  # noqa: E402

from kvmesh.frontend.callers import caller_of  # noqa: E402
from kvmesh.frontend.keys.caller import KeyCaller  # noqa: E402
from kvmesh.frontend.keys.guard import Doorkeeper  # noqa: E402
from kvmesh.frontend.keys.issuer import IssuerKeys  # noqa: E402
from kvmesh.frontend.keys.jwks import read_jwks  # noqa: E402
from kvmesh.frontend.keys.meters import Meters  # noqa: E402
from kvmesh.frontend.keys.tokens import MAX_CACHED, TokenRules, TokenVerifier  # noqa: E402
from kvmesh.mesh.http.errors import UnauthorizedError  # noqa: E402
from kvmesh.mesh.http.request import Request  # noqa: E402
from kvmesh.protocol.errors import ConfigError, OverloadedError  # noqa: E402

RULES = TokenRules("https://issuer.example", "mesh", leeway_s=30)
RSA, EC = rsa.generate_private_key(65537, 2048), ec.generate_private_key(ec.SECP256R1())
ED = ed25519.Ed25519PrivateKey.generate()
SIGNERS: Mapping[str, tuple[str, Any]] = {"rsa": ("RS256", RSA), "ec": ("ES256", EC), "ed": ("EdDSA", ED)}


def jwk(kid: str, private: Any, **fields: str) -> dict[str, Any]:
    algorithm = jwt.get_algorithm_by_name(SIGNERS[kid][0])
    return {**algorithm.to_jwk(private.public_key(), as_dict=True), "kid": kid, **fields}


JWKS = {"keys": [jwk(kid, private) for kid, (_, private) in SIGNERS.items()]}


def token(kid: str = "rsa", key: Any = None, algorithm: str = "", **claims: Any) -> str:
    now = int(time.time())
    known = {"iss": RULES.issuer, "aud": RULES.audience, "sub": "alice", "exp": now + 100, **claims}
    known = {name: value for name, value in known.items() if value is not None}
    return str(jwt.encode(known, key or SIGNERS[kid][1], algorithm=algorithm or SIGNERS[kid][0], headers={"kid": kid}))


def part(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "jwks.json"
    path.write_text(json.dumps(JWKS))
    return path


@pytest.fixture
def tokens(file: Path) -> TokenVerifier:
    return TokenVerifier(IssuerKeys(str(file)), RULES, Meters())


@pytest.mark.parametrize("kid", SIGNERS)
def test_a_signed_token_stands_for_its_subject(tokens: TokenVerifier, kid: str) -> None:
    claims = {"tenant": "t", "models": ["tiny*"], "max_priority": 2, "requests_per_minute": 5}
    caller = tokens.caller(token(kid, kvmesh=claims))
    assert (caller.tenant, caller.priority(9), caller.may_use("big")) == ("t", 2, False)
    assert caller.meter is not None
    assert caller.meter.limits.requests == 5
    other = tokens.caller(token(kid, kvmesh=claims, sub="bob"))
    assert other.owner != caller.owner
    assert other.meter is not caller.meter
    again = tokens.caller(token(kid, kvmesh=claims, jti="another token of alice"))
    assert again.meter is caller.meter, "limits are of the subject, not of the token"
    assert tokens.caller(token(kid, tenant="from-its-own-claim")).tenant == "from-its-own-claim"


def test_what_is_not_signed_by_the_issuer_is_refused(tokens: TokenVerifier) -> None:
    now = int(time.time())
    good = token()
    head, body, signature = good.split(".")
    public = RSA.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    claims = {"iss": RULES.issuer, "aud": RULES.audience, "sub": "eve", "exp": now + 100}
    none = f"{part({'alg': 'none', 'kid': 'rsa'})}.{part(claims)}."
    signed = f"{part({'alg': 'HS256', 'kid': 'rsa'})}.{part(claims)}"
    mac = base64.urlsafe_b64encode(hmac.digest(public, signed.encode(), hashlib.sha256)).rstrip(b"=").decode()
    stranger = rsa.generate_private_key(65537, 2048)
    for wrong in (
        none,
        none + signature,
        f"{signed}.{mac}",  # the public key taken for a shared secret
        f"{head}.{part(claims)}.{signature}",
        f"{head}.{body}.",
        token(key=stranger),
        token("ec", key=RSA, algorithm="RS256"),
        token(key=RSA, algorithm="RS512"),
        token(aud="another"),
        token(aud=None),
        token(iss="https://evil.example"),
        token(iss=None),
        token(sub=None),
        token(exp=None),
        token(exp="soon"),
        token(kvmesh={"requests_per_minute": -1}),
        token(kvmesh="all"),
        token(tenant=["t"]),
        token(tenant="with space"),
        "a.b.c",
        "...",
        good + "x" * 9000,
    ):
        with pytest.raises(UnauthorizedError) as refused:
            tokens.caller(wrong)
        assert "eve" not in str(refused.value)
        assert wrong[:20] not in str(refused.value)


def test_times_are_kept_with_leeway_also_for_known_tokens(file: Path) -> None:
    now = time.time()
    tokens = TokenVerifier(IssuerKeys(str(file)), RULES, Meters(), wall_clock=lambda: now)
    text = token(exp=int(now) + 100, nbf=int(now) - 10)
    tokens.caller(text)
    now += 125
    tokens.caller(text)
    now += 10
    with pytest.raises(UnauthorizedError, match="expired"):
        tokens.caller(text)
    early = token(exp=int(now) + 900, nbf=int(now) + 40)
    with pytest.raises(UnauthorizedError, match="not count yet"):
        tokens.caller(early)
    now += 15
    tokens.caller(early)


def test_a_verified_token_is_not_verified_again(tokens: TokenVerifier, monkeypatch: pytest.MonkeyPatch) -> None:
    text = token()
    first = tokens.caller(text)
    monkeypatch.setattr(jwt, "decode", None)
    assert tokens.caller(text) is first
    assert MAX_CACHED <= 100_000


def test_a_withdrawn_key_counts_for_known_tokens_too(file: Path) -> None:
    now = 0.0
    tokens = TokenVerifier(IssuerKeys(str(file), lambda: now), RULES, Meters())
    text = token()
    tokens.caller(text)
    file.write_text(json.dumps({"keys": JWKS["keys"][1:]}))
    now = 3.0
    with pytest.raises(UnauthorizedError, match="not known"):
        tokens.caller(text)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"keys": 3}',
        b'{"keys": []}',
        json.dumps({"keys": [{"kty": "oct", "kid": "rsa", "k": "c2VjcmV0"}]}).encode(),
        json.dumps({"keys": [{"kty": "RSA", "n": "AQAB", "e": "AQAB"}]}).encode(),
        json.dumps({"keys": [jwk("rsa", RSA, use="enc")]}).encode(),
        json.dumps({"keys": [jwk("rsa", RSA, alg="HS256")]}).encode(),
    ],
)
def test_a_set_without_a_key_that_can_be_used_is_refused(content: bytes) -> None:
    with pytest.raises(ConfigError, match="FILE"):
        read_jwks(content, "FILE")


@pytest.mark.parametrize("url", ["http://issuer.example/jwks", "ftp://127.0.0.1/x", "file:///etc/passwd"])
def test_keys_come_over_https_alone(url: str) -> None:
    with pytest.raises(ConfigError, match="https"):
        IssuerKeys(url)


async def test_keys_are_fetched_in_the_background_and_again_for_an_unknown_one() -> None:
    import asyncio

    fetched = 0
    keys = JWKS["keys"][:1]

    async def show(request: web.Request) -> web.Response:
        nonlocal fetched
        fetched += 1
        return web.json_response({"keys": keys})

    app = web.Application()
    app.router.add_get("/jwks", show)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    now = 0.0
    issuer = IssuerKeys(f"http://127.0.0.1:{port}/jwks", lambda: now)
    tokens = TokenVerifier(issuer, RULES, Meters())
    with pytest.raises(OverloadedError, match="being fetched"):
        tokens.caller(token())
    running = asyncio.create_task(issuer.run())
    try:
        async with asyncio.timeout(10):
            while not issuer.is_known:
                await asyncio.sleep(0.01)
            tokens.caller(token())
            before = fetched
            keys = JWKS["keys"]
            now = 100.0
            with pytest.raises(OverloadedError):
                tokens.caller(token("ec"))
            while fetched == before or "ec" not in issuer.keys:
                await asyncio.sleep(0.01)
            tokens.caller(token("ec"))
        for _ in range(20):
            with pytest.raises(UnauthorizedError):
                tokens.caller(token("rsa").replace(token("rsa").split(".")[0], part({"alg": "RS256", "kid": "x"})))
        await asyncio.sleep(0.1)
        assert fetched == before + 1, "strangers cannot have the issuer asked again and again"
    finally:
        running.cancel()
        await runner.cleanup()


def test_keys_and_tokens_pass_the_same_door(tokens: TokenVerifier) -> None:
    door = Doorkeeper(None, tokens)
    request = Request(None, "POST", "/", "", [("authorization", f"Bearer {token()}")], 0.0)  # type: ignore[arg-type]
    door(request)
    assert isinstance(caller_of(request), KeyCaller)
    for wrong in ("sk-key", "a.b.c"):
        request = Request(None, "POST", "/", "", [("x-api-key", wrong)], 0.0)  # type: ignore[arg-type]
        with pytest.raises(UnauthorizedError):
            door(request)
