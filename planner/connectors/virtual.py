"""Workers that somebody else starts and stops, who asks what is wanted and says what was done. HTTP and JSON.

    GET  /decision                  -> {"decision_id": 3, "prefill": 2, "decode": 5, "flip": null, "reasons": [...]}
    GET  /decision?after=3          -> the same, or 204 if there is none after number 3
    POST /decision/3/acknowledge    {"prefill": 2, "decode": 5, "done": true, "notes": []}

An acknowledgement says how many workers are ordered now. `done: false` tells of a part, and more will follow.
"""

import asyncio
import hmac
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from msgspec import Meta, Struct

from planner.connectors.connector import Applied, ConnectorError, Fleets
from planner.connectors.steps import applied_of
from planner.model import Fleet, Flip, ScalingDecision
from protocol.errors import ConfigError

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 10
SHUTDOWN_S = 2.0  # for calls that are being answered
_Count = Annotated[int, Meta(ge=0, le=1_000_000)]


class Order(Struct, frozen=True, kw_only=True):
    """What GET /decision answers."""

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
    """ "" for no path. Raises ConfigError."""
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
        present: Callable[[], Fleets],
        timeout_s: float,
        token: str = "",
        clock: Callable[[], float] = lambda: asyncio.get_running_loop().time(),
    ) -> None:
        """`present`: who has joined the mesh. `timeout_s`: what is not acknowledged by then is an error."""
        self._present = present
        self._timeout_s = timeout_s
        self._token = token
        self._clock = clock
        self._order: Order | None = None
        self._ordered_s = 0.0
        self._told: Acknowledgement | None = None  # the last, of whatever order
        self._answer: Acknowledgement | None = None  # to the order that stands
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self, host: str, port: int) -> None:
        """Raises ConfigError if the address cannot be had."""
        runner = web.AppRunner(self._application(), access_log=None, shutdown_timeout=SHUTDOWN_S)
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, port)
            await site.start()
        except OSError as error:
            await runner.cleanup()
            raise ConfigError(f"cannot listen on {host}:{port}: {error}", hint="set --virtual-port") from error
        self._runner = runner
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{runner.addresses[0][1]}"
        log.info("decisions can be fetched", extra={"url": f"{self.url}/decision"})

    async def fleets(self) -> Fleets:
        """Ready are those who have joined; what was acknowledged beyond them is starting."""
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
            self._ordered_s = self._clock()  # and it stands: told again after as long
            raise ConnectorError(
                f"nobody has acknowledged decision {self._order.decision_id} within {self._timeout_s:g} s",
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
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    # --- what the orchestrator asks -------------------------------------------------------------------

    def _application(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard()])
        app.add_routes(
            [web.get("/decision", self._tell), web.post(r"/decision/{number:\d{1,12}}/acknowledge", self._hear)]
        )
        return app

    def _guard(self) -> Middleware:
        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            told = request.headers.get("authorization", "").encode(errors="replace")
            if self._token and not hmac.compare_digest(told, f"Bearer {self._token}".encode()):
                return _refuse(401, "send the token of --virtual-token-file as Authorization: Bearer")
            return await handler(request)

        return guard

    async def _tell(self, request: web.Request) -> web.Response:
        after = request.query.get("after", "0")
        if not after.isdigit() or len(after) > 12:
            return _refuse(400, "after is the number of a decision")
        if self._order is None or self._order.decision_id <= int(after):
            return web.Response(status=204)
        return web.Response(body=msgspec.json.encode(self._order), content_type="application/json")

    async def _hear(self, request: web.Request) -> web.Response:
        number = int(request.match_info["number"])
        try:
            said = msgspec.json.decode(await request.read(), type=Acknowledgement)
        except msgspec.DecodeError as error:
            return _refuse(400, f"this is no acknowledgement: {error}")
        if self._order is None or number != self._order.decision_id:
            standing = "none" if self._order is None else str(self._order.decision_id)
            return _refuse(409, f"decision {number} does not stand: the one to carry out is {standing}")
        if (said.prefill, said.decode) < (0, 0) or self._is_below(said):
            return _refuse(422, "fewer workers than asked for cannot be the whole: send done: false")
        self._told = self._answer = said
        return web.Response(status=204)

    def _is_below(self, said: Acknowledgement) -> bool:
        assert self._order is not None
        return said.done and (said.prefill < self._order.prefill or said.decode < self._order.decode)


def with_ordered(there: Fleet, ordered: int) -> Fleet:
    return Fleet(
        ready=min(there.ready, ordered), starting=max(0, ordered - there.ready), draining=max(0, there.ready - ordered)
    )


def _refuse(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)
