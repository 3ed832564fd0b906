"""Examine a running mesh: which services answer, how the pairs among them reach each other, and what to do about it.

The services measure the ways between themselves, one probe at a time each. The answers come from other processes: they
are read field by field, and shown only as numbers and short texts.
"""

import asyncio
import math
import random
from collections.abc import Sequence
from itertools import permutations
from typing import Any

from msgspec import Struct
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvmesh.mesh.address import split_address
from kvmesh.mesh.discovery import Put, open_discovery
from kvmesh.mesh.identity.credentials import Credentials
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.mesh.plane.probing import PROBE_S, ping
from kvmesh.protocol.errors import InvalidRequestError, MeshError, OverloadedError, WireError
from kvmesh.protocol.messages import PeerProbe, ProbePeer, Role, RouterCard, WorkerCard, decode_card
from kvmesh.protocol.version import RELEASE, release_name

CARDS_QUIET_S = 1.5  # without another card, all have come
MAX_SERVICES = 4096
ASKED_AT_ONCE = 16
BUSY_TRIES = 5
CLOCK_OFF_S = 1.0  # beyond this, logs and traces of two hosts cannot be laid side by side
SLOW_GB_PER_S = 0.1
LOOPBACK = ("127.", "localhost", "[::1]", "::1", "0.0.0.0")


class ClusterService(Struct, frozen=True, kw_only=True):
    """A service of the mesh, as this machine sees it. Times are None if it does not answer here."""

    name: str
    kind: str  # "router", or a worker's role
    address: str
    release: str
    protocol: int
    model: str = ""
    transfer: str = ""  # the backend that moves its KV
    problem: str = ""
    round_trip_ms: float | None = None
    clock_offset_s: float | None = None


class ClusterPair(Struct, frozen=True, kw_only=True):
    """The way from one service to another, as the first one has measured it."""

    source: str
    target: str
    reachable: bool | None  # None: the source could not be asked
    problem: str = ""
    round_trip_ms: float | None = None
    clock_offset_s: float | None = None
    transfer: str = ""  # "": no KV goes this way
    transfer_problem: str = ""
    carried_by: str = ""  # "tcp", or "rdma or shared memory"
    gb_per_s: float | None = None
    rdma_devices: tuple[str, ...] = ()
    ucx: tuple[str, ...] = ()


class ClusterAdvice(Struct, frozen=True):
    about: str
    found: str
    advice: str
    is_failure: bool = False


class ClusterReport(Struct, frozen=True, kw_only=True):
    """The JSON object of `kvmesh doctor --cluster --json`."""

    ok: bool
    services: list[ClusterService]
    pairs: list[ClusterPair]
    left_out: int  # pairs that were not measured
    problems: list[ClusterAdvice]


# --- what is decided ----------------------------------------------------------------------------------


def host_of(service: ClusterService) -> str:
    try:
        return split_address(service.address)[0]
    except ValueError:
        return service.address


def kv_way(source: ClusterService, target: ClusterService) -> str:
    """Return the backend over which the source would pull KV from the target; "" if it never does."""
    pulls = source.kind == Role.DECODE and target.kind == Role.PREFILL and source.model == target.model
    if not pulls or not (source.transfer and target.transfer):
        return ""
    return "shm" if target.transfer == "shm" else "nixl" if "nixl" in target.transfer else ""


def choose_pairs(
    services: Sequence[ClusterService], most: int, rng: random.Random
) -> tuple[list[tuple[ClusterService, ClusterService]], int]:
    """Return the pairs to measure, and how many are left out.

    Of too many, one for every two hosts comes first, and before the others those over which KV moves.
    """
    usable = [service for service in services if not service.problem or service.kind != "router"]
    if len(usable) * (len(usable) - 1) <= most:
        return list(permutations(usable, 2)), 0
    total = len(usable) * (len(usable) - 1)
    drawn = {(rng.randrange(len(usable)), rng.randrange(len(usable))) for _ in range(64 * most)}
    pairs = [(usable[i], usable[j]) for i, j in sorted(drawn) if i != j]
    rng.shuffle(pairs)
    seen = set[tuple[str, str]]()
    ranked = []
    for source, target in pairs:
        hosts = (host_of(source), host_of(target))
        ranked.append(((hosts in seen, not kv_way(source, target)), (source, target)))
        seen.add(hosts)
    ranked.sort(key=lambda entry: entry[0])
    chosen = [pair for _, pair in ranked[:most]]
    return chosen, total - len(chosen)


def pair_of(source: ClusterService, target: ClusterService, probe: PeerProbe) -> ClusterPair:
    """Return what a probe says. Numbers that no network has are left out."""
    way = kv_way(source, target)
    is_measured = bool(way) and 0 < probe.num_bytes <= 1 << 30 and 0 < probe.duration_s < PROBE_S
    return ClusterPair(
        source=source.name,
        target=target.name,
        reachable=not probe.problem,
        problem=shown(probe.problem),
        round_trip_ms=milliseconds(probe.round_trip_s),
        clock_offset_s=finite(probe.clock_offset_s),
        transfer=way,
        transfer_problem=shown(probe.transfer_problem),
        carried_by=carrier(way, probe) if is_measured else "",
        gb_per_s=round(probe.num_bytes / probe.duration_s / 1e9, 3) if is_measured else None,
        rdma_devices=tuple(map(shown, probe.rdma_devices)),
        ucx=tuple(map(shown, probe.ucx)),
    )


def carrier(way: str, probe: PeerProbe) -> str:
    if way == "shm":
        return "shared memory"
    return "tcp" if probe.tcp_bytes >= probe.num_bytes // 2 else "rdma or shared memory"


def shown(text: str) -> str:
    """Return a text of a peer as it may be shown on a terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)[:300]


def finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 6)


def milliseconds(seconds: float | None) -> float | None:
    return None if finite(seconds) is None or seconds is None or seconds < 0 else round(1000 * seconds, 3)


def advise(services: Sequence[ClusterService], pairs: Sequence[ClusterPair]) -> list[ClusterAdvice]:
    """Return one piece of advice for each problem."""
    found = [*advice_on_services(services)]
    by_name = {service.name: service for service in services}
    for pair in pairs:
        target = by_name[pair.target]
        about = f"{pair.source} -> {pair.target}"
        if pair.reachable is None:
            found.append(ClusterAdvice(about, pair.problem, "mend what is said of that service above"))
        elif not pair.reachable:
            advice = f"let {host_of(by_name[pair.source])} reach {target.address}: firewall, route, --advertise-host"
            found.append(ClusterAdvice(about, pair.problem, advice, is_failure=True))
        if off := clock_problem(pair.clock_offset_s):
            found.append(ClusterAdvice(about, off, CLOCK_ADVICE))
        if pair.transfer_problem:
            found.append(ClusterAdvice(about, pair.transfer_problem, transfer_advice(pair), is_failure=True))
        elif pair.carried_by == "tcp" and pair.rdma_devices:
            text = f"KV moves over TCP, {pair.source} has RDMA devices: {', '.join(pair.rdma_devices[:4])}"
            found.append(ClusterAdvice(about, text, "see docs/networking.md, RDMA: UCX_TLS, UCX_NET_DEVICES, memlock"))
        elif pair.gb_per_s is not None and pair.gb_per_s < SLOW_GB_PER_S:
            found.append(
                ClusterAdvice(about, f"KV moves at {pair.gb_per_s} GB/s", "check the link and who else uses it")
            )
    return found


CLOCK_ADVICE = "run chrony or another NTP client: the mesh works, but logs and traces of the hosts do not line up"


def clock_problem(offset_s: float | None) -> str:
    if offset_s is None or abs(offset_s) < CLOCK_OFF_S:
        return ""
    return f"the clock there is {abs(offset_s):.1f} s {'ahead' if offset_s > 0 else 'behind'}"


def transfer_advice(pair: ClusterPair) -> str:
    if pair.transfer == "shm":
        return "shared memory works on one host alone: start workers with --kv-transfer nixl"
    return "let NIXL's ports through: UCX takes any TCP port (UCX_TCP_PORT_RANGE narrows it); docs/networking.md"


def advice_on_services(services: Sequence[ClusterService]) -> list[ClusterAdvice]:
    found = []
    hosts = {host_of(service) for service in services}
    for service in services:
        if service.problem:
            text = f"{service.address}: {service.problem}"
            advice = "is it alive? can this machine reach it? --advertise-host must be an address that peers can reach"
            found.append(ClusterAdvice(service.name, text, advice, is_failure=True))
        if len(hosts) > 1 and service.address.startswith(LOOPBACK):
            text = f"it advertises {service.address}, which no other host can reach"
            found.append(ClusterAdvice(service.name, text, "start it with --advertise-host", is_failure=True))
        if off := clock_problem(service.clock_offset_s):
            found.append(ClusterAdvice(service.name, f"{off}, seen from here", CLOCK_ADVICE))
    releases = sorted({service.release for service in services} | {release_name(RELEASE)})
    if len(releases) > 1:
        text = f"releases differ: {', '.join(releases)}"
        found.append(ClusterAdvice("versions", text, "it works for neighbouring releases; finish the upgrade"))
    if not services:
        text = "discovery shows no service"
        found.append(ClusterAdvice("mesh", text, "give --discovery as the services have it", is_failure=True))
    return found


# --- what is asked ------------------------------------------------------------------------------------


async def examine_cluster(url: str, most_pairs: int, credentials: Credentials | None = None) -> ClusterReport:
    """Ask all services, then have pairs of them probe each other. Raises MeshError if discovery cannot be read."""
    plane = PlaneClient(credentials)
    try:
        limit = asyncio.Semaphore(ASKED_AT_ONCE)
        found = await services_of(url, credentials)
        services = await asyncio.gather(*(look_at(plane, service, limit) for service in found))
        chosen, left_out = choose_pairs(services, most_pairs, random.Random(most_pairs))
        pairs = await measure(plane, chosen)
    finally:
        await plane.close()
    problems = advise(services, pairs)
    return ClusterReport(
        ok=not any(problem.is_failure for problem in problems),
        services=list(services),
        pairs=pairs,
        left_out=left_out,
        problems=problems,
    )


async def services_of(url: str, credentials: Credentials | None = None) -> list[ClusterService]:
    """Return the workers and routers that discovery shows, by name."""
    found: dict[str, ClusterService] = {}
    discovery = open_discovery(url, credentials)
    try:
        changes = discovery.watch("")
        while len(found) < MAX_SERVICES:
            change = await asyncio.wait_for(anext(changes), CARDS_QUIET_S)
            if isinstance(change, Put) and (service := service_of(change)) is not None:
                found[change.key] = service
    except (TimeoutError, StopAsyncIteration):
        pass
    finally:
        await discovery.close()
    return sorted(found.values(), key=lambda service: (service.kind == "router", service.name))


def service_of(change: Put) -> ClusterService | None:
    """Return the service of a card that has a request plane; None for others, and for cards that cannot be read."""
    try:
        if change.key.startswith("workers/"):
            card = decode_card(change.value, WorkerCard)
            more: dict[str, Any] = {"kind": card.role.value, "model": shown(card.model), "transfer": card.transfer}
            return described(card, more)
        if change.key.startswith("routers/"):
            router = decode_card(change.value, RouterCard)
            return described(router, {"kind": "router"}) if router.address else None
    except WireError:
        return None
    return None


def described(card: WorkerCard | RouterCard, more: dict[str, Any]) -> ClusterService:
    return ClusterService(
        name=shown(card.name),
        address=shown(card.address),
        release=release_name(card.release),
        protocol=card.protocol,
        **more,
    )


async def look_at(plane: PlaneClient, service: ClusterService, limit: asyncio.Semaphore) -> ClusterService:
    """Return the service with what it answers to this machine."""
    facts = {name: getattr(service, name) for name in service.__struct_fields__}
    async with limit:
        try:
            best = await ping(plane, service.address)
        except MeshError as error:
            return ClusterService(**facts | {"problem": refusal(error)})
    times = {"round_trip_ms": milliseconds(best.round_trip_s), "clock_offset_s": finite(best.offset_s)}
    return ClusterService(**facts | times)


def refusal(error: MeshError) -> str:
    if isinstance(error, InvalidRequestError):  # no such method
        return "it is too old to be asked"
    return shown(str(error))


async def measure(plane: PlaneClient, chosen: Sequence[tuple[ClusterService, ClusterService]]) -> list[ClusterPair]:
    """Have the pairs measured: those that move KV one after the other, so that they do not share the network."""
    limit, sources = asyncio.Semaphore(ASKED_AT_ONCE), {source.name: asyncio.Lock() for source, _ in chosen}

    async def one(source: ClusterService, target: ClusterService) -> ClusterPair:
        async with sources[source.name], limit:
            return await probe_pair(plane, source, target)

    plain = [(number, pair) for number, pair in enumerate(chosen) if not kv_way(*pair)]
    found = dict(
        zip((number for number, _ in plain), await asyncio.gather(*(one(*pair) for _, pair in plain)), strict=True)
    )
    for number, pair in enumerate(chosen):
        if number not in found:
            found[number] = await one(*pair)
    return [found[number] for number in range(len(chosen))]


async def probe_pair(plane: PlaneClient, source: ClusterService, target: ClusterService) -> ClusterPair:
    request = ProbePeer(address=target.address, transfer=kv_way(source, target))
    problem = source.problem
    for _ in range(0 if problem else BUSY_TRIES):
        try:
            return pair_of(
                source, target, await plane.ask(source.address, "probe_peer", request, PeerProbe, PROBE_S + 5)
            )
        except OverloadedError as error:
            problem = shown(str(error))
            await asyncio.sleep(1.0)
        except MeshError as error:
            problem = refusal(error)
            break
    asked = f"{source.name} could not be asked: {problem}"
    return ClusterPair(source=source.name, target=target.name, reachable=None, problem=asked)


# --- what is shown ------------------------------------------------------------------------------------


def show_cluster(report: ClusterReport, console: Console) -> None:
    services = Table(title="services, as this machine sees them", title_justify="left", box=None)
    for column in ("service", "kind", "address", "release", "round trip", "clock"):
        services.add_column(column)
    for one in report.services:
        seen = Text("no answer", "bold red") if one.problem else Text(milliseconds_text(one.round_trip_ms))
        version = f"{one.release}, protocol {one.protocol}"
        services.add_row(one.name, one.kind, one.address, version, seen, offset_text(one.clock_offset_s))
    console.print(services)
    pairs = Table(title="\npairs, as the first one of each sees the second", title_justify="left", box=None)
    for column in ("from", "to", "reachable", "round trip", "clock", "KV", "carried by", "GB/s"):
        pairs.add_column(column)
    for pair in report.pairs:
        reached = {True: Text("yes", "green"), False: Text("no", "bold red"), None: Text("?", "yellow")}[pair.reachable]
        speed = "" if pair.gb_per_s is None else f"{pair.gb_per_s:.2f}"
        pairs.add_row(
            pair.source, pair.target, reached, milliseconds_text(pair.round_trip_ms), offset_text(pair.clock_offset_s),
            pair.transfer or "-", pair.carried_by, speed,
        )  # fmt: skip
    console.print(pairs)
    if report.left_out:
        console.print(f"{report.left_out} more pairs were not measured: --pairs {len(report.pairs) + report.left_out}")
    for settings in sorted({setting for pair in report.pairs for setting in pair.ucx}):
        console.print(f"set for UCX: {settings}", markup=False)
    for problem in report.problems:
        colour = "bold red" if problem.is_failure else "yellow"
        console.print(Text("\n").append(problem.about, colour).append(f": {problem.found}\n-> {problem.advice}"))
    console.print("\nall pairs are well" if not report.problems else f"\n{len(report.problems)} problems")


def milliseconds_text(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} ms"


def offset_text(value: float | None) -> str:
    return "" if value is None else f"{value:+.3f} s"
