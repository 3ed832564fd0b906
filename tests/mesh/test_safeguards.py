"""KVMESH_WITHOUT switches safeguards off."""

import pytest

from kvmesh.mesh.safeguards import SAFEGUARDS, is_off, read_switched_off
from kvmesh.protocol.errors import ConfigError


def test_all_safeguards_are_on_by_default() -> None:
    assert read_switched_off("") == frozenset()
    assert not any(is_off(name) for name in SAFEGUARDS)  # type: ignore[arg-type]


def test_only_named_safeguards_are_off() -> None:
    assert read_switched_off("nonce, credit") == {"nonce", "credit"}


def test_an_unknown_safeguard_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"nonse.*nonce"):
        read_switched_off("nonse")
