"""TLS: who gets through, and what the others are told."""

import asyncio
import ssl
import subprocess
from pathlib import Path

import aiohttp
import pytest

from kvmesh.frontend.security import tls_context
from kvmesh.mesh.http.request import Reply, Request, json_reply
from kvmesh.mesh.http.server import App, Route, listening
from kvmesh.protocol.errors import ConfigError


async def echo(request: Request) -> Reply:
    return json_reply({})


def app() -> App:
    return App([Route("GET", "/health", echo, is_open=True)])


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
