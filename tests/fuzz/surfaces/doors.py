"""Promises about what says who somebody is: members' names, files of certificates, files of API keys."""

import shutil
import tempfile
from functools import cache
from pathlib import Path

from kvmesh.frontend.keys.keyfile import read_key_file, written
from kvmesh.mesh.identity.credentials import CA, CERT, KEY, Credentials
from kvmesh.mesh.identity.names import MeshRole, identity_of_uri
from kvmesh.protocol.errors import ConfigError, IdentityError
from tests.fuzz.surfaces.short import must_be_short
from tests.support.certificates import TestCa

PARTS = (CA, CERT, KEY)


def member_uris(data: bytes) -> None:
    """A name is refused, or it is exactly the name of one member."""
    uri = data.decode("utf-8", "replace")
    try:
        identity = identity_of_uri(uri)
    except IdentityError as error:
        must_be_short(error, 1200)
        return
    assert identity.uri == uri
    assert identity.stands_for(identity.name) and not identity.stands_for(f"{identity.name}x")


@cache
def _folders() -> tuple[Path, Path]:
    """Return the folder of a sound member, and one for its spoilt copies."""
    root = Path(tempfile.mkdtemp(prefix="kvmesh-fuzz-tls-"))
    member = TestCa(root / "ca").issue(MeshRole.WORKER)
    return member, root / "spoilt"


def certificate_files(data: bytes) -> None:
    """A folder of certificates of which one file was changed is read, or refused by ConfigError."""
    if len(data) < 3:
        return
    member, spoilt = _folders()
    shutil.rmtree(spoilt, ignore_errors=True)
    shutil.copytree(member, spoilt)
    file = spoilt / PARTS[data[0] % 3]
    whole = file.read_bytes()
    at = data[1] * len(whole) // 256
    file.write_bytes(data[3:] if data[2] % 2 else whole[:at] + data[3:] + whole[at + len(data) - 3 :])
    file.chmod(0o600)
    try:
        Credentials(spoilt)
    except ConfigError as error:
        must_be_short(error, 1500)


def key_files(data: bytes) -> None:
    """A file of keys is refused by an error that has no key in it, or means the same after it was written again."""
    text = data.decode("utf-8", "replace")
    try:
        found = read_key_file(text, "the file")
    except ConfigError as error:
        must_be_short(error, 1500)
        must_be_short(Exception("".join(str(error).split("sk-secret")[1:])), 0)
        return
    again = read_key_file("\n".join(map(written, found.lines)), "the file")
    assert again.lines == found.lines
