"""Carry out the decisions of a planner that runs elsewhere: `kvmesh planner apply`.

The planner (`--connector virtual`) has no rights over containers. This process has those of its user: it asks the
planner for the decision, has a connector of this host carry it out, and reports that. See docs/planner-operations.md.
"""

import asyncio
import logging
import os
from collections.abc import Sequence
from typing import Annotated, Any

import aiohttp
import msgspec
from msgspec import Meta, Struct

from kvmesh.mesh.bodies import bounded
from kvmesh.mesh.config import load
from kvmesh.mesh.identity.credentials import MeshTls, open_credentials
from kvmesh.mesh.lifecycle import run
from kvmesh.mesh.member_session import member_session
from kvmesh.mesh.telemetry import LogFormat, LogLevel, setup_logging
from kvmesh.planner.config import ServiceConfig
from kvmesh.planner.connectors.compose import open_connector
from kvmesh.planner.connectors.connector import Applied, Connector, Fleets
from kvmesh.planner.connectors.virtual import Acknowledgement, Order, read_token
from kvmesh.planner.model import Action, Reason, RoleFleet, ScalingDecision
from kvmesh.planner.service import either
from kvmesh.protocol.errors import ConfigError, MeshError, UnreachableError, WireError

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
MAX_REPLY_BYTES = 64 << 10
REPEAT_S = 60.0  # a planner that was restarted has to be told again, and containers may have gone meanwhile
MAX_NOTES, MAX_NOTE_CHARS = 16, 500


class ApplyConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_PLANNER_APPLY_<NAME>`, that over the TOML file of `--config`, that over the default."""

    url: Annotated[str, Meta(description="the planner's --virtual-host and --virtual-port: http://host:port")] = (
        "http://127.0.0.1:8090"
    )
    token_file: Annotated[str, Meta(description="the planner's --virtual-token-file; empty: none")] = ""
    mesh_tls: MeshTls = ""
    poll_s: Annotated[float, Meta(gt=0, description="time between two questions")] = 2.0
    aggregated: Annotated[bool, Meta(description="the planner has --mode aggregated: there are no prefill workers")] = (
        False
    )
    compose_command: Annotated[str, Meta(description="docker compose, as for a shell")] = "docker compose"
    compose_inspect: Annotated[str, Meta(description="the command that shows containers by id")] = "docker inspect"
    compose_files: Annotated[tuple[str, ...], Meta(description="files (-f)")] = ()
    compose_project: Annotated[str, Meta(description="project (-p); default: the folder's")] = ""
    compose_prefill: Annotated[str, Meta(description="service of the prefill workers")] = "prefill"
    compose_decode: Annotated[str, Meta(description="service of the decode workers")] = "decode"
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"


def apply(argv: Sequence[str]) -> int:
    config = load(
        ApplyConfig,
        argv,
        os.environ,
        prefix="KVMESH_PLANNER_APPLY_",
        prog="kvmesh planner apply",
        description="Carry out, with docker compose on this host, what a planner with --connector virtual decides.",
        section="planner_apply",
    )
    setup_logging("planner-apply", level=config.log_level, fmt=config.log_format)
    if not config.url.startswith(("http://", "https://")):
        raise ConfigError(f"no planner at {config.url!r}", hint="give --url as http://host:port")
    headers = {"authorization": f"Bearer {token}"} if (token := read_token(config.token_file)) else {}
    return run(lambda stop: serve(config, headers, stop))


async def serve(config: ApplyConfig, headers: dict[str, str], stop: asyncio.Event) -> None:
    """Carry out decisions until `stop` is set. The workers then stay as they are."""
    own = {name: getattr(config, name) for name in config.__struct_fields__ if name.startswith("compose_")}
    mode: Any = "aggregated" if config.aggregated else "disaggregated"
    connector = await open_connector(ServiceConfig(connector="compose", mode=mode, **own), nobody)
    async with member_session(open_credentials(config.mesh_tls), headers=headers) as http:
        planner = RemotePlanner(http, config.url.rstrip("/"))
        await carry_out(planner, connector, config.poll_s, stop)
        await connector.close()


def nobody() -> Fleets:
    """Return no workers: a connector that lists containers does not ask discovery."""
    return Fleets(prefill=RoleFleet(ready=0), decode=RoleFleet(ready=0))


class RemotePlanner:
    """Asks a planner over HTTP. Its methods raise MeshError if it does not answer as it should."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url

    async def order(self) -> Order | None:
        """Return the order that stands; None if there is none yet."""
        status, body = await self._ask("GET", "/decision")
        if status == 204:
            return None
        try:
            return msgspec.json.decode(body, type=Order)
        except msgspec.DecodeError as error:
            raise WireError(f"{self._url} sends no decision: {error}", hint="is --url that of a planner?") from error

    async def acknowledge(self, order: Order, applied: Applied) -> None:
        """Report what was done. An order that does not stand any more (409) is no error: the next one is asked for."""
        said = Acknowledgement(
            prefill=applied.prefill,
            decode=applied.decode,
            done=applied.is_complete,
            notes=tuple(note[:MAX_NOTE_CHARS] for note in applied.notes[:MAX_NOTES]),
        )
        await self._ask("POST", f"/decision/{order.decision_id}/acknowledge", msgspec.json.encode(said), fine=409)

    async def _ask(self, method: str, path: str, body: bytes | None = None, fine: int = 200) -> tuple[int, bytes]:
        try:
            async with (
                asyncio.timeout(TIMEOUT_S),
                self._http.request(method, f"{self._url}{path}", data=body) as response,
            ):
                answer = await bounded(response, MAX_REPLY_BYTES)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise UnreachableError(f"no planner answers at {self._url}: {error}", hint="see --url") from error
        if response.status not in (200, 204, fine):
            said = answer[:200].decode(errors="replace")
            raise MeshError(f"the planner at {self._url} answered {response.status}: {said}", hint="see --token-file")
        return response.status, answer


async def carry_out(planner: RemotePlanner, connector: Connector, poll_s: float, stop: asyncio.Event) -> None:
    """Ask, carry out and report until `stop` is set. A failure is logged once and tried again."""
    clock = asyncio.get_running_loop().time
    done: Order | None = None
    done_s, problem = 0.0, ""
    while not stop.is_set():
        try:
            order = await planner.order()
            if order is not None and (order != done or clock() - done_s > REPEAT_S):
                applied = await connector.apply(decision_of(order))
                await planner.acknowledge(order, applied)
                if order != done and applied.is_complete:
                    said = f"prefill {applied.prefill}, decode {applied.decode}"
                    log.info("decision %d is carried out: %s", order.decision_id, said)
                done, done_s = (order if applied.is_complete else None), clock()
            problem = ""
        except MeshError as error:
            if str(error) != problem:
                problem = str(error)
                log.warning("%s", error)
        await either(stop, poll_s)


def decision_of(order: Order) -> ScalingDecision:
    return ScalingDecision(
        at_s=0.0,
        loop="none",
        action=Action.SCALE,
        prefill=order.prefill,
        decode=order.decode,
        flip=order.flip,
        reasons=tuple(Reason(code="ordered", text=text) for text in order.reasons),
    )
