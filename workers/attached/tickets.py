"""vLLM's kv_transfer_params as our tickets, and back. Pure.

A stock vLLM server asserts on what it is given: parameters that ask for a pull without saying of what end its engine
process. So nothing reaches a server that was not checked here, and nothing of a caller's does.
"""

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from protocol.errors import EngineError, TransferError
from protocol.ids import WorkerId
from protocol.messages import Ticket

BACKEND = "vllm-nixl-http"  # not the name of workers that hold vLLM themselves: those hand the first token over as well
ASK_FOR_TICKET: Mapping[str, bool] = {"do_remote_decode": True, "do_remote_prefill": False}

MAX_OPAQUE_BYTES = 8 << 20
MAX_KEYS = 64

_Name = Annotated[str, Meta(min_length=1, max_length=512, pattern=r"^[\x21-\x7e]+\Z")]
_Size = Annotated[int, Meta(ge=1, le=4096)]
_BlockId = Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]
_HOST = re.compile(r"[A-Za-z0-9_.:%\[\]-]{1,255}")


class _Pull(msgspec.Struct):
    """What every version needs to pull, and what some add. Further keys are let through if they are plain values."""

    do_remote_prefill: bool
    remote_block_ids: Annotated[list[list[_BlockId] | _BlockId], Meta(min_length=1, max_length=1 << 20)]
    remote_engine_id: _Name
    remote_request_id: _Name
    remote_host: str
    remote_port: Annotated[int, Meta(ge=1, le=65535)]
    do_remote_decode: bool = False
    tp_size: _Size = 1
    dcp_size: _Size = 1
    pp_size: _Size = 1
    remote_num_tokens: Annotated[int, Meta(ge=0, le=1 << 32)] = 0

    @property
    def num_blocks(self) -> int:
        """Of the group of layers with the most: the one that sees the whole prompt. Old versions know no groups."""
        groups = [group for group in self.remote_block_ids if isinstance(group, list)]
        return max(map(len, groups)) if groups else len(self.remote_block_ids)


def ticket_of(params: bytes, worker_id: WorkerId, address: str, nonce: int, prompt_tokens: int) -> Ticket:
    """The ticket for what a prefill server answered (kv_transfer_params as JSON).

    Raises EngineError if that server offers nothing, or something that no server could pull.
    """
    try:
        pull, _ = _read(params)
    except TransferError as error:
        raise EngineError(f"the prefill server offers no KV: {error}", hint=START_HINT) from error
    return Ticket(
        offer_id=nonce,
        worker_id=worker_id,
        address=address,
        backend=BACKEND,
        nonce=nonce,
        num_tokens=pull.remote_num_tokens or prompt_tokens,
        opaque=params,
    )


START_HINT = (
    'start it with --kv-transfer-config \'{"kv_connector": "NixlConnector", "kv_role": "kv_both"}\', '
    "or attach it without --role"
)


def params_of(ticket: Ticket, prompt_tokens: int, block_size: int) -> tuple[dict[str, Any], int]:
    """kv_transfer_params for the decode server, and how many blocks they name.

    Raises TransferError for a ticket that this server must not see; the prompt can still be computed there.
    """
    if ticket.backend != BACKEND:
        raise TransferError(f"a ticket of {ticket.backend!r}, {BACKEND!r} was expected")
    pull, params = _read(ticket.opaque)
    if ticket.num_tokens != prompt_tokens:
        raise TransferError(f"a ticket for {ticket.num_tokens} tokens, the prompt has {prompt_tokens}")
    if pull.num_blocks < (needed := math.ceil(prompt_tokens / block_size)):
        raise TransferError(
            f"a ticket for {pull.num_blocks} blocks, the prompt has {needed} of {block_size} tokens",
            hint="start prefill and decode servers with the same --block-size",
        )
    return params, pull.num_blocks


def _read(opaque: bytes) -> tuple[_Pull, dict[str, Any]]:
    """Raises TransferError for whatever is not a complete offer."""
    if not 0 < len(opaque) <= MAX_OPAQUE_BYTES:
        raise TransferError(f"kv_transfer_params of {len(opaque)} bytes; at most {MAX_OPAQUE_BYTES} are accepted")
    try:
        params = msgspec.json.decode(opaque, type=dict[str, Any])
        pull = msgspec.convert(params, _Pull)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TransferError(f"unreadable kv_transfer_params: {error}") from error
    _check(pull, params)
    return pull, params


def _check(pull: _Pull, params: Mapping[str, Any]) -> None:
    if not pull.do_remote_prefill or pull.do_remote_decode:
        raise TransferError("kv_transfer_params that offer no blocks to a decode server")
    if not pull.num_blocks:
        raise TransferError("kv_transfer_params without a block")
    if not _HOST.fullmatch(pull.remote_host):
        raise TransferError(f"kv_transfer_params that name no host: {pull.remote_host[:80]!r}")
    if len(params) > MAX_KEYS:
        raise TransferError(f"kv_transfer_params with {len(params)} keys; at most {MAX_KEYS} are accepted")
    known = {*_Pull.__struct_fields__}
    for key, value in params.items():
        if key not in known and not isinstance(value, str | int | float | None):
            raise TransferError(f"kv_transfer_params with an unknown kind of value in {key[:80]!r}")
