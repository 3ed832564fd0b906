"""Keep a worker in front of each server that runs already, while the mesh runs. The servers run no code of ours."""

import asyncio
from collections.abc import Callable, Sequence, Set

import msgspec

from kvmesh.cluster.attach.servers import ANNOUNCED, AttachConfig, process_specs, read_announced
from kvmesh.mesh.discovery import Discovery, Put, open_discovery
from kvmesh.mesh.supervisor import ProcessSpec, Supervisor
from kvmesh.protocol.errors import ConfigError, WireError
from kvmesh.protocol.messages import WorkerCard, decode_card

STOP_S = 10.0  # more than the requests in progress get
IDLE_STOP_S = 2.0


async def attach(
    config: AttachConfig, specs: Sequence[ProcessSpec], stop: asyncio.Event, tell: Callable[[str], None]
) -> None:
    """Keep the processes running until `stop`. Raises the supervisor's error if one cannot run."""
    supervisor = Supervisor(None, tell)
    discovery = open_discovery(config.discovery)
    joined: dict[str, str] = {}
    watching = [asyncio.create_task(watch_who_joins(discovery, supervisor, joined, tell), name="watch who joins")]
    if config.discover:
        attached = Announced(config, supervisor, {spec.name for spec in specs}, tell)
        watching.append(asyncio.create_task(attached.follow(discovery), name="follow announced servers"))
    waiting = [
        asyncio.create_task(stop.wait(), name="wait for Ctrl-C"),
        asyncio.create_task(supervisor.failed.wait(), name="wait for a failure"),
    ]
    try:
        for spec in specs:
            supervisor.start(spec)
        await asyncio.wait([*watching, *waiting], return_when=asyncio.FIRST_COMPLETED)
        for task in watching:
            if task.done():
                task.result()
        if supervisor.failure is not None and not stop.is_set():
            raise supervisor.failure
        await end_all(watching)
        await stop_in_order(supervisor, set(joined.values()), config.drain_timeout_s + STOP_S)
    finally:
        await end_all([*watching, *waiting])
        await supervisor.kill_all()
        await discovery.close()


class Announced:
    """Keep a worker in front of each server that is published in discovery under `servers/<name>`."""

    def __init__(
        self, config: AttachConfig, supervisor: Supervisor, taken: Set[str], tell: Callable[[str], None]
    ) -> None:
        """Refuse the names in `taken`: other servers have them."""
        self._config = config
        self._supervisor = supervisor
        self._taken = taken
        self._tell = tell
        self._running: dict[str, ProcessSpec] = {}

    async def follow(self, discovery: Discovery) -> None:
        async for change in discovery.watch(ANNOUNCED):
            name = change.key.removeprefix(ANNOUNCED)
            try:
                spec = self._spec(name, change.value) if isinstance(change, Put) else None
            except ConfigError as error:
                self._tell(f"{change.key} is not attached: {error}")
                spec = None
            if spec != self._running.get(name):
                await self._replace(name, spec)

    def _spec(self, name: str, value: bytes) -> ProcessSpec:
        """Raises ConfigError."""
        if not name or name in self._taken:
            raise ConfigError(f"the name {name!r} is taken", hint="announce it by another --name")
        [spec] = process_specs(msgspec.structs.replace(self._config, frontend=False), [read_announced(name, value)])
        return spec

    async def _replace(self, name: str, spec: ProcessSpec | None) -> None:
        if self._running.pop(name, None) is not None:
            await self._supervisor.stop([name], self._config.drain_timeout_s + STOP_S)
            self._tell(f"{name} is attached no more")
        if spec is not None:
            self._running[name] = spec
            self._supervisor.start(spec, on_failure=lambda error: self._tell(f"{name} is not attached: {error}"))


async def end_all(tasks: Sequence[asyncio.Task[object]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def stop_in_order(supervisor: Supervisor, joined: Set[str], timeout_s: float) -> None:
    """The frontend first: it drains while the workers still work. Who waits for a server has nothing to finish."""
    await supervisor.stop(["frontend"], timeout_s)
    await supervisor.stop([name for name in supervisor.pids() if name not in joined], IDLE_STOP_S)
    await supervisor.stop_all(timeout_s)


async def watch_who_joins(
    discovery: Discovery, supervisor: Supervisor, joined: dict[str, str], tell: Callable[[str], None]
) -> None:
    """Keep in `joined` the names of our workers in the mesh, by key, and report each that joins."""
    async for change in discovery.watch("workers/"):
        if not isinstance(change, Put):
            joined.pop(change.key, None)
            continue
        try:
            card = decode_card(change.value, WorkerCard)
        except WireError:  # of another version of kvmesh: not ours
            continue
        if card.pid == await supervisor.settled_pid(card.name):
            joined[change.key] = card.name
            tell(describe(card))


def describe(card: WorkerCard) -> str:
    """Describe how the mesh sees a server."""
    told = "its KV events are followed" if card.kv_events else "it sends no KV events: its cache is predicted"
    return f"{card.name} serves {card.model} ({card.role.value}, blocks of {card.block_size} tokens); {told}"
