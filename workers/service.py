"""Run one worker: its engine, the calls it answers, its KV events and its place in the mesh."""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import replace

from kvevents.batches import in_parts
from kvevents.formats import encode_payload
from kvevents.transport import Publisher, open_publisher
from mesh.discovery import Registration, open_discovery
from mesh.lifecycle import settle, watch_parent
from mesh.plane.server import Call, Handler, PlaneServer
from mesh.telemetry import request_context, serve_metrics
from protocol.errors import DrainingError, EngineError, InvalidRequestError, MeshError
from protocol.ids import WorkerId, new_worker_id
from protocol.messages import (
    Control,
    EmbedRequest,
    GenerateRequest,
    KvDigest,
    KvSnapshot,
    ReleaseOffer,
    Role,
    WorkerCard,
    decode,
    encode,
)
from workers.backends import open_engine
from workers.config import WorkerConfig
from workers.engine import Controllable, Engine, EngineInfo
from workers.metrics import CACHED_BLOCKS, OFFERS, REQUESTS, RUNNING, USED_BLOCKS, WAITING

log = logging.getLogger(__name__)

HEALTH_CHECK_S = 1.0


async def serve(config: WorkerConfig, stop: asyncio.Event) -> None:
    """Work until `stop` is set, then leave the mesh and finish what is in flight.

    Raises EngineError if the engine dies: a supervisor starts the worker anew.
    """
    watch_parent(stop)
    name = config.name or config.role.value
    worker_id = new_worker_id(name)
    async with AsyncExitStack() as cleanup:
        metrics_url, close_metrics = serve_metrics(
            config.host, config.metrics_port, advertise_host=config.advertise_host
        )
        cleanup.push_async_callback(asyncio.to_thread, close_metrics)
        engine = open_engine(config)
        publisher = open_publisher(
            config.kv_events_transport,
            worker_id,
            bind=f"tcp://{config.host}:*",
            advertise_host=config.advertise_host,
            nats_url=config.nats_url,
        )
        cleanup.push_async_callback(publisher.close)
        worker = Worker(config.role, engine, publisher)
        server = PlaneServer(worker.handlers(), max_calls=config.max_calls, always={"release"})
        cleanup.push_async_callback(server.close)
        address = await server.start(config.host, config.port, advertise_host=config.advertise_host)
        cleanup.push_async_callback(engine.stop)
        info = await started(stop, engine, worker_id, address)
        if info is None:
            log.info("stopped before the engine was ready")
            return
        worker.info = info
        engine.on_kv_events(publisher.publish)
        observe_load(engine)
        discovery = open_discovery(config.discovery)
        cleanup.push_async_callback(discovery.close)

        async def register(info: EngineInfo) -> Registration:
            card = make_card(name, worker_id, config, info, address, publisher, metrics_url)
            return await discovery.put(f"workers/{worker_id}", encode(card))

        registration = await register(info) if info.serves else None
        worker.on_info = register
        settle()
        log.info("ready", extra={"worker": worker_id, "address": address, "model": info.model, "kv": info.transfer})
        await until_stopped(stop, engine)
        log.info("draining")
        if registration is not None:
            await registration.withdraw()
        deadline = asyncio.get_running_loop().time() + config.drain_timeout_s
        if cut_off := await server.drain(config.drain_timeout_s):
            log.warning("stopped with %d calls unanswered after %.1f s", cut_off, config.drain_timeout_s)
        await offers_taken(engine, deadline)


async def started(stop: asyncio.Event, engine: Engine, worker_id: WorkerId, address: str) -> EngineInfo | None:
    """The engine's start, given up when `stop` comes first; then None. `engine.stop` ends what had begun."""
    starting = asyncio.create_task(engine.start(worker_id, address), name="start the engine")
    stopping = asyncio.create_task(stop.wait(), name="wait for stop")
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return starting.result() if starting.done() else None
    finally:
        for task in (starting, stopping):
            task.cancel()
        await asyncio.gather(starting, stopping, return_exceptions=True)


async def until_stopped(stop: asyncio.Event, engine: Engine) -> None:
    while not stop.is_set():
        engine.check_health()
        try:
            await asyncio.wait_for(stop.wait(), HEALTH_CHECK_S)
        except TimeoutError:
            continue


async def offers_taken(engine: Engine, deadline: float) -> None:
    """A prefill worker that leaves while decode workers still fetch from it would make them compute again."""
    while engine.load().offers and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.02)  # once in the life of a worker: not worth an event in the seam


class Worker:
    """The calls a worker answers."""

    def __init__(self, role: Role, engine: Engine, publisher: Publisher) -> None:
        self._role = role
        self._engine = engine
        self._publisher = publisher
        self.info: EngineInfo | None = None
        self.on_info: Callable[[EngineInfo], Awaitable[object]] = _nobody_told

    def handlers(self) -> dict[str, Handler]:
        return {
            "generate": self.generate,
            "embed": self.embed,
            "release": self.release,
            "kv_snapshot": self.kv_snapshot,
            "kv_digest": self.kv_digest,
            "control": self.control,
        }

    async def generate(self, call: Call) -> None:
        request = decode(call.body, GenerateRequest)
        with request_context(request.request_id), counted():
            self._check_roles(request)
            async with aclosing(self._engine.generate(request)) as deltas:
                async for delta in deltas:
                    await call.send(delta)

    async def embed(self, call: Call) -> None:
        request = decode(call.body, EmbedRequest)
        with request_context(request.request_id), counted():
            self._check_model(request.model)
            await call.send(await self._engine.embed(request))

    async def release(self, call: Call) -> None:
        offer = decode(call.body, ReleaseOffer)
        self._engine.release(offer.offer_id, offer.nonce)

    async def kv_snapshot(self, call: Call) -> None:
        """One message per part; `seq` is the same in all: parts are cut before anything else can be published."""
        events = self._engine.kv_snapshot()
        seq, ts = self._publisher.last_seq, time.time()
        payloads = await asyncio.to_thread(lambda: [encode_payload(part, ts, 0) for part in in_parts(events)])
        for payload in payloads:
            await call.send(KvSnapshot(seq=seq, payload=payload))

    async def kv_digest(self, call: Call) -> None:
        """Of exactly what was published up to `seq`: between these two lines nothing can be."""
        digest = self._engine.kv_digest()
        await call.send(KvDigest(seq=self._publisher.last_seq, blocks=digest.blocks, value=digest.value))

    async def control(self, call: Call) -> None:
        request = decode(call.body, Control)
        if self.info is None:
            raise DrainingError("this worker is still starting")
        if not isinstance(self._engine, Controllable):
            raise InvalidRequestError(f"this worker's engine cannot {request.action.value}", hint="vLLM's can")
        reply = await self._engine.control(request)
        log.info("control", extra={"action": request.action.value, "detail": reply.detail})
        if reply.loras != self.info.loras:
            self.info = replace(self.info, loras=reply.loras)
            await self.on_info(self.info)
        await call.send(reply)

    def _check_model(self, model: str) -> None:
        if self.info is None:
            raise DrainingError("this worker is still starting")
        if model != self.info.model:
            raise InvalidRequestError(f"model {model!r} is not served here", hint="route by the worker's card")

    def _check_roles(self, request: GenerateRequest) -> None:
        self._check_model(request.model)
        if request.offer_kv and self._role is Role.DECODE:
            raise InvalidRequestError("a decode worker offers no KV", hint="send prefill legs to prefill workers")
        if self._role is Role.PREFILL and not request.offer_kv:
            raise InvalidRequestError("a prefill worker only prefills", hint="send the request to a decode worker")


async def _nobody_told(info: EngineInfo) -> None:
    """Before the worker has joined the mesh."""


@contextmanager
def counted() -> Iterator[None]:
    """One request ends here, in whatever way."""
    outcome = "cancelled"
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
        REQUESTS.labels(outcome).inc()


def make_card(
    name: str,
    worker_id: WorkerId,
    config: WorkerConfig,
    info: EngineInfo,
    address: str,
    publisher: Publisher,
    metrics_url: str,
) -> WorkerCard:
    return WorkerCard(
        worker_id=worker_id,
        name=name,
        role=config.role,
        model=info.model,
        model_path=info.model_path,
        address=address,
        block_size=info.block_size,
        total_blocks=info.total_blocks,
        context_tokens=info.context_tokens,
        max_num_seqs=info.max_num_seqs,
        kv_events=publisher.endpoint if info.tells_events else "",
        kv_replay=publisher.replay_endpoint if info.tells_events else "",
        transfer=info.transfer,
        dp_size=info.dp_size,
        pid=os.getpid(),
        metrics_url=metrics_url,
        features=info.features,
        loras=info.loras,
        tool_parser=config.tool_parser,
        reasoning_parser=config.reasoning_parser,
    )


def observe_load(engine: Engine) -> None:
    """The gauges read the engine when they are scraped, and cost nothing otherwise."""
    RUNNING.set_function(lambda: engine.load().running)
    WAITING.set_function(lambda: engine.load().waiting)
    USED_BLOCKS.set_function(lambda: engine.load().used_blocks)
    CACHED_BLOCKS.set_function(lambda: engine.load().cached_blocks)
    OFFERS.set_function(lambda: engine.load().offers)
