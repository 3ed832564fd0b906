"""Run vLLM as an engine of the mesh: its life, its requests, the KV that it offers and pulls, and control calls."""

import asyncio
import json
import logging
import os
import shutil
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from kvmesh.mesh.short_folder import short_folder
from kvmesh.protocol.errors import ConfigError, DrainingError, EngineError, InvalidRequestError, TransferError
from kvmesh.protocol.events import Digest, KvEvent
from kvmesh.protocol.ids import RequestId, WorkerId, new_generation
from kvmesh.protocol.messages import (
    NO_LAYOUT,
    Control,
    ControlAction,
    ControlReply,
    Delta,
    Embedding,
    EmbedRequest,
    Feature,
    GenerateRequest,
    PullReport,
    SamplingParams,
    StopConditions,
    Ticket,
    pack_tokens,
    unpack_tokens,
)
from kvmesh.workers.checks import check_embedding, check_generation
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.engine import Caching, EngineInfo, EngineLoad
from kvmesh.workers.engines.external.cache import RankCache
from kvmesh.workers.engines.external.content import EngineContent
from kvmesh.workers.engines.external.control import argument
from kvmesh.workers.engines.external.life import EngineLife
from kvmesh.workers.engines.external.ports import free_ports
from kvmesh.workers.engines.vllm.adapters import Adapters
from kvmesh.workers.engines.vllm.arguments import Adapter, LaunchPlan, Surroundings, parse_adapters, plan_start
from kvmesh.workers.engines.vllm.driver import Driver, LoadedAdapter, VllmFacts, open_driver
from kvmesh.workers.engines.vllm.events import EventFeed
from kvmesh.workers.engines.vllm.extension import EXTENSION
from kvmesh.workers.engines.vllm.patience import within
from kvmesh.workers.engines.vllm.starting import Starting
from kvmesh.workers.engines.vllm.transfer import TRANSFER, keeps_kv
from kvmesh.workers.engines.vllm.translate import (
    DivergedError,
    PullFailedError,
    VllmAnswer,
    VllmQuestion,
    VllmStep,
    offering,
    pulling,
    unpulled,
    whole,
    write_ticket,
)
from kvmesh.workers.loaded_content import KvContent
from kvmesh.workers.metrics import PULL_BYTES, PULL_SECONDS, PULLS
from kvmesh.workers.weights_hash import WeightsHasher, cache_folder, content_files, files_digest

log = logging.getLogger(__name__)

OpenDriver = Callable[[Sequence[str], Mapping[str, str]], Driver]


@dataclass(frozen=True, slots=True)
class _StandingOffer:
    nonce: int
    expiry: asyncio.TimerHandle


class VllmEngine:
    """Implements kvmesh.workers.engine.Engine, Ranked and Controllable. A request says which rank it is for."""

    def __init__(self, config: WorkerConfig, name: str, open_vllm: OpenDriver = open_driver) -> None:
        """Raises ConfigError if the settings contradict each other."""
        self._name = name
        self._config = config
        self._model_path = str(Path(config.model_path).resolve())
        self._open_vllm = open_vllm
        self._folder = short_folder("kvmesh-vllm-", "events")
        try:
            self._first_adapters = [_read_adapter(name, path) for name, path in parse_adapters(config.loras, name)]
            self._plan = self._plan_start()
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._starting: Starting[Driver] | None = None
        self._driver: Driver | None = None
        self._caches = [RankCache() for _ in range(config.dp_size)]
        self._feed: EventFeed | None = None
        self._offers: dict[int, _StandingOffer] = {}
        self._next_offer = 1
        self._adapters: Adapters | None = None
        self._content = EngineContent(config.model_path, has_weights=not config.random_weights)
        self._slept_level = 0  # 0: it is awake
        self._life = EngineLife()

    # --- its life -------------------------------------------------------------------------------------

    async def start(self, worker_id: WorkerId, address: str) -> EngineInfo:
        self._life.begin(worker_id, address)
        await self._content.begin()
        self._starting = Starting(lambda: self._open_vllm(self._plan.flags, self._plan.environ))
        driver = self._driver = await self._starting.result()
        await driver.prepare()
        facts = driver.facts
        await self._content.loaded(facts.kv_settings)
        self._life.uses_xgrammar("vllm" if facts.uses_xgrammar else "")
        for cache in self._caches:
            cache.begin(facts.block_size)
        if self._plan.tells_events:
            self._feed = EventFeed(self._caches, driver.reset_prefix_cache)
            self._feed.follow(worker_id, driver.event_endpoints())
        adapters = self._adapters = Adapters(self._name, driver, self._caches, self._content)
        for adapter in self._first_adapters:
            await adapters.load(adapter.name, adapter.path)
        self._life.info = info = EngineInfo(
            model=self._name,
            model_path=self._model_path,
            block_size=facts.block_size,
            total_blocks=facts.total_blocks,
            context_tokens=facts.context_tokens,
            max_num_seqs=facts.max_num_seqs,
            layout=NO_LAYOUT,
            transfer=self._plan.transfer,
            features=_features(facts),
            loras=adapters.names,
            dp_size=self._config.dp_size,
            tells_events=self._plan.tells_events,
        )
        for rank in range(self._config.dp_size):
            await self._warm_up(rank)
        return info

    async def _warm_up(self, rank: int) -> None:
        """Run one small request, so that no client waits while vLLM compiles."""
        driver, prompt = self._started, [*range(1, 9)]
        if "generate" in driver.facts.tasks:
            request = GenerateRequest(
                request_id=RequestId("warm-up"),
                model=self._name,
                prompt=pack_tokens(prompt),
                sampling=SamplingParams(temperature=0, top_logprobs=1),
                stop=StopConditions(max_tokens=2, ignore_eos=True),
            )
            question = whole(request, driver.facts.context_tokens)
            async with aclosing(driver.generate(question, request.request_id, None, None, rank)) as steps:
                async for _ in steps:
                    pass
        elif "embed" in driver.facts.tasks:
            await driver.embed(prompt, "warm-up", None, None)

    def check_health(self) -> None:
        self._life.check()
        if failure := self._started.failure():
            raise EngineError(
                f"vLLM's engine died: {failure}", hint="see the worker's log; its supervisor starts it again"
            )

    async def stop(self) -> None:
        if not self._life.stop():  # it ends all waits: vLLM would leave them waiting
            return
        self._content.close()
        for offer in self._offers.values():
            offer.expiry.cancel()
        if self._feed is not None:
            await self._feed.close()
        if self._adapters is not None:
            await self._adapters.close()
        if self._starting is not None and (driver := await self._starting.end()) is not None:
            await driver.close()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def load(self) -> EngineLoad:
        """Return the load of all ranks together."""
        if self._life.info is None:
            return EngineLoad(0, 0, 0, 0, 0, 0)
        total, loads, in_flight = self._life.info.total_blocks, self._started.loads, self._life.in_flight
        running = min(sum(load.running for load in loads), in_flight)  # vLLM reports after its steps alone
        is_used = bool(in_flight or self._offers)
        used = [round(load.used_share * total) if is_used else 0 for load in loads]
        cached = [min(cache.num_blocks, total) for cache in self._caches]
        return EngineLoad(
            running=running,
            waiting=in_flight - running,
            used_blocks=sum(used),
            cached_blocks=sum(max(0, c - u) for c, u in zip(cached, used, strict=True)),
            total_blocks=total * len(loads),
            offers=len(self._offers),
        )

    # --- its requests ---------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        check_generation(request, self._ready())
        await self._life.try_guide(request)
        self._check_rank(request.dp_rank)
        async with self._loaded.using(request.lora) as adapter:
            answer = self._first_try(request, adapter)
            async with aclosing(self._answer(request, answer, adapter)) as deltas:
                async for delta in deltas:
                    yield delta

    async def _answer(
        self, request: GenerateRequest, answer: VllmAnswer, adapter: LoadedAdapter | None
    ) -> AsyncGenerator[Delta, None]:
        with self._life.counted():
            while True:
                try:
                    async with aclosing(self._ask(request, answer, adapter)) as deltas:
                        async for delta in deltas:
                            yield delta
                    return
                except PullFailedError as error:
                    answer = self._computed_here(request, answer.question, str(error))
                except DivergedError:
                    log.info("request %s: vLLM drew another first token than the prefill worker", request.request_id)
                    answer = VllmAnswer(
                        whole(request, self._facts.context_tokens), self._facts.eos_token_ids, answer.report
                    )

    async def embed(self, request: EmbedRequest) -> Embedding:
        check_embedding(request, self._ready())
        async with self._loaded.using(request.lora) as adapter:
            with self._life.counted():
                vector = await self._started.embed(
                    unpack_tokens(request.prompt), request.request_id, request.cache_salt, adapter
                )
        return Embedding(vector=vector)

    def _first_try(self, request: GenerateRequest, adapter: LoadedAdapter | None) -> VllmAnswer:
        facts = self._facts
        if request.offer_kv:
            if not self._plan.transfer:
                raise InvalidRequestError("this worker has no KV transfer", hint="start it with --role prefill")
            return VllmAnswer(offering(request, facts.context_tokens), facts.eos_token_ids)
        if request.ticket is None:
            return VllmAnswer(whole(request, facts.context_tokens), facts.eos_token_ids)
        try:
            if not self._plan.transfer or request.ticket.backend != TRANSFER:
                raise TransferError(f"a ticket of {request.ticket.backend!r}, this worker pulls by {TRANSFER!r}")
            self._content.check(request)
            question = pulling(request, request.ticket, facts.block_size, facts.context_tokens)
        except TransferError as error:
            return self._computed_here(request, whole(request, facts.context_tokens), str(error))
        return VllmAnswer(question, facts.eos_token_ids)

    def _computed_here(self, request: GenerateRequest, question: VllmQuestion, reason: str) -> VllmAnswer:
        """The KV did not come: the prompt is computed by this worker."""
        log.warning("request %s computes its prompt itself: %s", request.request_id, reason)
        PULLS.labels(TRANSFER, "failed").inc()
        return VllmAnswer(unpulled(question), self._facts.eos_token_ids, PullReport(TRANSFER, 0, 0, 0.0, reason))

    async def _ask(
        self, request: GenerateRequest, answer: VllmAnswer, adapter: LoadedAdapter | None
    ) -> AsyncGenerator[Delta, None]:
        """Ask vLLM one question. Raise PullFailedError and DivergedError before it has given anything."""
        driver, started = self._started, time.perf_counter()
        load = driver.loads[request.dp_rank]
        pulls = answer.question.kv is not None and not answer.question.offers
        steps = driver.generate(answer.question, request.request_id, request.cache_salt, adapter, request.dp_rank)
        if pulls:
            steps = within(self._config.pull_timeout_s, steps, lambda: load.waiting)
        async with aclosing(steps):
            while (step := await self._life.waits.next(steps)) is not None:
                if pulls and answer.report is None:
                    answer.report = self._report(answer.question, step, time.perf_counter() - started)
                delta = answer.take(step)
                if delta is None:
                    continue
                if not answer.question.offers or delta.finish_reason is not None:
                    yield delta
                    continue
                ticket, is_taken = self._offer(step, adapter), False
                try:
                    yield msgspec.structs.replace(delta, ticket=ticket)
                    is_taken = True
                finally:
                    if not is_taken:  # nobody will come for it; vLLM frees the blocks after its lease
                        self.release(ticket.offer_id, ticket.nonce)

    def _report(self, question: VllmQuestion, step: VllmStep, duration_s: float) -> PullReport | None:
        """Return how the pull went. Where vLLM does not tell how many tokens it pulled, the whole prompt counts."""
        if step.finish_reason not in (None, "stop", "length"):
            return None
        facts = self._facts
        pulled = len(question.prompt) if step.pulled_tokens is None else step.pulled_tokens
        num_blocks = -(-pulled // facts.block_size)  # a pull begins with a whole block
        report = PullReport(TRANSFER, num_blocks * facts.block_bytes, num_blocks, duration_s)
        PULLS.labels(TRANSFER, "ok").inc()
        PULL_BYTES.labels(TRANSFER).inc(report.num_bytes)
        PULL_SECONDS.labels(TRANSFER).observe(duration_s)
        return report

    def _ready(self) -> EngineInfo:
        """Raises what keeps it from taking another request."""
        if self._life.info is None and not self._life.is_stopping:
            raise DrainingError("this worker is still starting")
        self.check_health()
        if self._slept_level:
            raise DrainingError("this worker was put to sleep", hint="wake it by the control call `wake`")
        return self._life.check()

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < len(self._caches):
            raise InvalidRequestError(f"there is no rank {rank} here", hint=f"there are {len(self._caches)}, from 0")

    @property
    def _started(self) -> Driver:
        assert self._driver is not None, "a healthy engine has started"
        return self._driver

    @property
    def _loaded(self) -> Adapters:
        assert self._adapters is not None, "a healthy engine has started"
        return self._adapters

    @property
    def _facts(self) -> VllmFacts:
        return self._started.facts

    # --- KV that is offered ---------------------------------------------------------------------------

    def _offer(self, step: VllmStep, adapter: LoadedAdapter | None) -> Ticket:
        """Return the ticket for an offer. vLLM itself frees the blocks: when they were pulled, or after its lease."""
        if not step.kv:
            raise EngineError("vLLM computed a prompt and offers no KV", hint="check its --kv-transfer-config")
        try:
            opaque, num_tokens = write_ticket(step.kv)
        except TransferError as error:
            raise EngineError(f"vLLM offers KV in an unknown form: {error}") from error
        offer_id, nonce = self._next_offer, new_generation()
        self._next_offer += 1
        expiry = asyncio.get_running_loop().call_later(self._config.offer_lease_s, self.release, offer_id, nonce)
        self._offers[offer_id] = _StandingOffer(nonce, expiry)
        return Ticket(
            offer_id=offer_id,
            worker_id=self._life.worker_id,
            address=self._life.address,
            backend=TRANSFER,
            nonce=nonce,
            num_tokens=num_tokens,
            opaque=opaque,
        )

    def release(self, offer_id: int, nonce: int) -> None:
        offer = self._offers.get(offer_id)
        if offer is not None and offer.nonce == nonce:
            offer.expiry.cancel()
            del self._offers[offer_id]

    # --- what it caches -------------------------------------------------------------------------------

    @property
    def ranks(self) -> Sequence[Caching]:
        return self._caches

    def on_kv_events(self, listener: Callable[[Sequence[KvEvent]], object]) -> None:
        """Call `listener` for the first rank. `ranks` has the others."""
        self._caches[0].on_kv_events(listener)

    def kv_snapshot(self) -> list[KvEvent]:
        return self._caches[0].kv_snapshot()

    def kv_digest(self) -> Digest:
        return self._caches[0].kv_digest()

    def kv_content(self) -> KvContent:
        return self._content.kv_content()

    # --- what operators ask ---------------------------------------------------------------------------

    async def control(self, request: Control) -> ControlReply:
        self.check_health()
        detail = await self._carry_out(self._started, request)
        if self._life.info is not None:
            self._life.info = replace(self._life.info, loras=self._loaded.names)
        return ControlReply(detail=detail, loras=self._loaded.names)

    async def _carry_out(self, driver: Driver, request: Control) -> str:
        match request.action:
            case ControlAction.RESET_PREFIX_CACHE:
                if "tiers" in request.arguments:
                    raise InvalidRequestError("vLLM's tiers are reset together", hint="leave `tiers` out")
                if not await driver.reset_prefix_cache():
                    raise InvalidRequestError(
                        "vLLM's cache is in use", hint=f"try again: offers end after {self._config.offer_lease_s:g} s"
                    )
                return "the prefix cache is empty"
            case ControlAction.SLEEP:
                level = _level(request.arguments)
                await driver.sleep(level)
                self._slept_level = level
                return f"asleep at level {level}"
            case ControlAction.WAKE:
                await self._wake(driver)
                return "awake"
            case ControlAction.START_PROFILE | ControlAction.STOP_PROFILE:
                starts = request.action is ControlAction.START_PROFILE
                await driver.profile(starts)
                return "profiling" if starts else "profiled"
            case ControlAction.LOAD_LORA:
                name, path = argument(request, "name"), argument(request, "path")
                await self._loaded.load(name, path)
                return f"adapter {name!r} is served"
            case ControlAction.UNLOAD_LORA:
                name = argument(request, "name")
                await self._loaded.unload(name)
                return f"adapter {name!r} is gone"
            case ControlAction.LIST_LORAS:
                return ", ".join(self._loaded.names) or "no adapters"
            case _:
                raise InvalidRequestError(f"vLLM does not {request.action.value}", hint="the worker itself may")

    async def _wake(self, driver: Driver) -> None:
        """Wake vLLM. After level 1 the weights come from host memory, after level 2 not: they have to be read again."""
        if self._slept_level > 1:
            await self._content.begin()
        await driver.wake()
        if self._slept_level > 1:
            await self._content.loaded(driver.facts.kv_settings)
        self._slept_level = 0

    # --- how vLLM is started --------------------------------------------------------------------------

    def _plan_start(self) -> LaunchPlan:
        """The events of a single rank go through a folder that only this user can enter, and take no port."""
        surroundings = Surroundings(
            events=f"ipc://{self._folder}/events",
            replay=f"ipc://{self._folder}/replay",
            side_channel_port=free_ports(self._config.dp_size, self._config.host),
            num_cpus=len(os.sched_getaffinity(0)),
            weights=_weights_of(self._model_path) if keeps_kv(self._config) else "",
        )
        return plan_start(self._config, self._name, self._first_adapters, surroundings)


def _weights_of(model_path: str) -> str:
    """Return the hash of a model's files. Blocks while files are read whose hash is not known yet. Raise OSError."""
    return files_digest(content_files(Path(model_path)), WeightsHasher(cache_folder())).hex()


def _features(facts: VllmFacts) -> tuple[Feature, ...]:
    """Return the engine's features. With speculative decoding vLLM takes no logit bias."""

    def is_there(feature: Feature) -> bool:
        if feature is Feature.EMBEDDINGS:
            return "embed" in facts.tasks
        return "generate" in facts.tasks and not (facts.guesses and feature is Feature.LOGIT_BIAS)

    return tuple(feature for feature in EXTENSION.features if is_there(feature))


def _read_adapter(name: str, path: str) -> Adapter:
    file = Path(path) / "adapter_config.json"
    try:
        rank = json.loads(file.read_bytes())["r"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"adapter {name!r} cannot be read: {error!r}", hint=f"{file} has to say its rank `r`"
        ) from error
    if not isinstance(rank, int) or rank < 1:
        raise ConfigError(f"adapter {name!r} has rank {rank!r}", hint="a positive number belongs there")
    return Adapter(name, str(Path(path).resolve()), rank)


def _level(arguments: Mapping[str, str]) -> int:
    level = arguments.get("level", "1")
    if level not in ("1", "2"):
        raise InvalidRequestError(f"no sleep level {level!r}", hint="1 or 2", param="level")
    return int(level)
