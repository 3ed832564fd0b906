"""A mesh in simulated time: what takes how long, who comes and goes, and that equal input gives equal figures."""

import gc
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import count
from typing import Any

import msgspec
import pytest

from kvmesh.planner.model import Action, Flip, Observation, RoleFleet, ScalingDecision
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.messages import GenerateRequest
from kvmesh.protocol.profile import DecodeTable, PrefillTable, Profile
from kvmesh.simulator import PlannerHook, SimConfig, SimReport, SimRequest, simulate
from kvmesh.simulator.loads import Shape, constant, synthesize
from kvmesh.simulator.records import WindowShares
from kvmesh.simulator.requests import thread_names
from kvmesh.workers.scheduler import Scheduler

BLOCK = 16
PROFILE = Profile(
    model="m",
    engine="mock",
    device="none",
    prefill=PrefillTable(isl_tokens=[1, 1001], ttft_s=[0.0, 1.0]),
    decode=DecodeTable(kv_tokens=[0, 1600], context_tokens=[1, 1600], itl_s=[[0.01, 0.01], [0.03, 0.03]]),
    total_kv_tokens=1600,
    kv_bytes_per_token=1_000_000,
)


def config(**settings: Any) -> SimConfig:
    values: dict[str, Any] = {"workers": 1, "blocks": 100, "block_size": BLOCK, "policy": "round-robin"}
    return SimConfig(**(values | settings))


def timed(**settings: Any) -> SimConfig:
    return config(prefill_profile=PROFILE, decode_profile=PROFILE, **settings)


def request(at_s: float, isl: int, osl: int, thread: int = 0) -> SimRequest:
    return SimRequest(at_s, isl, osl, thread_names(thread, 0, isl // BLOCK), thread)


def run(requests: Sequence[SimRequest], settings: SimConfig, hook: PlannerHook | None = None) -> SimReport:
    return simulate(requests, settings, hook)


def fixed(rate_s: float = 0.001, itl_s: float = 0.01, **settings: Any) -> SimConfig:
    return config(prefill_rate=1 / rate_s, itl_s=itl_s, **settings)


def chats(seconds: float = 120.0) -> list[SimRequest]:
    shape = Shape(isl_tokens=150, osl_tokens=60, spread=0.6, groups=3, prefix_tokens=64, turns=3, pause_s=5)
    return list(synthesize(constant(3.0), seconds, shape, seed=5, block_size=BLOCK))


# --- one request ---------------------------------------------------------------------------------------------


def test_a_prompt_and_its_answer_take_their_steps() -> None:
    report = run([request(2.0, 100, 11)], fixed())
    assert report.ttft_s.mean == pytest.approx(0.1)
    assert report.itl_s.mean == pytest.approx(0.01)
    assert report.e2e_s.mean == pytest.approx(0.2)
    assert report.duration_s == pytest.approx(2.2)


def test_steps_take_longer_the_more_of_the_cache_is_read() -> None:
    """The KV cache is 7 blocks of 16, 112 tokens, and from the 14th token on 8 blocks."""
    report = run([request(0.0, 100, 25)], timed())

    def step_s(blocks: int) -> float:
        return 0.01 + 0.02 * blocks * BLOCK / 1600

    assert report.e2e_s.mean - report.ttft_s.mean == pytest.approx(12 * step_s(7) + 12 * step_s(8))


def test_a_prompt_lengthens_one_step_of_decoding_sequences() -> None:
    alone, both = (run([request(0.0, 16, 101), *more], fixed()) for more in ([], [request(0.5, 160, 1, thread=1)]))
    assert both.e2e_s.max == pytest.approx(alone.e2e_s.max + 0.16)


def test_hops_are_part_of_what_the_client_sees() -> None:
    near, far = (run([request(0.0, 100, 11)], fixed(hop_s=hop_s)) for hop_s in (0.0, 0.25))
    assert far.ttft_s.mean == pytest.approx(near.ttft_s.mean + 0.5)
    assert far.itl_s.mean == pytest.approx(near.itl_s.mean)


def test_the_kv_of_a_prompt_needs_transfer_time() -> None:
    """The pull of 100 tokens of 1 MB at 1 GB/s takes 0.1 s, between the first and the second token."""
    slow, fast = (
        run([request(0.0, 100, 2)], timed(mode="disaggregated", workers=2, kv_bandwidth_gbps=gbps))
        for gbps in (1.0, 0.0)
    )
    assert slow.ttft_s.mean == fast.ttft_s.mean
    assert slow.itl_s.mean == pytest.approx(fast.itl_s.mean + 0.1)


def test_blocks_cached_on_the_decode_worker_are_not_moved() -> None:
    turns = [request(0.0, 96, 2, thread=1), request(10.0, 960, 2, thread=1)]
    slow = run(turns, timed(mode="disaggregated", workers=2, kv_bandwidth_gbps=1.0))
    fast = run(turns, timed(mode="disaggregated", workers=2, kv_bandwidth_gbps=0.0))
    assert slow.itl_s.mean - fast.itl_s.mean == pytest.approx((0.096 + 0.864) / 2, abs=2e-3)


def test_the_answer_is_part_of_the_next_turns_prefix() -> None:
    turns = [request(0.0, 96, 65, thread=1), request(10.0, 192, 2, thread=1)]
    assert run(turns, fixed()).hit_share == pytest.approx(160 / 288)


# --- many ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["aggregated", "disaggregated"])
@pytest.mark.parametrize("blocks", [60, 400])
def test_runs_of_steps_give_the_figures_of_single_steps(
    mode: Any, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(mode=mode, workers=4, blocks=blocks, policy="kv", speedup=4.0, max_step_tokens=96)
    at_once = run(chats(), settings)
    monkeypatch.setattr(Scheduler, "plan_run", lambda _: None)
    one_by_one = run(chats(), settings)
    for name in ("ttft_s", "itl_s", "e2e_s"):
        for figure in ("mean", "p50"):
            exact = getattr(getattr(one_by_one, name), figure)
            assert getattr(getattr(at_once, name), figure) == pytest.approx(exact, rel=0.05), (name, figure)
    assert at_once.requests == one_by_one.requests
    assert at_once.hit_share == pytest.approx(one_by_one.hit_share, abs=0.01)


def test_runs_equal_single_steps_exactly_without_lags(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run may report its blocks late, because nothing that a router learns matters here."""
    settings = config(workers=3, blocks=80, max_step_tokens=64, saturation_tokens=0)
    at_once = run(chats(), settings)
    monkeypatch.setattr(Scheduler, "plan_run", lambda _: None)
    one_by_one = run(chats(), settings)
    assert at_once.preemptions == one_by_one.preemptions > 0
    assert at_once.hit_share == one_by_one.hit_share
    assert at_once.ttft_s.max == pytest.approx(one_by_one.ttft_s.max, rel=1e-9)
    assert at_once.e2e_s.mean == pytest.approx(one_by_one.e2e_s.mean, rel=1e-9)
    assert at_once.busy_share == pytest.approx(one_by_one.busy_share, rel=1e-9)


def test_a_closed_loop_keeps_so_many_requests_going() -> None:
    requests = [request(0.0, 100, 11, thread) for thread in range(20)]
    report = run(requests, fixed(concurrency=2, max_step_tokens=100))
    assert report.requests == 20
    assert report.ttft_s.max < 0.35, "at most one other is before it"
    assert report.duration_s > 20 * 0.1


def test_goodput_counts_those_that_keep_both_limits() -> None:
    requests = [request(10.0 * number, isl, 5, number) for number, isl in enumerate([100, 300, 100, 300])]
    report = run(requests, fixed(ttft_slo_s=0.2, itl_slo_s=0.02))
    assert (report.attainment, report.ttft_attainment, report.itl_attainment) == (0.5, 0.5, 1.0)
    assert report.goodput_rps == pytest.approx(2 / report.duration_s)


def test_a_request_that_can_never_run_fails_alone() -> None:
    report = run([request(0.0, 5000, 5), request(1.0, 100, 5, 1)], fixed())
    assert (report.requests, report.failed, report.e2e_s.mean > 0) == (2, 1, True)


def test_requests_for_other_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match="blocks of 32 tokens"):
        run([request(0.0, 100, 5)], fixed(block_size=32))
    with pytest.raises(ConfigError, match="the one before"):
        run([request(1.0, 100, 5), request(0.5, 100, 5)], fixed())


def test_several_routers_share_the_requests() -> None:
    report = run(chats(), config(workers=4, routers=3, policy="kv", gossip_lag_s=0.05))
    assert report.failed == 0
    assert report.hit_share > 0.3


# --- the planner in the loop ---------------------------------------------------------------------------------


class Script:
    """Orders what is written down; remembers what it was told."""

    def __init__(self, orders: dict[float, tuple[int, int] | tuple[int, int, Flip]]) -> None:
        self.orders = orders
        self.seen: list[Observation] = []
        self.last = (0, 0)

    def decide(self, seen: Observation) -> ScalingDecision:
        self.seen.append(seen)
        order = self.orders.get(seen.at_s)
        if order is None:
            prefill, decode = seen.prefill.ordered, seen.decode.ordered
            return ScalingDecision(at_s=seen.at_s, loop="none", action=Action.HOLD, prefill=prefill, decode=decode)
        flip = order[2] if len(order) == 3 else None
        return ScalingDecision(
            at_s=seen.at_s, loop="reactive", action=Action.SCALE, prefill=order[0], decode=order[1], flip=flip
        )

    def at(self, at_s: float) -> Observation:
        return next(seen for seen in self.seen if seen.at_s == at_s)


def steady(until_s: float, gap_s: float = 1.0, isl: int = 100, osl: int = 20) -> list[SimRequest]:
    return [request(number * gap_s, isl, osl, number) for number in range(int(until_s / gap_s))]


def test_an_ordered_worker_starts_first() -> None:
    script = Script({10.0: (0, 3)})
    report = run(steady(100), fixed(start_s=30.0), PlannerHook(script.decide, 5.0, 20.0))
    assert [(seen.decode.ready, seen.decode.starting) for seen in (script.at(15.0), script.at(45.0))] == [
        (1, 2),
        (3, 0),
    ]
    assert report.started == 2
    assert report.worker_hours * 3600 == pytest.approx(report.duration_s + 2 * (report.duration_s - 10), rel=1e-6)


def test_a_worker_that_is_taken_away_finishes_what_it_has() -> None:
    script = Script({10.0: (0, 1)})
    report = run(steady(60, gap_s=0.5, osl=200), fixed(workers=3, itl_s=0.02), PlannerHook(script.decide, 5.0))
    assert report.failed == 0
    assert report.stopped == 2
    assert (script.at(15.0).decode.ready, script.at(15.0).decode.draining) in [(1, 0), (1, 1), (1, 2)]
    assert script.at(30.0).decode.draining == 0


def test_a_flip_takes_seconds_and_keeps_the_cache() -> None:
    script = Script({20.0: (1, 3, Flip(to_role="decode", count=1))})
    settings = fixed(mode="disaggregated", workers=4, prefill_workers=2, start_s=1000.0, flip_s=3.0)
    report = run(steady(60), settings, PlannerHook(script.decide, 2.0))
    assert (report.flipped, report.started, report.stopped, report.failed) == (1, 0, 0, 0)
    assert (script.at(22.0).decode.ready, script.at(22.0).decode.starting) == (2, 1)
    assert (script.at(26.0).prefill.ready, script.at(26.0).decode.ready) == (1, 3)


def test_the_planner_gets_the_traffic_of_an_interval() -> None:
    script = Script({})
    run(steady(100), fixed(), PlannerHook(script.decide, 5.0, 20.0))
    assert [seen.at_s for seen in script.seen if seen.traffic is not None] == [20.0, 40.0, 60.0, 80.0]
    traffic = script.at(40.0).traffic
    assert traffic is not None
    assert (traffic.start_s, traffic.end_s, traffic.requests) == (20.0, 40.0, 20)
    assert (traffic.isl_tokens, traffic.osl_tokens) == (100, 20)
    assert traffic.ttft_s == pytest.approx(0.1)
    assert traffic.itl_s == pytest.approx(0.01)


def test_an_interval_without_requests_has_no_means() -> None:
    script = Script({})
    run([request(0.0, 100, 2), request(100.0, 100, 2, 1)], fixed(), PlannerHook(script.decide, 5.0, 20.0))
    traffic = script.at(60.0).traffic
    assert traffic is not None
    assert (traffic.requests, traffic.isl_tokens, traffic.ttft_s, traffic.hit_share) == (0, None, None, None)


def test_requests_waiting_in_the_router_count_as_worker_load() -> None:
    script = Script({})
    crowd = [request(1.0, 1000, 2, thread) for thread in range(8)]
    run(crowd, fixed(rate_s=0.01, saturation_tokens=500, policy="kv", blocks=1000), PlannerHook(script.decide, 5.0))
    assert script.at(5.0).decode_loads[0].queued_tokens > 6000


# --- determinism ---------------------------------------------------------------------------------------------

_PROGRAM = """
import msgspec, sys
from kvmesh.simulator import SimConfig, simulate
from kvmesh.simulator.loads import Shape, bursty, synthesize
from kvmesh.simulator.page import as_html
shape = Shape(isl_tokens=150, osl_tokens=40, spread=0.5, groups=3, prefix_tokens=64, turns=2)
load = synthesize(bursty(4, 9, 30, 10, seed=3), 60, shape, seed=5, block_size=16)
settings = SimConfig(mode="disaggregated", workers=5, blocks=90, block_size=16, routers=2, seed=4, sample_s=5)
report = simulate(load, settings)
sys.stdout.buffer.write(msgspec.json.encode(report) + as_html(report, "t", (), {}).encode())
"""


def test_the_same_seed_gives_the_same_bytes_in_every_process() -> None:
    outputs = [
        subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            env=os.environ | {"PYTHONHASHSEED": str(seed)},
            capture_output=True,
            check=True,
        ).stdout
        for seed in (0, 1, 2)
    ]
    assert len(outputs[0]) > 1000
    assert outputs[0] == outputs[1] == outputs[2]


def test_memory_does_not_grow_with_the_requests() -> None:
    """Objects do not grow once the caches are full: the exact values of all requests are one array."""
    shape = Shape(isl_tokens=150, osl_tokens=20, spread=0.3, groups=3, prefix_tokens=64)
    load = synthesize(constant(10.0), 300.0, shape, seed=5, block_size=BLOCK)
    settings = config(workers=2, blocks=60, policy="kv")
    objects: dict[int, int] = {}
    numbers = count(1)

    def on_end() -> None:
        if (number := next(numbers)) in (1000, 2900):
            gc.collect()
            objects[number] = sys.getallocatedblocks()

    simulate(load, settings, on_end=on_end)
    assert objects[2900] - objects[1000] < 1900 / 4, "not one object for four requests"


def test_reports_are_plain_values() -> None:
    report = run(chats(30), config())
    assert msgspec.json.decode(msgspec.json.encode(report), type=SimReport) == report


def test_the_scheduler_is_the_live_one() -> None:
    """The simulator queues the sequence that a worker would make of the request, but without tokens."""
    body = GenerateRequest(request_id="r", model="m", prompt=b"")  # type: ignore[arg-type]
    from kvmesh.protocol.hashing import unpack_hashes
    from kvmesh.simulator.sequence import prompt_hashes, sequence_for

    names = thread_names(3, 0, 4)
    sequence = sequence_for(body, 70, unpack_hashes(prompt_hashes(names)).tolist(), names, 3)
    told = list(sequence.hashes)
    sequence.hashes = []
    sequence.extend_hashes(4, BLOCK)
    assert sequence.hashes == told, "a prompt's names give the hashes that the router was told"
    sequence.tokens.extend((0,) * 30)
    sequence.extend_hashes(6, BLOCK)
    assert prompt_hashes(thread_names(3, 0, 6)) == b"".join(h.to_bytes(8, "little") for h in sequence.hashes)


@pytest.mark.parametrize("mode", ["aggregated", "disaggregated"])
def test_reports_of_load_change_no_placement_without_outside_callers(mode: str) -> None:
    settings = {"workers": 4, "policy": "kv", "mode": mode, "prefill_rate": 1000.0, "itl_s": 0.01}
    silent, reporting = (run(chats(), config(**settings, load_report_interval_s=s)) for s in (0.0, 0.1))
    assert reporting == silent


def test_windows_are_kept_where_enough_requests_are_in_time() -> None:
    shares = WindowShares()
    for number in range(100):
        shares.add(number, is_prompt=number >= 5, is_smooth=True)
    for number in range(100):
        shares.add(900 + number, is_prompt=number >= 6, is_smooth=number > 50)
    assert shares.shares() == (0.5, 0.5)
    assert WindowShares().shares() == (1.0, 1.0)


def test_routers_and_planner_agree_about_caches_and_workers_that_come_and_go() -> None:
    """Six workers serve from 100 s to 200 s, two before and after: hits are as the router believed all the time."""
    seen: dict[float, RoleFleet] = {}

    def decide(observation: Observation) -> ScalingDecision:
        seen[observation.at_s] = observation.decode
        wanted = 6 if 100 <= observation.at_s < 200 else 2
        return ScalingDecision(at_s=observation.at_s, loop="none", action=Action.SCALE, prefill=0, decode=wanted)

    shape = Shape(isl_tokens=64, osl_tokens=8, groups=8, prefix_tokens=640, turns=2)
    requests = list(synthesize(constant(3.0), 300, shape, seed=1, block_size=64))
    settings = SimConfig(
        workers=2, blocks=400, block_size=64, start_s=10.0, prefill_rate=4000, itl_s=0.01, sample_s=20.0
    )
    report = simulate(requests, settings, PlannerHook(decide, 5.0))
    assert report.failed == 0 and (report.started, report.stopped) == (4, 4)
    assert [seen[at_s].ready for at_s in (95.0, 105.0, 120.0, 205.0)] == [2, 2, 6, 2]
    assert seen[105.0].starting == 4
    for sample in report.timeline[:15]:
        assert sample.hit_share == pytest.approx(sample.predicted_share, abs=0.02)
        assert sample.hit_share > 0.6 or sample.at_s <= 20
