"""The benchmarks of disks and of shared storage notice all damage that it does."""

from pathlib import Path

import pytest

from kvmesh.lab.bench.kv_disk import FAULTS, corrupt, measure_shares
from kvmesh.lab.bench.kv_shared import corrupt_shared
from kvmesh.protocol.errors import ConfigError


def test_all_damage_is_caught_and_none_served(tmp_path: Path) -> None:
    result = corrupt(tmp_path, block_bytes=3000)
    assert result.injected > 100
    assert result.injected % len(FAULTS) == 0
    assert (result.caught, result.served) == (result.injected, 0)


def test_all_damage_in_shared_storage_is_caught_and_none_served(tmp_path: Path) -> None:
    result = corrupt_shared(tmp_path, block_bytes=3000)
    assert result.injected > 100
    assert (result.caught, result.served) == (result.injected, 0)


def test_the_store_is_compared_with_dd(tmp_path: Path) -> None:
    try:
        shares = measure_shares(tmp_path, 1 << 16, mib=2, rounds=1)
    except ConfigError:
        pytest.skip("this file system takes no direct I/O")
    assert shares.read > 0
    assert shares.write > 0
    assert shares.path == "direct"
