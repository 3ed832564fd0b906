"""Test that addresses are joined and split."""

import pytest

from kvmesh.mesh.address import join_address, split_address


@pytest.mark.parametrize(
    ("host", "address"),
    [("127.0.0.1", "127.0.0.1:80"), ("prefill-0", "prefill-0:80"), ("::1", "[::1]:80"), ("[::1]", "[::1]:80")],
)
def test_a_host_with_colons_gets_brackets(host: str, address: str) -> None:
    assert join_address(host, 80) == address
    assert split_address(address) == (host.strip("[]"), 80)


@pytest.mark.parametrize("address", ["", "host", "host:", "host:http", "[::1]"])
def test_an_address_without_a_port_is_none(address: str) -> None:
    with pytest.raises(ValueError, match="int"):
        split_address(address)
