"""Run `kvmesh etcd-user`: have etcd ask for passwords, and make the user of a mesh."""

import os
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from kvmesh.mesh.config import load
from kvmesh.mesh.discovery import DiscoveryUrl
from kvmesh.protocol.errors import ConfigError


class EtcdUserConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_ETCD_USER_<NAME>`, that over [etcd_user] of `--config`, that over the default."""

    discovery: DiscoveryUrl
    root_password_file: Annotated[str, Meta(min_length=1, description="file with the password of etcd's user root")]
    role: Annotated[
        Literal["all", "worker", "router", "frontend", "planner", "reader"],
        Meta(description="what the user may write: the cards of its role; all: every key of the mesh"),
    ] = "all"
    name: Annotated[
        str, Meta(max_length=128, description="worker: the user may write cards of workers of this name alone")
    ] = ""
    wait_s: Annotated[float, Meta(ge=0, description="time that etcd has to answer")] = 60.0


def main(argv: list[str]) -> int:
    config = load(
        EtcdUserConfig,
        argv,
        os.environ,
        prefix="KVMESH_ETCD_USER_",
        prog="kvmesh etcd-user",
        description="Make the user that --discovery names, with the rights of its role to keys of its prefix alone, "
        "and have etcd ask everybody for a password. A second run changes nothing.",
        section="etcd_user",
    )
    from kvmesh.mesh.discovery.etcd.discovery import read_settings
    from kvmesh.mesh.discovery.etcd.users import guard

    scheme, _, rest = config.discovery.partition(":")
    settings = read_settings(rest) if scheme == "etcd" and rest else None
    if settings is None or not settings.user:
        raise ConfigError(
            f"{config.discovery!r} names no user of an etcd",
            hint="give --discovery etcd:HOST:PORT/PREFIX?user=NAME&password-file=FILE",
        )
    if config.name and config.role != "worker":
        raise ConfigError(f"--name {config.name} of a {config.role}", hint="only a worker's cards are limited by name")
    guard(settings, password_in(config.root_password_file), config.wait_s, config.role, config.name)
    rights = "use the keys of its prefix" if config.role == "all" else f"read them, and write those of a {config.role}"
    print(f"{settings.shown()} asks for passwords; {settings.user} may {rights}")
    return 0


def password_in(path: str) -> str:
    """Raises ConfigError."""
    try:
        password = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read --root-password-file {path}: {error}") from error
    if not password:
        raise ConfigError(f"--root-password-file {path} is empty", hint="etcd takes no empty password for root")
    return password
