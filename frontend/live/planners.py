"""Ask the planner of the mesh for its last steps, while somebody looks at the live page."""

import asyncio
import logging
from collections.abc import Callable

import aiohttp
import msgspec

from kvmesh.frontend.live.picture import MAX_NAME_CHARS, MAX_STEPS, MAX_TEXT_CHARS, Row, cut
from kvmesh.mesh.bodies import bounded
from kvmesh.mesh.discovery import Deleted, Discovery
from kvmesh.mesh.identity.credentials import Credentials
from kvmesh.mesh.member_session import member_session
from kvmesh.protocol.errors import MeshError, WireError
from kvmesh.protocol.messages import UNREADABLE, PlannerCard, PlannerStep, PlannerSteps, RoleCount, decode_card

log = logging.getLogger(__name__)

ASK_S = 2.0
TIMEOUT_S = 3.0
MAX_BYTES = 1 << 20
MAX_PLANNERS = 16  # in discovery; the first by key acts
KEY_PREFIX = "planners/"
_decoder = msgspec.json.Decoder(PlannerSteps)


class PlannerFollower:
    """Follows the planner that acts, from `start` to `stop`."""

    def __init__(
        self, discovery: Discovery, credentials: Credentials | None, on_step: Callable[[PlannerStep], object]
    ) -> None:
        """Follow by `discovery`. `on_step` is told of each step that is new and has changed something."""
        self._discovery = discovery
        self._credentials = credentials
        self._on_step = on_step
        self._cards: dict[str, PlannerCard] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._asked = ""  # the name of the planner that was asked last
        self._last_s = 0.0  # of the newest step that is known
        self._news: Row | None = None

    def start(self) -> None:
        if not self._tasks:
            self._last_s = 0.0
            self._tasks = [
                asyncio.create_task(self._watch(), name="live page: follow planners"),
                asyncio.create_task(self._ask_again(), name="live page: ask the planner"),
            ]

    async def stop(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._cards.clear()

    def take(self) -> Row | None:
        """Return what is new since the last call; None: nothing."""
        news, self._news = self._news, None
        return news

    async def _watch(self) -> None:
        async for change in self._discovery.watch(KEY_PREFIX):
            if isinstance(change, Deleted):
                self._cards.pop(change.key, None)
            elif change.key in self._cards or len(self._cards) < MAX_PLANNERS:
                try:
                    self._cards[change.key] = decode_card(change.value, PlannerCard)
                except WireError as error:
                    log.warning("a planner's card that cannot be read: %s", error)

    async def _ask_again(self) -> None:
        async with member_session(self._credentials) as http:
            while True:
                await self._ask(http)
                await asyncio.sleep(ASK_S)

    async def _ask(self, http: aiohttp.ClientSession) -> None:
        if not self._cards:
            self._say({} if self._asked else None)
            self._asked, self._last_s = "", 0.0
            return
        card = self._cards[min(self._cards)]
        name = cut(card.name, MAX_NAME_CHARS)
        if name != self._asked:
            self._asked, self._last_s = name, 0.0
        about = {"name": name, "connector": cut(card.connector, MAX_NAME_CHARS)}
        try:
            steps = await fetch_steps(http, steps_url(card.metrics_url))
        except MeshError as error:
            self._say(about | {"problem": cut(str(error), MAX_TEXT_CHARS), "steps": []})
            return
        new = [step for step in steps if step.ts_s > self._last_s]
        if not new:
            return
        for step in new if self._last_s else ():
            if step.applied or step.error:
                self._on_step(step)
        self._last_s = max(step.ts_s for step in new)
        self._say(about | {"steps": [step_row(step) for step in new]})

    def _say(self, row: Row | None) -> None:
        if row is not None:
            earlier = list((self._news or {}).get("steps", ()))
            self._news = {**row, "steps": [*earlier, *row.get("steps", ())][-MAX_STEPS:]} if row else row


def steps_url(metrics_url: str) -> str:
    """Return where a planner tells its steps, beside its page of metrics. Raises nothing: "" if there is none."""
    base, slash, page = metrics_url.rpartition("/")
    return f"{base}/steps" if slash and page == "metrics" and base.startswith(("http://", "https://")) else ""


async def fetch_steps(http: aiohttp.ClientSession, url: str) -> list[PlannerStep]:
    """Return the steps that a planner remembers, oldest first. Raise MeshError."""
    if not url:
        raise MeshError("the planner has no page of steps", hint="set its --metrics-port")
    try:
        async with asyncio.timeout(TIMEOUT_S), http.get(url) as response:
            body = await bounded(response, MAX_BYTES)
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise MeshError(f"the planner does not answer: {error or f'not within {TIMEOUT_S:g} s'}") from error
    if response.status != 200:
        raise MeshError(f"the planner answered {response.status}", hint="it may be of an older release")
    try:
        return sorted(_decoder.decode(body).steps, key=lambda step: step.ts_s)[-MAX_STEPS:]
    except UNREADABLE as error:
        raise MeshError(
            "the planner's steps cannot be read", hint="run releases that are next to each other"
        ) from error


def step_row(step: PlannerStep) -> Row:
    """Return a step as viewers see it."""
    return {
        "at": round(step.ts_s, 2),
        "mode": cut(step.mode, MAX_NAME_CHARS),
        "loop": cut(step.loop, MAX_NAME_CHARS),
        "prefill": counts_of(step.prefill),
        "decode": counts_of(step.decode),
        "rps": step.requests_per_s,
        "forecast": step.forecast_per_s,
        "ttft_s": step.ttft_s,
        "itl_s": step.itl_s,
        "why": [cut(reason, MAX_TEXT_CHARS) for reason in step.reasons],
        "applied": step.applied,
        "error": cut(step.error, MAX_TEXT_CHARS),
    }


def counts_of(count: RoleCount) -> list[int]:
    """Return how many are ready, start, drain and are ordered."""
    return [count.ready, count.starting, count.draining, count.ordered]
