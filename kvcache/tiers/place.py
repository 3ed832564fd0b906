"""Read the setting that names shared storage. Pure."""

import re
from typing import NamedTuple

from kvmesh.protocol.errors import ConfigError

_ENDPOINT = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:]+\])(:[1-9][0-9]{0,4})?(/[A-Za-z0-9._~/-]*)?")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")


class FolderPlace(NamedTuple):
    """A folder, on one host or on a file system of several."""

    path: str


class BucketPlace(NamedTuple):
    """A bucket of an object store, and the beginning of the names there."""

    bucket: str
    prefix: str


def place_of(place: str) -> FolderPlace | BucketPlace:
    """Return what `--kv-shared` names. Raise ConfigError."""
    kind, _, path = place.partition(":")
    if kind == "dir" and path:
        return FolderPlace(path)
    bucket, _, prefix = path.removeprefix("//").partition("/")
    if kind == "s3" and path.startswith("//") and _BUCKET.fullmatch(bucket):
        return BucketPlace(bucket, prefix.strip("/"))
    raise ConfigError(f"no shared storage {place!r}", hint="set --kv-shared to dir:PATH or s3://BUCKET/PREFIX")


def check_endpoint(url: str) -> None:
    """Raise ConfigError if this is no URL of an S3 server. "" is none, and fine."""
    if url and not _ENDPOINT.fullmatch(url):
        raise ConfigError(f"no URL of an S3 server: {url!r}", hint="set --kv-shared-endpoint to http(s)://HOST[:PORT]")
