"""API keys and TLS: who gets through, and what the others are told."""

import asyncio
import logging
import ssl
import subprocess
from pathlib import Path

import aiohttp
import pytest

from frontend import security
from frontend.security import ApiKeyGuard, read_api_keys, tls_context
from mesh.http.errors import UnauthorizedError
from mesh.http.request import Reply, Request, json_reply
from mesh.http.server import App, Route, listening
from protocol.errors import ConfigError

KEYS = """
# people
sk-first    # of the first
sk-second  acme
"""


def request(*headers: tuple[str, str]) -> Request:
    return Request(None, "POST", "/", "", list(headers), 0.0)  # type: ignore[arg-type]


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
    assert asking.tenant == tenant


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


def test_keys_are_compared_in_constant_time_with_all(guard: ApiKeyGuard, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return left == right

    monkeypatch.setattr(security.hmac, "compare_digest", compare)
    guard(request(("x-api-key", "sk-first")))
    assert len(compared) == 2
    assert {len(side) for pair in compared for side in pair} == {32}


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
        read_api_keys(text, "FILE")
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
    assert third.tenant == "other"
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
    return json_reply({"tenant": request.tenant})


def app(guard: ApiKeyGuard | None = None) -> App:
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


# --- TLS ----------------------------------------------------------------------------------------------


class Certificates:
    """A certificate authority of our own, a server and a client that it has signed; a stranger that it has not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._openssl(
            "req", "-x509", *self._new("ca"), "-subj", "/CN=test ca", "-days", "2", "-out", self.file("ca.pem")
        )
        self._sign("server", "subjectAltName=IP:127.0.0.1,DNS:localhost")
        self._sign("renewed", "subjectAltName=IP:127.0.0.1,DNS:localhost")
        self._sign("client", "extendedKeyUsage=clientAuth")
        self._openssl("req", "-x509", *self._new("stranger"), "-subj", "/CN=x", "-out", self.file("stranger.pem"))

    def file(self, name: str) -> str:
        return str(self.folder / name)

    def _new(self, name: str) -> list[str]:
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
        return [*curve, "-nodes", "-keyout", self.file(f"{name}.key")]

    def _sign(self, name: str, extension: str) -> None:
        (self.folder / f"{name}.ext").write_text(extension)
        self._openssl("req", *self._new(name), "-subj", f"/CN={name}", "-out", self.file(f"{name}.csr"))
        self._openssl(
            "x509", "-req", "-in", self.file(f"{name}.csr"), "-CA", self.file("ca.pem"), "-CAkey", self.file("ca.key"),
            "-CAcreateserial", "-days", "2", "-extfile", self.file(f"{name}.ext"), "-out", self.file(f"{name}.pem"),
        )  # fmt: skip

    @staticmethod
    def _openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True)

    def for_client(self, name: str = "") -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.file("ca.pem"))
        if name:
            context.load_cert_chain(self.file(f"{name}.pem"), self.file(f"{name}.key"))
        return context


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


async def health(url: str, context: ssl.SSLContext) -> int:
    async with aiohttp.ClientSession() as session, session.get(url + "/health", ssl=context) as reply:
        return reply.status


async def test_with_a_certificate_https_is_spoken(certificates: Certificates) -> None:
    tls = tls_context(certificates.file("server.pem"), certificates.file("server.key"), "")
    assert tls is not None
    assert tls.minimum_version == ssl.TLSVersion.TLSv1_2
    async with listening(app(), "127.0.0.1", 0, tls=tls) as url:
        assert url.startswith("https://")
        assert await health(url, certificates.for_client()) == 200
        with pytest.raises(aiohttp.ClientError):  # plain HTTP
            await health(url.replace("https", "http"), certificates.for_client())


async def test_with_a_client_ca_clients_need_a_certificate(certificates: Certificates) -> None:
    files = [certificates.file(name) for name in ("server.pem", "server.key", "ca.pem")]
    async with listening(app(), "127.0.0.1", 0, tls=tls_context(*files)) as url:
        assert await health(url, certificates.for_client("client")) == 200
        for context in (certificates.for_client(), certificates.for_client("stranger")):
            with pytest.raises((aiohttp.ClientError, ConnectionError, ssl.SSLError)):
                await health(url, context)


class Rotation:
    """The files of a running server, which can be exchanged, and its clock."""

    def __init__(self, folder: Path, certificates: Certificates) -> None:
        self._certificates = certificates
        self.files = [str(folder / name) for name in ("cert", "key", "ca")]
        self.now = 0.0

    def exchange(self, cert: str, key: str, ca: str) -> None:
        for target, source in zip(self.files, (cert, key, ca), strict=True):
            Path(target).write_bytes(Path(self._certificates.file(source)).read_bytes())
        self.now += 3.0

    def context(self) -> ssl.SSLContext:
        context = tls_context(*self.files, clock=lambda: self.now)
        assert context is not None
        return context


async def common_name(url: str, context: ssl.SSLContext, server_name: str) -> str:
    """Return the common name of the certificate that the server shows. Read from the server, because it refuses a TLS
    1.3 client after its handshake."""
    port = int(url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=server_name)
    try:
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        if b" 200 OK" not in await reader.readline():
            raise ConnectionError("the server has hung up")
        subject = writer.get_extra_info("peercert")["subject"]
        return str(dict(pair for part in subject for pair in part)["commonName"])
    finally:
        writer.close()


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
async def test_a_renewed_certificate_and_client_ca_count_for_new_connections(
    certificates: Certificates, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """A client that connects to an address does not name the server in its handshake."""
    rotation = Rotation(tmp_path, certificates)
    rotation.exchange("server.pem", "server.key", "ca.pem")
    async with listening(app(), "127.0.0.1", 0, tls=rotation.context()) as url:
        assert await common_name(url, certificates.for_client("client"), name) == "server"
        rotation.exchange("renewed.pem", "renewed.key", "stranger.pem")
        assert await common_name(url, certificates.for_client("stranger"), name) == "renewed"
        with pytest.raises((ConnectionError, ssl.SSLError)):
            await common_name(url, certificates.for_client("client"), name)
        rotation.exchange("server.pem", "renewed.key", "ca.pem")  # which do not fit
        assert await common_name(url, certificates.for_client("stranger"), name) == "renewed"
        assert "the TLS files stay as they were" in caplog.text
        Path(rotation.files[0]).unlink()
        rotation.now += 3.0
        assert await common_name(url, certificates.for_client("stranger"), name) == "renewed"


def test_the_key_may_stand_in_the_certificates_file(certificates: Certificates, tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_text(
        Path(certificates.file("server.pem")).read_text() + Path(certificates.file("server.key")).read_text()
    )
    assert tls_context(str(both), "", "") is not None
    assert tls_context("", "", "") is None


def test_settings_that_cannot_work_say_what_would(certificates: Certificates, tmp_path: Path) -> None:
    cert, key, other = (certificates.file(name) for name in ("server.pem", "server.key", "client.key"))
    text = tmp_path / "text"
    text.write_text("no PEM")
    locked = tmp_path / "locked.key"
    subprocess.run(
        ["openssl", "pkey", "-in", key, "-aes256", "-passout", "pass:x", "-out", str(locked)],
        check=True, capture_output=True,
    )  # fmt: skip
    for files, says in [
        (("", key, ""), r"--tls-key is given without --tls-cert"),
        (("", "", cert), r"--tls-client-ca is given without --tls-cert"),
        (("missing", key, ""), r"cannot read --tls-cert missing: No such file"),
        ((cert, "missing", ""), r"cannot read --tls-key missing: No such file"),
        ((cert, key, "missing"), r"cannot read --tls-client-ca missing: No such file"),
        ((cert, other, ""), r"cannot be used: KEY_VALUES_MISMATCH.*private key"),
        ((cert, "", ""), r"cannot be used.*private key"),
        ((str(text), key, ""), r"cannot be used.*PEM"),
        ((cert, key, str(text)), r"holds no certificate"),
        ((cert, str(locked), ""), r"the TLS key is encrypted"),
    ]:
        with pytest.raises(ConfigError, match=says):
            tls_context(*files)
