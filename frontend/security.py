"""Guard the API: TLS from files that flags name, and the web pages that may call."""

import logging
import ssl
import stat
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

from kvmesh.frontend.report import PLACEMENT_HEADERS
from kvmesh.mesh.http.cors import Cors, read_origins
from kvmesh.mesh.watched_files import Stamp, WatchedFiles, stamp_of
from kvmesh.protocol.errors import ConfigError

log = logging.getLogger(__name__)

SHOWN_TO_PAGES = (
    "x-request-id",
    "request-id",
    "retry-after",
    "www-authenticate",
    *(f"x-ratelimit-{what}-{limit}" for limit in ("requests", "tokens") for what in ("limit", "remaining", "reset")),
    *PLACEMENT_HEADERS,
)


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
