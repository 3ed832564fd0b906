"""Run the workers of a process: each has an engine, calls that it answers, KV events and a place in the mesh."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import msgspec

from kvmesh.kvevents.batches import in_parts
from kvmesh.kvevents.door import EventDoor
from kvmesh.kvevents.formats import encode_payload
from kvmesh.mesh.discovery import Discovery, open_discovery, standing_calls
from kvmesh.mesh.exposition import labelled
from kvmesh.mesh.http.door import door_of
from kvmesh.mesh.http.files import make_room_for_files
from kvmesh.mesh.identity.credentials import Credentials
from kvmesh.mesh.identity.metrics import using
from kvmesh.mesh.identity.names import MeshRole
from kvmesh.mesh.lifecycle import settle, unless_stopped, watch_parent
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.mesh.plane.probing import PeerProbing
from kvmesh.mesh.plane.server import Call, Handler, PlaneServer
from kvmesh.mesh.telemetry import RequestContext, log_ready, serve_metrics
from kvmesh.protocol.errors import DrainingError, EngineError, InvalidRequestError, MeshError
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.messages import (
    Control,
    ControlAction,
    EmbedRequest,
    GenerateRequest,
    KvDigest,
    KvRank,
    KvSnapshot,
    OfferPrefix,
    OpenedTicket,
    RedeemTicket,
    ReleaseOffer,
    Role,
    WorkerIdentity,
    decode,
    encode,
)
from kvmesh.workers.canary import CANARY_INTERVAL_S
from kvmesh.workers.card_tiers import CardTiers, ReportsTiers
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.controls import WorkerControls
from kvmesh.workers.engine import Engine, EngineInfo, KeepsTimes, PullsKv, Pushing, Ranked, SharesPrefixes
from kvmesh.workers.engines.opening import check_settings, open_engine
from kvmesh.workers.engines.registry import ENGINES
from kvmesh.workers.event_keys import EventKeys
from kvmesh.workers.life import Place, WorkerLife, offers_taken
from kvmesh.workers.load_reports import LoadReports
from kvmesh.workers.loaded_content import KnowsContent, KvContent, check_card, with_ticket_content
from kvmesh.workers.membership import Membership, with_content
from kvmesh.workers.metrics import REQUESTS, forget_load, labels_of_workers, watch_load
from kvmesh.workers.model_files import OfferedFiles
from kvmesh.workers.names import worker_name
from kvmesh.workers.peer_pulls import asking
from kvmesh.workers.prefix_offers import LEASE_S, PrefixOffers
from kvmesh.workers.sealed_tickets import TicketOffice
from kvmesh.workers.spent_time import SpentTime
from kvmesh.workers.stall import ANSWER_STALL_S, AnswerWatch
from kvmesh.workers.transfer_probe import ProbeOffers, probe_transfer
from kvmesh.workers.trying import EngineCanary

log = logging.getLogger(__name__)

HEALTH_CHECK_S = 1.0
FREES = frozenset({"release", "redeem"})  # methods that have to work while this worker drains
FILES_PER_WORKER = 24  # 7 of its own, the rest for connections of frontends and followers of its events


class Readiness:
    """Knows whether all workers of a process are in the mesh; /health asks from another thread."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = self._starting = num_workers
        self._leaving = 0
        self._states: dict[str, str] = {}  # of the workers that take no requests

    def problem(self) -> str:
        """Return why the process should get no work, "" if all its workers have joined and none has begun to leave."""
        if self._leaving:
            return "draining"
        if self._starting:
            return f"{self._starting} of {self._num_workers} workers have not joined yet"
        return ", ".join(f"{name} is {state}" for name, state in self._states.items())

    def on_ready(self) -> None:
        self._starting -= 1
        if self._starting == 0:
            settle()

    def on_leaving(self) -> None:
        self._leaving += 1

    def on_state(self, name: str, state: str) -> None:
        """Note the state of a worker, "" if it serves."""
        self._states.pop(name, None)
        if state:
            self._states[name] = state


@dataclass(frozen=True, slots=True)
class Host:
    """The parts that the workers of a process share."""

    discovery: Discovery
    metrics_url: str
    readiness: Readiness
    plane: PlaneClient
    door: EventDoor | None = None  # of a closed mesh whose KV events go over ZMQ

    @property
    def credentials(self) -> Credentials | None:
        return self.plane.credentials


async def serve(config: WorkerConfig, stop: asyncio.Event) -> None:
    """Work until `stop` is set, then leave the mesh and finish what is in flight.

    Raises EngineError if an engine dies, in an ExceptionGroup if there are several workers: a supervisor then starts
    the process again.
    """
    watch_parent(stop)
    configs = configs_of(config)
    readiness = Readiness(len(configs))
    async with AsyncExitStack() as cleanup:
        credentials = await cleanup.enter_async_context(using(config.mesh_tls, MeshRole.WORKER, config.name))
        cleanup.enter_context(labelled("worker", config.namespace, labels_of_workers))
        metrics_url, close_metrics = serve_metrics(
            config.host,
            config.metrics_port,
            advertise_host=config.advertise_host,
            problem=readiness.problem,
            door=door_of(credentials, answers_probes=config.mesh_probes),
            allowed_hosts=config.allowed_hosts,
        )
        cleanup.push_async_callback(asyncio.to_thread, close_metrics)
        discovery = open_discovery(config.discovery, credentials)
        cleanup.push_async_callback(discovery.close)
        plane = PlaneClient(credentials)
        cleanup.push_async_callback(plane.close)
        door = None
        if credentials is not None and config.kv_events_transport == "zmq":
            door = EventDoor()
            cleanup.push_async_callback(door.close)
        host = Host(discovery, metrics_url, readiness, plane, door)
        if len(configs) == 1:
            await serve_one(configs[0], host, stop)
            return
        make_room_for_files(FILES_PER_WORKER * len(configs) + 256)
        async with asyncio.TaskGroup() as workers:
            for one in configs:
                workers.create_task(serve_one(one, host, stop), name=f"worker {one.name}")


def configs_of(config: WorkerConfig) -> list[WorkerConfig]:
    """Return the settings of each worker of this process. Raise ConfigError if there cannot be several."""
    if config.count == 1:
        return [config]
    check_settings(config, ENGINES[config.engine])
    name = worker_name(config)
    # An agent of NIXL for each worker would cost several threads and tens of megabytes.
    transfer: Literal["nixl", "shm"] = "nixl" if config.kv_transfer == "nixl" else "shm"
    return [
        msgspec.structs.replace(
            config, count=1, name=f"{name}-{i}", port=config.port and config.port + i, kv_transfer=transfer
        )
        for i in range(config.count)
    ]


async def serve_one(config: WorkerConfig, host: Host, stop: asyncio.Event) -> None:
    async with AsyncExitStack() as cleanup:
        engine = asking_peers(open_engine(config), host.plane)
        membership = Membership(config, engine, host.discovery, host.metrics_url, host.door)
        cleanup.push_async_callback(membership.close)
        worker = open_worker(config, host, engine, membership)
        cleanup.push_async_callback(worker.canary.close)
        server = open_server(config, worker, host, membership)
        cleanup.push_async_callback(server.close)
        membership.address = await server.start(config.host, config.port, advertise_host=config.advertise_host)
        cleanup.push_async_callback(engine.stop)
        info = await unless_stopped(engine.start(membership.worker_id, membership.address), stop)
        if info is None:
            log.info("stopped before it was ready")
            return
        cleanup.push_async_callback(worker.life.end)
        worker.info = info
        membership.follow_caches()
        worker.observe(worker_name(config), info.model, cleanup)
        cleanup.push_async_callback(membership.leave)
        await membership.join(info)
        host.readiness.on_ready()
        log_ready(
            log,
            metrics=host.metrics_url,
            discovery=config.discovery,
            worker=membership.worker_id,
            address=membership.address,
            model=info.model,
            kv=info.transfer,
        )
        await until_stopped(stop, worker)
        host.readiness.on_leaving()
        log.info("draining")
        await worker.life.end()
        await membership.leave()
        worker.load_reports.close()
        deadline = asyncio.get_running_loop().time() + config.drain_timeout_s
        if cut_off := await server.drain(config.drain_timeout_s):
            log.warning("stopped with %d calls unanswered after %.1f s", cut_off, config.drain_timeout_s)
        await offers_taken(engine, deadline)


def open_worker(config: WorkerConfig, host: Host, engine: Engine, membership: Membership) -> "Worker":
    return Worker(
        engine,
        membership,
        config.drain_timeout_s,
        config.load_report_interval_s,
        files=membership.files,
        stall_timeout_s=answer_stall_s(config, engine),
        office=None if host.credentials is None else TicketOffice(host.plane),
        credentials=host.credentials,
        canary_interval_s=canary_interval_s(config),
        on_state=partial(host.readiness.on_state, worker_name(config)),
    )


def asking_peers(engine: Engine, plane: PlaneClient) -> Engine:
    """Return the engine. If it pulls KV itself, it can ask peers on the request plane: do they live, what do they
    offer?"""
    if isinstance(engine, PullsKv):
        engine.peer_answers = partial(answers, plane)
    if isinstance(engine, SharesPrefixes):
        engine.ask_prefix = asking(plane, LEASE_S)
    return engine


async def answers(plane: PlaneClient, address: str, timeout_s: float) -> bool:
    """Return whether a worker answers at an address."""
    try:
        await plane.ask(address, "identify", None, WorkerIdentity, timeout_s)
    except MeshError:
        return False
    return True


def open_server(config: WorkerConfig, worker: "Worker", host: Host, membership: Membership) -> PlaneServer:
    return PlaneServer(
        worker.handlers(),
        max_calls=config.max_calls,
        always=FREES,
        standing={**standing_calls(host.discovery), **EventKeys(host.door, membership).handlers()},
        credentials=host.credentials,
    )


def answer_stall_s(config: WorkerConfig, engine: Engine) -> float:
    """Return how long all answers may stand still. An engine whose steps are watched needs no such limit."""
    if isinstance(engine, Pushing):
        return 0.0
    return ANSWER_STALL_S if config.stall_timeout_s is None else config.stall_timeout_s


def canary_interval_s(config: WorkerConfig) -> float:
    """Return after how long a quiet worker tries its engine. A server that we do not own may be paid for by token."""
    if config.canary_interval_s is not None:
        return config.canary_interval_s
    return 0.0 if config.engine == "attach" else CANARY_INTERVAL_S


async def until_stopped(stop: asyncio.Event, worker: "Worker") -> None:
    while not stop.is_set():
        worker.check_health()
        await worker.tell_tiers()
        await worker.tell_content()
        try:
            await asyncio.wait_for(stop.wait(), HEALTH_CHECK_S)
        except TimeoutError:
            continue


class Worker:
    """The calls a worker answers."""

    def __init__(
        self,
        engine: Engine,
        place: Place,
        drain_timeout_s: float = 0.0,
        load_report_interval_s: float = 0.0,
        files: OfferedFiles | None = None,
        stall_timeout_s: float = 0.0,
        office: TicketOffice | None = None,
        credentials: Credentials | None = None,
        canary_interval_s: float = 0.0,
        on_state: Callable[[str], object] = str,
    ) -> None:
        """Take `stall_timeout_s`: an engine none of whose answers advances for so long counts as hung. 0: never."""
        self._engine = engine
        self._answers = AnswerWatch(stall_timeout_s)
        self._office = office  # of a closed mesh: its tickets are sealed
        self._calls: dict[RequestId, asyncio.Task[Any]] = {}
        self._place = place
        self._pushing = engine if isinstance(engine, Pushing) else None
        self._timing = engine if isinstance(engine, KeepsTimes) else None
        self._ranks = engine.ranks if isinstance(engine, Ranked) else [engine]
        self.life = WorkerLife(engine, place, self._info, drain_timeout_s, on_state)
        self._content = engine.kv_content if isinstance(engine, KnowsContent) else KvContent
        self.canary = EngineCanary(engine, canary_interval_s)
        self._controls = WorkerControls(engine, place, self.life, self._info, self.canary.quiet_s, self._check_engine)
        self.load_reports = LoadReports(self._ranks, load_report_interval_s)
        self.info: EngineInfo | None = None
        self._card_tiers = CardTiers()
        self._files = files or OfferedFiles()
        self._probing = PeerProbing(probe_transfer, credentials)
        self._probe_offers = ProbeOffers()
        self._prefix_offers = PrefixOffers(engine)

    def check_health(self) -> None:
        """Raise EngineError if this worker can serve no more."""
        self._check_engine()
        now_s, requests = time.monotonic(), len(self.life.requests)
        info = self.info if self._place.states.engine_answers else None  # a quiet engine that sleeps is let sleep
        if what := self._answers.hangs(requests, now_s) or self.canary.look(requests, now_s, info):
            raise EngineError(f"the engine of {self._place.worker_id} hangs: {what}")

    def _check_engine(self) -> None:
        self._engine.check_health()
        self.life.check_health()

    def observe(self, name: str, model: str, cleanup: AsyncExitStack) -> None:
        """Let Prometheus read the load until `cleanup` is closed."""
        place, engine, answers = self._place, self._engine, self._answers
        watch_load(
            name,
            lambda: (model, place.role.value),
            engine.load,
            answers.age_s,
            lambda: place.states.takes_requests,
        )
        cleanup.callback(forget_load, name)

    def handlers(self) -> dict[str, Handler]:
        return {
            "generate": self.generate,
            "embed": self.embed,
            "release": self.release,
            "redeem": self.redeem,
            "identify": self.identify,
            "model_file": self._files.answer,
            "kv_snapshot": self.kv_snapshot,
            "kv_digest": self.kv_digest,
            "control": self.control,
            "load": self.load_reports.answer,
            "probe_offer": self._probe_offers.answer,
            "offer_prefix": self.offer_prefix,
            **self._probing.handlers(),
        }

    async def generate(self, call: Call) -> None:
        came = time.monotonic()
        request = decode(call.body, GenerateRequest)
        await self._end_earlier(request.request_id)
        with (
            RequestContext(request.request_id, request.traceparent, request.tracestate),
            counted(self.life.requests, self._calls, request.request_id),
        ):
            self._check_is_meant(request.worker_id)
            self._check_roles(request)
            check_card(request.content, self._content(), request.lora)
            if self._office is not None:
                if request.offer_kv:
                    await self._answer_sealed(call, request, self._office)
                    return
                request = await self._office.opened(request)
            pushing, content = self._pushing, self._content().of(request.lora)
            answer = self._engine.generate(request) if pushing is None else pushing.push(request, call.offer)
            spent = SpentTime(request, came, self._timing) if request.traceparent else None
            async with aclosing(answer) as deltas:
                async for delta in deltas:
                    self._answers.note()
                    if delta.ticket is not None:
                        delta = with_ticket_content(delta, content, self._content().of(request.lora))
                    await call.send(delta if spent is None else spent.told(delta))

    async def _answer_sealed(self, call: Call, request: GenerateRequest, office: TicketOffice) -> None:
        """Answer a prefill leg of a closed mesh."""
        spent = SpentTime(request, time.monotonic(), self._timing) if request.traceparent else None
        content = self._content().of(request.lora)
        async with aclosing(self._engine.generate(request)) as deltas:
            async for each in deltas:
                self._answers.note()
                delta = with_ticket_content(each, content, self._content().of(request.lora))
                timed = delta if spent is None else spent.told(delta)
                await call.send(office.sealed_in(timed, request.kv_for, call.caller))

    async def embed(self, call: Call) -> None:
        request = decode(call.body, EmbedRequest)
        await self._end_earlier(request.request_id)
        with (
            RequestContext(request.request_id, request.traceparent, request.tracestate),
            counted(self.life.requests, self._calls, request.request_id),
        ):
            self._check_is_meant(request.worker_id)
            self._check_model(request.model)
            vector = await self._engine.embed(request)
            self._answers.note()
            await call.send(vector)

    async def _end_earlier(self, request_id: RequestId) -> None:
        """End an earlier call for the same request, if there is one.

        A caller that has lost this worker and found it again asks once more, perhaps before the loss is seen here.
        """
        while (earlier := self._calls.get(request_id)) is not None:
            earlier.cancel()
            await asyncio.wait([earlier])

    async def release(self, call: Call) -> None:
        offer = decode(call.body, ReleaseOffer)
        if self._office is None:
            self._engine.release(offer.offer_id, offer.nonce)
        elif (ticket := self._office.sealed.release(offer.secret, call.caller)) is not None:
            self._engine.release(ticket.offer_id, ticket.nonce)

    async def redeem(self, call: Call) -> None:
        if self._office is None:
            raise InvalidRequestError(
                "this worker seals no tickets", hint="start all services with --mesh-tls, or none"
            )
        secret = decode(call.body, RedeemTicket).secret
        await call.send(OpenedTicket(ticket=self._office.sealed.redeem(secret, call.caller)))

    async def offer_prefix(self, call: Call) -> None:
        asked = decode(call.body, OfferPrefix)
        self._check_is_meant(WorkerId(asked.worker_id))
        self._check_model(asked.model)
        await self._prefix_offers.answer(call, asked)

    async def kv_snapshot(self, call: Call) -> None:
        """Send one message per part, all with one `seq`: the parts are cut before anything else can be published."""
        rank = self._rank_asked_for(call)
        events = self._ranks[rank].kv_snapshot()
        seq, ts = self._place.publishers[rank].last_seq, time.time()
        payloads = await asyncio.to_thread(lambda: [encode_payload(part, ts, rank) for part in in_parts(events)])
        for payload in payloads:
            await call.send(KvSnapshot(seq=seq, payload=payload))

    async def identify(self, call: Call) -> None:
        await call.send(WorkerIdentity(worker_id=self._place.worker_id))

    async def kv_digest(self, call: Call) -> None:
        """Send the digest of exactly what was published up to `seq`: nothing is published between these two lines."""
        rank = self._rank_asked_for(call)
        digest = self._ranks[rank].kv_digest()
        seq = self._place.publishers[rank].last_seq
        await call.send(KvDigest(seq=seq, blocks=digest.blocks, value=digest.value))

    async def control(self, call: Call) -> None:
        """Do what an operator asks. Adapters that came or went are told to routers."""
        request = decode(call.body, Control)
        info = self._info()
        reply = await self._controls.carry_out(request)
        if request.action is not ControlAction.STATUS:
            log.info("control", extra={"action": request.action.value, "detail": reply.detail})
        if request.action is not ControlAction.SET_ROLE and reply.loras != info.loras:
            self.info = replace(info, loras=reply.loras)
            await self._place.join(self.info)
        await call.send(reply)

    async def tell_tiers(self) -> None:
        """Report on the card how fast the tiers of the cache are, where that has changed."""
        if not isinstance(self._engine, ReportsTiers) or not self._place.states.takes_requests:
            return
        info = self._card_tiers.due(self._info(), self._engine.tier_report(), time.monotonic())
        if info is not None:
            self.info = info
            await self._place.join(info)

    async def tell_content(self) -> None:
        """Report on the card what the KV was computed with, once that is known or another."""
        content = self._content()
        if self._place.states.has_card and content != self._place.content:
            self.info = with_content(self._info(), content)
            await self._place.join(self.info)

    def _info(self) -> EngineInfo:
        if self.info is None:
            raise DrainingError("this worker is still starting")
        return self.info

    def _rank_asked_for(self, call: Call) -> int:
        rank = 0 if call.body == _NONE else decode(call.body, KvRank).dp_rank
        if not 0 <= rank < len(self._ranks):
            raise InvalidRequestError(f"there is no rank {rank} here", hint=f"there are {len(self._ranks)}, from 0")
        return rank

    def _check_is_meant(self, worker_id: WorkerId) -> None:
        """Raise DrainingError for a call that means a worker that was at this address before."""
        if worker_id and worker_id != self._place.worker_id:
            raise DrainingError(f"worker {worker_id} has moved or ended; here is {self._place.worker_id} now")

    def _check_model(self, model: str) -> None:
        info = self._info()
        if (refusal := self._place.states.refusal()) is not None:
            raise refusal
        if model != info.model:
            raise InvalidRequestError(f"model {model!r} is not served here", hint="route by the worker's card")

    def _check_roles(self, request: GenerateRequest) -> None:
        self._check_model(request.model)
        role = self._place.role
        if role is not (Role.DECODE if request.offer_kv else Role.PREFILL):
            return
        if self._place.states.turns:  # the caller has not heard of the change yet
            raise DrainingError(f"this worker has become {role.noun}")
        if role is Role.DECODE:
            raise InvalidRequestError("a decode worker offers no KV", hint="send prefill legs to prefill workers")
        raise InvalidRequestError("a prefill worker only prefills", hint="send the request to a decode worker")


_NONE = encode(None)


@contextmanager
def counted(
    running: set[asyncio.Task[Any]], calls: dict[RequestId, asyncio.Task[Any]], request_id: RequestId
) -> Iterator[None]:
    """Count one request, however it ends. Until then its task is among those `running`, and in `calls` under its id."""
    outcome = "cancelled"
    task = asyncio.current_task()
    assert task is not None
    running.add(task)
    calls[request_id] = task
    try:
        yield
        outcome = "ok"
    except MeshError as error:
        outcome = error.code
        if isinstance(error, EngineError):
            log.error("request failed: %s", error)
        raise
    except Exception:
        outcome = "internal"
        raise
    finally:
        running.discard(task)
        del calls[request_id]
        REQUESTS.labels(outcome).inc()
