"""Certificates: made, read, refused, and read again when they change."""

import ssl
import time
from pathlib import Path

import pytest

from kvmesh.commands.certs import main as certs
from kvmesh.mesh.identity import issuing
from kvmesh.mesh.identity.credentials import CA, CERT, KEY, Credentials, member_of, open_credentials
from kvmesh.mesh.identity.names import Identity, MeshRole
from kvmesh.mesh.watched_files import LOOK_S
from kvmesh.protocol.errors import ConfigError, ExpiredError, IdentityError
from tests.support.certificates import TestCa

WORKER, FRONTEND, ROUTER = MeshRole.WORKER, MeshRole.FRONTEND, MeshRole.ROUTER


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def shake_hands(
    caller: Credentials, answerer: Credentials, roles: frozenset[MeshRole] = frozenset(MeshRole)
) -> tuple[Identity, Identity]:
    """Return whom each side sees. Raises ssl.SSLError."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = caller.client_context(roles).wrap_bio(back, there)
    server = answerer.server_context().wrap_bio(there, back, server_side=True)
    for side in (client, server, client, server):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return member_of(server).identity, member_of(client).identity


@pytest.fixture
def ca(tmp_path: Path) -> TestCa:
    return TestCa(tmp_path / "ca")


def test_two_members_see_who_the_other_is(ca: TestCa) -> None:
    frontend, worker = ca.member(FRONTEND), ca.member(WORKER, "decode-1")
    assert shake_hands(frontend, worker) == (frontend.identity, worker.identity)
    assert worker.identity == Identity("test", WORKER, "decode-1")


def test_a_caller_refuses_a_server_of_another_role(ca: TestCa) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="expected was: worker"):
        shake_hands(ca.member(FRONTEND), ca.member(ROUTER), frozenset({WORKER}))


def test_a_member_of_another_ca_is_refused(ca: TestCa, tmp_path: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(ca.member(FRONTEND), TestCa(tmp_path / "other").member(WORKER))


def test_a_member_of_another_namespace_is_refused(ca: TestCa, tmp_path: Path) -> None:
    other = TestCa(tmp_path / "other", "stage").member(WORKER)
    bundle = (ca.folder / CA).read_bytes() + (tmp_path / "other" / CA).read_bytes()
    own = ca.issue(FRONTEND)
    for folder in (own, other.folder):
        (folder / CA).write_bytes(bundle)
    with pytest.raises(ssl.SSLCertVerificationError, match="meshes do not talk"):
        shake_hands(Credentials(own), Credentials(other.folder))


def test_an_expired_certificate_is_refused_at_start(ca: TestCa) -> None:
    folder = ca.issue(WORKER, life_s=0.1)
    ca.until_expired(folder)
    time.sleep(1)
    with pytest.raises(ExpiredError, match="it has expired"):
        Credentials(folder)


def test_an_expired_certificate_is_refused_by_a_peer(ca: TestCa) -> None:
    worker = ca.member(WORKER, life_s=1.5)
    ca.until_expired(worker.folder)
    time.sleep(1)
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        shake_hands(ca.member(FRONTEND), worker)


def test_a_key_that_everybody_can_read_is_refused(ca: TestCa) -> None:
    folder = ca.issue(WORKER)
    (folder / KEY).chmod(0o644)
    with pytest.raises(ConfigError, match="chmod o-rw"):
        Credentials(folder)


@pytest.mark.parametrize("name", [CA, CERT, KEY])
def test_a_missing_file_is_named(ca: TestCa, name: str) -> None:
    folder = ca.issue(WORKER)
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=name):
        Credentials(folder)


def test_a_key_of_another_certificate_is_refused(ca: TestCa) -> None:
    folder, other = ca.issue(WORKER), ca.issue(FRONTEND)
    (folder / KEY).write_bytes((other / KEY).read_bytes())
    with pytest.raises(ConfigError, match="cannot be used together"):
        Credentials(folder)


def test_changed_files_count_for_the_next_connection(ca: TestCa) -> None:
    clock = Clock()
    credentials = Credentials(ca.issue(WORKER, life_s=100), clock)
    before, context = credentials.member.expires_at_s, credentials.client_context()
    ca.issue(WORKER, life_s=10_000)
    assert credentials.client_context() is context
    clock.now_s += LOOK_S
    assert credentials.client_context() is not context
    assert credentials.member.expires_at_s > before + 9_000


def test_files_that_became_unusable_change_nothing(ca: TestCa, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    folder = ca.issue(WORKER)
    credentials = Credentials(folder, clock)
    context = credentials.server_context()
    (folder / CERT).write_text("half")
    clock.now_s += LOOK_S
    assert credentials.server_context() is context
    assert "stay as they were" in caplog.text


def test_the_log_warns_once_a_week_before(ca: TestCa, caplog: pytest.LogCaptureFixture) -> None:
    credentials = ca.member(WORKER, life_s=86_400 * 6)
    credentials.warn_before_expiry(time.time())
    credentials.warn_before_expiry(time.time())
    assert caplog.text.count("kvmesh certs rotate") == 1
    ca.member(FRONTEND, life_s=86_400 * 8).warn_before_expiry(time.time())
    assert caplog.text.count("kvmesh certs rotate") == 1


def test_a_changed_ca_is_trusted_beside_the_old_one(ca: TestCa) -> None:
    frontend, worker = ca.issue(FRONTEND), ca.issue(WORKER)
    folders = [frontend, worker]
    issuing.begin_roll(ca.folder, folders)
    assert issuing.rotate(ca.folder, [worker], 0, time.time()) == [worker]
    shake_hands(Credentials(frontend), Credentials(worker))  # one of the old CA, one of the new
    with pytest.raises(ConfigError, match="is of the old CA"):
        issuing.end_roll(ca.folder, folders)
    issuing.rotate(ca.folder, folders, 0, time.time())
    issuing.end_roll(ca.folder, folders)
    shake_hands(Credentials(frontend), Credentials(worker))
    assert (worker / CA).read_bytes().count(b"BEGIN CERTIFICATE") == 1


def test_rotate_renews_what_expires_soon_alone(ca: TestCa) -> None:
    soon, later = ca.issue(WORKER, "a", life_s=3_600), ca.issue(WORKER, "b", life_s=36_000)
    assert issuing.rotate(ca.folder, [soon, later], 7_200, time.time()) == [soon]
    assert issuing.read_member(soon).identity.name == "a"
    assert issuing.read_member(soon).hosts == ("localhost", "127.0.0.1")


def test_the_command_makes_what_a_service_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ca, out = str(tmp_path / "ca"), tmp_path / "member"
    assert certs(["init", "--ca", ca, "--namespace", "prod"]) == 0
    assert certs(["issue", "--ca", ca, "--role", "worker", "--name", "decode", "--out", str(out)]) == 0
    credentials = open_credentials(str(out))
    assert credentials is not None and credentials.identity == Identity("prod", WORKER, "decode")
    assert (out / KEY).stat().st_mode & 0o777 == 0o600
    assert certs(["rotate", "--ca", ca, "--folders", str(out), "--within-days", "365"]) == 0
    assert f"renewed {out}" in capsys.readouterr().out


def test_a_second_ca_in_a_folder_is_refused(ca: TestCa) -> None:
    with pytest.raises(ConfigError, match="there is a CA"):
        issuing.init(ca.folder, "test")


def test_a_name_that_fits_no_uri_is_refused(ca: TestCa) -> None:
    with pytest.raises(IdentityError, match="cannot be a name"):
        ca.issue(WORKER, "a/b")
