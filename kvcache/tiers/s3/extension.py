"""Register S3 as shared storage."""

from importlib.util import find_spec

from kvmesh.kvcache.tiers.objects import BucketStorage, Objects
from kvmesh.kvcache.tiers.place import BucketPlace
from kvmesh.protocol.errors import ConfigError


def open_s3(place: BucketPlace, endpoint: str, timeout_s: float) -> Objects:
    """Raise ConfigError without the package obstore, and for settings that no server could have."""
    if find_spec("obstore") is None:
        raise ConfigError("--kv-shared s3: needs a package", hint="pip install 'kvmesh[s3]'")
    from kvmesh.kvcache.tiers.s3.bucket import open_bucket

    return open_bucket(place, endpoint, timeout_s)


EXTENSION = BucketStorage(open_s3)
