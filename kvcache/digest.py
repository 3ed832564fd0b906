"""Compute the digest of many prefixes at once."""

from collections.abc import Sequence

import numpy as np

from kvmesh.protocol.hashing import TIER_MARK, digest_term

_FEW = 16


def digest_terms(hashes: Sequence[int]) -> int:
    """Return the sum of `kvmesh.protocol.hashing.digest_term` (of the device tier) over `hashes`, mod 2**64."""
    if not hashes:
        return 0
    if len(hashes) < _FEW:
        return sum(map(digest_term, hashes))
    mixed = np.array(hashes, np.uint64) + np.uint64(TIER_MARK)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return int((mixed ^ (mixed >> np.uint64(31))).sum(dtype=np.uint64))
