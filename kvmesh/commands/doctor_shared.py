"""Check that storage for KV of several workers keeps the rules that they rely on."""

import secrets
import time

from kvmesh.kvcache.tiers.objects import ABSENT, DRAFTS, Objects
from kvmesh.kvcache.tiers.store import TierError
from kvmesh.protocol.errors import ConfigError
from kvmesh.workers.shared_tier import SharedSettings, open_objects

TIMEOUT_S = 5.0  # of one call
PROBE_BYTES = 4 << 20


def check_storage(place: str) -> tuple[str, str]:
    """Write, read, list and remove an object. Return what was found, and the problem: "" if there is none."""
    try:
        objects = open_objects(SharedSettings(place, 1 << 30, timeout_s=TIMEOUT_S))
    except (ConfigError, TierError) as error:
        return "", str(error)
    name = f"{DRAFTS}/doctor-{secrets.token_hex(8)}"
    try:
        return _check(objects, name)
    except TierError as error:
        return "", str(error)
    finally:
        objects.close()


def _check(objects: Objects, name: str) -> tuple[str, str]:
    data = secrets.token_bytes(PROBE_BYTES)
    try:
        began = time.perf_counter()
        problems = {"an object cannot be created": not objects.put(name, [data], ABSENT)}
        found = f"works; {PROBE_BYTES >> 20} MiB written in {1000 * (time.perf_counter() - began):.0f} ms"
        problems |= _check_versions(objects, name, data)
    finally:
        objects.remove(name)
    return found, "; ".join([problem for problem, is_there in problems.items() if is_there])


def _check_versions(objects: Objects, name: str, data: bytes) -> dict[str, bool]:
    """Return for each problem whether it is there."""
    is_second = objects.put(name, [data], ABSENT)
    found, version = objects.get(name) or (b"", "none")
    return {
        "an object can be created twice": is_second,
        "other bytes are read than were written": found != data or objects.read(name, 1, 10) != data[1:11],
        "a new object is not listed": name not in [one.name for one in objects.listing(f"{DRAFTS}/")],
        "an object cannot be replaced by version": not objects.put(name, [data[:1]], version),
        "an old version can be replaced": objects.put(name, [data], version),
    }
