"""The offers of attached vLLM servers as our tickets, and back. Pure."""

import math
from typing import Any

from kvmesh.protocol.errors import EngineError, TransferError
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import Ticket
from kvmesh.workers.engines.vllm.params import read_params

BACKEND = "vllm-nixl-http"  # not the name of workers that hold vLLM themselves: those hand the first token over as well
START_HINT = (
    'start it with --kv-transfer-config \'{"kv_connector": "NixlConnector", "kv_role": "kv_both"}\', '
    "or attach it without --role"
)


def ticket_of(params: bytes, worker_id: WorkerId, address: str, nonce: int, prompt_tokens: int) -> Ticket:
    """The ticket for what a prefill server answered (kv_transfer_params as JSON).

    Raises EngineError if that server offers nothing, or something that no server could pull.
    """
    try:
        pull, _ = read_params(params)
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


def params_of(ticket: Ticket, prompt_tokens: int, block_size: int) -> tuple[dict[str, Any], int]:
    """Return the kv_transfer_params for the decode server, and how many blocks they name.

    Raise TransferError for a ticket that this server must not see; the prompt can still be computed there.
    """
    if ticket.backend != BACKEND:
        raise TransferError(f"a ticket of {ticket.backend!r}, {BACKEND!r} was expected")
    pull, params = read_params(ticket.opaque)
    if ticket.num_tokens != prompt_tokens:
        raise TransferError(f"a ticket for {ticket.num_tokens} tokens, the prompt has {prompt_tokens}")
    if pull.num_blocks < (needed := math.ceil(prompt_tokens / block_size)):
        raise TransferError(
            f"a ticket for {pull.num_blocks} blocks, the prompt has {needed} of {block_size} tokens",
            hint="start prefill and decode servers with the same --block-size",
        )
    return params, pull.num_blocks
