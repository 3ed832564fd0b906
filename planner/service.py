"""Run the planner: observe, decide, apply, and say why."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Literal, Protocol

import aiohttp
from msgspec.structs import replace

from kvmesh.mesh.discovery import open_discovery
from kvmesh.mesh.exposition import labelled
from kvmesh.mesh.http.door import door_of
from kvmesh.mesh.identity.metrics import using
from kvmesh.mesh.identity.names import MeshRole
from kvmesh.mesh.lifecycle import watch_parent
from kvmesh.mesh.member_session import member_session
from kvmesh.mesh.telemetry import log_ready, serve_metrics
from kvmesh.planner import metrics
from kvmesh.planner.budget import counted_gpus
from kvmesh.planner.config import ServiceConfig, decoding_role
from kvmesh.planner.connectors.connector import Applied, Connector, ConnectorError, Fleets
from kvmesh.planner.connectors.kinds import kind_of, open_connector
from kvmesh.planner.connectors.shadow import ShadowConnector
from kvmesh.planner.core import PlannerCore
from kvmesh.planner.lease import Lease, card_of
from kvmesh.planner.model import Action, Flip, Observation, Reason, RoleFleet, ScalingDecision
from kvmesh.planner.observe import FrontendSource, MeshView, Observer, PrometheusSource, TrafficSource, page_answers
from kvmesh.planner.outlook import Outlook, OutlookKeeper
from kvmesh.planner.profiles import open_profiles
from kvmesh.planner.record import Record, RecordFile, kept
from kvmesh.planner.slo import SloWatch, read_statements, with_slo
from kvmesh.planner.told import ToldSteps, step_of
from kvmesh.planner.traffic import SloLimits
from kvmesh.protocol.errors import ConfigError, FeedLostError

log = logging.getLogger(__name__)

LEASE_POLL_S = 0.5
LATE_PIECES = 12  # a piece of traffic that could not be closed for this many ticks is given up
MAYBE_SEVERAL = 2  # processes assumed behind a URL of which only the address is known
MAX_GAP_TICKS = 3.0  # GPU-hours are not counted over a longer gap between two steps


class Core(Protocol):
    """Decides; kvmesh.planner.core.PlannerCore does, and tests have their own."""

    def decide(self, seen: Observation) -> ScalingDecision: ...


class Observes(Protocol):
    """Observes the mesh; kvmesh.planner.observe.Observer does, and tests have their own."""

    async def observe(self, at_s: float, fleets: Fleets) -> Observation: ...

    @property
    def problem(self) -> str: ...


async def serve(config: ServiceConfig, stop: asyncio.Event) -> None:
    """Plan until `stop` is set. Raise ConfigError, and FeedLostError if discovery ends: who sees nobody must stop."""
    watch_parent(stop)
    config = planned_with(config)
    prefill, decode = open_profiles(config)
    core = PlannerCore(config, prefill, decode)
    records = RecordFile(Path(config.record_file), int(config.record_mib * 2**20)) if config.record_file else None
    async with AsyncExitStack() as cleanup:
        credentials = await cleanup.enter_async_context(using(config.mesh_tls, MeshRole.PLANNER))
        cleanup.enter_context(labelled("planner", config.namespace))
        door = door_of(credentials, answers_probes=config.mesh_probes)
        told = ToldSteps()
        metrics_url, close_metrics = serve_metrics(
            config.host, config.metrics_port, door=door, allowed_hosts=config.allowed_hosts, pages=told.pages
        )
        cleanup.push_async_callback(asyncio.to_thread, close_metrics)
        http = await cleanup.enter_async_context(member_session(credentials))
        outside = await cleanup.enter_async_context(aiohttp.ClientSession())  # a Prometheus is no member of the mesh
        discovery = open_discovery(config.discovery, credentials)
        cleanup.push_async_callback(discovery.close)
        view = MeshView(decoding_role(config), lambda url: page_answers(http, url))
        connector = await open_connector(config, lambda: present(view))
        cleanup.push_async_callback(connector.close)
        if config.shadow:
            connector = ShadowConnector(connector, asyncio.get_running_loop().time, config.start_s, config.flip_s)
        lease = Lease(discovery, card_of(config.name, metrics_url, config.record_file, config.connector))
        planner = Planner(
            config,
            core,
            Observer(http, view, open_source(config, http, outside, view)),
            connector,
            records,
            (counted_gpus(prefill), counted_gpus(decode)),
            told,
        )
        acts: Callable[[float], bool] = always if config.shadow else lease.is_ours
        said = {"connector": connector.name, "record": config.record_file}
        log_ready(log, metrics=metrics_url, discovery=config.discovery, **said)
        async with asyncio.TaskGroup() as feeds:
            follow = [feeds.create_task(lost_if_it_ends(view.follow(discovery)), name="planner: follow the mesh")]
            if not config.shadow:
                follow.append(feeds.create_task(lost_if_it_ends(lease.hold()), name="planner: hold the lease"))
            await planner.run(stop, acts, lease.holder)
            for feed in follow:
                feed.cancel()


def planned_with(config: ServiceConfig) -> ServiceConfig:
    """Return the settings with those that follow from the SLO, the aim and the connector.

    Without role flips, if the connector cannot flip, starts are ordered earlier.
    """
    config = with_slo(config, config.slo, config.aim)
    return config if kind_of(config).can_flip else replace(config, flips=False)


async def lost_if_it_ends(feed: Awaitable[None]) -> None:
    await feed
    raise FeedLostError("discovery has ended", hint="see the planner's log, and --discovery")


def open_source(
    config: ServiceConfig, http: aiohttp.ClientSession, outside: aiohttp.ClientSession, view: MeshView
) -> TrafficSource:
    """Return the source of the traffic figures. Raise ConfigError for a bad URL."""
    limits = SloLimits(config.ttft_slo_s, config.itl_slo_s) if config.slo else None
    if config.source == "frontends":
        named = dict.fromkeys((url.rstrip("/") for url in config.frontends), MAYBE_SEVERAL)
        return FrontendSource(http, lambda: named or view.frontends(), LATE_PIECES * tick_s(config), limits)
    if not config.prometheus_url.startswith(("http://", "https://")):
        raise ConfigError(
            f"no Prometheus server at {config.prometheus_url!r}", hint="set --prometheus-url to http://host:port"
        )
    window_s = config.prometheus_window_s
    return PrometheusSource(outside, config.prometheus_url, config.prometheus_matcher, window_s, limits)


def tick_s(config: ServiceConfig) -> float:
    return (
        config.reactive_interval_s if config.reactive else min(config.reactive_interval_s, config.predictive_interval_s)
    )


def present(view: MeshView) -> Fleets:
    """Return the workers that have joined the mesh. Starting workers are not known here."""
    return Fleets(prefill=RoleFleet(ready=len(view.prefilling())), decode=RoleFleet(ready=len(view.decoding())))


def always(at_s: float) -> bool:
    return True


class Planner:
    """The loop: in every tick it observes, decides, applies and records."""

    def __init__(
        self,
        config: ServiceConfig,
        core: Core,
        observer: Observes,
        connector: Connector,
        records: RecordFile | None,
        gpus: tuple[int, int],
        told: ToldSteps | None = None,
    ) -> None:
        """Plan with these parts. `gpus` are those of one prefill and of one decode worker."""
        self._told = told or ToldSteps()
        self._config = config
        self._core = core
        self._observer = observer
        self._connector = connector
        self._records = records
        self._gpus = gpus
        self._outlooks = OutlookKeeper(config, gpus)
        self._slo = SloWatch(read_statements(config.slo))
        self._last_s: float | None = None  # time of the last step
        self._flip: Flip | None = None  # was decided, and its order failed
        self._target: tuple[int, int] | None = None
        self._problem = ""
        self._said = ""

    async def run(self, stop: asyncio.Event, acts: Callable[[float], bool], holder: Callable[[], str]) -> None:
        """Plan until `stop` is set, while `acts` is true for the loop's time. `holder` names the planner that acts."""
        clock = asyncio.get_running_loop().time
        waiting_for = ""
        while not stop.is_set():
            at_s = clock()
            if not acts(at_s):
                metrics.ACTING.set(0)
                if (who := holder()) and who != waiting_for:
                    waiting_for = who
                    log.info("waiting: %s holds the lease", who)
                await either(stop, LEASE_POLL_S)
                continue
            waiting_for = ""
            metrics.ACTING.set(0 if self._config.shadow else 1)
            await self.step(at_s)
            await either(stop, max(0.05, at_s + tick_s(self._config) - clock()))

    async def step(self, at_s: float) -> ScalingDecision | None:
        """Observe, decide and apply once. Return None if the present workers are not known."""
        try:
            fleets = await self._connector.fleets()
        except ConnectorError as error:
            self._blind(at_s, error)
            return None
        observation = await self._observer.observe(at_s, fleets)
        self._slo.hear(observation.traffic)
        metrics.show_observation(observation)
        self._count_gpu_hours(at_s, fleets)
        decision, outlook = await asyncio.to_thread(self._outlooks.decide, self._core, observation)
        if observation.traffic is None and self._observer.problem:
            metrics.LATE.inc()
            text = f"the traffic figures are missing: {self._observer.problem}"
            decision = replace(decision, reasons=(*decision.reasons, Reason(code="no-traffic", text=text)))
        decision = self._with_flip(decision)
        metrics.show_decision(decision)
        applied, error_text = None, ""
        if self._is_due(decision, fleets):
            try:
                applied = await self._connector.apply(decision)
                self._flip = None
                metrics.APPLIED.labels("ok" if applied.is_complete else "partial").inc()
                if applied.flipped and decision.flip is not None:
                    metrics.FLIPS.labels(decision.flip.to_role).inc(applied.flipped)
            except ConnectorError as error:
                self._flip = decision.flip
                error_text = str(error)
                metrics.APPLIED.labels("error").inc()
        self._tell(observation, decision, applied, error_text, outlook)
        return decision

    def _is_due(self, decision: ScalingDecision, fleets: Fleets) -> bool:
        """Return whether the counts differ from the decision: an order that failed is given again."""
        return decision.flip is not None or (decision.prefill, decision.decode) != (
            fleets.prefill.ordered,
            fleets.decode.ordered,
        )

    def _with_flip(self, decision: ScalingDecision) -> ScalingDecision:
        """Repeat a flip whose order failed, as long as the target is the same."""
        target = (decision.prefill, decision.decode)
        if target != self._target:
            self._target, self._flip = target, None
        if self._flip is not None and decision.flip is None:
            return replace(decision, flip=self._flip)
        return decision

    def _blind(self, at_s: float, error: ConnectorError) -> None:
        """Record that the workers are not known, and decide nothing."""
        metrics.APPLIED.labels("error").inc()
        prefill, decode = self._target or (0, 0)
        reason = Reason(code="no-fleet", text=f"the connector cannot list the workers: {error}")
        decision = ScalingDecision(
            at_s=at_s, loop="none", action=Action.HOLD, prefill=prefill, decode=decode, reasons=(reason,)
        )
        metrics.DECISIONS.labels("none", "hold", reason.code).inc()
        self._tell(None, decision, None, str(error))

    def _count_gpu_hours(self, at_s: float, fleets: Fleets) -> None:
        longest_s = MAX_GAP_TICKS * tick_s(self._config)
        if self._last_s is not None and at_s - self._last_s <= longest_s:
            there = zip((fleets.prefill, fleets.decode), self._gpus, strict=True)
            gpus = sum((fleet.ordered + fleet.draining) * of_one for fleet, of_one in there)
            metrics.GPU_HOURS.inc(gpus * (at_s - self._last_s) / 3600)
        self._last_s = at_s

    def _tell(
        self,
        observation: Observation | None,
        decision: ScalingDecision,
        applied: Applied | None,
        error: str,
        outlook: Outlook | None = None,
    ) -> None:
        """Log changes and new failures, and record everything."""
        why = "; ".join(f"{reason.code}: {reason.text}" for reason in decision.reasons) or "as decided before"
        if error and error != self._problem:
            log.warning("not done: %s", error)
        elif applied is not None:
            notes = "".join(f"; {note}" for note in applied.notes)
            said = f"{decision.prefill} prefill, {decision.decode} decode{notes}"
            if applied.is_complete or said != self._said:  # an order that waits is not logged in every step
                log.info("%s: %s", said, why)
            self._said = said
        self._problem = error
        states = () if observation is None else self._slo.states(observation.at_s)
        metrics.show_slo(states)
        mode: Literal["active", "shadow"] = "shadow" if self._config.shadow else "active"
        self._told.add(step_of(time.time(), mode, observation, decision, applied, error))
        if self._records is not None:
            self._records.add(
                Record(
                    ts_s=time.time(),
                    planner=self._config.name,
                    mode=mode,
                    connector=self._connector.name,
                    observation=kept(observation),
                    decision=decision,
                    applied=applied,
                    error=error,
                    outlook=outlook,
                    slo=states,
                )
            )


async def either(stop: asyncio.Event, timeout_s: float) -> None:
    """Wait until `stop` is set or the time has passed."""
    try:
        async with asyncio.timeout(timeout_s):
            await stop.wait()
    except TimeoutError:
        pass
