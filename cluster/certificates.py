"""Make the certificates of a mesh on this host."""

from pathlib import Path

from kvmesh.mesh.identity.credentials import CA_KEY, CERT, Credentials, issued_folder
from kvmesh.mesh.identity.names import Identity, MeshRole
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.messages import Role

NAMESPACE = "up"
DAYS = 365.0


def check_ca(folder: str) -> None:
    """Raise ConfigError if a folder that was named has no CA: with a mistyped name, a mesh would get a new one."""
    if folder not in ("", "auto") and not (Path(folder) / CA_KEY).exists():
        raise ConfigError(
            f"there is no CA in --mesh-tls {folder}",
            hint="make one with `kvmesh certs init --ca FOLDER`, or set --mesh-tls auto",
        )


def issue_all(ca: Path) -> Credentials:
    """Make a CA, unless the folder has one, and what is missing for each kind of process. Return the operator's.

    Raises ConfigError.
    """
    try:
        from kvmesh.mesh.identity import issuing
    except ImportError as error:
        raise ConfigError(
            "--mesh-tls needs the package cryptography, which is missing", hint="pip install 'kvmesh[certs]'"
        ) from error
    if not (ca / CA_KEY).exists():
        issuing.init(ca, NAMESPACE)
    alone = (MeshRole.FRONTEND, MeshRole.ROUTER, MeshRole.PLANNER, MeshRole.OPERATOR, MeshRole.OBSERVER)
    members = [(role, role.value) for role in alone] + [(MeshRole.WORKER, role.value) for role in Role]
    namespace = issuing.read_authority(ca).namespace
    for role, name in members:
        folder = issued_folder(ca, role, name)
        if not (folder / CERT).exists():
            issuing.issue(ca, Identity(namespace, role, name), folder, ("localhost", "127.0.0.1"), DAYS)
    return Credentials(issued_folder(ca, MeshRole.OPERATOR, MeshRole.OPERATOR.value))
