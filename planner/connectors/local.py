"""Scale the workers that `kvmesh up` runs as processes of this host, over its control socket."""

from typing import TypeVar

import aiohttp
import msgspec

from kvmesh.mesh.bodies import bounded
from kvmesh.planner.config import ServiceConfig, decoding_role
from kvmesh.planner.connectors.connector import Applied, ConnectorError, Fleets, Present
from kvmesh.planner.connectors.local_api import (
    MAX_BODY_BYTES,
    Flipped,
    FlipRequest,
    MemberReport,
    Scaled,
    ScaleRequest,
    WorkersReport,
)
from kvmesh.planner.connectors.steps import applied_of, steps_to
from kvmesh.planner.model import RoleFleet, ScalingDecision
from kvmesh.protocol.errors import ConfigError, WireError
from kvmesh.protocol.messages import UNREADABLE, Role

TIMEOUT_S = 15.0
T = TypeVar("T")


class LocalConnector:
    name = "local"

    def __init__(self, control: str, decoding: Role = Role.DECODE) -> None:
        """Raise ConfigError unless `control` is unix:<path>. `decoding` is AGGREGATED where workers do both halves."""
        scheme, _, path = control.partition(":")
        if scheme != "unix" or not path:
            raise ConfigError(
                f"no control socket at {control!r}",
                hint="set --local-control to unix:<run directory>/control/control.sock, as `kvmesh up` shows it",
            )
        self._path = path
        self._decoding = decoding
        self._http: aiohttp.ClientSession | None = None

    async def fleets(self) -> Fleets:
        workers = (await self.ask("GET", "/workers", WorkersReport)).workers
        prefill = RoleFleet(ready=0) if self._decoding is Role.AGGREGATED else fleet_of(workers, Role.PREFILL)
        return Fleets(prefill=prefill, decode=fleet_of(workers, self._decoding))

    async def apply(self, decision: ScalingDecision) -> Applied:
        flipped: tuple[str, ...] = ()
        notes: tuple[str, ...] = ()
        steps = steps_to(decision, await self.fleets(), name=self.name, can_flip=True, can_choose=True)
        if steps.flip and steps.flip_to is not None:
            reply = await self.ask("POST", "/flip", Flipped, FlipRequest(to=steps.flip_to, count=steps.flip))
            flipped = reply.flipped
            notes = tuple(
                f"{r.name or self.name} refused to turn into a {steps.flip_to} worker: {r.why}" for r in reply.refused
            )
            rest = msgspec.structs.replace(decision, flip=None)
            steps = steps_to(rest, await self.fleets(), name=self.name, can_flip=True, can_choose=True)
        if self._decoding is Role.AGGREGATED:
            scaled = await self.ask("POST", "/scale", Scaled, ScaleRequest(aggregated=steps.decode))
            return applied_of(decision, 0, scaled.counts.get(Role.AGGREGATED, 0), 0, steps.notes)
        counts = ScaleRequest(prefill=steps.prefill, decode=steps.decode)
        scaled = await self.ask("POST", "/scale", Scaled, counts)
        prefill, decode = scaled.counts.get(Role.PREFILL, 0), scaled.counts.get(Role.DECODE, 0)
        return applied_of(decision, prefill, decode, len(flipped), notes + steps.notes)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def ask(self, method: str, path: str, reply: type[T], body: object = None) -> T:
        """Return the answer of `kvmesh up`. Raise ConnectorError."""
        if self._http is None:
            self._http = aiohttp.ClientSession(
                base_url="http://localhost",
                connector=aiohttp.UnixConnector(self._path),
                timeout=aiohttp.ClientTimeout(TIMEOUT_S),
            )
        data = None if body is None else msgspec.json.encode(body)
        headers = {"content-type": "application/json"}
        try:
            async with self._http.request(method, path, data=data, headers=headers) as response:
                content = await bounded(response, MAX_BODY_BYTES * 16)
            if response.status != 200:
                raise ConnectorError(f"kvmesh up refuses {method} {path}: {content[:500].decode(errors='replace')}")
            return msgspec.json.decode(content, type=reply)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ConnectorError(
                f"the control socket at {self._path} does not answer: {error or 'it took too long'}",
                hint="is `kvmesh up` running?",
            ) from error
        except (*UNREADABLE, WireError) as error:
            raise ConnectorError(f"what answers at {self._path} cannot be understood: {error}") from error


async def open_connector(config: ServiceConfig, present: Present) -> LocalConnector:
    """Raise ConfigError if the control socket has no path."""
    return LocalConnector(config.local_control, decoding_role(config))


def fleet_of(workers: tuple[MemberReport, ...], role: Role) -> RoleFleet:
    states = [worker.state for worker in workers if worker.role is role]
    return RoleFleet(
        ready=states.count("ready"),
        starting=states.count("starting") + states.count("flipping"),
        draining=states.count("draining"),
    )
