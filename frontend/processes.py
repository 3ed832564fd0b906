"""Several frontends on one port: each a process with an event loop and a router of its own.

The kernel spreads connections over them (SO_REUSEPORT). Their routers tell each other what they place, as those of
different hosts do; `/metrics` of any of them counts all.
"""

import asyncio
import logging
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from frontend.config import FrontendConfig
from frontend.responses.opening import check_setting
from mesh.address import cannot_listen
from mesh.config import to_flags
from mesh.lifecycle import watch_parent
from mesh.supervisor import ProcessSpec, Supervisor

log = logging.getLogger(__name__)


async def serve_processes(config: FrontendConfig, config_file: str, stop: asyncio.Event) -> None:
    """Keep `config.processes` frontends running until `stop` is set. Raises MeshError if one cannot run.

    `config_file`: where their embedded routers read their settings, "" for none.
    """
    check_setting(config.responses_store, is_one_process=False)
    watch_parent(stop)
    supervisor = Supervisor(None, log.warning)
    with reserved_port(config.host, config.port) as port, tempfile.TemporaryDirectory(prefix="kvmesh-") as shared:
        try:
            for number in range(config.processes):
                supervisor.start(process_spec(config, config_file, number, port, Path(shared)))
            await until_stopped(stop, supervisor)
            await supervisor.stop_all(config.drain_timeout_s + 5.0)
        finally:
            await supervisor.kill_all()
    if supervisor.failure is not None:
        raise supervisor.failure


async def until_stopped(stop: asyncio.Event, supervisor: Supervisor) -> None:
    """Wait until `stop`; also return when a process cannot be kept running."""
    waiting = [asyncio.create_task(event.wait()) for event in (stop, supervisor.failed)]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()


def process_spec(config: FrontendConfig, config_file: str, number: int, port: int, shared: Path) -> ProcessSpec:
    name = f"{config.name}-{number}"
    own = msgspec.structs.replace(config, name=name, port=port, processes=1, shares_port_with=str(shared))
    flags = [*to_flags(own), *(["--config", config_file] if config_file else [])]
    return ProcessSpec(name, ["-m", "frontend", *flags])


@contextmanager
def reserved_port(host: str, port: int) -> Iterator[int]:
    """Hold the port for the processes, which listen on it: we are bound to it and do not. Raises ConfigError."""
    holder = bound_socket(host, port)
    try:
        yield holder.getsockname()[1]
    finally:
        holder.close()


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
