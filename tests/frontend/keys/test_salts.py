"""No caller can name the salt of another tenant, and no block of one tenant counts for another."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.frontend.keys.opening import read_secret
from kvmesh.frontend.salts import own_salt
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.events import Stored
from kvmesh.protocol.hashing import hash_seed, pack_hashes, sequence_hashes
from kvmesh.protocol.ids import EngineHash, WorkerId
from kvmesh.router.index import Holder, PlainIndex, PrefixIndex

TENANTS = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=12)
ASKED = st.none() | st.text(max_size=40)


@given(TENANTS, ASKED, TENANTS, ASKED)
def test_two_tenants_never_have_the_same_salt(a: str, asked_a: str | None, b: str, asked_b: str | None) -> None:
    """Also where one of them sends what the other's salt is made of, or the salt itself."""
    tried = [asked_b, own_salt(a, asked_a), f"{a} {asked_a}", f"{len(a)} {a} ", ""]
    if a != b:
        assert own_salt(a, asked_a) not in [own_salt(b, salt) for salt in tried if b or salt is not None]


@given(st.lists(st.integers(0, 2**18), min_size=16, max_size=200), TENANTS, TENANTS, ASKED, ASKED)
def test_no_block_of_one_tenant_matches_for_another(
    tokens: list[int], a: str, b: str, asked_a: str | None, asked_b: str | None
) -> None:
    salts = own_salt(a, asked_a), own_salt(b, asked_b)
    if a == b or None in salts:
        return
    mine, theirs = (sequence_hashes(tokens, 16, hash_seed(None, salt)) for salt in salts)
    assert not set(mine) & set(theirs)
    holder = Holder(WorkerId("w"), 0)
    full = tuple(tokens[: len(mine) * 16])
    names = tuple(EngineHash(n) for n in range(len(mine)))
    for new_index in (PlainIndex, PrefixIndex):
        index = new_index()
        index.apply(holder, [Stored(names, None, full, 16, salt=salts[0])])
        assert index.match(pack_hashes(theirs)) == {}
        assert index.match(pack_hashes(mine)) == {holder: (len(mine),) * 4}


def test_the_same_tenant_and_salt_share_blocks() -> None:
    assert own_salt("a", "s") == own_salt("a", "s")
    assert own_salt("", None) is None


def test_a_secret_changes_every_salt() -> None:
    assert own_salt("a", None) != own_salt("a", None, b"secret of the mesh")


def test_a_short_or_missing_secret_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short").write_text("short")
    for name in ("short", "missing"):
        with pytest.raises(ConfigError, match=name):
            read_secret(str(tmp_path / name))
    (tmp_path / "good").write_text("0123456789abcdef\n")
    assert read_secret(str(tmp_path / "good")) == b"0123456789abcdef"
