"""Run `kvmesh keys new | hash | list`: make and show the lines of a file of API keys."""

import os
import secrets
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvmesh.frontend.keys.keyfile import KeyLine, hashed, is_key, read_key_file, written
from kvmesh.mesh.config import load, unknown
from kvmesh.protocol.errors import ConfigError

KEY_BYTES = 32
USAGE = "kvmesh keys new --name NAME [options], kvmesh keys hash FILE, or kvmesh keys list FILE"


class NewKeyConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_KEYS_<NAME>`, that over [keys] of `--config`, that over the default."""

    name: Annotated[str, Meta(min_length=1, description="what logs and metrics call the key")]
    file: Annotated[str, Meta(description="append the line to this file; default: print it after the key")] = ""
    tenant: Annotated[str, Meta(description="tenant that the key stands for; tenants share no cached prompt")] = ""
    models: Annotated[str, Meta(description="models that it may use, with commas; * and ? stand for characters")] = ""
    max_priority: Annotated[int | None, Meta(description="highest priority of its requests, -100 to 100")] = None
    requests_per_minute: Annotated[int | None, Meta(description="requests in any minute")] = None
    tokens_per_minute: Annotated[int | None, Meta(description="tokens of prompts and answers in any minute")] = None
    streams: Annotated[int | None, Meta(description="requests in progress")] = None
    admin: Annotated[bool, Meta(description="it may control the workers of the mesh: `kvmesh workers`")] = False
    expires_days: Annotated[
        Annotated[float, Meta(gt=0)] | None, Meta(description="days until it expires; default: never")
    ] = None


def main(argv: list[str]) -> int:
    commands: Mapping[str, Callable[[list[str]], int]] = {"new": new, "hash": hash_file, "list": show}
    if argv and argv[0] in ("-h", "--help"):
        print(f"usage: {USAGE}")
        return 0
    if not argv:
        raise ConfigError("there is no command", hint=f"write {USAGE}")
    if argv[0] not in commands:
        raise unknown(f"command {argv[0]!r} of keys", argv[0], commands, f"write {USAGE}")
    return commands[argv[0]](argv[1:])


def new(argv: list[str]) -> int:
    """Print a new key, and add its line to the file."""
    config = load(
        NewKeyConfig,
        argv,
        os.environ,
        prefix="KVMESH_KEYS_",
        prog="kvmesh keys new",
        description="Make a new API key. The key is printed once and kept nowhere; the file has its hash.",
        section="keys",
    )
    key = "sk-" + secrets.token_urlsafe(KEY_BYTES)
    line = written(line_of(config, key, datetime.now(UTC)))
    if config.file:
        append(Path(config.file), line)
    print(key)
    if not config.file:
        print(line)
    return 0


def line_of(config: NewKeyConfig, key: str, now: datetime) -> KeyLine:
    """Return the line of a new key. Raise ConfigError."""
    fields = {name: getattr(config, name) for name in KeyLine.__struct_fields__ if hasattr(config, name)}
    fields["models"] = tuple(filter(None, map(str.strip, config.models.split(","))))
    fields["sha256"] = hashed(key)
    if config.expires_days is not None:
        fields["expires"] = (now + timedelta(days=config.expires_days)).replace(microsecond=0)
    try:
        return msgspec.convert(fields, KeyLine)
    except msgspec.ValidationError as error:
        raise ConfigError(f"no such key can be made: {error}", hint="see kvmesh keys new --help") from error


def append(path: Path, line: str) -> None:
    """Add a line to a file that nobody else may read. Raise ConfigError if the file would not be one of keys."""
    try:
        before = path.read_text("utf-8") if path.exists() else ""
        read_key_file(f"{before}\n{line}\n", str(path))
        separator = "" if not before or before.endswith("\n") else "\n"
        with open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a", encoding="utf-8") as file:
            file.write(f"{separator}{line}\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot add a key to {path}: {error}") from error


def hash_file(argv: list[str]) -> int:
    """Print a file with the hashes of the keys that stand in it. Comments stay, also those behind keys."""
    text, source = read_argument(argv, "hash")
    lines = text.splitlines()
    read_key_file(text, source)
    for number, line in enumerate(lines, 1):
        content, mark, comment = line.partition("#")
        words = content.split()
        if not words or content.lstrip().startswith("{"):
            print(line)
            continue
        if mark:
            print(f"#{comment}")
        if not is_key(words[0]):
            raise ConfigError(f"line {number} of {source} is no API key")
        print(written(KeyLine(name=f"line-{number}", sha256=hashed(words[0]), tenant="".join(words[1:]))))
    print("give the keys names of your own if their limits or metrics matter", file=sys.stderr)
    return 0


def show(argv: list[str]) -> int:
    """Print the keys of a file, without their hashes."""
    text, source = read_argument(argv, "list")
    table = Table(box=SIMPLE_HEAD)
    for column in ("name", "tenant", "models", "priority", "req/min", "tok/min", "streams", "expires", "admin"):
        table.add_column(column)
    now = datetime.now(UTC)
    for line in read_key_file(text, source).lines:
        expires = "never" if line.expires is None else line.expires.date().isoformat()
        if line.expires is not None and line.expires <= now:
            expires += " (expired)"
        numbers = (line.max_priority, line.requests_per_minute, line.tokens_per_minute, line.streams)
        shown = ["" if number is None else str(number) for number in numbers]
        table.add_row(
            line.name, line.tenant, ", ".join(line.models) or "all", *shown, expires, "yes" if line.admin else ""
        )
    Console().print(table)
    return 0


def read_argument(argv: list[str], command: str) -> tuple[str, str]:
    """Return the text of the file that is named, and its name. `-` stands for the standard input. Raise ConfigError."""
    if len(argv) != 1:
        raise ConfigError(f"{command} takes one file", hint=f"write kvmesh keys {command} FILE")
    try:
        return (sys.stdin.read() if argv[0] == "-" else Path(argv[0]).read_text("utf-8")), argv[0]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {argv[0]}: {error}") from error
