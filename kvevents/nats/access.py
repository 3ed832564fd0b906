"""Read the address of a NATS server, with user, password and TLS."""

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from kvmesh.protocol.errors import ConfigError

USAGE = "nats://host:port?user=NAME&password-file=FILE, or with TLS tls://host:port?ca=FILE&cert=FILE&key=FILE"
DEFAULT_PORT = 4222
PLAIN, TLS = "nats", "tls"
SCHEMES = (f"{PLAIN}://", f"{TLS}://")
_TLS_OPTIONS = {"ca", "cert", "key"}


@dataclass(frozen=True, slots=True)
class NatsAccess:
    """A server, and what it is told at the start of a connection. Cards of workers have `url` alone."""

    url: str  # nats://host:port, tls://host:port
    user: str = ""
    password: str = field(default="", repr=False)
    ca: str = ""  # file; "": the system's
    cert: str = ""  # file of a client certificate, and of its key
    key: str = ""

    @property
    def inbox(self) -> str:
        """The prefix of the subjects of answers. Each user has its own, so that no other user can be let into it."""
        return f"_INBOX_{token(self.user)}" if self.user else "_INBOX"

    def load_tls(self, context: ssl.SSLContext | None = None) -> ssl.SSLContext | None:
        """Return the TLS context, None without TLS. A given one reads its files again. Raises ConfigError."""
        if not self.url.startswith(f"{TLS}://"):
            return None
        try:
            if context is None:
                context = ssl.create_default_context(cafile=self.ca or None)
            elif self.ca:
                context.load_verify_locations(self.ca)
            if self.cert:
                context.load_cert_chain(self.cert, self.key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"cannot use the TLS files of {self.url}: {error}", hint=USAGE) from error
        return context


def token(name: str) -> str:
    """Escape `name` for use as one part of a subject, or as a consumer's name."""
    return quote(name, safe="").replace(".", "%2E")


def read_access(url: str) -> NatsAccess:
    """Read nats:// or tls://host:port with options, or nats://NAME:PASSWORD@host:port. Raises ConfigError."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or DEFAULT_PORT
    except ValueError:
        raise ConfigError("no NATS server in --nats-url", hint=f"give it as {USAGE}") from None
    if not host or parts.scheme not in (PLAIN, TLS) or parts.path not in ("", "/"):
        raise ConfigError(f"no NATS server {shown(url)!r}", hint=f"give it as {USAGE}")
    server = f"{parts.scheme}://[{host}]:{port}" if ":" in host else f"{parts.scheme}://{host}:{port}"
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    known = {"user", "password-file"} | (_TLS_OPTIONS if parts.scheme == TLS else set())
    if unknown := sorted(options.keys() - known):
        hint = f"TLS is tls://{host}:{port}" if _TLS_OPTIONS & set(unknown) else USAGE
        raise ConfigError(f"unknown option of {server}: {', '.join(unknown)}", hint=hint)
    if parts.username and not options:
        return NatsAccess(server, unquote(parts.username), unquote(parts.password or ""))
    for one, other in (("user", "password-file"), ("cert", "key")):
        if (one in options) != (other in options):
            raise ConfigError(f"{server} has only one of {one} and {other}", hint="set both, or none")
    password = read_password(options.get("password-file", ""))
    tls = {name: options.get(name, "") for name in _TLS_OPTIONS}
    access = NatsAccess(server, options.get("user", ""), password, **tls)
    access.load_tls()  # finds a bad file now
    return access


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
