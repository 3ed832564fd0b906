"""The doctor of a running mesh: which pairs it has measured, what it makes of the answers, what it advises."""

import asyncio
import io
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from kvmesh.commands.doctor_cluster import (
    ClusterPair,
    ClusterReport,
    ClusterService,
    advise,
    choose_pairs,
    examine_cluster,
    pair_of,
    show_cluster,
)
from kvmesh.mesh.discovery import open_discovery
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.mesh.plane.probing import ClockReading, PeerProbing, quickest
from kvmesh.mesh.plane.server import Call, PlaneServer
from kvmesh.protocol.errors import OverloadedError, WireError
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import Clock, PeerProbe, ProbePeer, Role, WorkerCard, encode_card
from kvmesh.protocol.version import RELEASE
from kvmesh.workers.transfer_probe import ProbeOffers, open_region, probe_transfer
from tests.support.patience import PATIENCE_S


def service(name: str, kind: str = "decode", host: str = "10.0.0.1", **more: Any) -> ClusterService:
    facts: dict[str, Any] = {
        "address": f"{host}:7000", "release": f"kvmesh {RELEASE}", "protocol": 2, "model": "m", "transfer": "nixl",
    }  # fmt: skip
    return ClusterService(name=name, kind=kind, **facts | more)


DECODE, PREFILL = service("d", "decode", "10.0.0.1"), service("p", "prefill", "10.0.0.2")
MEASURED = PeerProbe(round_trip_s=0.0002, clock_offset_s=0.001, num_bytes=1 << 24, duration_s=0.02, tcp_bytes=1 << 24)


# --- which pairs --------------------------------------------------------------------------------------


def test_a_small_mesh_has_all_its_pairs_measured() -> None:
    chosen, left_out = choose_pairs([DECODE, PREFILL, service("r", "router")], 64, random.Random(1))
    assert (len(chosen), left_out) == (6, 0)


def test_of_a_thousand_workers_every_host_is_seen_first() -> None:
    workers = [service(f"w{i}", "decode" if i % 2 else "prefill", f"10.0.0.{i % 4}") for i in range(1000)]
    chosen, left_out = choose_pairs(workers, 40, random.Random(1))
    assert (len(chosen), left_out) == (40, 1000 * 999 - 40)
    hosts = {(source.address, target.address) for source, target in chosen}
    assert len(hosts) == 16, "each of the four hosts with each"
    assert len(set(chosen)) == 40


# --- what answers mean --------------------------------------------------------------------------------


def test_the_ping_with_the_shortest_round_trip_tells_the_clock() -> None:
    best = quickest([ClockReading(100.0, 105.4, 100.9), ClockReading(200.0, 205.001, 200.002)])
    assert (round(best.round_trip_s, 6), round(best.offset_s, 6)) == (0.002, 5.0)


def test_bytes_on_tcp_connections_tell_what_carries_kv() -> None:
    assert pair_of(DECODE, PREFILL, MEASURED).carried_by == "tcp"
    assert pair_of(DECODE, PREFILL, replace(MEASURED, tcp_bytes=400)).carried_by == "rdma or shared memory"
    assert pair_of(DECODE, PREFILL, MEASURED).gb_per_s == pytest.approx(0.839, abs=0.001)


@pytest.mark.parametrize(
    "told",
    [
        PeerProbe(round_trip_s=float("nan"), clock_offset_s=float("inf"), num_bytes=-5, duration_s=-1.0),
        PeerProbe(round_trip_s=-1.0, num_bytes=1 << 60, duration_s=0.0, tcp_bytes=-1),
    ],
)
def test_impossible_numbers_of_a_service_are_left_out(told: PeerProbe) -> None:
    pair = pair_of(DECODE, PREFILL, told)
    assert (pair.round_trip_ms, pair.gb_per_s, pair.carried_by) == (None, None, "")
    assert pair.clock_offset_s is None


def test_texts_of_a_service_cannot_write_to_the_terminal() -> None:
    pair = pair_of(DECODE, PREFILL, PeerProbe(problem="\x1b[2Jgone" + "x" * 900))
    assert "\x1b" not in pair.problem
    assert len(pair.problem) == 300


@pytest.mark.parametrize(
    ("pair", "found", "advice"),
    [
        ({"reachable": False, "problem": "no answer"}, "no answer", "let 10.0.0.1 reach 10.0.0.2:7000"),
        ({"clock_offset_s": 5.0}, "the clock there is 5.0 s ahead", "chrony"),
        ({"clock_offset_s": -5.0}, "the clock there is 5.0 s behind", "chrony"),
        ({"transfer": "nixl", "transfer_problem": "no read"}, "no read", "UCX_TCP_PORT_RANGE"),
        ({"transfer": "shm", "transfer_problem": "no map"}, "no map", "--kv-transfer nixl"),
        ({"carried_by": "tcp", "gb_per_s": 1.0, "rdma_devices": ("mlx5_0",)}, "over TCP, d has RDMA", "UCX_NET_DEV"),
        ({"carried_by": "tcp", "gb_per_s": 0.05}, "0.05 GB/s", "check the link"),
        ({"reachable": None, "problem": "d could not be asked: x"}, "could not be asked", "of that service above"),
    ],
)
def test_each_problem_of_a_pair_has_its_advice(pair: dict[str, Any], found: str, advice: str) -> None:
    facts: dict[str, Any] = {"source": "d", "target": "p", "reachable": True} | pair
    [problem] = advise([DECODE, PREFILL], [ClusterPair(**facts)])
    assert problem.about == "d -> p"
    assert found in problem.found
    assert advice in problem.advice


@pytest.mark.parametrize(
    ("one", "found"),
    [
        (service("w", address="127.0.0.1:7000"), "no other host can reach"),
        (service("w", problem="refused"), "refused"),
        (service("w", release="kvmesh 0.1"), f"releases differ: kvmesh 0.1, kvmesh {RELEASE}"),
        (service("w", clock_offset_s=-3.0), "3.0 s behind, seen from here"),
    ],
)
def test_each_problem_of_a_service_has_its_advice(one: ClusterService, found: str) -> None:
    [problem] = advise([one, PREFILL], [])
    assert found in problem.found
    assert problem.advice


def test_well_services_and_pairs_need_no_advice() -> None:
    assert advise([DECODE, PREFILL], [pair_of(DECODE, PREFILL, MEASURED)]) == []


# --- real services ------------------------------------------------------------------------------------


class SkewedWorker:
    """A worker's answers to probes, with a clock that is ahead."""

    def __init__(self, name: str, role: Role, ahead_s: float = 0.0) -> None:
        self.name, self.role, self.ahead_s = name, role, ahead_s
        self.probing = PeerProbing(probe_transfer)
        offers = {"probe_offer": ProbeOffers().answer, "clock": self.clock}
        self.server = PlaneServer(dict(self.probing.handlers()) | offers)

    async def clock(self, call: Call) -> None:
        await call.send(Clock(unix_s=time.time() + self.ahead_s))

    def card(self) -> WorkerCard:
        return WorkerCard(
            worker_id=WorkerId(f"{self.name}-id"), name=self.name, role=self.role, model="m", model_path="",
            address=self.server.address, block_size=16, total_blocks=8, context_tokens=64, transfer="shm",
        )  # fmt: skip


@asynccontextmanager
async def mesh_of(url: str, *workers: SkewedWorker) -> AsyncIterator[None]:
    discovery = open_discovery(url)
    try:
        for worker in workers:
            await worker.server.start("127.0.0.1")
            await discovery.put(f"workers/{worker.name}-id", encode_card(worker.card()))
        yield
    finally:
        await discovery.close()
        for worker in workers:
            await worker.server.close()


async def test_a_clock_that_is_ahead_is_found_and_kv_is_measured(tmp_path: Any) -> None:
    url = f"file:{tmp_path}"
    async with mesh_of(url, SkewedWorker("d", Role.DECODE), SkewedWorker("p", Role.PREFILL, ahead_s=5.0)):
        report = await examine_cluster(url, 64)
    pairs = {(pair.source, pair.target): pair for pair in report.pairs}
    assert pairs["d", "p"].clock_offset_s == pytest.approx(5.0, abs=0.2)
    assert pairs["p", "d"].clock_offset_s == pytest.approx(0.0, abs=0.2)
    assert (pairs["d", "p"].carried_by, pairs["d", "p"].transfer_problem) == ("shared memory", "")
    assert (pairs["d", "p"].gb_per_s or 0) > 0
    assert report.ok, "a wrong clock is a warning"
    assert {problem.about for problem in report.problems} == {"p", "d -> p"}
    shown = io.StringIO()
    show_cluster(report, Console(file=shown, width=200))
    assert "5.0 s ahead" in shown.getvalue()


async def test_a_worker_that_died_is_unreachable_for_all(tmp_path: Any) -> None:
    url = f"file:{tmp_path}"
    alive, dead = SkewedWorker("d", Role.DECODE), SkewedWorker("p", Role.PREFILL)
    async with mesh_of(url, alive, dead):
        await dead.server.close()
        report: ClusterReport = await examine_cluster(url, 64)
    assert not report.ok
    assert {(pair.source, pair.target, pair.reachable) for pair in report.pairs} == {
        ("d", "p", False),
        ("p", "d", None),
    }


async def test_a_service_makes_one_probe_at_a_time() -> None:
    release = asyncio.Event()

    async def wait(plane: PlaneClient, request: ProbePeer, found: PeerProbe) -> PeerProbe:
        await release.wait()
        return found

    probing = PeerProbing(wait)
    server, client = PlaneServer(probing.handlers()), PlaneClient()
    try:
        address = await server.start("127.0.0.1")
        request = ProbePeer(address=address, transfer="shm")
        first = asyncio.create_task(client.ask(address, "probe_peer", request, PeerProbe, PATIENCE_S))
        while not probing._is_busy:
            await asyncio.sleep(0.001)
        with pytest.raises(OverloadedError, match="a probe of a peer runs here already"):
            await client.ask(address, "probe_peer", request, PeerProbe, PATIENCE_S)
        release.set()
        assert (await first).problem == ""
        assert (await client.ask(address, "probe_peer", request, PeerProbe, PATIENCE_S)).problem == ""
    finally:
        await client.close()
        await server.close()


@pytest.mark.parametrize("num_bytes", [0, 1 << 40])
async def test_a_probe_of_too_many_bytes_is_refused(num_bytes: int) -> None:
    server, client = PlaneServer(PeerProbing().handlers()), PlaneClient()
    try:
        address = await server.start("127.0.0.1")
        with pytest.raises(WireError):
            await client.ask(address, "probe_peer", {"address": "x:1", "num_bytes": num_bytes}, PeerProbe, PATIENCE_S)
    finally:
        await client.close()
        await server.close()


async def test_memory_of_a_probe_is_freed_when_the_caller_leaves() -> None:
    offers = ProbeOffers()
    server, client = PlaneServer({"probe_offer": offers.answer}), PlaneClient()
    try:
        address = await server.start("127.0.0.1")
        body = {"transfer": "shm", "num_bytes": 1 << 20}
        async with client.open(address, "probe_offer", body, PATIENCE_S) as stream:
            assert await stream.next() is not None
            assert offers._is_busy
        async with asyncio.timeout(PATIENCE_S):
            while offers._is_busy:
                await asyncio.sleep(0.001)
    finally:
        await client.close()
        await server.close()


async def test_only_backends_that_move_kv_give_memory() -> None:
    with pytest.raises(Exception, match="cannot be read over 'smoke'"):
        await open_region("smoke", 1 << 20)
