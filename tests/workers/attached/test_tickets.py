"""An offer of a prefill server is checked before a decode server sees it: stock engines die of a malformed one."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.protocol.errors import EngineError, TransferError
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import Ticket
from kvmesh.workers.engines.attached.tickets import params_of, ticket_of
from tests.support.fake_servers import offer_of

TOKENS, BLOCK = 40, 16
OFFER = offer_of(range(TOKENS))


def ticket(offer: Any, **fields: Any) -> Ticket:
    whole = ticket_of(json.dumps(OFFER).encode(), WorkerId("w"), "h:1", 7, TOKENS)
    return msgspec.structs.replace(whole, opaque=json.dumps(offer).encode(), **fields)


def test_an_offer_comes_through_as_it_was() -> None:
    whole = ticket(OFFER)
    assert (whole.backend, whole.num_tokens, whole.address) == ("vllm-nixl-http", TOKENS, "h:1")
    assert params_of(whole, TOKENS, BLOCK) == (OFFER, 3)


def test_only_plain_values_of_newer_versions_pass() -> None:
    newer = OFFER | {"remote_prefill_cached_tokens": 32, "mode": "pull", "x": None}
    assert params_of(ticket(newer), TOKENS, BLOCK)[0] == newer
    with pytest.raises(TransferError, match="'nested'"):
        params_of(ticket(OFFER | {"nested": {"a": 1}}), TOKENS, BLOCK)


@pytest.mark.parametrize(
    "name", ["remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port"]
)
def test_what_a_pull_needs_is_there_or_nothing_is_sent(name: str) -> None:
    with pytest.raises(TransferError, match=name):
        params_of(ticket({key: value for key, value in OFFER.items() if key != name}), TOKENS, BLOCK)


@pytest.mark.parametrize(
    "change",
    [
        {"remote_block_ids": []},
        {"remote_block_ids": [[]]},
        {"remote_block_ids": [[1, 2]]},  # of three
        {"remote_block_ids": [[1, 2, -3]]},
        {"remote_block_ids": [["1", 2, 3]]},
        {"remote_block_ids": None},
        {"remote_host": "a b"},
        {"remote_host": ""},
        {"remote_port": 0},
        {"remote_port": "5601"},
        {"remote_engine_id": ""},
        {"remote_engine_id": "x\n"},
        {"do_remote_prefill": False},
        {"do_remote_decode": True},
        {"tp_size": 0},
        {"tp_size": 2**31},
        {"dcp_size": 2**31},
        {"pp_size": 2**31},
    ],
)
def test_a_malformed_offer_is_not_passed_on(change: dict[str, Any]) -> None:
    with pytest.raises(TransferError):
        params_of(ticket(OFFER | change), TOKENS, BLOCK)


def test_an_offer_is_for_its_prompt() -> None:
    with pytest.raises(TransferError, match="40 tokens, the prompt has 41"):
        params_of(ticket(OFFER), 41, BLOCK)
    with pytest.raises(TransferError, match="'shm'"):
        params_of(ticket(OFFER, backend="shm"), TOKENS, BLOCK)


@given(st.binary(max_size=300))
def test_no_bytes_are_worse_than_a_transfer_error(opaque: bytes) -> None:
    with pytest.raises(TransferError):
        params_of(msgspec.structs.replace(ticket(OFFER), opaque=opaque), TOKENS, BLOCK)


@given(
    st.dictionaries(st.sampled_from([*OFFER, "more"]), st.none() | st.integers() | st.text() | st.lists(st.integers()))
)
def test_what_passes_has_all_that_the_engine_asserts(changes: dict[str, Any]) -> None:
    try:
        params, _ = params_of(ticket(OFFER | changes), TOKENS, BLOCK)
    except TransferError:
        return
    assert params["do_remote_prefill"] is True
    assert all(params[name] for name in ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host"))


@pytest.mark.parametrize("params", [b"null", b"{}", b'{"do_remote_prefill": true}'])
def test_a_server_that_offers_nothing_is_told_how_to_start(params: bytes) -> None:
    with pytest.raises(EngineError, match="--kv-transfer-config"):
        ticket_of(params, WorkerId("w"), "h:1", 7, TOKENS)
