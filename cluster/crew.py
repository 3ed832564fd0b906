"""Change the workers of a mesh on this host while requests run: start, drain and flip them."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import aiohttp

from kvmesh.cluster.notices import OwnerNotices
from kvmesh.frontend.crew import WorkerCrew
from kvmesh.mesh.discovery import Deleted, Discovery, Put
from kvmesh.mesh.identity.credentials import Credentials
from kvmesh.mesh.member_session import member_session
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.mesh.supervisor import ProcessSpec, Supervisor
from kvmesh.planner.connectors.local_api import MAX_WORKERS, Flipped, MemberReport, Refusal, Scaled, State
from kvmesh.planner.loads import fetch_load
from kvmesh.protocol.errors import InvalidRequestError, MeshError, WireError
from kvmesh.protocol.messages import Control, ControlAction, ControlReply, DownCard, Role, WorkerCard, decode_card

log = logging.getLogger(__name__)
SILENT_S = 15.0  # from the lapse of a card until requests do not wait for the worker any more

LOAD_TIMEOUT_S = 1.0
REFUSAL_S = 1.0  # a worker that refuses a role has answered by then
SCALED_ROLES = (Role.PREFILL, Role.DECODE, Role.AGGREGATED)
MAX_FAILURES = 16  # of workers, kept for GET /workers


@dataclass(frozen=True, slots=True)
class WorkerStakes:
    """Say what is lost if a worker goes: its requests have to end first, and its cached blocks are computed again."""

    requests: float
    cached_blocks: float = 0.0


@dataclass(slots=True)
class Member:
    name: str
    role: Role
    card: WorkerCard | None = None  # its last card, None while there is none
    doing: Literal["", "flipping", "draining"] = ""
    is_down: bool = False  # it ended again and again; it is tried again after a pause
    silence: asyncio.TimerHandle | None = None  # since its card lapsed, while its process runs: it may be stopped
    is_silent: bool = False  # ... for SILENT_S
    cards: dict[str, WorkerCard] = field(default_factory=dict)  # by key of discovery


class Crew:
    """Keep account of the workers and change them. Methods may be called at any time; one change is made at a time."""

    def __init__(
        self,
        supervisor: Supervisor,
        spec_of: Callable[[Role, str], ProcessSpec],
        drain_timeout_s: float,
        tell: Callable[[str], None],
        fetch: Callable[[WorkerCard], Awaitable[WorkerStakes | None]] | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        """Take `spec_of`, the process of a role and name, and `fetch`, what is lost if a worker goes."""
        self._supervisor = supervisor
        self._spec_of = spec_of
        self._drain_timeout_s = drain_timeout_s
        self._tell = tell
        self._fetch = fetch or partial(stakes_of, credentials=credentials)
        self._members: dict[str, Member] = {}
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._plane = PlaneClient(credentials)
        self.operators = WorkerCrew(self._plane, self._known)
        self.failures: list[Refusal] = []
        self.notices = OwnerNotices()
        self.is_complete = False  # every first worker has joined: from then on the mesh serves without those that fail

    # --- what there is --------------------------------------------------------------------------------

    def adopt(self, name: str, role: Role) -> None:
        """Add a worker that the mesh begins with. If it cannot run at the start, the whole mesh fails."""
        self._members[name] = Member(name, role)
        self._show_kept()

    def on_down(self, name: str, failure: MeshError, retry_s: float) -> bool:
        """Report a worker that ends again and again. Return whether the mesh serves without it."""
        member = self._members.get(name)
        if member is None or not self.is_complete:
            return False
        if not member.is_down:
            self._note(name, failure)
            last_line = str(failure).rstrip().rpartition("\n")[2]
            self._tell(
                f"{name} is down, the others go on; it is tried again in {retry_s:.0f} s. It ended with: {last_line}"
            )
        member.is_down = True
        self.notices.show_down(DownCard(name=name, role=member.role, retry_s=retry_s))
        self._show_kept()
        return True

    def _show_kept(self) -> None:
        """Tell frontends which workers come back if they end."""
        kept = (m for m in self._members.values() if m.doing != "draining" and not (m.is_down or m.is_silent))
        self.notices.keep(m.name for m in kept)

    def reports(self) -> list[MemberReport]:
        return [
            MemberReport(name=m.name, role=m.role, state=self._state(m), pid=self._supervisor.pid(m.name))
            for m in self._members.values()
        ]

    def cards(self) -> list[WorkerCard]:
        """Return the cards of the workers that take requests."""
        return [m.card for m in self._members.values() if m.card is not None and self._state(m) == "ready"]

    def _known(self) -> list[WorkerCard]:
        """Return the cards of all workers, including those that rest."""
        return [m.card for m in self._members.values() if m.card is not None]

    async def follow(self, discovery: Discovery) -> None:
        """Follow which workers are ready until the watch ends."""
        async for change in discovery.watch("workers/"):
            if isinstance(change, Put):
                try:
                    card = decode_card(change.value, WorkerCard)
                except WireError as error:
                    log.warning("a card that cannot be read at %s: %s", change.key, error)
                    continue
                if (member := self._members.get(card.name)) is not None:
                    member.cards[change.key] = card
                    if card.pid == await self._supervisor.settled_pid(card.name):  # else another mesh's
                        self._on_card(member, card)
            elif isinstance(change, Deleted):
                if change.has_lapsed and (running := self._running(change.key)) is not None:
                    self._on_lapse(running)
                    continue
                for member in self._members.values():
                    if (gone := member.cards.pop(change.key, None)) is not None and member.card is gone:
                        member.card = None

    def _running(self, key: str) -> Member | None:
        """Return the worker of a key if its process is ours and runs."""
        having = (member for member in self._members.values() if key in member.cards)
        return next((m for m in having if m.cards[key].pid == self._supervisor.pid(m.name)), None)

    def _on_lapse(self, member: Member) -> None:
        """Have requests wait SILENT_S for a worker, which is not ended: perhaps only discovery is lost."""
        if member.silence is None:
            member.silence = asyncio.get_running_loop().call_later(SILENT_S, self._on_silence, member)

    def _on_silence(self, member: Member) -> None:
        member.is_silent = True
        self._show_kept()
        self._tell(f"{member.name} runs and gives no sign of life: requests do not wait for it")

    def _on_card(self, member: Member, card: WorkerCard) -> None:
        member.card = card
        if member.silence is not None:
            member.silence.cancel()
            member.silence = None
        if member.is_silent:
            member.is_silent = False
            self._show_kept()
            self._tell(f"{member.name} gives signs of life again")
        if member.is_down:
            member.is_down = False
            self.notices.withdraw_down(member.name)
            self._show_kept()
            self._tell(f"{member.name} is back")
        if member.doing == "" and card.role is not member.role and card.role in SCALED_ROLES:
            self._has_role(member, card.role)  # another caller changed its role

    def _state(self, member: Member) -> State:
        if member.doing:
            return member.doing
        has_card = member.card is not None and member.card.pid == self._supervisor.pid(member.name)
        if has_card:
            return "ready"
        return "down" if member.is_down else "starting"

    def _of(self, role: Role) -> list[Member]:
        """Return the workers that have this role or will have it soon."""
        return [m for m in self._members.values() if m.role is role and m.doing != "draining" and not m.is_down]

    # --- changing it ----------------------------------------------------------------------------------

    async def scale(self, targets: Mapping[Role, int]) -> Scaled:
        """Start missing workers and drain surplus ones: those with the fewest requests in hand, none that still starts.

        Raises InvalidRequestError.
        """
        check_targets(targets)
        async with self._changing:
            started: list[str] = []
            draining: list[str] = []
            for role, target in targets.items():
                present = self._of(role)
                started += [self._start(role) for _ in range(target - len(present))]
                ready = [m for m in present if self._state(m) == "ready"]
                draining += await self._drain(ready, min(len(present), len(ready)) - target)
            return Scaled(
                counts={role: len(self._of(role)) for role in SCALED_ROLES},
                started=tuple(started),
                draining=tuple(draining),
            )

    def _start(self, role: Role) -> str:
        numbers = iter(range(MAX_WORKERS * 4))
        taken = self._members.keys() | self._supervisor.pids().keys()
        name = next(name for n in numbers if (name := f"{role.value}-{n}") not in taken)
        self._members[name] = Member(name, role)
        self._show_kept()
        self._supervisor.start(self._spec_of(role, name), lambda failure: self._lost(name, failure))
        self._tell(f"{name} is being started")
        return name

    def _lost(self, name: str, failure: MeshError) -> None:
        """Remove a worker that was added and does not run. The mesh continues without it."""
        self._members.pop(name, None)
        self._show_kept()
        self._note(name, failure)
        self._tell(f"{name} was given up: {failure}")

    def _note(self, name: str, failure: MeshError) -> None:
        self.failures = [*self.failures, Refusal(name, str(failure))][-MAX_FAILURES:]

    async def _drain(self, ready: Sequence[Member], count: int) -> list[str]:
        if count <= 0:
            return []
        chosen = cheapest_to_lose(await self._stakes(ready), count)
        for member in chosen:
            member.doing = "draining"
            self._show_kept()
            self._spawn(self._end(member), f"drain {member.name}")
        return [member.name for member in chosen]

    async def _end(self, member: Member) -> None:
        self._tell(f"{member.name} is drained")
        await self._supervisor.stop([member.name], 2 * self._drain_timeout_s + 5)  # requests, then what it offers
        self._members.pop(member.name, None)
        self._tell(f"{member.name} has ended")

    async def flip(self, to_role: Role, count: int) -> Flipped:
        """Change `count` workers of the other role to `to_role`, those that cost least to lose.

        Raises InvalidRequestError.
        """
        if to_role not in (Role.PREFILL, Role.DECODE) or not 0 <= count <= MAX_WORKERS:
            raise InvalidRequestError(f"cannot turn {count} workers into {to_role.value} workers")
        from_role = Role.DECODE if to_role is Role.PREFILL else Role.PREFILL
        async with self._changing:
            ready = [m for m in self._of(from_role) if self._state(m) == "ready"]
            chosen = cheapest_to_lose(await self._stakes(ready), count)
            outcomes = await asyncio.gather(*(self._flip(member, to_role) for member in chosen))
        refused = [Refusal(m.name, why) for m, why in zip(chosen, outcomes, strict=True) if why]
        if len(chosen) < count:
            refused.append(Refusal("", f"only {len(chosen)} of {count} {from_role.value} workers are ready"))
        done = [m.name for m, why in zip(chosen, outcomes, strict=True) if not why]
        return Flipped(flipped=tuple(done), refused=tuple(refused))

    async def _flip(self, member: Member, role: Role) -> str:
        """Begin to change a worker's role. Return why it refuses, "" if the change has begun."""
        before, card = member.role, member.card
        if card is None:
            return "it has just left"
        member.doing = "flipping"
        self._has_role(member, role)
        asked = self._spawn(self._ask_flip(member, card, role, before), f"flip {member.name}")
        await asyncio.wait({asked}, timeout=REFUSAL_S)
        if asked.done() and member.role is before:
            return next((f.why for f in reversed(self.failures) if f.name == member.name), "it has not said why")
        return ""

    async def _ask_flip(self, member: Member, card: WorkerCard, role: Role, before: Role) -> None:
        control = Control(action=ControlAction.SET_ROLE, arguments={"role": role.value})
        timeout_s = 2 * self._drain_timeout_s + 10
        try:
            await self._plane.ask(card.address, "control", control, ControlReply, timeout_s)
            self._tell(f"{member.name} is now {role.noun}")
        except MeshError as error:
            self._has_role(member, before)
            self._note(member.name, error)
            self._tell(f"{member.name} stays a {before.value} worker: {error}")
        finally:
            if member.doing == "flipping":
                member.doing = ""

    def _has_role(self, member: Member, role: Role) -> None:
        """Give the worker a role that it keeps when its process is started again."""
        member.role = role
        self._supervisor.respecify(self._spec_of(role, member.name))

    async def _stakes(self, members: Sequence[Member]) -> list[tuple[Member, WorkerStakes | None]]:
        cards = [m.card for m in members if m.card is not None]
        loads = await asyncio.gather(*(self._fetch(card) for card in cards))
        return list(zip([m for m in members if m.card is not None], loads, strict=True))

    # --- the end --------------------------------------------------------------------------------------

    def _spawn(self, work: Awaitable[None], name: str) -> asyncio.Task[None]:
        async def run() -> None:
            await work

        task = asyncio.create_task(run(), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Cancel all changes in progress. The supervisor still has the processes."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._plane.close()


def check_targets(targets: Mapping[Role, int]) -> None:
    """Raise InvalidRequestError for a count that this host does not take."""
    for role, target in targets.items():
        if not 0 <= target <= MAX_WORKERS:
            raise InvalidRequestError(
                f"{target} {role.value} workers are asked for", hint=f"this host takes 0 to {MAX_WORKERS}"
            )


def cheapest_to_lose(stakes: Iterable[tuple[Member, WorkerStakes | None]], count: int) -> list[Member]:
    """Return the workers that cost least to lose.

    Those are the workers with the fewest requests in hand, then with the fewest blocks in their caches, then the
    youngest. Workers of which that is not known come last.
    """

    def cost(entry: tuple[Member, WorkerStakes | None]) -> tuple[float, float, int]:
        member, stake = entry
        number = member.name.rpartition("-")[2]
        youth = -int(number) if number.isdigit() else 0
        return (math.inf, math.inf, youth) if stake is None else (stake.requests, stake.cached_blocks, youth)

    return [member for member, _ in sorted(stakes, key=cost)[: max(0, count)]]


async def stakes_of(card: WorkerCard, credentials: Credentials | None = None) -> WorkerStakes | None:
    """Ask a worker what is lost if it goes. Return None if it does not answer as it should."""
    with suppress(aiohttp.ClientError, TimeoutError, MeshError):
        async with member_session(credentials, timeout=aiohttp.ClientTimeout(LOAD_TIMEOUT_S)) as http:
            load = await fetch_load(http, card)
            return WorkerStakes(float(load.running + load.waiting), float(load.cached_blocks))
    return None
