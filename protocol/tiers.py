"""Name the kinds of storage that KV blocks lie in, and the words that engines have for them."""

from enum import IntEnum


class Tier(IntEnum):
    """The kinds of storage for blocks, the fastest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    SHARED = 3


MEDIA = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.DISK: "DISK", Tier.SHARED: "SHARED"}  # in our own KV events
TIER_WORDS = {
    **dict.fromkeys(("", "GPU", "DEVICE", "HBM"), Tier.DEVICE),
    **dict.fromkeys(("CPU", "CPU_PINNED", "CPU_TIER1", "HOST", "HOST_PINNED", "DRAM"), Tier.HOST),
    **dict.fromkeys(("DISK", "SSD", "NVME", "STORAGE", "CPU_TIER2", "FILE", "FS"), Tier.DISK),
}


def tier_of(medium: str | None) -> Tier:
    """Return the tier that an engine's word for a storage medium means; an unknown word means the slowest."""
    return TIER_WORDS.get((medium or "").upper(), Tier.SHARED)


def tiers_of(mask: int) -> list[Tier]:
    """Return the tiers of a bit set: bit t is tier t."""
    return [tier for tier in Tier if mask >> tier & 1]
