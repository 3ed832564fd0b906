"""Keep the public keys of an issuer of tokens: from a file, or fetched from a URL in the background."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from kvmesh.frontend.keys.jwks import MAX_BYTES, PublicKey, read_jwks
from kvmesh.mesh.watched_files import WatchedFiles, stamp_of
from kvmesh.protocol.errors import ConfigError, kind_of

log = logging.getLogger(__name__)

REFRESH_S = 300.0  # between fetches
RETRY_S = 5.0  # after one that failed
UNKNOWN_S = 30.0  # between fetches because of keys that are not known
FETCH_S = 5.0
_LOCAL = ("127.0.0.1", "::1", "localhost")


class IssuerKeys:
    """The keys of one issuer. Requests read what is there; none waits for a fetch."""

    def __init__(self, source: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`source`: a file, or a URL that `run` fetches. Raise ConfigError."""
        self._source = source
        self._clock = clock
        self._fetched: Mapping[str, PublicKey] = {}
        self._wanted = asyncio.Event()
        self._asked_at = -UNKNOWN_S
        self.is_url = "://" in source
        self._file: WatchedFiles[Mapping[str, PublicKey]] | None = None
        if self.is_url:
            _check_url(source)
        else:
            self._file = WatchedFiles(self._look, self._read, "public keys", clock)

    def _look(self) -> tuple[tuple[int, int, int], ...]:
        try:
            return stamp_of([self._source])
        except OSError as error:
            raise ConfigError(f"cannot read --jwt-keys {self._source}: {error.strerror}") from error

    def _read(self) -> Mapping[str, PublicKey]:
        try:
            return read_jwks(Path(self._source).read_bytes()[: MAX_BYTES + 1], self._source)
        except OSError as error:
            raise ConfigError(f"cannot read --jwt-keys {self._source}: {error.strerror}") from error

    @property
    def keys(self) -> Mapping[str, PublicKey]:
        """Return the keys by their ids; another object when they have changed."""
        return self._fetched if self._file is None else self._file.read()

    @property
    def is_known(self) -> bool:
        """Return whether the keys have been read at least once."""
        return bool(self.keys)

    def want(self) -> bool:
        """Have the keys fetched soon, because a token names one that is not known. Return whether they will be."""
        if not self.is_url or self._clock() < self._asked_at + UNKNOWN_S:
            return False
        self._asked_at = self._clock()
        self._wanted.set()
        return True

    async def run(self) -> None:
        """Fetch the keys now and then, until cancelled."""
        while self.is_url:
            self._wanted.clear()
            wait_s = REFRESH_S if await self._fetch() else RETRY_S
            try:
                async with asyncio.timeout(wait_s):
                    await self._wanted.wait()
            except TimeoutError:
                continue

    async def _fetch(self) -> bool:
        """Return whether the keys could be fetched. Otherwise those before stay."""
        try:
            timeout = aiohttp.ClientTimeout(FETCH_S)
            async with (
                aiohttp.ClientSession(timeout=timeout) as http,
                http.get(self._source, allow_redirects=False) as reply,
            ):
                reply.raise_for_status()
                data = await reply.content.read(MAX_BYTES + 1)
                while len(data) <= MAX_BYTES and (more := await reply.content.read(MAX_BYTES)):
                    data += more
            if len(data) > MAX_BYTES:
                raise ConfigError(f"{self._source} sends more than {MAX_BYTES} bytes")
            self._fetched = read_jwks(data, self._source)
        except (aiohttp.ClientError, OSError, ConfigError) as error:  # TimeoutError is an OSError
            log.warning("the public keys of %s stay as they were: %s", self._source, kind_of(error))
            return False
        return True


def _check_url(url: str) -> None:
    """Raise ConfigError for a URL whose answer somebody on the way could have written."""
    parts = urlsplit(url)
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in _LOCAL):
        raise ConfigError(f"--jwt-keys {url} is not an https URL", hint="http is for this host alone")
