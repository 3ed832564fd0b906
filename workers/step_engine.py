"""The engine of our own: drives scheduler, executor and KV transfer, one step after the other.

All state lives on the event loop. `Executor` calls run in a thread, one at a time; those of an executor with a pace of
its own (the mock's) on the loop too. Pulls and loads begin and get their blocks during steps too, but not after a
request of the step was aborted: what it held may be written to until the step has ended (`Scheduler.plan_moves`).
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from kvmesh.kvcache.memory import KvRegion
from kvmesh.kvcache.pool import BlockPool
from kvmesh.kvcache.tiers.peers import PeerPrefixes
from kvmesh.kvcache.tiers.whole import WholeCache
from kvmesh.kvcache.transfer.backend import TransferBackend
from kvmesh.protocol.errors import (
    ConfigError,
    EngineError,
    InvalidRequestError,
    MeshError,
    OverloadedError,
    UnreachableError,
    kind_of,
)
from kvmesh.protocol.events import Digest, KvEvent
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.messages import (
    Delta,
    Embedding,
    EmbedRequest,
    Feature,
    GenerateRequest,
    OfferedPrefix,
    OfferPrefix,
    SamplingParams,
    Ticket,
)
from kvmesh.protocol.tiers import Tier
from kvmesh.workers.checks import check_embedding, check_generation
from kvmesh.workers.disk_tier import open_disk
from kvmesh.workers.durable_tier import OpenedTier
from kvmesh.workers.engine import AskPrefix, EngineInfo, EngineLoad, EngineReport, PeerAnswers
from kvmesh.workers.executor import Executor, ModelInfo, Pace, Result, Row
from kvmesh.workers.guides import Guides, Matcher, follow_guides
from kvmesh.workers.metrics import HESITATIONS, STEP_SECONDS, STEP_TOKENS
from kvmesh.workers.peer_pulls import fetcher_of
from kvmesh.workers.pinned_offers import PinnedOffers
from kvmesh.workers.pulls import Pulls
from kvmesh.workers.scheduler import Limits, Output, Scheduler, Step
from kvmesh.workers.shared_tier import FollowedStorage, open_shared
from kvmesh.workers.stage_marks import StageMarks
from kvmesh.workers.stall import StepWatch
from kvmesh.workers.step_content import StepContent
from kvmesh.workers.tier_copies import TierCopies
from kvmesh.workers.tiers import (
    NO_TIERS,
    OpenTiers,
    TierReport,
    TierSettings,
    check_reset,
    loads_of,
    note_prompts,
    open_tiers,
    report_of,
)

log = logging.getLogger(__name__)

LOAD_END_S = 2.0  # for a start that was given up: a model may take minutes to load
ENGINE_THREAD = "engine"  # its threads have names that begin so
EVENTS_EVERY_S = 0.05  # for blocks that running answers fill: nobody asks for them before the answers end


@dataclass(frozen=True, slots=True)
class StepEngineConfig:
    model: str
    model_path: str
    num_blocks: int
    max_num_seqs: int
    max_step_tokens: int
    offer_lease_s: float  # a KV offer that nobody fetched or released by then is unpinned
    pull_timeout_s: float
    stall_timeout_s: float = 0.0  # of a step; 0: it may take for ever
    tiers: TierSettings = NO_TIERS
    shares_prefixes: bool = False  # pulls prefixes from peers, and offers them its own
    has_weights: bool = True  # in the model's folder; else KV depends on its configuration alone


class _Preparing:
    """Does in the engine's thread what belongs to the start, and what only its own end stops."""

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self._thread = thread
        self._work: Future[Any] | None = None

    async def do(self, work: Callable[..., Any], *arguments: Any) -> Any:
        self._work = self._thread.submit(work, *arguments)
        return await asyncio.wrap_future(self._work)

    async def has_ended(self) -> bool:
        """Return whether nothing is being done any more, or soon."""
        if self._work is None or self._work.done():
            return True
        await asyncio.wait([asyncio.wrap_future(self._work)], timeout=LOAD_END_S)
        return self._work.done()


class StepEngine:
    """Implements kvmesh.workers.engine.Engine over any Executor."""

    def __init__(self, executor: Executor, transfer: TransferBackend | None, config: StepEngineConfig) -> None:
        self._executor = executor
        self._transfer = transfer
        self._config = config
        self.peer_answers: PeerAnswers | None = None
        self.ask_prefix: AskPrefix | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=ENGINE_THREAD)
        self._preparing = _Preparing(self._thread)
        self._wake = asyncio.Event()
        self._watch = StepWatch(config.stall_timeout_s)
        self._outputs: dict[RequestId, _OutputQueue] = {}
        self._vectors: dict[RequestId, asyncio.Future[Embedding]] = {}
        self._marks = StageMarks()
        self.times = self._marks.times
        self._offers: PinnedOffers | None = None
        if transfer is not None:
            self._offers = PinnedOffers(transfer, config.offer_lease_s, self._wake.set)
        self._listeners: list[Callable[[Sequence[KvEvent]], object]] = []
        self._load_listeners: list[Callable[[], object]] = []
        self._published_s = 0.0
        self._events_planned = False
        self._loop_task: asyncio.Task[None] | None = None
        self._failure: EngineError | None = None
        self._stopped = False
        self._hesitates = False  # in a step that takes far longer than it should
        self._is_stuck = False  # in a step that does not end
        self._worker_id = WorkerId("")
        self._info: EngineInfo | None = None
        self._guides: Guides | None = None
        self._pace: Pace | None = None
        self._copies: TierCopies | None = None
        self._tiers: OpenTiers | None = None
        self._shared: FollowedStorage | None = None
        self.tier_report: Callable[[], TierReport] = TierReport
        self._content = StepContent(
            config.model,
            config.model_path,
            has_weights=config.has_weights,
            shares_prefixes=config.shares_prefixes and transfer is not None,
        )
        self.kv_content = self._content.kv_content

    async def start(self, worker_id: WorkerId, address: str) -> EngineInfo:
        self._worker_id = worker_id
        await self._preparing.do(self._content.begin)
        model: ModelInfo = await self._preparing.do(self._executor.load)
        await asyncio.sleep(model.start_s)
        self._guides, self._pace = model.guides, model.pace
        num_blocks = self._config.num_blocks
        with _enough_memory(num_blocks, model.layout.block_bytes) as size_bytes:
            memory = None if self._transfer is None else self._transfer.allocate(size_bytes)
            region = await self._preparing.do(self._executor.allocate_kv, num_blocks, memory)
        await self._preparing.do(self._warm_up, model)
        await self._preparing.do(self._content.loaded, model)
        if self._transfer is not None:
            await self._transfer.register(region, worker_id, address)
        limits = Limits(self._config.max_num_seqs, self._config.max_step_tokens, model.context_tokens, model.vocab_size)
        self._pool, self._scheduler, tiers = await _open_cache(
            self._config, model, region, limits, self._executor, self._content, has_peers=self._transfer is not None
        )
        self._cache = WholeCache(self._pool, self._scheduler.tiers)
        self._pulls = Pulls(
            self._transfer,
            self._scheduler,
            self._config.pull_timeout_s,
            self._wake.set,
            None if model.pace is None else model.pace.pull_s,
            self.peer_answers,
            fetcher_of(self._transfer, self._scheduler.peers, self.ask_prefix),
            self.kv_content,
        )
        if tiers is not None:
            copy_s = None if model.pace is None else model.pace.tier_s
            self._copies = TierCopies(
                tiers, self._scheduler, self._config.pull_timeout_s, self._wake.set, self._plan_events, copy_s
            )
            self._tiers = tiers
            self._shared = FollowedStorage.of(tiers.stack, tiers.stores, self._config.pull_timeout_s, self._plan_events)
        self.tier_report = partial(report_of, self._scheduler.tiers, self._scheduler.peers)
        if model.pace is not None:
            self._thread.shutdown(wait=False)  # its work is done
        self._loop_task = asyncio.create_task(self._run(), name="engine steps")
        self._info = _info_of(self._config, model, self._transfer)
        self._info = replace(self._info, tiers=self.tier_report().tiers, kv_print=self.kv_content().kv_print)
        return self._info

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        return self.push(request, _takes_nothing)

    async def push(self, request: GenerateRequest, take: Callable[[Delta], bool]) -> AsyncGenerator[Delta, None]:
        check_generation(request, self._ready())
        if request.offer_kv and self._transfer is None:
            raise InvalidRequestError("this worker has no KV transfer", hint="start it with --kv-transfer")
        matcher = await _add(request, self._guides, self._scheduler, self.check_health)
        if request.traceparent:
            self._marks.add(request.request_id)
        queue = self._outputs[request.request_id] = _OutputQueue(take)
        self._wake.set()
        undelivered: Ticket | None = None
        try:
            # What comes from elsewhere need not wait for the end of the step.
            _begin(self._scheduler.plan_moves(), self._pulls, self._copies, self._marks)
            while True:
                delta = await queue.take()
                undelivered = delta.ticket
                yield delta
                undelivered = None
                if delta.finish_reason is not None or delta.ticket is not None:
                    return
        finally:
            del self._outputs[request.request_id]
            self._marks.forget(request.request_id)
            if (late := queue.ticket() or undelivered) is not None:
                self.release(late.offer_id, late.nonce)
            self._abort(request.request_id)
            if matcher is not None:
                matcher.close()

    async def embed(self, request: EmbedRequest) -> Embedding:
        check_embedding(request, self._ready())
        self._scheduler.add_embedding(request)
        vector: asyncio.Future[Embedding] = asyncio.get_running_loop().create_future()
        self._vectors[request.request_id] = vector
        self._wake.set()
        try:
            return await vector
        finally:
            del self._vectors[request.request_id]
            self._abort(request.request_id)

    def release(self, offer_id: int, nonce: int) -> None:
        if self._offers is not None:
            self._offers.release(offer_id, nonce)

    def offer_prefix(self, asked: OfferPrefix) -> OfferedPrefix:
        self._ready()
        peers = self._scheduler.peers
        if peers is None or self._offers is None:
            raise InvalidRequestError("this worker offers no prefixes", hint="start it with --kv-peers true")
        return self._offers.open_prefix(peers, asked)

    def on_kv_events(self, listener: Callable[[Sequence[KvEvent]], object]) -> None:
        """Tell the listener first what is there: a disk has blocks from the start."""
        if self._info is not None:
            self._publish_events()
            if events := self._cache.snapshot():
                listener(events)
        self._listeners.append(listener)

    def kv_snapshot(self) -> list[KvEvent]:
        self._publish_events()  # pending events must not be published after the snapshot that contains them
        return self._cache.snapshot()

    def kv_digest(self) -> Digest:
        self._publish_events()
        return self._cache.digest

    def rename(self, worker_id: WorkerId) -> None:
        self._worker_id = worker_id

    async def reset_cache(self, tiers: Collection[Tier] | None = None) -> None:
        """Forget the cached blocks of some tiers, or of all.

        A block in use cannot be forgotten: what is computed next follows on from it.
        """
        wanted = tuple(Tier) if tiers is None else tiers
        async with AsyncExitStack() as still:
            if self._shared is not None and Tier.SHARED in wanted:
                await still.enter_async_context(self._shared.still())
            if Tier.DEVICE in wanted and (held := self._pool.held_blocks):
                raise InvalidRequestError(
                    f"{held} blocks of the cache are in use", hint="drain the worker, or try again"
                )
            if tiers is not None:
                check_reset(tiers, self._scheduler.tiers)
            self._publish_events()
            self._cache.clear(wanted)
            self._publish_events()
            if self._copies is not None:
                await self._copies.clear(wanted)

    def load(self) -> EngineLoad:
        return EngineLoad(
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            used_blocks=self._pool.held_blocks,
            cached_blocks=self._pool.cached_blocks,
            total_blocks=self._pool.num_blocks,
            offers=0 if self._offers is None else len(self._offers),
            queued_tokens=self._scheduler.queued_tokens,
            stalled_s=self._watch.age_s(time.monotonic()),
            tiers=() if self._tiers is None else loads_of(self._tiers),
        )

    def on_load_change(self, listener: Callable[[], object]) -> None:
        self._load_listeners.append(listener)

    def report(self) -> EngineReport:
        """Report the prompts alone: all requests of this engine come from the mesh."""
        return EngineReport(queued_tokens=0 if self._info is None else self._scheduler.certain_tokens)

    def check_health(self) -> None:
        if self._failure is None and (what := self._watch.hangs(time.monotonic())):
            self._is_stuck = True
            self._fail(EngineError(f"the engine of {self._worker_id} hangs: {what}"))
        if self._failure is not None:
            raise self._failure
        if self._loop_task is None:
            raise EngineError("the engine has not started")
        if not self._hesitates and self._watch.hesitates():
            self._hesitates = True
            HESITATIONS.inc()
            log.warning("a step takes far longer than those before: its %d answers go elsewhere", len(self._outputs))
            self._fail_callers(hesitation(self._worker_id))

    async def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        self._content.close()
        if self._failure is None:
            self._fail(EngineError(f"{self._worker_id} is stopping"))
        if self._loop_task is not None:
            self._loop_task.cancel()
            with suppress(asyncio.CancelledError):
                await self._loop_task
            await self._pulls.close()
            if self._shared is not None:
                await self._shared.close()
            if self._copies is not None and not await self._copies.close():
                return  # a copy may still use the memory of the transfer: it ends with the process
        if self._offers is not None:
            self._offers.close()
        if self._is_stuck and self._pace is None:
            return  # its thread may be in a step that never ends, and writes to the memory of the transfer
        if not await self._preparing.has_ended():
            self._thread.shutdown(wait=False)
            return  # as above: the process ends without its thread
        await asyncio.to_thread(self._thread.shutdown)  # a start that was given up may still use the transfer's memory
        if self._transfer is not None:
            await self._transfer.close()
        if self._guides is not None:
            self._guides.close()
        self._executor.close()

    def _ready(self) -> EngineInfo:
        """Raises what keeps it from taking another request."""
        self.check_health()
        assert self._info is not None, "a healthy engine has started"
        if self._hesitates:
            raise hesitation(self._worker_id)
        if self._scheduler.is_full():
            raise OverloadedError(f"{self._scheduler.num_waiting} requests wait on {self._worker_id} already")
        return self._info

    def _warm_up(self, model: ModelInfo) -> None:
        """Two steps on blocks that nobody has yet: what an executor does only once is not paid by a request."""
        size = model.layout.block_size
        prompt = [0] * min(size, self._config.max_step_tokens, model.context_tokens - 1)
        for tokens, start in ((prompt, 0), ([0], len(prompt))):
            output = [0] * (start > 0)
            row = Row("warm-up", tokens, start, [0, 1], True, SamplingParams(temperature=0), prompt, output)
            self._watch.begin(len(tokens), time.monotonic())
            self._executor.execute([row])
            self._watch.end(time.monotonic())

    async def _run(self) -> None:
        """Step until cancelled. A failing executor ends the engine: its KV cache cannot be trusted any more."""
        try:
            while True:
                if self._guides is not None and self._guides.num_answers:
                    self._deliver(self._scheduler.complete_pending())
                step = self._scheduler.plan()
                _begin(step, self._pulls, self._copies, self._marks)
                if not step.rows:
                    if self._pace is not None:
                        self._pace.rest()
                    if self._copies is not None:
                        self._copies.pump()
                    self._wake.clear()
                    self._plan_events()
                    await self._wake.wait()
                    continue
                num_tokens = sum([len(row.token_ids) for row in step.rows])
                started = time.monotonic()
                self._watch.begin(num_tokens, started)
                results = await self._execute(step.rows)
                ended = time.monotonic()
                self._watch.end(ended)
                self._hesitates = False
                STEP_SECONDS.observe(ended - started)
                STEP_TOKENS.inc(num_tokens)
                if self._guides is not None and self._guides.num_answers:
                    await follow_guides(step.rows, results, self._wake.set)
                self._deliver(self._scheduler.complete(step, results), has_news=num_tokens > len(step.rows))
                note_prompts(self._scheduler, step.rows, ended - started)
                if self._copies is not None:
                    self._copies.pump()
        except Exception as error:
            log.exception("the engine failed")
            self._fail(EngineError(f"the engine of {self._worker_id} failed: {kind_of(error)}"))

    async def _execute(self, rows: Sequence[Row]) -> Sequence[Result]:
        if self._pace is not None:
            await self._pace.keep(rows)  # first: meanwhile the deltas of the step before are sent
            return self._executor.execute(rows)
        # Shielded: a step that has begun writes to the cache until it ends, whoever gives up on it.
        loop = asyncio.get_running_loop()
        return await asyncio.shield(loop.run_in_executor(self._thread, self._executor.execute, rows))

    def _deliver(self, outputs: Sequence[Output], *, has_news: bool = False) -> None:
        """Pass on what a step has added to the answers. `has_news`: it has computed parts of prompts, too."""
        has_prompts = has_news
        traced = self._marks.marks
        for output in outputs:
            if output.vector:
                vector = self._vectors.get(output.request_id)
                if vector is not None and not vector.done():  # done: its caller was just cancelled
                    vector.set_result(Embedding(vector=output.vector))
                continue
            queue = self._outputs.get(output.request_id)
            if output.failure is not None:
                if queue is not None:
                    queue.fail(output.failure)
                continue
            delta = self._offer(output) if output.handoff else output.delta
            if (report := self._pulls.take_report(output.request_id)) is not None:
                delta = msgspec.structs.replace(delta, pull=report)
            if traced and delta.cached_tokens is not None:
                self._marks.note_first(output.request_id)
            has_news |= delta.finish_reason is not None
            if queue is not None:
                queue.put(delta)
        if has_prompts:
            self._note_load_change()
        if has_news or time.monotonic() - self._published_s >= EVENTS_EVERY_S:
            self._plan_events()

    def _offer(self, output: Output) -> Delta:
        """A finished prefill leg: its blocks stay pinned for the decode worker, for as long as the lease."""
        assert self._offers is not None, "a request with offer_kv came to a worker without transfer"
        try:
            ticket = self._offers.open(output.handoff, output.num_tokens, self._pool.release)
        except MeshError as error:
            self._pool.release(output.handoff)
            if (queue := self._outputs.get(output.request_id)) is not None:
                queue.fail(error)
            return output.delta
        return msgspec.structs.replace(output.delta, ticket=ticket)

    def _abort(self, request_id: RequestId) -> None:
        self._scheduler.abort(request_id)
        self._pulls.abandon(request_id)
        if self._copies is not None:
            self._copies.abandon(request_id)
        self._note_load_change()
        self._wake.set()

    def _note_load_change(self) -> None:
        for listener in self._load_listeners:
            listener()

    def _fail(self, failure: EngineError) -> None:
        self._failure = failure
        self._fail_callers(failure)

    def _fail_callers(self, failure: MeshError) -> None:
        for queue in self._outputs.values():
            queue.fail(failure)
        for vector in self._vectors.values():
            if not vector.done():
                vector.set_exception(failure)

    def _plan_events(self) -> None:
        """Publish after the tokens of this step have been sent.

        Their callers take them in the next turn of the loop, and what a turn sends is written at its end.
        """
        if not self._events_planned:
            self._events_planned = True
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._publish_planned)

    def _publish_planned(self) -> None:
        self._events_planned = False
        if self._stopped:
            return
        try:
            self._publish_events()
        except Exception as error:  # nobody knows what was not told: the worker has to start again
            log.exception("KV events cannot be told")
            self._fail(EngineError(f"{self._worker_id} cannot tell its KV events: {type(error).__name__}: {error}"))

    def _publish_events(self) -> None:
        self._published_s = time.monotonic()
        if events := self._cache.take_events():
            for listener in self._listeners:
                listener(events)


def _info_of(config: StepEngineConfig, model: ModelInfo, transfer: TransferBackend | None) -> EngineInfo:
    return EngineInfo(
        model=config.model,
        model_path=config.model_path,
        block_size=model.layout.block_size,
        total_blocks=config.num_blocks,
        context_tokens=model.context_tokens,
        max_num_seqs=config.max_num_seqs,
        layout=model.layout,
        transfer="" if transfer is None else transfer.name,
        features=model.features if model.guides is None else (*model.features, Feature.GUIDED),
        loras=model.loras,
        roles=model.roles,
        capacity=model.capacity,
    )


async def _open_cache(
    config: StepEngineConfig,
    model: ModelInfo,
    region: KvRegion,
    limits: Limits,
    executor: Executor,
    content: StepContent,
    *,
    has_peers: bool,
) -> tuple[BlockPool, Scheduler, OpenTiers | None]:
    """Open the cache. Tiers that outlive a worker have to wait until its weights are known."""
    pool = BlockPool(config.num_blocks, model.layout.block_size)
    durable: list[OpenedTier] = []
    if config.tiers.disk is not None:
        durable.append(await open_disk(config.tiers.disk, config.model, await content.wait(), model.layout))
    if config.tiers.shared is not None:
        durable.append(await open_shared(config.tiers.shared, config.model, await content.wait(), model.layout))
    tiers = open_tiers(config.tiers, config.model, model.layout, region, pool, executor, durable)
    stack = None if tiers is None else tiers.stack
    peers = None
    if has_peers and config.shares_prefixes:
        compute = None if stack is None else stack.compute
        peers = PeerPrefixes(pool, content.of_peers, model.layout.block_bytes, compute)
    return pool, Scheduler(pool, limits, model.eos_token_ids, stack, peers), tiers


async def _add(
    request: GenerateRequest, guides: Guides | None, scheduler: Scheduler, check_health: Callable[[], None]
) -> Matcher | None:
    """Queue a request. Return the place of its answer in its guide, if it has one."""
    if request.guide is None or guides is None:
        scheduler.add(request)
        return None
    matcher = await guides.open(request.guide, request.generated, request.tenant)
    try:
        check_health()
        scheduler.add(request, matcher)
    except MeshError:
        matcher.close()
        raise
    return matcher


class _OutputQueue:
    """Deltas on their way to one consumer. A consumer that is behind gets them merged: bounded by the answer.

    One that waits is woken only for what `take` does not take.
    """

    def __init__(self, take: Callable[[Delta], bool]) -> None:
        self._offer = take
        self._delta: Delta | None = None
        self._failure: MeshError | None = None
        self._waiter: asyncio.Future[None] | None = None  # an Event would cost more than the rest of a token's way

    def put(self, delta: Delta) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():  # done: its consumer was just cancelled
            is_last = delta.finish_reason is not None or delta.ticket is not None
            if not is_last and self._offer(delta):
                return
        self._delta = delta if self._delta is None else _merged(self._delta, delta)
        self._notify()

    def fail(self, failure: MeshError) -> None:
        self._failure = failure
        self._notify()

    def ticket(self) -> Ticket | None:
        """Return the ticket of a delta that was never taken."""
        return None if self._delta is None else self._delta.ticket

    async def take(self) -> Delta:
        while (delta := self._delta) is None:
            if self._failure is not None:
                raise self._failure
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._delta = None
        return delta

    def _notify(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():  # done: its consumer was just cancelled
            waiter.set_result(None)


def hesitation(worker_id: WorkerId) -> UnreachableError:
    """Return an error after which a caller tries other workers, and this one again later."""
    return UnreachableError(f"the engine of {worker_id} makes no step", hint="see its log")


@contextmanager
def _enough_memory(num_blocks: int, block_bytes: int) -> Iterator[int]:
    """Give the size of the KV cache that is allocated within. Raise ConfigError if there is not so much memory."""
    try:
        yield num_blocks * block_bytes
    except (MemoryError, OverflowError, OSError) as error:
        raise ConfigError(
            f"there is no memory for {num_blocks} KV blocks of {block_bytes} bytes", hint="set fewer --num-blocks"
        ) from error


def _begin(step: Step, pulls: Pulls, copies: TierCopies | None, marks: StageMarks) -> None:
    """Start the pulls and loads of a step."""
    for pull in step.pulls:
        pulls.start(pull)
    for load in step.loads:
        assert copies is not None, "only tiers plan loads"
        copies.start(load)
    if marks.unscheduled:
        moved = [pull.sequence for pull in (*step.pulls, *step.loads)]
        marks.note_scheduled((*step.sequences, *moved))


def _takes_nothing(delta: Delta) -> bool:
    return False


def _merged(first: Delta, second: Delta) -> Delta:
    logprobs = (*(first.logprobs or ()), *(second.logprobs or ()))
    return Delta(
        token_ids=first.token_ids + second.token_ids,
        finish_reason=second.finish_reason,
        logprobs=logprobs or None,
        cached_tokens=second.cached_tokens if first.cached_tokens is None else first.cached_tokens,
        ticket=second.ticket,
        pull=first.pull or second.pull,
        stop_token=second.stop_token,
    )
