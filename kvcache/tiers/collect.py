"""Decide which objects of shared storage are removed, and who does that. Pure; the times are parameters.

Names are `<model>/<epoch>/<object>`; what has fewer parts is no object of KV blocks.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvmesh.kvcache.tiers.bundle import OBJECT_BYTES
from kvmesh.kvcache.tiers.objects import DRAFTS, StoredObject

LEASE_S = 50.0  # for which one worker alone collects
GRACE_S = 60.0  # objects of an epoch that has ended, and drafts, may still be written so long
FULL_SHARE = 0.9  # of the limit: a model that has more finds no room soon, or has found none
LEFT_SHARE = 0.85  # of the limit that is left by a collection


class CollectLease(Struct, frozen=True):
    """Say who collects. Two at the same time do no harm: they would remove the same."""

    holder: Annotated[str, Meta(max_length=64)]
    until_s: float  # since 1970; hosts' clocks differ by less than the lease


def lease_to_write(found: bytes | None, holder: str, now_s: float) -> bytes | None:
    """Return the lease that this worker may write over the one that was found, None while another has it."""
    if found is not None:
        try:
            lease = msgspec.json.decode(found, type=CollectLease)
        except msgspec.DecodeError:
            lease = CollectLease("", 0.0)  # nobody wrote that
        if lease.holder != holder and now_s < lease.until_s <= now_s + 2 * LEASE_S:
            return None
    return msgspec.json.encode(CollectLease(holder, now_s + LEASE_S))


class SharedLimits(Struct, frozen=True):
    """Bound what shared storage holds."""

    num_bytes: int  # of each model
    age_s: float  # of objects that nobody uses

    def share_bytes(self, share: float) -> int:
        """Return a share of the limit, with room for one more object."""
        return max(0, int(self.num_bytes * share) - OBJECT_BYTES)


def to_collect(objects: Sequence[StoredObject], limits: SharedLimits, now_s: float, folder: str) -> list[StoredObject]:
    """Return the objects to remove: too old, of an epoch that has ended, or too many, the least recently used first.

    `folder`: `<model>/<epoch>/` of this worker.
    """
    removed, kept = list[StoredObject](), dict[str, list[StoredObject]]()
    for one in objects:
        age_s = _age_limit_s(one.name, folder, limits)
        if age_s is None:
            continue
        if now_s - one.used_s > age_s:
            removed.append(one)
        else:
            kept.setdefault(one.name.split("/")[0], []).append(one)
    for model, mine in kept.items():
        if model != DRAFTS:
            removed += _too_many(mine, limits)
    return removed


def _age_limit_s(name: str, folder: str, limits: SharedLimits) -> float | None:
    """Return how old an object may become, None for one that is not collected."""
    model, *rest = name.split("/")
    if model == DRAFTS:
        return GRACE_S
    if len(rest) != 2:
        return None
    has_ended = model == folder.split("/")[0] and not name.startswith(folder)
    return GRACE_S if has_ended else limits.age_s


def _too_many(objects: Sequence[StoredObject], limits: SharedLimits) -> list[StoredObject]:
    """Return the least recently used objects of a model, if it has too much."""
    total, removed = sum([one.num_bytes for one in objects]), list[StoredObject]()
    if total <= limits.share_bytes(FULL_SHARE):
        return removed
    for one in sorted(objects, key=lambda each: each.used_s):
        if total <= limits.share_bytes(LEFT_SHARE):
            break
        total -= one.num_bytes
        removed.append(one)
    return removed
