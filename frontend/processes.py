"""Several frontends on one port: each a process with an event loop and a router of its own.

The kernel spreads connections over them (SO_REUSEPORT). Their routers tell each other what they place, as those of
different hosts do; `/metrics` of any of them counts all. SIGHUP replaces them in turn by new processes, each of which
listens before the old one leaves.
"""

import asyncio
import logging
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec

from kvmesh.frontend.config import FrontendConfig
from kvmesh.frontend.table import check_settings
from kvmesh.mesh.address import cannot_listen
from kvmesh.mesh.config import to_flags
from kvmesh.mesh.lifecycle import on_hangup, unless_stopped, watch_parent
from kvmesh.mesh.merged_metrics import ready_file
from kvmesh.mesh.supervisor import ProcessSpec, Supervisor
from kvmesh.protocol.errors import ConfigError, MeshError

log = logging.getLogger(__name__)

READY_S = 60.0  # for a new process to listen
LOOK_S = 0.05


async def serve_processes(config: FrontendConfig, config_file: str, stop: asyncio.Event) -> None:
    """Keep `config.processes` frontends running until `stop` is set. Raises MeshError if one cannot run.

    `config_file`: where their embedded routers read their settings, "" for none.
    """
    check_settings(config)
    watch_parent(stop)
    supervisor = Supervisor(None, log.warning)
    with reserved_port(config.host, config.port) as port, tempfile.TemporaryDirectory(prefix="kvmesh-") as shared:
        try:
            frontends = Frontends(config, config_file, port, Path(shared), supervisor)
            frontends.start()
            await frontends.run(stop)
            await supervisor.stop_all(frontends.end_s)
        finally:
            await supervisor.kill_all()
    if supervisor.failure is not None:
        raise supervisor.failure


class Frontends:
    """Owns the processes of one port, and replaces them in turn."""

    def __init__(
        self, config: FrontendConfig, config_file: str, port: int, shared: Path, supervisor: Supervisor
    ) -> None:
        self.end_s = config.drain_notice_s + config.drain_timeout_s + 5.0
        self._config = config
        self._config_file = config_file
        self._port = port
        self._shared = shared
        self._supervisor = supervisor
        self._numbers = list(range(config.processes))
        self._hangup = on_hangup()
        self._failed: MeshError | None = None  # why a new process does not run

    def start(self) -> None:
        for number in self._numbers:
            self._supervisor.start(self._spec(number))

    async def run(self, stop: asyncio.Event) -> None:
        """Keep the processes, and replace them at each SIGHUP. Return at `stop`, or if one cannot be kept running."""
        while not (stop.is_set() or self._supervisor.failed.is_set()):
            await first_of(stop, self._supervisor.failed, self._hangup)
            if self._hangup.is_set():
                self._hangup.clear()
                await unless_stopped(self.roll(), stop)

    async def roll(self) -> None:
        """Replace the processes in turn: a new one listens before the old one leaves, so the port is never closed."""
        log.info("SIGHUP: new processes take over")
        twice = 2 * self._config.processes  # a process and the one after it have different names and ports
        for old in list(self._numbers):
            new = (old + self._config.processes) % twice
            if not await self._started(new):
                log.error("the processes stay as they are: %s", self._failed or "a new one is not ready")
                await self._supervisor.stop([self._name(new)], self.end_s)
                return
            self._numbers[self._numbers.index(old)] = new
            await self._supervisor.stop([self._name(old)], self.end_s)
        log.info("new processes have taken over")

    async def _started(self, number: int) -> bool:
        """Start a process. Return whether it listens soon."""
        self._failed, name = None, self._name(number)

        def on_failure(failure: MeshError) -> None:
            if number in self._numbers:
                self._supervisor.fail(failure)
            self._failed = failure

        self._supervisor.start(self._spec(number), on_failure)
        with suppress(TimeoutError):
            async with asyncio.timeout(READY_S):
                while self._failed is None:
                    pid = self._supervisor.pid(name)
                    if pid is not None and ready_file(self._shared, pid).exists():
                        return True
                    await asyncio.sleep(LOOK_S)
        return False

    def _name(self, number: int) -> str:
        return f"{self._config.name}-{number}"

    def _spec(self, number: int) -> ProcessSpec:
        return process_spec(self._config, self._config_file, number, self._port, self._shared)


async def first_of(*events: asyncio.Event) -> None:
    """Return when one of the events is set."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()


def process_spec(config: FrontendConfig, config_file: str, number: int, port: int, shared: Path) -> ProcessSpec:
    name = f"{config.name}-{number}"
    limits_port = config.limits_port + number if config.limits_port else 0
    ui_port = config.ui_port + number if config.ui_port else config.ui_port
    own = msgspec.structs.replace(
        config,
        name=name,
        port=port,
        processes=1,
        shares_port_with=str(shared),
        limits_port=limits_port,
        ui_port=ui_port,
    )
    flags = [*to_flags(own), *(["--config", config_file] if config_file else [])]
    return ProcessSpec(name, ["-m", "kvmesh.frontend", *flags])


@contextmanager
def reserved_port(host: str, port: int) -> Iterator[int]:
    """Hold the port for the processes, which listen on it: we are bound to it and do not. Raises ConfigError."""
    with ExitStack() as held:
        holder = held.enter_context(bound_socket(host, port))
        number = holder.getsockname()[1]
        claim(host, number, held)
        yield number


def claim(host: str, port: int, held: ExitStack) -> None:
    """Refuse a port that processes of another frontend share: the system would give both of them connections.

    The claim is a name in the system that goes with this process. Raises ConfigError.
    """
    if sys.platform != "linux":
        return
    name = held.enter_context(socket.socket(socket.AF_UNIX))
    try:
        name.bind(f"\0kvmesh-frontend-{host}-{port}")
    except OSError as error:
        raise ConfigError(
            f"the processes of another frontend answer on {host}:{port} already",
            hint="stop it, or choose another --port",
        ) from error


def bound_socket(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        holder = socket.socket(family, kind, protocol)
        try:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a server before may still end
            if port:
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            holder.bind(address)
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # a free port is one that nobody shares yet
        except OSError:
            holder.close()
            raise
    except OSError as error:
        raise cannot_listen(host, port, error) from error
    return holder
