"""A log of requests that a simulated mesh has answered: what is true of it is known exactly."""

from base64 import b64encode
from collections.abc import Sequence

from kvmesh.simulator import SimConfig, SimRequest, simulate
from kvmesh.simulator.access_log import AccessLine
from kvmesh.simulator.loads import Shape, constant, synthesize
from kvmesh.simulator.open_request import SimAnswer

BLOCK_SIZE = 16
SPLIT = SimConfig(
    mode="disaggregated",
    workers=3,
    prefill_workers=1,
    blocks=2048,
    block_size=BLOCK_SIZE,
    max_num_seqs=32,
    max_step_tokens=512,
    ttft_slo_s=2.0,
    itl_slo_s=0.1,
)
TOGETHER = SimConfig(
    workers=2,
    blocks=2048,
    block_size=BLOCK_SIZE,
    max_num_seqs=32,
    max_step_tokens=512,
    ttft_slo_s=2.0,
    itl_slo_s=0.1,
)


def load(rate: float = 4.0, duration_s: float = 40.0, groups: int = 4) -> list[SimRequest]:
    shape = Shape(isl_tokens=600, osl_tokens=60, spread=0.4, groups=groups, prefix_tokens=256)
    return list(synthesize(constant(rate), duration_s, shape, seed=3, block_size=BLOCK_SIZE))


def talk() -> list[SimRequest]:
    """Return conversations in which an answer is most of the next prompt."""
    shape = Shape(isl_tokens=100, osl_tokens=300, spread=0.4, groups=2, prefix_tokens=128, turns=5, pause_s=2.0)
    return list(synthesize(constant(3.0), 60.0, shape, seed=3, block_size=BLOCK_SIZE))


def lines_of(requests: Sequence[SimRequest], config: SimConfig, slowed: float = 1.0) -> list[tuple[float, AccessLine]]:
    """Return the log of a mesh; `slowed`: by which the later half took longer than such a mesh takes."""
    answers: list[SimAnswer] = []
    simulate(requests, config, on_answer=answers.append)
    return [(requests[one.number].arrival_s, line_of(requests, one, config, slowed)) for one in sorted(answers)]


def line_of(requests: Sequence[SimRequest], one: SimAnswer, config: SimConfig, slowed: float) -> AccessLine:
    """Return the line of one request. Which worker served it is of no matter to these tests beyond the fit."""
    request = requests[one.number]
    times = slowed if one.number >= len(requests) // 2 else 1.0
    is_split = config.mode == "disaggregated"
    return AccessLine(
        status=200,
        endpoint="completions",
        outcome="ok",
        model="m",
        isl_tokens=request.isl_tokens,
        osl_tokens=request.osl_tokens,
        cached_tokens=one.cached_tokens,
        block_size=config.block_size,
        blocks=b64encode(request.names).decode(),
        worker=one.decode,
        prefill_worker=one.prefill if is_split else None,
        ttft_ms=one.ttft_s * 1e3 * times,
        itl_ms=None if one.itl_s is None else one.itl_s * 1e3 * times,
        queue_ms=one.queue_s * 1e3,
        prefill_ms=(one.ttft_s - one.queue_s) * 1e3 * times,
        pull_ms=0.0,
    )
