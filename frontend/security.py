"""Guard the API: API keys and TLS, each from files that flags name, and the web pages that may call."""

import hashlib
import hmac
import logging
import re
import ssl
import stat
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Generic, NamedTuple, NoReturn, TypeVar

from frontend.report import PLACEMENT_HEADERS
from mesh.http.cors import Cors, read_origins
from mesh.http.errors import UnauthorizedError
from mesh.http.request import Request
from protocol.errors import ConfigError

log = logging.getLogger(__name__)

MAX_KEYS = 10_000  # every request is compared with all of them
LOOK_S = 2.0  # between looks whether files have changed
_KEY = re.compile(r"[\x21-\x7e]{1,1024}")
_TENANT = re.compile(r"[\x21-\x7e]{1,256}")
_BEARER = re.compile(r"bearer +(\S+)", re.IGNORECASE)
_CARRIERS = ("authorization", "x-api-key")
SHOWN_TO_PAGES = ("x-request-id", "request-id", "retry-after", "www-authenticate", *PLACEMENT_HEADERS)
_SEND = "send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`"


class ApiKey(NamedTuple):
    digest: bytes  # SHA-256: the key itself is not kept
    tenant: str  # "": whatever the request says


def read_api_keys(text: str, source: str) -> list[ApiKey]:
    """Read one key a line, then the tenant it stands for, if any; `#` begins a comment.

    Raises ConfigError that names the line, and never the key.
    """
    keys: dict[bytes, ApiKey] = {}
    for number, line in enumerate(text.splitlines(), 1):
        key, *rest = line.partition("#")[0].split() or [""]
        if not key:
            continue
        digest, tenant = _digest(key), rest[0] if rest else ""
        if len(rest) > 1 or not _KEY.fullmatch(key) or (tenant and not _TENANT.fullmatch(tenant)):
            raise ConfigError(
                f"line {number} of {source} is no API key",
                hint="write a key and, if it stands for one, a tenant; both in printable ASCII, without spaces",
            )
        if digest in keys:
            raise ConfigError(f"line {number} of {source} has the same key as a line before it", hint="remove one")
        keys[digest] = ApiKey(digest, tenant)
    if not 0 < len(keys) <= MAX_KEYS:
        raise ConfigError(f"{source} holds {len(keys)} API keys", hint=f"write 1 to {MAX_KEYS}, one a line")
    return list(keys.values())


Stamp = tuple[tuple[int, int, int], ...]  # of files: changes with what is in them
T = TypeVar("T")


class WatchedFiles(Generic[T]):
    """Keeps what was read from files, and reads them again once they have changed."""

    def __init__(self, look: Callable[[], Stamp], read: Callable[[], T], name: str, clock: Callable[[], float]) -> None:
        """Read the files; `name` says what they hold, for the log. Raise ConfigError."""
        self._look = look
        self._read_files = read
        self._name = name
        self._clock = clock
        self._stamp = look()
        self._content = read()
        self._next_look = clock() + LOOK_S

    def read(self) -> T:
        """Return the content. If the files cannot be used any more, it stays: they may be half written."""
        if self._clock() >= self._next_look:
            self._next_look = self._clock() + LOOK_S
            try:
                self._read_changes()
            except (ConfigError, OSError) as error:
                log.error("the %s stay as they were: %s", self._name, error)
        return self._content

    def _read_changes(self) -> None:
        stamp = self._look()
        if stamp != self._stamp:
            self._content, self._stamp = self._read_files(), stamp
            log.info("the %s were read again", self._name)


class ApiKeyGuard:
    """Lets requests pass that carry one of the keys in a file. A file that changes is read again."""

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Raise ConfigError."""
        self._path = Path(path)
        self._keys = WatchedFiles(self._look, self._read, "API keys", clock)
        warn_if_public("--api-keys-file", path)

    def __call__(self, request: Request) -> None:
        """Name the tenant of its key in the request. Raise UnauthorizedError."""
        keys = self._keys.read()
        sent = sent_key(request)
        if sent is None:
            raise UnauthorizedError("no API key was sent", hint=_SEND)
        digest, found = _digest(sent), None
        for key in keys:  # to the end: the time taken tells nothing
            if hmac.compare_digest(key.digest, digest):
                found = key
        if found is None:
            raise UnauthorizedError("Incorrect API key provided", hint="check it, and " + _SEND)
        request.tenant = found.tenant

    def _look(self) -> Stamp:
        try:
            return stamp_of([str(self._path)])
        except OSError as error:
            self._cannot_read(error)

    def _read(self) -> list[ApiKey]:
        try:
            if self._path.stat().st_mode & stat.S_IWOTH:
                raise ConfigError(
                    f"every user of this machine can write API keys into {self._path}", hint="chmod o-w it"
                )
            return read_api_keys(self._path.read_text("utf-8"), str(self._path))
        except (OSError, UnicodeDecodeError) as error:
            self._cannot_read(error)

    def _cannot_read(self, error: OSError | UnicodeDecodeError) -> NoReturn:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"cannot read the API keys in {self._path}: {why}", hint="give --api-keys-file a text file, one key a line"
        ) from error


def sent_key(request: Request) -> str | None:
    """The key that a request carries: OpenAI's clients send a bearer token, Anthropic's a header of its own.

    Raises UnauthorizedError for one of these headers that was sent twice: what is in front of us may have looked at
    the other.
    """
    names = [name for name, _ in request.headers if name in _CARRIERS]
    if len(set(names)) < len(names):
        raise UnauthorizedError("a header with an API key was sent twice", hint="send one key; " + _SEND)
    if found := _BEARER.fullmatch(request.header("authorization") or ""):
        return found[1]
    return request.header("x-api-key") or None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def open_to(origins: str) -> Cors | None:
    """Return the rules for web pages of these origins; None if there are none. Raise ConfigError."""
    found = read_origins(origins)
    return Cors(found, SHOWN_TO_PAGES) if found else None


def tls_context(
    cert: str, key: str, client_ca: str, *, clock: Callable[[], float] = time.monotonic
) -> ssl.SSLContext | None:
    """Return the TLS context of a listener; None without `cert`. All are paths of PEM files, "" where not given.

    Without `key` it is looked for in the file of `cert`. With `client_ca`, clients need a certificate signed by it.
    Files that change count for the connections that come then. Raises ConfigError.
    """
    if not cert:
        if key or client_ca:
            given = "--tls-key" if key else "--tls-client-ca"
            raise ConfigError(f"{given} is given without --tls-cert", hint="give --tls-cert too, or none of them")
        return None
    renewal = TlsRenewal((cert, key, client_ca), clock)
    context = renewal.files.read()
    context.sni_callback = renewal
    warn_if_public("--tls-key", key or cert)
    return context


class TlsRenewal:
    """Called in each handshake (not only for a client that names the server): gives it the files as they are now."""

    def __init__(self, paths: tuple[str, str, str], clock: Callable[[], float]) -> None:
        """Read the files at `paths`: certificate, key, clients' CA. Raise ConfigError."""
        self._paths = paths
        self.files = WatchedFiles(self._look, partial(_load_context, *paths), "TLS files", clock)

    def __call__(
        self, connection: ssl.SSLSocket | ssl.SSLObject, server_name: str | None, context: ssl.SSLContext
    ) -> None:
        if (newest := self.files.read()) is not context:
            connection.context = newest

    def _look(self) -> Stamp:
        """Raise ConfigError."""
        cert, key, client_ca = self._paths
        files = [("--tls-cert", cert), ("--tls-key", key or cert), ("--tls-client-ca", client_ca)]
        given = [(flag, path) for flag, path in files if path]
        for flag, path in given:
            _check_readable(flag, path)
        return stamp_of([path for _, path in given])


def _load_context(cert: str, key: str, client_ca: str) -> ssl.SSLContext:
    """Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(cert, key or None, password=_no_password)
    except ssl.SSLError as error:
        raise ConfigError(
            f"the certificate in {cert} and the key in {key or cert} cannot be used: {error.reason or error}",
            hint="give --tls-cert the certificate with its chain and --tls-key its private key, both as PEM",
        ) from error
    if client_ca:
        try:
            context.load_verify_locations(client_ca)
        except ssl.SSLError as error:
            raise ConfigError(
                f"{client_ca} holds no certificate: {error.reason or error}",
                hint="give --tls-client-ca the certificate, as PEM, that signs those of the clients",
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def stamp_of(paths: Sequence[str]) -> Stamp:
    """Raises OSError."""
    found = [Path(path).stat() for path in paths]
    return tuple((file.st_mtime_ns, file.st_ino, file.st_size) for file in found)


def warn_if_public(flag: str, path: str) -> None:
    try:
        is_public = Path(path).stat().st_mode & stat.S_IROTH
    except OSError:  # it has just been read; whoever reads it again says what is wrong
        return
    if is_public:
        log.warning("every user of this machine can read the secrets in %s %s: chmod o-r it", flag, path)


def _check_readable(flag: str, path: str) -> None:
    """OpenSSL does not say which of the files it could not read."""
    try:
        Path(path).open("rb").close()
    except OSError as error:
        raise ConfigError(f"cannot read {flag} {path}: {error.strerror}", hint="give a PEM file") from error


def _no_password() -> NoReturn:
    raise ConfigError("the TLS key is encrypted", hint="give --tls-key one that is not: nobody can be asked here")
