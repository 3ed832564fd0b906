"""A live run and its simulation: what is recorded, and how they are compared."""

import pytest

from kvmesh.lab.bench.fidelity import (
    BLOCK_SIZE,
    FidelityConfig,
    Sent,
    as_sent,
    hop_of,
    mesh_of,
    report_of,
    simulated,
    table_of,
    tokens_of,
)
from kvmesh.lab.bench.load import TimedAnswer
from kvmesh.protocol.messages import Role
from kvmesh.simulator import SimRequest, simulate
from kvmesh.simulator.requests import thread_names

CONFIG = FidelityConfig(speedup=1.0, workers=1)


def sent(at_s: float, thread: int = 0, ttft_s: float = 0.1, itl_s: float = 0.01, isl: int = 64, osl: int = 11) -> Sent:
    request = SimRequest(0.0, isl, osl, thread_names(thread, 0, isl // BLOCK_SIZE), thread)
    first_s = at_s + ttft_s
    answer = TimedAnswer(sent_s=at_s, status=200, first_token_s=first_s, last_event_s=first_s + itl_s * (osl - 1))
    return Sent(request, answer)


def test_prompts_share_tokens_where_their_blocks_share_names() -> None:
    one, other = (sent(0.0, thread=3, isl=isl).request for isl in (64, 70))
    assert tokens_of(one, "") == tokens_of(other, "")[:64]
    assert len(tokens_of(other, "")) == 70
    assert tokens_of(one, "warm-up")[:16] != tokens_of(one, "")[:16]


def test_the_simulator_gets_the_real_sending_times() -> None:
    assert [request.arrival_s for request in as_sent([sent(12.5), sent(10.0)])] == [0.0, 2.5]


def test_errors_are_those_of_the_medians() -> None:
    run = [sent(float(number), thread=number, ttft_s=0.02, itl_s=0.005) for number in range(5)]
    simulation = simulate(as_sent(run), simulated(CONFIG, 0.0))
    report = report_of(run, simulation, 0.0)
    assert report.live_ttft_p50_s == pytest.approx(0.02)
    assert report.ttft_error == pytest.approx(simulation.ttft_s.p50 / 0.02 - 1)
    assert report.itl_error == pytest.approx(simulation.itl_s.p50 / 0.005 - 1)
    assert report.failures == 5, "the answers of this test have no body"
    assert table_of(report).row_count == 2


def test_the_hop_is_measured_on_lone_requests() -> None:
    alone = [sent(float(number), thread=number) for number in range(3)]
    exact = simulate(as_sent(alone), simulated(CONFIG, 0.0)).ttft_s.p50
    assert hop_of(alone, CONFIG) == pytest.approx((0.1 - exact) / 2)
    assert hop_of([sent(0.0, ttft_s=exact / 2)], CONFIG) == 0.0


@pytest.mark.parametrize("mode", ["aggregated", "disaggregated"])
def test_mesh_and_simulation_are_of_one_size(mode: str) -> None:
    config = FidelityConfig(mode=mode, workers=4)  # type: ignore[arg-type]
    mesh, simulation = mesh_of(config), simulated(config, 0.0)
    up, worker = mesh.up, mesh.worker_config(Role.AGGREGATED, "w", "file:/run")
    assert up.prefill == simulation.num_prefill
    assert up.prefill + up.decode + up.aggregated == simulation.workers
    assert (worker.num_blocks, worker.block_size) == (simulation.blocks, simulation.block_size)
    assert (worker.max_num_seqs, worker.max_step_tokens) == (simulation.max_num_seqs, simulation.max_step_tokens)
