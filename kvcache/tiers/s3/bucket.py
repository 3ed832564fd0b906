"""Keep objects in a bucket of S3, or of a server that speaks its protocol. Needs the package obstore.

Calls block their thread and nobody else: obstore waits outside Python. Credentials come from the usual environment.
"""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import S3Store

from kvmesh.kvcache.tiers.objects import ABSENT, MissingObjectError, StoredObject
from kvmesh.kvcache.tiers.place import BucketPlace, check_endpoint
from kvmesh.kvcache.tiers.store import TierIoError
from kvmesh.protocol.errors import ConfigError

T = TypeVar("T")

RETRIES = 2
LISTING_S = 60.0  # a server may have another page for ever
MOST_LISTED = 1_000_000  # objects of one listing, 200 bytes each
SAID_OF_ERROR = 300  # characters


def open_bucket(place: BucketPlace, endpoint: str, timeout_s: float) -> "S3Objects":
    """Return the objects below a prefix of a bucket. `endpoint`: of the server, "" for that of the environment.

    Raise ConfigError for settings that no server could have.
    """
    endpoint = endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
    check_endpoint(endpoint)  # obstore would panic
    options: dict[str, Any] = {"endpoint": endpoint} if endpoint else {}
    try:
        store = S3Store(
            place.bucket,
            prefix=place.prefix or None,
            client_options={"timeout": timedelta(seconds=timeout_s), "allow_http": endpoint.startswith("http://")},
            retry_config={"max_retries": RETRIES, "retry_timeout": timedelta(seconds=timeout_s)},
            **options,
        )
    except (BaseError, ValueError) as error:
        raise ConfigError(
            f"bad settings of --kv-shared: {_said(error)}", hint="see AWS_* in the environment"
        ) from error
    return S3Objects(store)


class S3Objects:
    """Objects of a bucket. What is in use does not become younger by it: age counts from when it was written."""

    label = "s3"
    list_every_s = 5.0

    def __init__(self, store: Any) -> None:
        """Take any store of obstore."""
        self._store = store

    def listing(self, folder: str) -> list[StoredObject]:
        def work() -> list[StoredObject]:
            return _listed(obstore.list(self._store, prefix=folder or None), time.monotonic() + LISTING_S)

        return _asked(work, "listed")

    def read(self, name: str, offset: int, num_bytes: int) -> bytes:
        try:
            return _asked(lambda: bytes(obstore.get_range(self._store, name, start=offset, length=num_bytes)), "read")
        except TierIoError:
            size = _asked(lambda: int(obstore.head(self._store, name)["size"]), "read")
            if offset < size:
                raise
            return b""  # a range that begins behind the end is an error of S3

    def get(self, name: str) -> tuple[bytes, str] | None:
        def work() -> tuple[bytes, str]:
            found = obstore.get(self._store, name)
            return bytes(found.bytes()), str(found.meta["e_tag"])

        try:
            return _asked(work, "read")
        except MissingObjectError:
            return None

    def put(self, name: str, parts: Sequence[bytes | memoryview], over: str | None) -> bool:
        mode: Any = "overwrite" if over is None else "create" if over == ABSENT else {"e_tag": over}

        def work() -> bool:
            try:
                obstore.put(self._store, name, b"".join(parts), mode=mode, use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                return False
            return True

        try:
            return _asked(work, "written")
        except MissingObjectError as error:
            if over:  # some servers say so of a version of what is not there
                return False
            raise TierIoError("shared storage cannot be written: there is no such bucket") from error

    def remove(self, name: str) -> None:
        try:
            _asked(lambda: obstore.delete(self._store, name), "removed")
        except MissingObjectError:
            return

    def touch(self, name: str) -> None:
        """Do nothing: S3 has no such call, and what is collected too soon is stored again."""

    def close(self) -> None:
        """Do nothing: connections end with the store."""


def _listed(pages: Iterable[Sequence[Any]], until_s: float) -> list[StoredObject]:
    """Return the objects of all pages. Raise TierIoError for more than a listing may have."""
    found: list[StoredObject] = []
    for page in pages:
        found += [StoredObject(one["path"], one["size"], one["last_modified"].timestamp()) for one in page]
        if len(found) > MOST_LISTED or time.monotonic() > until_s:
            raise TierIoError(
                f"shared storage cannot be listed: no end after {len(found)} objects",
                hint="give kvmesh a bucket of its own",
            )
    return found


def _asked(work: Callable[[], T], what: str) -> T:
    try:
        return work()
    except FileNotFoundError as error:
        raise MissingObjectError("shared storage does not hold the object any more") from error
    except (BaseError, OSError) as error:
        raise TierIoError(f"shared storage cannot be {what}: {_said(error)}") from error
    except BaseException as error:
        if type(error).__name__ == "PanicException":  # a bug in Rust, which no `except Exception` would take
            raise TierIoError(f"shared storage cannot be {what}: {_said(error)}") from error
        raise


def _said(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:SAID_OF_ERROR]
