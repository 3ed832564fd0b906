"""Prefill and decode apart as SGLang's servers do it: both are asked at once, and meet by themselves in a `room`.

Their requests carry bootstrap_host, bootstrap_port and bootstrap_room in /v1/completions; the prefill server answers
once its KV was fetched. The same tickets as those of workers that hold SGLang themselves.
"""

import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from protocol.errors import ConfigError, EngineError, InvalidRequestError, TransferError
from protocol.ids import WorkerId
from protocol.messages import GenerateRequest, Role, Ticket
from workers.engines.attached.probe import Disaggregation
from workers.engines.sglang.offers import Offer, Offers
from workers.engines.sglang.translate import MAX_ROOM, Bootstrap, backend_name, bootstrap_of, encode_bootstrap

START_HINT = "start it with --disaggregation-mode {role}, or attach it without --role"


def transfer_of(role: Role, told: Disaggregation | None) -> str:
    """What its card says: "" for a server that does both. Raises ConfigError for one that was started as another."""
    mode = "null" if told is None else told.mode
    if role is Role.AGGREGATED:
        if mode != "null":
            raise ConfigError(f"this SGLang server runs as {mode}", hint=f"attach it with --role {mode}")
        return ""
    if mode != role.value:
        found = "does not say that it can" if mode == "null" else f"runs as {mode}"
        raise ConfigError(f"--role {role.value}, and the server {found}", hint=START_HINT.format(role=role.value))
    assert told is not None
    return backend_name(told.transfer)


class Bootstraps:
    """The pairs of one server. Belongs to the event loop it was made on."""

    def __init__(self, role: Role, host: str, told: Disaggregation) -> None:
        self._role = role
        self._host = host
        self._told = told
        self._offers = Offers()

    def __len__(self) -> int:
        """Prefills that are not fetched yet."""
        return len(self._offers)

    def offer(self, prefill: Callable[[dict[str, Any]], Awaitable[None]]) -> tuple[Offer, Bootstrap]:
        """Begin a prefill: `prefill` sends it with these fields, and returns when the server has answered.

        Raises InvalidRequestError.
        """
        if self._role is not Role.PREFILL:
            raise InvalidRequestError("this SGLang server offers no KV", hint="attach one with --role prefill")
        bootstrap = Bootstrap(self._host, self._told.bootstrap_port, secrets.randbelow(MAX_ROOM))
        return self._offers.open(lambda: prefill(bootstrap.kwargs)), bootstrap

    def release(self, offer_id: int, nonce: int) -> None:
        self._offers.release(offer_id, nonce)

    def fields_for(self, request: GenerateRequest) -> dict[str, Any]:
        """Of a decode server's request. Raises EngineError: it cannot compute a prompt, another pair may."""
        if request.ticket is None:
            raise EngineError(
                "a SGLang decode server computes no prompts", hint="attach a prefill server, or one without --role"
            )
        try:
            return bootstrap_of(request.ticket, self._told.transfer).kwargs
        except TransferError as error:
            raise EngineError(str(error)) from error

    async def close(self) -> None:
        """A second call does nothing."""
        await self._offers.close()


def bootstrap_ticket(
    offer: Offer, bootstrap: Bootstrap, worker_id: WorkerId, address: str, transfer: str, prompt_tokens: int
) -> Ticket:
    return Ticket(
        offer_id=offer.offer_id,
        worker_id=worker_id,
        address=address,
        backend=transfer,
        nonce=offer.nonce,
        num_tokens=prompt_tokens,
        opaque=encode_bootstrap(bootstrap),
    )
