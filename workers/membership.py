"""A worker's place in the mesh: its card and its KV events. It can leave, and come back under another id."""

import asyncio
import logging
import os
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from kvmesh.kvevents.connect import open_publisher
from kvmesh.kvevents.door import EventDoor, new_keys
from kvmesh.kvevents.transport import Publisher
from kvmesh.mesh.discovery import Discovery, Registration
from kvmesh.protocol.ids import WorkerId, new_worker_id
from kvmesh.protocol.kv_content import MAX_ADAPTERS
from kvmesh.protocol.messages import Role, WorkerCard, encode_card
from kvmesh.protocol.model_files import ModelFile
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.endpoint import http_endpoint_of
from kvmesh.workers.engine import Engine, EngineInfo, Ranked
from kvmesh.workers.load_reports import reporting_ranks
from kvmesh.workers.loaded_content import KnowsContent, KvContent
from kvmesh.workers.model_files import OfferedFiles, model_files
from kvmesh.workers.names import worker_name
from kvmesh.workers.states import WorkerStates

log = logging.getLogger(__name__)


class Membership:
    """Join the mesh; with a `door`, events over ZMQ are closed. Raise ConfigError if KV events cannot be published."""

    def __init__(
        self,
        config: WorkerConfig,
        engine: Engine,
        discovery: Discovery,
        metrics_url: str,
        door: EventDoor | None = None,
    ) -> None:
        self.role = config.role
        self.engine_kind: str = config.engine
        self.worker_id = new_worker_id(worker_name(config))
        self.address = ""  # of the request plane: to be set before it joins
        self.states = WorkerStates()
        self._showing = asyncio.Lock()  # the last card that is shown has the last state
        self.content = KvContent()  # as in the card
        self._config = config
        self._engine = engine
        self._ranks = engine.ranks if isinstance(engine, Ranked) else [engine]
        self._discovery = discovery
        self._metrics_url = metrics_url
        self._registration: Registration | None = None
        self.files = OfferedFiles()
        self._door = door
        self.event_key = ""  # public; of all publishers that this worker has under its present id
        self.publishers: Sequence[Publisher] = self._open_publishers()

    def follow_caches(self) -> None:
        """Publish what the engine tells of its caches, from now on. Call it once."""
        for number, rank in enumerate(self._ranks):
            rank.on_kv_events(lambda events, number=number: self.publishers[number].publish(events))  # type: ignore[misc]

    async def join(self, info: EngineInfo) -> None:
        """Join the mesh, or report to routers what has changed.

        Does nothing for an engine that serves nobody, and in a state in which the worker has no card.
        """
        if not info.serves:
            return
        async with self._showing:
            folder = Path(info.model_path)
            files = await asyncio.to_thread(model_files, folder)
            self.files.offer(folder, files)
            http_endpoint = await asyncio.to_thread(http_endpoint_of, self._config)
            if not self.states.has_card:
                return
            self.content = content_now(self._engine)
            card = make_card(
                self._config,
                self.worker_id,
                self.role,
                with_content(info, self.content),
                self.address,
                self.publishers,
                self._metrics_url,
                reports_load=bool(reporting_ranks(self._ranks, self._config.load_report_interval_s)),
                files=files,
                http_endpoint=http_endpoint,
                kv_key=self.event_key if info.tells_events else "",
                resting=self.states.on_card,
            )
            self._registration = await self._discovery.put(f"workers/{self.worker_id}", encode_card(card))

    async def leave(self) -> None:
        """A second call does nothing."""
        async with self._showing:
            registration, self._registration = self._registration, None
            if registration is not None:
                await registration.withdraw()

    async def change(self, role: Role, *, tells_events: bool) -> None:
        """Be another worker from now on, which has yet to join. Its first events say what its caches hold."""
        worker_id, before = self.worker_id, self.publishers
        event_key, self.worker_id = self.event_key, new_worker_id(worker_name(self._config))
        try:
            fresh = self._open_publishers()
        except BaseException:
            self.worker_id, self.event_key = worker_id, event_key
            raise
        if tells_events:  # no event can come between the earlier batches and the snapshot
            for rank, publisher in zip(self._ranks, fresh, strict=True):
                if events := rank.kv_snapshot():
                    publisher.publish(events)
        self.role, self.publishers = role, fresh
        for publisher in before:
            await publisher.close()

    async def close(self) -> None:
        await self.leave()
        for publisher in self.publishers:
            await publisher.close()

    def _open_publishers(self) -> list[Publisher]:
        config = self._config
        keys = None
        if self._door is not None and config.kv_events_transport == "zmq":
            keys = new_keys()
            self.event_key = keys.public
        return [
            open_publisher(
                config.kv_events_transport,
                self.worker_id,
                bind=f"tcp://{config.host}:{config.kv_events_ports or '*'}",
                advertise_host=config.advertise_host,
                nats_url=config.nats_url,
                dp_rank=rank,
                door=self._door,
                keys=keys,
            )
            for rank in range(len(self._ranks))
        ]


def content_now(engine: Engine) -> KvContent:
    """Return what the KV of an engine was computed with, as far as the engine says."""
    return engine.kv_content() if isinstance(engine, KnowsContent) else KvContent()


def with_content(info: EngineInfo, content: KvContent) -> EngineInfo:
    """Return the facts about an engine with what its KV was computed with."""
    return replace(
        info,
        content_fingerprint=content.fingerprint,
        adapter_fingerprints=content.adapters[:MAX_ADAPTERS],
        kv_print=content.kv_print,
    )


# The fields of a card that an engine knows. A capacity may be a setting instead.
SAME_FIELDS = sorted({*WorkerCard.__struct_fields__} & {each.name for each in fields(EngineInfo)} - {"capacity"})


def make_card(
    config: WorkerConfig,
    worker_id: WorkerId,
    role: Role,
    info: EngineInfo,
    address: str,
    publishers: Sequence[Publisher],
    metrics_url: str,
    *,
    reports_load: bool = False,
    files: Sequence[ModelFile] = (),
    http_endpoint: str = "",
    kv_key: str = "",
    resting: str = "",
) -> WorkerCard:
    endpoints = [(one.endpoint, one.replay_endpoint) for one in publishers] if info.tells_events else [("", "")]
    return WorkerCard(
        **{name: getattr(info, name) for name in SAME_FIELDS},
        worker_id=worker_id,
        name=worker_name(config),
        role=role,
        address=address,
        kv_events=endpoints[0][0],
        kv_replay=endpoints[0][1],
        rank_kv_events=tuple(endpoints[1:]),
        kv_key=kv_key,
        pid=os.getpid(),
        metrics_url=metrics_url,
        http_endpoint=http_endpoint,
        capacity=info.capacity if config.capacity is None else config.capacity,
        reports_load=reports_load,
        tool_parser=config.tool_parser,
        reasoning_parser=config.reasoning_parser,
        model_files=tuple(files),
        resting=resting,
    )
