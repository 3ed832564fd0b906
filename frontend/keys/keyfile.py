"""Read and write files of API keys. Pure.

A line is a JSON object with the SHA-256 of a key and what the key may do. A line of the older form, a key and perhaps
the tenant that it stands for, is read too. `#` begins a comment.
"""

import hashlib
import re
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvmesh.frontend.hints import MAX_PRIORITY
from kvmesh.frontend.keys.budget import KeyLimits
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.messages import UNREADABLE

MAX_KEYS = 10_000
MAX_LIMIT = 2**40
_KEY = re.compile(r"[\x21-\x7e]{1,1024}")
_TENANT = re.compile(r"[\x21-\x7e]{1,256}")
_WRITE = "write lines with `kvmesh keys new` or `kvmesh keys hash`"

KeyName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._@-]{1,64}$")]
Pattern = Annotated[str, Meta(min_length=1, max_length=512)]
_Limit = Annotated[int, Meta(ge=1, le=MAX_LIMIT)]


class KeyLine(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One line of the file."""

    name: KeyName  # in logs, metrics and limits
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]  # of the key, which is nowhere kept
    tenant: Annotated[str, Meta(pattern=r"^[\x21-\x7e]{0,256}$")] = ""  # "": none
    models: Annotated[tuple[Pattern, ...], Meta(max_length=1000)] = ()  # (): all; * and ? stand for any characters
    max_priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    streams: _Limit | None = None
    admin: bool = False  # it may control the workers of the mesh
    expires: Annotated[datetime, Meta(tz=True)] | None = None

    @property
    def limits(self) -> KeyLimits:
        return KeyLimits(self.requests_per_minute, self.tokens_per_minute, self.streams)


class KeyFile(Struct, frozen=True):
    """The content of a file of keys."""

    lines: Sequence[KeyLine]
    num_plain: int  # lines of the older form, which hold the keys themselves


_decoder = msgspec.json.Decoder(KeyLine)


def read_key_file(text: str, source: str) -> KeyFile:
    """Return the keys of a file. Raise ConfigError that names the line, and never a key."""
    lines: list[KeyLine] = []
    names: set[str] = set()
    digests: set[str] = set()
    num_plain = 0
    for number, line in enumerate(text.splitlines(), 1):
        where = f"line {number} of {source}"
        found, is_plain = _read_line(line.strip(), number, where)
        if found is None:
            continue
        if found.sha256 in digests:
            raise ConfigError(f"{where} has the same key as a line before it", hint="remove one")
        if found.name in names:
            raise ConfigError(f"{where} has the same name as a line before it", hint="give each key a name of its own")
        lines.append(found)
        names.add(found.name)
        digests.add(found.sha256)
        num_plain += is_plain
    if not 0 < len(lines) <= MAX_KEYS:
        raise ConfigError(f"{source} holds {len(lines)} API keys", hint=f"write 1 to {MAX_KEYS}, one a line")
    return KeyFile(lines, num_plain)


def _read_line(line: str, number: int, where: str) -> tuple[KeyLine | None, bool]:
    """Return the key of a line, None if it has none, and whether it is of the older form."""
    if not line or line.startswith("#"):
        return None, False
    if not line.startswith("{"):
        return _read_plain(line, number, where), True
    try:
        return _decoder.decode(line), False
    except UNREADABLE as error:
        is_named = "unknown field" in str(error)  # by msgspec; the name may be a key that somebody put there
        why = f"it has a field beside {', '.join(KeyLine.__struct_fields__)}" if is_named else str(error)
        raise ConfigError(f"{where} is no API key: {why}", hint=_WRITE) from None


def _read_plain(line: str, number: int, where: str) -> KeyLine | None:
    key, *rest = line.partition("#")[0].split() or [""]
    tenant = rest[0] if rest else ""
    if len(rest) > 1 or not _KEY.fullmatch(key) or (tenant and not _TENANT.fullmatch(tenant)):
        raise ConfigError(f"{where} is no API key", hint=_WRITE)
    return KeyLine(name=f"line-{number}", sha256=hashed(key), tenant=tenant)


def hashed(key: str) -> str:
    """Return what stands in the file for a key. Keys are random, so no slow hash is needed."""
    return hashlib.sha256(key.encode()).hexdigest()


def written(line: KeyLine) -> str:
    """Return the line as it stands in the file."""
    return msgspec.json.encode(line).decode()


def is_key(text: str) -> bool:
    """Return whether a text can be sent as a key."""
    return _KEY.fullmatch(text) is not None
