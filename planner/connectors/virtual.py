"""Serve decisions to an orchestrator that starts and stops workers itself. HTTP and JSON.

    GET  /decision                  -> {"decision_id": 3, "prefill": 2, "decode": 5, "flip": null, "reasons": [...]}
    GET  /decision?after=3          -> the same, or 204 if decision 3 is the latest
    POST /decision/3/acknowledge    {"prefill": 2, "decode": 5, "done": true, "notes": []}

An acknowledgement says how many workers are ordered now. `done: false` reports a part; another one will follow.
"""

import asyncio
import hmac
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvmesh.mesh.http.door import Door, door_of
from kvmesh.mesh.http.errors import NotFoundError, UnauthorizedError
from kvmesh.mesh.http.request import Reply, Request, json_reply
from kvmesh.mesh.http.server import App, HttpLimits, Route, listening
from kvmesh.mesh.identity.credentials import open_credentials
from kvmesh.planner.config import ServiceConfig
from kvmesh.planner.connectors.connector import Applied, ConnectorError, Fleets, Present
from kvmesh.planner.connectors.steps import applied_of
from kvmesh.planner.model import Flip, RoleFleet, ScalingDecision
from kvmesh.protocol.errors import ConfigError, InvalidRequestError, MeshError

log = logging.getLogger(__name__)

LIMITS = HttpLimits(max_body_bytes=64 << 10, max_connections=64)
MAX_DIGITS = 12  # of a decision's number
_Count = Annotated[int, Meta(ge=0, le=1_000_000)]


class Order(Struct, frozen=True, kw_only=True):
    """The answer to GET /decision."""

    decision_id: int
    prefill: int
    decode: int
    flip: Flip | None
    reasons: tuple[str, ...]


class Acknowledgement(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prefill: _Count
    decode: _Count
    done: bool = True
    flipped: _Count = 0
    notes: Annotated[tuple[Annotated[str, Meta(max_length=500)], ...], Meta(max_length=16)] = ()


def read_token(path: str) -> str:
    """Return the token in a file, "" for no path. Raise ConfigError if it is missing or too short."""
    if not path:
        return ""
    try:
        token = Path(path).read_text().strip()
    except OSError as error:
        raise ConfigError(f"cannot read the token: {error}", hint="see --virtual-token-file") from error
    if len(token) < 16:
        raise ConfigError(f"the token in {path} has {len(token)} characters", hint="take 16 or more")
    return token


class VirtualConnector:
    name = "virtual"

    def __init__(
        self,
        present: Present,
        timeout_s: float,
        token: str = "",
        clock: Callable[[], float] = lambda: asyncio.get_running_loop().time(),
    ) -> None:
        """Take the workers from `present`. A decision that is not acknowledged after `timeout_s` is an error."""
        self._present = present
        self._timeout_s = timeout_s
        self._token = token
        self._clock = clock
        self._order: Order | None = None
        self._ordered_s = 0.0
        self._told: Acknowledgement | None = None  # the last one, to any order
        self._answer: Acknowledgement | None = None  # to the present order
        self._listener = AsyncExitStack()
        self.url = ""

    async def start(self, host: str, port: int, door: Door | None = None, allowed_hosts: str = "") -> None:
        """Listen for the orchestrator. Raise ConfigError if the address cannot be used."""
        routes = [
            Route("GET", "/decision", self._tell, error_body=error_body),
            Route("POST", "/decision/{number}/acknowledge", self._hear, error_body=error_body),
        ]
        app = App(routes, LIMITS, guard=self._check_token if self._token else None, allowed_hosts=allowed_hosts)
        try:
            self.url = await self._listener.enter_async_context(listening(app, host, port, door=door))
        except ConfigError as error:
            raise ConfigError(error.message, hint="set --virtual-host and --virtual-port") from error
        log.info("decisions can be fetched", extra={"url": f"{self.url}/decision"})

    async def fleets(self) -> Fleets:
        """Count workers that have joined as ready, and acknowledged ones beyond them as starting."""
        there = self._present()
        if self._told is None:
            return there
        return Fleets(
            prefill=with_ordered(there.prefill, self._told.prefill),
            decode=with_ordered(there.decode, self._told.decode),
        )

    async def apply(self, decision: ScalingDecision) -> Applied:
        order = self._order
        if order is None or (order.prefill, order.decode) != (decision.prefill, decision.decode):
            number = 1 if order is None else order.decision_id + 1
            reasons = tuple(reason.text for reason in decision.reasons)
            self._order = Order(
                decision_id=number,
                prefill=decision.prefill,
                decode=decision.decode,
                flip=decision.flip,
                reasons=reasons,
            )
            self._ordered_s, self._answer = self._clock(), None
        assert self._order is not None
        answer = self._answer
        if (answer is None or not answer.done) and self._clock() - self._ordered_s > self._timeout_s:
            self._ordered_s = self._clock()  # the decision still stands; the next error comes after another timeout
            raise ConnectorError(
                f"decision {self._order.decision_id} was not acknowledged within {self._timeout_s:g} s",
                hint=f"does the orchestrator poll {self.url}/decision?",
            )
        if answer is None:
            fleets = await self.fleets()
            waits = f"decision {self._order.decision_id} waits to be acknowledged"
            return applied_of(decision, fleets.prefill.ordered, fleets.decode.ordered, 0, (waits,))
        notes = answer.notes
        if decision.flip is not None and answer.done and not answer.flipped:
            notes += (f"{self.name}: the orchestrator turned no worker into a {decision.flip.to_role} worker",)
        return applied_of(decision, answer.prefill, answer.decode, answer.flipped, notes)

    async def close(self) -> None:
        await self._listener.aclose()

    # --- what the orchestrator asks -------------------------------------------------------------------

    def _check_token(self, request: Request) -> None:
        """Raise UnauthorizedError for a request without the token."""
        given = (request.header("authorization") or "").encode(errors="replace")
        if not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            raise UnauthorizedError("send the token of --virtual-token-file as Authorization: Bearer")

    async def _tell(self, request: Request) -> Reply:
        after = request.query.get("after", "0")
        if not is_number(after):
            raise InvalidRequestError("after is the number of a decision")
        if self._order is None or self._order.decision_id <= int(after):
            return Reply(status=204)
        return json_reply(self._order)

    async def _hear(self, request: Request) -> Reply:
        if not is_number(request.params["number"]):
            raise NotFoundError(f"there is no {request.path[:200]!r} here")
        number = int(request.params["number"])
        said = request.json(Acknowledgement)
        if self._order is None or number != self._order.decision_id:
            standing = "none" if self._order is None else str(self._order.decision_id)
            return refuse(409, f"decision {number} does not stand: the one to carry out is {standing}")
        if self._is_below(said):
            return refuse(422, "fewer workers than asked for cannot be the whole: send done: false")
        self._told = self._answer = said
        return Reply(status=204)

    def _is_below(self, said: Acknowledgement) -> bool:
        assert self._order is not None
        return said.done and (said.prefill < self._order.prefill or said.decode < self._order.decode)


async def open_connector(config: ServiceConfig, present: Present) -> VirtualConnector:
    """Raise ConfigError if the token cannot be read or the address cannot be used."""
    connector = VirtualConnector(present, config.virtual_timeout_s, read_token(config.virtual_token_file))
    door = door_of(open_credentials(config.mesh_tls))
    await connector.start(config.virtual_host, config.virtual_port, door, config.allowed_hosts)
    return connector


def with_ordered(there: RoleFleet, ordered: int) -> RoleFleet:
    return RoleFleet(
        ready=min(there.ready, ordered), starting=max(0, ordered - there.ready), draining=max(0, there.ready - ordered)
    )


def is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS


def refuse(status: int, message: str) -> Reply:
    return json_reply({"error": {"message": message}}, status)


def error_body(error: MeshError) -> bytes:
    return msgspec.json.encode({"error": {"message": str(error)}})
