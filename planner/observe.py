"""Observe the mesh: its workers, the counts of its frontends, the loads of its workers. A thin shell."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import aiohttp
import msgspec

from kvmesh.mesh.discovery import Deleted, Discovery
from kvmesh.mesh.lapsed import Lapsed
from kvmesh.planner.connectors.connector import Fleets
from kvmesh.planner.loads import fetch_loads, shared_out
from kvmesh.planner.model import Observation, Traffic
from kvmesh.planner.scrape import fetch_page
from kvmesh.planner.traffic import Page, SloLimits, TrafficMeter, age_query, queries, read_page, traffic_told
from kvmesh.protocol.errors import MeshError, WireError
from kvmesh.protocol.messages import FrontendCard, Role, WorkerCard, decode_card

log = logging.getLogger(__name__)

TIMEOUT_S = 5.0
ANSWER_S = 2.0  # of a worker whose lease has ended
MAX_CARDS = 65_536


async def nothing_answers(url: str) -> bool:
    return False


async def page_answers(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        await fetch_page(http, url, ANSWER_S)
    except MeshError:
        return False
    return True


class MeshView:
    """Knows which workers and frontends have a card in discovery."""

    def __init__(self, decoding: Role = Role.DECODE, answers: Callable[[str], Awaitable[bool]] | None = None) -> None:
        """Count workers of the role `decoding` as those that write answers. AGGREGATED: there are no others.

        `answers` tells whether a page is there; a worker whose lease has ended counts for as long as its page is.
        """
        self._roles = (Role.AGGREGATED,) if decoding is Role.AGGREGATED else (Role.PREFILL, Role.DECODE)
        self._told: set[Role] = set()  # roles that are present and not counted
        self._workers: dict[str, WorkerCard] = {}
        self._frontends: dict[str, FrontendCard] = {}
        self._answers = answers or nothing_answers
        self._lapsed = Lapsed(self._runs, self._forget)

    async def follow(self, discovery: Discovery) -> None:
        """Follow the cards until the watch ends."""
        try:
            await self._follow(discovery)
        finally:
            await self._lapsed.close()

    async def _follow(self, discovery: Discovery) -> None:
        async for change in discovery.watch(""):
            kind, _, _ = change.key.partition("/")
            if isinstance(change, Deleted):
                self._on_deleted(change)
                continue
            self._lapsed.discard(change.key)
            try:
                if kind == "workers" and len(self._workers) < MAX_CARDS:
                    self._join(change.key, decode_card(change.value, WorkerCard))
                elif kind == "frontends" and len(self._frontends) < MAX_CARDS:
                    self._frontends[change.key] = decode_card(change.value, FrontendCard)
            except WireError as error:
                log.warning("a card that cannot be read at %s: %s", change.key, error)

    def _on_deleted(self, change: Deleted) -> None:
        if change.has_lapsed and change.key in self._workers:
            self._lapsed.add(change.key)  # it may have lost discovery only: another in its place would be one too many
            return
        self._lapsed.discard(change.key)
        self._forget(change.key)

    def _forget(self, key: str) -> None:
        self._workers.pop(key, None)
        self._frontends.pop(key, None)

    async def _runs(self, key: str) -> bool:
        """Return whether the page of a worker answers, and is not that of a worker that has taken its place."""
        card = self._workers[key]
        place = (card.name, card.metrics_url)
        if any((other.name, other.metrics_url) == place for at, other in self._workers.items() if at != key):
            return False
        return bool(card.metrics_url) and await self._answers(card.metrics_url)

    def _join(self, key: str, card: WorkerCard) -> None:
        self._workers[key] = card
        if card.role in self._roles or card.role in self._told:
            return
        self._told.add(card.role)
        counted = " and ".join(role.value for role in self._roles)
        text = "%s is an %s worker, this planner counts %s workers alone; see --mode"
        log.warning(text, card.name, card.role.value, counted)

    @property
    def has_prefill_role(self) -> bool:
        return Role.PREFILL in self._roles

    def prefilling(self) -> list[WorkerCard]:
        return self._of(Role.PREFILL) if self.has_prefill_role else []

    def decoding(self) -> list[WorkerCard]:
        return self._of(self._roles[-1])

    def _of(self, role: Role) -> list[WorkerCard]:
        return [card for card in self._workers.values() if card.role is role and not card.resting]

    def frontends(self) -> dict[str, int]:
        """Return how many processes answer at each URL."""
        found: dict[str, list[FrontendCard]] = {}
        for _, card in sorted(self._frontends.items()):
            found.setdefault(card.url, []).append(card)
        return {cards[0].observed_url: len(cards) for cards in found.values()}


class TrafficSource(Protocol):
    async def piece(self, at_s: float) -> Traffic | None:
        """Return the traffic since the last piece. None means nothing new, or not known: then `problem` says why.

        A source does not raise MeshError.
        """

    @property
    def problem(self) -> str: ...

    @property
    def waiting(self) -> float:
        """Return how many requests wait in routers, as far as is known."""


class FrontendSource:
    """Reads the /metrics pages of the frontends."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        frontends: Callable[[], dict[str, int]],
        longest_s: float,
        limits: SloLimits | None = None,
    ) -> None:
        """Read the pages that `frontends` names, with their processes. A piece open for `longest_s` is given up.

        With `limits`, count the requests that kept them.
        """
        self._limits = limits
        self._http = http
        self._frontends = frontends
        self._longest_s = longest_s
        self._meter = TrafficMeter(time.time(), counts_slo=limits is not None)
        self.waiting = 0.0

    @property
    def problem(self) -> str:
        return self._meter.problem

    async def piece(self, at_s: float) -> Traffic | None:
        self._meter.give_up(at_s, self._longest_s)
        urls = self._frontends()
        pages = await asyncio.gather(*(self._page(url, processes) for url, processes in urls.items()))
        self.waiting = sum(page.waiting for page in pages if page is not None)
        self._meter.on_scrape(at_s, dict(zip(urls, pages, strict=True)))
        return self._meter.close(at_s)

    async def _page(self, url: str, processes: int) -> Page | None:
        try:
            page = await fetch_page(self._http, f"{url}/metrics", TIMEOUT_S)
            return read_page(page, processes, self._limits)
        except MeshError as error:
            log.warning("no traffic from a frontend: %s", error)
            return None


class PrometheusSource:
    """Asks a Prometheus server that scrapes the frontends."""

    def __init__(
        self, http: aiohttp.ClientSession, url: str, matcher: str, window_s: float, limits: SloLimits | None = None
    ) -> None:
        """Ask for the series that the PromQL `matcher` picks, such as job="frontend".

        A piece is `window_s` long: several times the interval between two scrapes. With `limits`, ask how many
        requests kept them.
        """
        self._limits = limits
        self._http = http
        self._url = url.rstrip("/")
        self._matcher = matcher
        self._window_s = window_s
        self._next_s = -math.inf
        self.problem = ""
        self.waiting = 0.0  # not known: a sample is too old for it

    async def piece(self, at_s: float) -> Traffic | None:
        if at_s < self._next_s:
            return None
        asked = queries(self._matcher, self._window_s, self._limits)
        try:
            age_s, *values = await asyncio.gather(
                self._ask(age_query(self._matcher)), *(self._ask(query) for query in asked.values())
            )
        except MeshError as error:
            self.problem = str(error)
            return None
        if age_s is None or not age_s <= self._window_s:
            self.problem = "it has no sample of a frontend" + ("" if age_s is None else f" since {age_s:.0f} s")
            return None
        answers = dict(zip(asked, values, strict=True))
        traffic = traffic_told(answers, at_s - self._window_s, at_s, counts_slo=self._limits is not None)
        self.problem = "" if traffic is not None else "it does not say how many requests came"
        if traffic is not None:
            self._next_s = at_s + self._window_s
        return traffic

    async def _ask(self, query: str) -> float | None:
        page = await fetch_page(self._http, f"{self._url}/api/v1/query", TIMEOUT_S, query=query)
        return read_answer(page)


def read_answer(body: str) -> float | None:
    """Return the number of an instant query; None if it is empty or nan. Raise WireError for any other answer. Pure."""
    try:
        answer: Any = msgspec.json.decode(body)
        if answer["status"] != "success":
            raise WireError(f"Prometheus says: {answer.get('error', answer['status'])}")
        result = answer["data"]["result"]
        if not result:
            return None
        if len(result) > 1:
            raise WireError(f"Prometheus gave {len(result)} series where one is expected")
        value = float(result[0]["value"][1])
    except (msgspec.DecodeError, KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise WireError(f"this is no answer of Prometheus: {body[:100]!r}") from error
    return value if math.isfinite(value) else None


class Observer:
    """Puts together the observations of the core."""

    def __init__(self, http: aiohttp.ClientSession, view: MeshView, source: TrafficSource) -> None:
        self._http = http
        self._view = view
        self._source = source
        self._isl_tokens: float | None = None

    @property
    def problem(self) -> str:
        return self._source.problem

    async def observe(self, at_s: float, fleets: Fleets) -> Observation:
        traffic = await self._source.piece(at_s)
        if traffic is not None and traffic.isl_tokens is not None:
            self._isl_tokens = traffic.isl_tokens
        prefill, decode = await asyncio.gather(
            *(
                fetch_loads(self._http, cards, self._isl_tokens)
                for cards in (self._view.prefilling(), self._view.decoding())
            )
        )
        waiting_tokens = self._source.waiting * (self._isl_tokens or 0.0)
        if self._view.has_prefill_role:
            prefill = shared_out(prefill, waiting_tokens)
        else:
            decode = shared_out(decode, waiting_tokens)
        return Observation(
            at_s=at_s,
            prefill=fleets.prefill,
            decode=fleets.decode,
            traffic=traffic,
            prefill_loads=prefill,
            decode_loads=decode,
        )
