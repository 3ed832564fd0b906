"""Run `kvmesh nats-config`: print the users of a NATS server for KV events, each with the least rights."""

import os
import re
from typing import Annotated

from msgspec import Meta, Struct

from kvmesh.mesh.config import load
from kvmesh.protocol.errors import ConfigError


class NatsConfigConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_NATS_CONFIG_<NAME>`, that over [nats_config] of `--config`, that over the default."""

    workers: Annotated[str, Meta(description="names of users for workers, with commas between them")] = "worker"
    routers: Annotated[str, Meta(description="names of users for routers, and for frontends with a router")] = "router"


def main(argv: list[str]) -> int:
    config = load(
        NatsConfigConfig,
        argv,
        os.environ,
        prefix="KVMESH_NATS_CONFIG_",
        prog="kvmesh nats-config",
        description="Print the block `authorization` of nats-server's configuration: users that may publish or follow "
        "KV events, and nothing else. The password of a user is in NATS_PASSWORD_<USER> of the server's environment.",
        section="nats_config",
    )
    from kvmesh.kvevents.nats.rights import NatsRole, NatsUser, authorization

    def users(names: str, role: NatsRole) -> list[NatsUser]:
        return [NatsUser(name, role, f"${variable_of(name)}") for name in names.split(",") if name]

    print(authorization([*users(config.workers, "worker"), *users(config.routers, "router")]), end="")
    return 0


def variable_of(name: str) -> str:
    """Return the variable with a user's password. Raises ConfigError."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
        raise ConfigError(f"{name[:100]!r} cannot be a user", hint="take letters, digits, - and _")
    return "NATS_PASSWORD_" + name.upper().replace("-", "_")
