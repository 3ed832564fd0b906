"""Run `kvmesh scale decode=3`: change how many workers the mesh of `kvmesh up` on this machine has."""

import asyncio
import os
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from kvmesh.commands.local_mesh import ControlPath, find_control
from kvmesh.mesh.config import load, unknown
from kvmesh.planner.connectors.local import LocalConnector
from kvmesh.planner.connectors.local_api import MAX_WORKERS, Scaled, ScaleRequest, WorkersReport
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.messages import Role

USAGE = "kvmesh scale decode=3 [prefill=1] [aggregated=0]"
_COUNT = re.compile(r"[a-z]+=[^/]*")


class ScaleConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_SCALE_<NAME>`, that over the TOML file of `--config`, that over the default."""

    control: ControlPath = ""


def main(argv: list[str]) -> int:
    """Return 0 if the mesh has the counts that are asked for, or is about to have them."""
    words = [word for word in argv if _COUNT.fullmatch(word)]
    config = load(
        ScaleConfig,
        [word for word in argv if not _COUNT.fullmatch(word)],
        os.environ,
        prefix="KVMESH_SCALE_",
        prog="kvmesh scale",
        description=f"Change how many workers the mesh of `kvmesh up` on this machine has, without a key: `{USAGE}`. "
        "New ones are started, surplus ones finish their requests and end.",
        section="scale",
    )
    asked = counts_of(words)
    control = find_control(config.control)
    if control is None:
        raise ConfigError("no mesh of yours runs here", hint="start one with `kvmesh up`, or give its --control")
    return asyncio.run(scale(control, asked))


def counts_of(words: Sequence[str]) -> dict[Role, int]:
    """Return the counts that words such as `decode=3` ask for. Raise ConfigError."""
    if not words:
        raise ConfigError("no role is given a number of workers", hint=f"write {USAGE}")
    roles = ScaleRequest.__struct_fields__
    counts = {}
    for word in words:
        role, _, count = word.partition("=")
        if role not in roles:
            raise unknown(f"role {role!r}", role, roles, f"write {USAGE}")
        if not count.isdecimal() or len(count) > len(str(MAX_WORKERS)) or int(count) > MAX_WORKERS:
            raise ConfigError(f"{word} gives no number of workers", hint=f"write {role}=N, from 0 to {MAX_WORKERS}")
        if Role(role) in counts:
            raise ConfigError(f"{role} is given twice", hint=f"write {USAGE}")
        counts[Role(role)] = int(count)
    return counts


async def scale(control: Path, asked: dict[Role, int]) -> int:
    """Raise ConfigError where a planner decides, ConnectorError if the mesh does not answer."""
    mesh = LocalConnector(f"unix:{control}")
    try:
        if (await mesh.ask("GET", "/workers", WorkersReport)).is_planned:
            raise ConfigError(
                "a planner decides how many workers this mesh has, and would undo it in its next step",
                hint="start `kvmesh up` without --planner",
            )
        request = msgspec.convert({role.value: count for role, count in asked.items()}, ScaleRequest)
        done = await mesh.ask("POST", "/scale", Scaled, request)
    finally:
        await mesh.close()
    print("\n".join(lines_of(asked, done)))
    return 0 if all(done.counts.get(role) == count for role, count in asked.items()) else 1


def lines_of(asked: dict[Role, int], done: Scaled) -> list[str]:
    lines = []
    for role, count in asked.items():
        has = done.counts.get(role, 0)
        later = "" if has == count else f", {has - count} too many: a worker that starts is not taken away, ask again"
        lines.append(f"{role.value}: {has} worker{'s' * (has != 1)}{later}")
    lines += [f"{name} is being started; `kvmesh workers` shows when it is ready" for name in done.started]
    lines += [f"{name} finishes its requests and ends" for name in done.draining]
    return lines
