"""Carry out what operators ask of a worker, whatever its engine: the engine's own share goes to the engine."""

import cProfile
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial

from kvmesh.protocol.errors import InvalidRequestError, MeshError
from kvmesh.protocol.messages import Control, ControlAction, ControlReply, Role, WorkerStatus
from kvmesh.protocol.tiers import Tier
from kvmesh.workers.engine import Controllable, Engine, EngineInfo, ResetsCache, Sleeps, Turnable
from kvmesh.workers.life import Place, WorkerLife


def check_can_turn(engine: Engine, kind: str, info: EngineInfo, role: Role) -> None:
    """Raise InvalidRequestError if the engine cannot work in this role."""
    if not isinstance(engine, Turnable) or not info.roles:
        raise InvalidRequestError(
            f"a worker with the engine {kind} cannot change its role while it runs",
            hint="torch and mock workers can; start another worker in its place",
        )
    if role not in info.roles:
        raise InvalidRequestError(
            f"this worker cannot become {role.noun}", hint="its profile has no table for that role"
        )


def role_asked_for(arguments: Mapping[str, str]) -> Role:
    """Raises InvalidRequestError if there is none, or one that is none."""
    try:
        return Role(arguments["role"])
    except (KeyError, ValueError):
        raise InvalidRequestError(
            f"set_role needs the argument 'role', got {dict(arguments)!r:.200}",
            hint=f"one of {', '.join(role.value for role in Role)}",
        ) from None


log = logging.getLogger(__name__)

LOG_LEVELS = ("debug", "info", "warning", "error")


class WorkerControls:
    """Answers `control`. `quiet_s` and `problem` say how the worker is."""

    def __init__(
        self,
        engine: Engine,
        place: Place,
        life: WorkerLife,
        info: Callable[[], EngineInfo],
        quiet_s: Callable[[], float],
        check_health: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._place = place
        self._life = life
        self._info = info
        self._quiet_s = quiet_s
        self._check_health = check_health
        self._profile = LoopProfile()

    async def carry_out(self, request: Control) -> ControlReply:
        """Return what was done. Raise InvalidRequestError for what this worker does not do, and EngineError."""
        info = self._info()
        match request.action:
            case ControlAction.STATUS:
                return ControlReply(detail=self.state, loras=info.loras, status=self.status())
            case ControlAction.SET_ROLE:
                return await self._set_role(role_asked_for(request.arguments))
            case ControlAction.DRAIN:
                detail = await self._life.drain()
            case ControlAction.RESUME:
                detail = await self._life.resume()
            case ControlAction.SLEEP:
                if not isinstance(self._engine, Controllable | Sleeps):
                    raise InvalidRequestError("this worker's engine cannot sleep", hint="drain it")
                detail = await self._life.sleep(partial(self._of_engine, request))
            case ControlAction.WAKE:
                if not isinstance(self._engine, Controllable | Sleeps):
                    raise InvalidRequestError("this worker's engine cannot sleep", hint="resume it")
                detail = await self._life.wake(partial(self._of_engine, request))
            case ControlAction.LOG_LEVEL:
                detail = set_log_level(request.arguments)
            case _:
                return await self._engine_reply(request)
        return ControlReply(detail=detail, loras=self._info().loras)

    async def _set_role(self, role: Role) -> ControlReply:
        """Turn, and say under which id the worker has come back. It is no error to ask for the role that it has."""
        place = self._place
        if role is place.role and place.states.has_card:
            return ControlReply(detail=f"it is {role.noun} already", worker_id=place.worker_id)
        check_can_turn(self._engine, place.engine_kind, self._info(), role)
        return ControlReply(detail=await self._life.turn(role), worker_id=place.worker_id)

    async def _of_engine(self, request: Control) -> str:
        return (await self._engine_reply(request)).detail

    async def _engine_reply(self, request: Control) -> ControlReply:
        """Have the engine do it. An engine's own exception for bad arguments is the operator's."""
        if not isinstance(self._engine, Controllable):
            return ControlReply(detail=await self._without_engine(request), loras=self._info().loras)
        try:
            return await self._engine.control(request)
        except (ValueError, TypeError, LookupError, OSError) as error:
            asked = request.action.value
            raise InvalidRequestError(f"the engine does not {asked}: {type(error).__name__}: {error}"[:500]) from error

    async def _without_engine(self, request: Control) -> str:
        """Do it for an engine that has no controls of its own."""
        engine = self._engine
        match request.action:
            case ControlAction.START_PROFILE:
                return self._profile.start()
            case ControlAction.STOP_PROFILE:
                return self._profile.stop()
            case ControlAction.RESET_PREFIX_CACHE if isinstance(engine, ResetsCache):
                tiers = tiers_to_reset(request.arguments)
                await engine.reset_cache(tiers)
                where = "" if tiers is None else f" of {', '.join(tier.name.lower() for tier in tiers)}"
                return f"the prefix cache{where} is empty"
            case ControlAction.SLEEP if isinstance(engine, Sleeps):
                await engine.sleep()
                return "asleep; weights and KV cache take no memory"
            case ControlAction.WAKE if isinstance(engine, Sleeps):
                await engine.wake()
                return "awake"
            case _:
                raise InvalidRequestError(f"this worker's engine cannot {request.action.value}", hint="vLLM's can")

    @property
    def state(self) -> str:
        return self._place.states.state.value

    def status(self) -> WorkerStatus:
        load = self._engine.load()
        return WorkerStatus(
            state=self.state,
            running=load.running,
            waiting=load.waiting,
            used_blocks=load.used_blocks,
            cached_blocks=load.cached_blocks,
            total_blocks=load.total_blocks,
            is_profiling=self._profile.is_on,
            log_level=logging.getLevelName(logging.getLogger().level).lower(),
            quiet_s=round(self._quiet_s(), 1),
            problem=self._problem(),
        )

    def _problem(self) -> str:
        """Return what is wrong with the engine, or with its KV events; "" for nothing."""
        try:
            self._check_health()
        except MeshError as error:
            return str(error)
        publishers = self._place.publishers if self._info().tells_events else ()
        return next((f"routers miss its KV events: {one.problem}" for one in publishers if one.problem), "")


class LoopProfile:
    """Profiles the thread of the event loop, for engines that have no profiler of their own."""

    def __init__(self) -> None:
        self._running: cProfile.Profile | None = None

    @property
    def is_on(self) -> bool:
        return self._running is not None

    def start(self) -> str:
        if self._running is not None:
            raise InvalidRequestError("this worker is profiled already", hint="stop it first")
        profile = cProfile.Profile()
        try:
            profile.enable()
        except ValueError as error:
            raise InvalidRequestError(f"this process is profiled by something else: {error}") from error
        self._running = profile
        return "profiling the thread of the event loop"

    def stop(self) -> str:
        profile, self._running = self._running, None
        if profile is None:
            raise InvalidRequestError("this worker is not profiled", hint="start it first")
        profile.disable()
        descriptor, path = tempfile.mkstemp(prefix=f"kvmesh-worker-{os.getpid()}-{time.time():.0f}-", suffix=".prof")
        os.close(descriptor)
        profile.dump_stats(path)
        return f"the profile is {path} on the worker's host; `python -m pstats` reads it"


def tiers_to_reset(arguments: Mapping[str, str]) -> tuple[Tier, ...] | None:
    """Return the tiers that an operator names, None for all. Raise InvalidRequestError."""
    if "tiers" not in arguments:
        return None
    known = {tier.name.lower(): tier for tier in Tier}
    names = [name.strip().lower() for name in arguments["tiers"].split(",")]
    if not all(name in known for name in names):
        raise InvalidRequestError(f"no tiers: {arguments['tiers']!r:.200}", hint=f"some of {','.join(known)}")
    return tuple(dict.fromkeys(known[name] for name in names))


def set_log_level(arguments: Mapping[str, str]) -> str:
    """Set the level of this process. Raise InvalidRequestError."""
    level = arguments.get("level", "").lower()
    if level not in LOG_LEVELS:
        raise InvalidRequestError(
            f"log_level needs the argument 'level', got {dict(arguments)!r:.200}",
            hint=f"one of {', '.join(LOG_LEVELS)}",
        )
    logging.getLogger().setLevel(level.upper())
    log.warning("the log level is %s now", level)
    return f"the log level is {level}"
