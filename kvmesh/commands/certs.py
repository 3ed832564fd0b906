"""Run `kvmesh certs`: make the CA of a mesh, the certificates of its members, and renew them."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from kvmesh.mesh.config import load
from kvmesh.mesh.identity.credentials import CA_KEY, issued_folder
from kvmesh.mesh.identity.names import Identity, MeshRole
from kvmesh.protocol.errors import ConfigError

DAY_S = 86_400.0
USAGE = """usage: kvmesh certs init | issue | rotate [options]

  init      make a CA: one for each mesh
  issue     write the folder of a member, for its --mesh-tls
  rotate    renew certificates before they expire; --roll-ca replaces the CA

`kvmesh certs <what> --help` lists the options."""


class InitConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    ca: Annotated[str, Meta(description="folder of the CA; its key stays there")] = "kvmesh-ca"
    namespace: Annotated[str, Meta(description="name of the mesh; members of other meshes are refused")] = "default"
    days: Annotated[float, Meta(gt=0, description="until the CA expires")] = 3650.0


class IssueConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: Annotated[MeshRole, Meta(description="what the member does; it decides what the member may do")]
    name: Annotated[str, Meta(description="name of the service, or its beginning before a dash; default: the role")] = (
        ""
    )
    ca: Annotated[str, Meta(description="folder of the CA")] = "kvmesh-ca"
    out: Annotated[str, Meta(description="folder to write; default: issued/<role>-<name> in the folder of the CA")] = ""
    hosts: Annotated[
        tuple[str, ...], Meta(description="host names and addresses, for clients outside of the mesh that check them")
    ] = ()
    days: Annotated[float, Meta(gt=0, description="until the certificate expires")] = 90.0


class RotateConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    ca: Annotated[str, Meta(description="folder of the CA")] = "kvmesh-ca"
    folders: Annotated[tuple[str, ...], Meta(description="folders of members; default: all in its issued/")] = ()
    within_days: Annotated[float, Meta(ge=0, description="renew what expires within this time")] = 30.0
    days: Annotated[float, Meta(gt=0, description="until a renewed certificate expires")] = 90.0
    roll_ca: Annotated[
        Literal["no", "begin", "end"],
        Meta(description="begin: make a new CA, and trust both; end: trust the new one alone"),
    ] = "no"


def main(argv: list[str]) -> int:
    what, rest = (argv[0], argv[1:]) if argv else ("", [])
    commands = {"init": init, "issue": issue, "rotate": rotate}
    if what not in commands:
        wants_help = what in ("-h", "--help")
        print(USAGE, file=sys.stdout if wants_help else sys.stderr)
        return 0 if wants_help else 2
    try:
        import kvmesh.mesh.identity.issuing  # noqa: F401 - a command alone needs its package
    except ImportError as error:
        raise ConfigError("the package cryptography is missing", hint="pip install 'kvmesh[certs]'") from error
    return commands[what](rest)


def init(argv: Sequence[str]) -> int:
    from kvmesh.mesh.identity import issuing

    config = load(InitConfig, argv, {}, prefix="KVMESH_CERTS_", prog="kvmesh certs init")
    issuing.init(Path(config.ca), config.namespace, config.days)
    print(f"made the CA of the mesh {config.namespace} in {config.ca}; keep {CA_KEY} there, and nowhere else")
    return 0


def issue(argv: Sequence[str]) -> int:
    from kvmesh.mesh.identity import issuing

    config = load(IssueConfig, argv, {}, prefix="KVMESH_CERTS_", prog="kvmesh certs issue")
    ca = Path(config.ca)
    identity = Identity(issuing.read_authority(ca).namespace, config.role, config.name or config.role.value)
    folder = Path(config.out) if config.out else issued_folder(ca, identity.role, identity.name)
    issuing.issue(ca, identity, folder, config.hosts, config.days)
    print(f"wrote {folder} for the {identity}: start it with --mesh-tls {folder}")
    return 0


def rotate(argv: Sequence[str]) -> int:
    from kvmesh.mesh.identity import issuing

    config = load(RotateConfig, argv, {}, prefix="KVMESH_CERTS_", prog="kvmesh certs rotate")
    ca = Path(config.ca)
    folders = [Path(folder) for folder in config.folders] or issuing.members_of(ca)
    if config.roll_ca == "begin":
        issuing.begin_roll(ca, folders)
        print(
            f"{len(folders)} members trust the new CA and the old one; next, `kvmesh certs rotate`, then --roll-ca end"
        )
    elif config.roll_ca == "end":
        issuing.end_roll(ca, folders)
        print(f"{len(folders)} members trust the new CA alone")
    else:
        renewed = issuing.rotate(ca, folders, config.within_days * DAY_S, time.time(), config.days)
        for folder in renewed:
            print(f"renewed {folder}")
        print(f"{len(renewed)} of {len(folders)} certificates were renewed")
    return 0
