"""Certificates for a test mesh: a CA in a folder, and a folder for each member."""

import time
from pathlib import Path

from kvmesh.mesh.identity import issuing
from kvmesh.mesh.identity.credentials import Credentials, issued_folder
from kvmesh.mesh.identity.names import Identity, MeshRole


class TestCa:
    """A CA of its own in `folder`. Each member that is asked for gets a folder there."""

    __test__ = False

    def __init__(self, folder: Path, namespace: str = "test") -> None:
        self.folder = folder
        self.namespace = namespace
        issuing.init(folder, namespace)

    def issue(self, role: MeshRole, name: str = "", *, life_s: float = 86_400.0, namespace: str = "") -> Path:
        """Return the folder of a member, for `--mesh-tls`. It gets a new certificate if it has one."""
        identity = Identity(namespace or self.namespace, role, name or role.value)
        folder = issued_folder(self.folder, role, identity.name)
        issuing.issue(self.folder, identity, folder, ["127.0.0.1", "localhost"], life_s / 86_400)
        return folder

    def member(self, role: MeshRole, name: str = "", *, life_s: float = 86_400.0) -> Credentials:
        """Return the credentials of a member, for code that runs in the test's own process."""
        return Credentials(self.issue(role, name, life_s=life_s))

    def until_expired(self, folder: Path) -> None:
        """Wait until the certificate of a member counts no more."""
        while issuing.read_member(folder).expires_at_s >= time.time():
            time.sleep(0.05)
