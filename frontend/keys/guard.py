"""Let requests pass that carry a key of the file, and say who their callers are."""

import hashlib
import hmac
import logging
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn

from kvmesh.frontend.callers import SEND, recognise, sent_key
from kvmesh.frontend.keys.caller import KeyCaller
from kvmesh.frontend.keys.issuer import IssuerKeys
from kvmesh.frontend.keys.keyfile import KeyLine, read_key_file
from kvmesh.frontend.keys.meters import Meters
from kvmesh.frontend.keys.tokens import TokenVerifier
from kvmesh.frontend.security import warn_if_public
from kvmesh.mesh.http.errors import UnauthorizedError
from kvmesh.mesh.http.request import Request
from kvmesh.mesh.watched_files import Stamp, WatchedFiles, stamp_of
from kvmesh.protocol.errors import ConfigError

log = logging.getLogger(__name__)


class KnownKey(NamedTuple):
    digest: bytes  # SHA-256: the key itself is not kept
    caller: KeyCaller
    expires: float | None  # in seconds since 1970


class ApiKeyGuard:
    """Lets requests pass that carry one of the keys in a file. A file that changes is read again."""

    def __init__(
        self,
        path: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        wall_clock: Callable[[], float] = time.time,
        meters: Meters | None = None,
        secret: bytes = b"",
    ) -> None:
        """Read the file; `meters` keep what its keys use, also over changes of the file. `secret`: see salts.py.

        Raise ConfigError.
        """
        self._secret = secret
        self._path = Path(path)
        self._wall_clock = wall_clock
        self._meters = meters or Meters(clock)
        self._files = WatchedFiles(self._look, self._read, "API keys", clock)
        warn_if_public("--api-keys-file", path)

    def __call__(self, request: Request) -> None:
        """Put the caller into the request. Raise UnauthorizedError."""
        known = self._files.read()
        sent = sent_key(request)
        if sent is None:
            raise UnauthorizedError("no API key was sent", hint=SEND)
        digest = hashlib.sha256(sent.encode(errors="surrogateescape")).digest()
        found = known.get(digest)  # whoever does not know a key cannot choose the digest that is looked for
        if found is None or not hmac.compare_digest(found.digest, digest):
            raise UnauthorizedError("Incorrect API key provided", hint="check it, and " + SEND)
        if found.expires is not None and self._wall_clock() >= found.expires:
            raise UnauthorizedError("Incorrect API key provided: it has expired", hint="ask for a new one")
        recognise(request, found.caller)

    def _look(self) -> Stamp:
        try:
            return stamp_of([str(self._path)])
        except OSError as error:
            self._cannot_read(error)

    def _read(self) -> Mapping[bytes, KnownKey]:
        try:
            if self._path.stat().st_mode & stat.S_IWOTH:
                raise ConfigError(
                    f"every user of this machine can write API keys into {self._path}", hint="chmod o-w it"
                )
            content = read_key_file(self._path.read_text("utf-8"), str(self._path))
        except (OSError, UnicodeDecodeError) as error:
            self._cannot_read(error)
        if content.num_plain:
            log.warning(
                "%d lines of %s hold keys that everybody can use who reads them; `kvmesh keys hash` hashes them",
                content.num_plain,
                self._path,
            )
        self._meters.retain({line.name for line in content.lines})
        return {known.digest: known for known in map(self._known, content.lines)}

    def _known(self, line: KeyLine) -> KnownKey:
        usage, meter = self._meters.of(line.name, line.limits)
        caller = KeyCaller(
            usage,
            tenant=line.tenant,
            models=line.models,
            max_priority=line.max_priority,
            meter=meter,
            secret=self._secret,
            is_admin=line.admin,
        )
        expires = None if line.expires is None else line.expires.timestamp()
        return KnownKey(bytes.fromhex(line.sha256), caller, expires)

    def _cannot_read(self, error: OSError | UnicodeDecodeError) -> NoReturn:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"cannot read the API keys in {self._path}: {why}", hint="give --api-keys-file a text file, one key a line"
        ) from error


class Doorkeeper:
    """Lets requests pass that carry a key of the file or a token of the issuer."""

    def __init__(self, keys: ApiKeyGuard | None, tokens: TokenVerifier | None) -> None:
        self._keys = keys
        self._tokens = tokens

    @property
    def issuer(self) -> IssuerKeys | None:
        """Return the public keys of the tokens, if tokens are taken."""
        return None if self._tokens is None else self._tokens.issuer

    def __call__(self, request: Request) -> None:
        """Put the caller into the request. Raise UnauthorizedError, OverloadedError."""
        if self._tokens is not None and (sent := sent_key(request) or "").count(".") == 2:
            recognise(request, self._tokens.caller(sent))
        elif self._keys is not None:
            self._keys(request)
        else:
            raise UnauthorizedError("Incorrect API key provided: no token was sent", hint=SEND)
