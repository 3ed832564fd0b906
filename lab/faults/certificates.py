"""Be the CA of a mesh whose ports are closed: a certificate for every process, and one that expires at once."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from kvmesh.lab.faults.kinds import FRONTEND, ROUTER
from kvmesh.mesh.identity import issuing
from kvmesh.mesh.identity.credentials import Credentials
from kvmesh.mesh.identity.names import Identity, MeshRole

NAMESPACE = "faults"
LIFE_S = 86_400.0
SHORT_LIFE_S = 3.0  # a process looks at its files every 2 s, and takes none that have expired
_ROLES: Mapping[str, MeshRole] = {FRONTEND: MeshRole.FRONTEND, ROUTER: MeshRole.ROUTER}


class MeshCertificates:
    """Issues the certificates of one run."""

    def __init__(self, folder: Path) -> None:
        self._ca = folder / "ca"
        self._members = folder / "members"
        self._hosts: dict[str, tuple[str, ...]] = {}
        issuing.init(self._ca, NAMESPACE)

    def issue(self, name: str, hosts: Sequence[str]) -> Path:
        """Return the folder of a process of the mesh, for --mesh-tls."""
        self._hosts[name] = tuple(hosts)
        return self.renew(name)

    def renew(self, name: str, life_s: float = LIFE_S) -> Path:
        """Give a process another certificate; it takes it within 2 s."""
        role = _ROLES.get(name.rpartition("-")[0], MeshRole.WORKER)
        return self._write(Identity(NAMESPACE, role, name), self._hosts[name], life_s)

    def operator(self) -> Credentials:
        """Return the credentials with which the fault machine itself asks."""
        return Credentials(self._write(Identity(NAMESPACE, MeshRole.OPERATOR, "faults"), (), LIFE_S))

    def _write(self, identity: Identity, hosts: Sequence[str], life_s: float) -> Path:
        folder = self._members / identity.name
        issuing.issue(self._ca, identity, folder, hosts, life_s / 86_400)
        return folder
