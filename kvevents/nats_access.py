"""Read the address of a NATS server, with user and password."""

from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from protocol.errors import ConfigError

USAGE = "nats://host:port?user=NAME&password-file=FILE"
DEFAULT_PORT = 4222


@dataclass(frozen=True, slots=True)
class NatsAccess:
    """A server, and what it is told at the start of a connection. Cards of workers have `url` alone."""

    url: str  # nats://host:port
    user: str = ""
    password: str = field(default="", repr=False)


def read_access(url: str) -> NatsAccess:
    """Read `nats://host:port?user=NAME&password-file=FILE`, or nats://NAME:PASSWORD@host:port. Raises ConfigError."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or DEFAULT_PORT
    except ValueError:
        raise ConfigError("no NATS server in --nats-url", hint=f"give it as {USAGE}") from None
    if not host or parts.scheme != "nats" or parts.path not in ("", "/"):
        raise ConfigError(f"no NATS server {shown(url)!r}", hint=f"give it as {USAGE}")
    server = f"nats://[{host}]:{port}" if ":" in host else f"nats://{host}:{port}"
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(options.keys() - {"user", "password-file"}):
        raise ConfigError(f"unknown option of {server}: {', '.join(unknown)}", hint=USAGE)
    if parts.username and not options:
        return NatsAccess(server, unquote(parts.username), unquote(parts.password or ""))
    if len(options) == 1:
        raise ConfigError(f"{server} has only one of user and password-file", hint="set both, or none")
    return NatsAccess(server, options.get("user", ""), read_password(options.get("password-file", "")))


def read_password(path: str) -> str:
    if not path:
        return ""
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read password-file={path} of NATS: {error}", hint=USAGE) from error


def shown(url: str) -> str:
    """Return the URL without what could be a password."""
    scheme, separator, rest = url.rpartition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"
