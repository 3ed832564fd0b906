"""Run `kvmesh workers`: see and control the workers of a running mesh.

The mesh of `kvmesh up` on this machine is asked over its control socket, any other over HTTP with an admin's key.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated
from urllib.parse import quote

import aiohttp
import msgspec
from msgspec import Meta
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvmesh.commands.http_client import API_KEY, DEFAULT_URL, ClientConfig, message_of, open_session
from kvmesh.commands.local_mesh import ControlPath, find_control
from kvmesh.frontend.crew import CrewList, CrewMember, WorkerControl, WorkerControlled
from kvmesh.mesh.config import load, unknown
from kvmesh.protocol.errors import ConfigError, EngineError

TIMEOUT_S = 180.0  # a drain and a change of role wait for the requests in hand
ALL = "all"
# What is typed, what is sent, and the argument that is typed behind the worker, in brackets if it may be left out.
ACTIONS: dict[str, tuple[str, str]] = {
    "drain": ("drain", ""),
    "resume": ("resume", ""),
    "role": ("set_role", "role"),
    "sleep": ("sleep", ""),
    "wake": ("wake", ""),
    "start-profile": ("start_profile", ""),
    "stop-profile": ("stop_profile", ""),
    "reset-cache": ("reset_prefix_cache", "[tiers]"),
    "log-level": ("log_level", "level"),
}
USAGE = (
    "kvmesh workers [list], or kvmesh workers drain | resume | role | sleep | wake | start-profile | stop-profile | "
    "reset-cache | log-level WORKER [a role, a level, or tiers as host,disk] [options]; WORKER: an id, a name, or all"
)


class WorkersConfig(ClientConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_WORKERS_<NAME>`, that over the TOML file of `--config`, that over the default."""

    control: ControlPath = ""
    url: Annotated[
        str, Meta(description=f"of a frontend; default: --control where there is no key, else {DEFAULT_URL}")
    ] = ""
    api_key: Annotated[str, Meta(description=f"an admin's; better in {API_KEY}, where others cannot see it")] = ""
    json: Annotated[bool, Meta(description="print JSON")] = False


def main(argv: list[str]) -> int:
    """Return 0 if everything that was asked for has been done."""
    words = []
    while argv and not argv[0].startswith("-"):
        words.append(argv.pop(0))
    if argv and argv[0] in ("-h", "--help"):
        print(f"usage: {USAGE}")
    config = load(
        WorkersConfig,
        argv,
        os.environ,
        prefix="KVMESH_WORKERS_",
        prog="kvmesh workers",
        description="See and control the workers of a running mesh: those of `kvmesh up` on this machine without a "
        "key, those of any mesh with --url and a key of `kvmesh keys new --admin`.",
        section="workers",
    )
    if not words or words == ["list"]:
        return asyncio.run(show(config))
    worker, control = asked_for(words)
    return asyncio.run(carry_out(config, worker, control))


def asked_for(words: list[str]) -> tuple[str, WorkerControl]:
    """Return the worker that is named, and what it is to do. Raise ConfigError."""
    known = ACTIONS.get(words[0])
    if known is None:
        raise unknown(f"action {words[0]!r}", words[0], ["list", *ACTIONS], f"write {USAGE}")
    action, argument = known
    is_optional = argument.startswith("[")
    if len(words) != (3 if argument else 2) and not (is_optional and len(words) == 2):
        behind = f" {argument.upper()}" if argument else ""
        raise ConfigError(
            f"{len(words) - 1} words follow {words[0]}", hint=f"write kvmesh workers {words[0]} WORKER{behind}"
        )
    arguments = {argument.strip("[]"): words[2]} if len(words) == 3 else {}
    return words[1], msgspec.convert({"action": action, "arguments": arguments}, WorkerControl)


async def show(config: WorkersConfig) -> int:
    async with asking(config) as (session, url):
        found = await crew(session, url)
    if config.json:
        print(msgspec.json.encode(found).decode())
        return 0
    Console(width=None if sys.stdout.isatty() else 160).print(table_of(found))
    return 0 if all(member.status is not None and not member.status.problem for member in found) else 1


async def carry_out(config: WorkersConfig, worker: str, control: WorkerControl) -> int:
    """Ask one worker after the other, so that "all" never takes a mesh out of service at once."""
    async with asking(config) as (session, url):
        names = [worker] if worker != ALL else [member.id for member in await crew(session, url)]
        failed = 0
        for name in names:
            try:
                done = await ask(session, url, name, control)
            except EngineError as error:
                failed += 1
                print(f"{name}: {error}", file=sys.stderr)
                continue
            print(msgspec.json.encode(done).decode() if config.json else f"{done.worker}: {done.detail}")
    return 1 if failed else 0


@asynccontextmanager
async def asking(config: WorkersConfig) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    """Yield a session, and the URL to ask. Raise ConfigError."""
    has_key = bool(config.api_key or os.environ.get(API_KEY))
    control = None if config.url or (has_key and not config.control) else find_control(config.control)
    if control is None:
        async with open_session(config.api_key, config.ca_file, TIMEOUT_S) as session:
            yield session, config.url or DEFAULT_URL
        return
    connector = aiohttp.UnixConnector(str(control))
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(TIMEOUT_S)) as session:
        yield session, "http://localhost"


async def crew(session: aiohttp.ClientSession, url: str) -> list[CrewMember]:
    """Return the workers. Raise EngineError if the frontend does not say."""
    return msgspec.json.decode(await _body(session, "GET", f"{url.rstrip('/')}/kvmesh/workers"), type=CrewList).workers


async def ask(session: aiohttp.ClientSession, url: str, worker: str, control: WorkerControl) -> WorkerControlled:
    """Have a worker do something. Raise EngineError with what it says."""
    path = f"{url.rstrip('/')}/kvmesh/workers/{quote(worker, safe='')}/control"
    return msgspec.json.decode(await _body(session, "POST", path, msgspec.json.encode(control)), type=WorkerControlled)


async def _body(session: aiohttp.ClientSession, method: str, url: str, data: bytes | None = None) -> bytes:
    headers = {"content-type": "application/json"} if data else {}
    try:
        async with session.request(method, url, data=data, headers=headers) as reply:
            body = await reply.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise EngineError(
            f"{url} does not answer: {error or type(error).__name__}", hint="see --url and --control"
        ) from error
    if reply.status != 200:
        raise EngineError(message_of(body))
    return body


def table_of(found: list[CrewMember]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for column in (
        "name",
        "id",
        "model",
        "role",
        "state",
        "running",
        "waiting",
        "KV blocks used",
        "cached",
        "quiet",
        "log",
    ):
        table.add_column(column)
    for member in found:
        status = member.status
        if status is None:
            table.add_row(member.name, member.id, member.model, member.role.value, f"no answer: {member.problem}")
            continue
        state = f"{status.state}: {status.problem}" if status.problem else status.state
        table.add_row(
            member.name,
            member.id,
            member.model,
            member.role.value,
            f"{state}, profiled" if status.is_profiling else state,
            str(status.running),
            str(status.waiting),
            f"{status.used_blocks}/{status.total_blocks}",
            str(status.cached_blocks),
            f"{status.quiet_s:.0f} s",
            status.log_level,
        )
    return table
