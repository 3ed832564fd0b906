"""Scale services of docker compose with `up --scale`. Compose decides which container is stopped.

Compose 1 and 2 print different lists, so compose is asked for ids alone, and the engine for the containers' states.
"""

import asyncio
import os
import shlex
from collections.abc import Sequence

import msgspec

from kvmesh.planner.config import ServiceConfig, has_prefill_role
from kvmesh.planner.connectors.connector import Applied, ConnectorError, Fleets, Present, check_distinct
from kvmesh.planner.connectors.steps import applied_of, steps_to
from kvmesh.planner.model import RoleFleet, ScalingDecision

LIST_TIMEOUT_S = 20.0
SCALE_TIMEOUT_S = 180.0  # compose waits for containers that stop, up to their stop_grace_period
MAX_OUTPUT_BYTES = 64 << 20
SERVICE_LABEL = "com.docker.compose.service"


class ContainerHealth(msgspec.Struct, frozen=True):
    status: str = msgspec.field(name="Status", default="")


class ContainerState(msgspec.Struct, frozen=True):
    status: str = msgspec.field(name="Status", default="")
    health: ContainerHealth | None = msgspec.field(name="Health", default=None)


class ContainerConfig(msgspec.Struct, frozen=True):
    labels: dict[str, str] | None = msgspec.field(name="Labels", default=None)


class Container(msgspec.Struct, frozen=True):
    """The fields of `docker inspect` that are used here."""

    state: ContainerState = msgspec.field(name="State")
    config: ContainerConfig = msgspec.field(name="Config")

    @property
    def service(self) -> str:
        return (self.config.labels or {}).get(SERVICE_LABEL, "")

    @property
    def is_ready(self) -> bool:
        """Return whether the container runs, and is healthy if it has a health check."""
        health = self.state.health.status if self.state.health is not None else ""
        return self.state.status == "running" and health in ("", "none", "healthy")


class ComposeConnector:
    name = "compose"

    def __init__(
        self,
        command: str,
        files: Sequence[str],
        project: str,
        *,
        prefill: str,
        decode: str,
        inspect: str = "docker inspect",
    ) -> None:
        """Raise ConfigError if both roles are one service.

        `command` and `inspect` are written as for a shell. `prefill` and `decode` are services; "" means no prefill
        workers.
        """
        check_distinct(self.name, prefill, decode)
        self._command = [*shlex.split(command), *(word for file in files for word in ("-f", file))]
        self._command += ["-p", project] if project else []
        self._inspect = shlex.split(inspect)
        self._prefill, self._decode = prefill, decode
        self._services = (prefill, decode) if prefill else (decode,)
        self._changing = asyncio.Lock()

    async def fleets(self) -> Fleets:
        listed = await self._run([*self._command, "ps", "--all", "--quiet", *self._services], LIST_TIMEOUT_S)
        containers: list[Container] = []
        if ids := listed.split():
            containers = read_containers(await self._run([*self._inspect, *ids], LIST_TIMEOUT_S))
        return Fleets(prefill=fleet_of(containers, self._prefill), decode=fleet_of(containers, self._decode))

    async def apply(self, decision: ScalingDecision) -> Applied:
        async with self._changing:
            fleets = await self.fleets()
            steps = steps_to(decision, fleets, name=self.name, can_flip=False, can_choose=False)
            counts = (steps.prefill, steps.decode)
            if counts != (fleets.prefill.ordered, fleets.decode.ordered):
                wanted = dict(zip((self._prefill, self._decode), counts, strict=True))
                scales = [f"--scale={service}={wanted[service]}" for service in self._services]
                flags = ["up", "--detach", "--no-deps", "--no-recreate", *scales, *self._services]
                await self._run([*self._command, *flags], SCALE_TIMEOUT_S)
                fleets = await self.fleets()
            return applied_of(decision, fleets.prefill.ordered, fleets.decode.ordered, 0, steps.notes)

    async def close(self) -> None:
        pass

    async def _run(self, command: Sequence[str], timeout_s: float) -> str:
        """Return the command's output. Raise ConnectorError if it fails, or takes too long and is killed."""
        shown = shlex.join(command[:4])
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=dict(os.environ),  # uvloop takes no other mapping
            )
        except OSError as error:
            raise ConnectorError(
                f"{shown} cannot be run: {error}", hint="see --compose-command, --compose-inspect"
            ) from error
        try:
            async with asyncio.timeout(timeout_s):
                out, err = await process.communicate()
        except TimeoutError:
            raise ConnectorError(f"{shown} has not ended after {timeout_s:g} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode or len(out) > MAX_OUTPUT_BYTES:
            said = err.decode(errors="replace").strip()[-500:]
            raise ConnectorError(f"{shown} ended with {process.returncode}: {said}")
        return out.decode(errors="replace")


async def open_connector(config: ServiceConfig, present: Present) -> ComposeConnector:
    """Raise ConfigError for settings that do not fit together."""
    return ComposeConnector(
        config.compose_command,
        config.compose_files,
        config.compose_project,
        prefill=config.compose_prefill if has_prefill_role(config) else "",
        decode=config.compose_decode,
        inspect=config.compose_inspect,
    )


def read_containers(listed: str) -> list[Container]:
    """Read what `docker inspect` prints. Raise ConnectorError if that is no list of containers."""
    try:
        return msgspec.json.decode(listed, type=list[Container])
    except msgspec.DecodeError as error:
        raise ConnectorError(f"docker inspect gives no list of containers: {error}") from error


def fleet_of(containers: Sequence[Container], service: str) -> RoleFleet:
    """Count the containers of a service. Without a health check, a container is ready when it runs."""
    own = [c for c in containers if service and c.service == service]
    there = [c for c in own if c.state.status not in ("exited", "dead", "removing")]
    ready = sum(c.is_ready for c in there)
    draining = sum(c.state.status == "removing" for c in own)
    return RoleFleet(ready=ready, starting=len(there) - ready, draining=draining)
