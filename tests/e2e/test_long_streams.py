"""Streams of eight minutes: every count of running requests stays right until each has ended."""

import time
from pathlib import Path

import pytest

from tests.support.mesh import Mesh, running_mesh, until
from tests.support.streams import Stream, check_mock_answer

STREAMS = 8
LOOK_S = 5.0
COUNTS = (
    (None, "kvmesh_frontend_inflight"),
    (None, "kvmesh_router_in_flight"),
    ("decode-0", "kvmesh_worker_running_requests"),
)


def counts(mesh: Mesh) -> list[float]:
    return [mesh.metric(name, worker) for worker, name in COUNTS]


@pytest.mark.parametrize(
    ("seconds", "lease_s"), [(10, 6), pytest.param(480, 120, marks=[pytest.mark.weekly, pytest.mark.timeout(1200)])]
)
def test_the_active_count_of_long_streams_stays_right(tmp_path: Path, seconds: int, lease_s: int) -> None:
    """The booking's lease is shorter than the streams: the frontend renews it every two seconds."""
    itl_ms = 50
    flags = ["--engine", "mock", "--kv-transfer", "shm", "--prefill", "0", "--decode", "1", "--lease-s", str(lease_s)]
    flags += ["--mock-itl-ms", str(itl_ms), "--num-blocks", "8192", "--log-level", "warning"]
    with running_mesh(tmp_path, *flags) as mesh:
        until(lambda: mesh.workers_seen() == 1, what="the worker")
        tokens = seconds * 1000 // itl_ms
        streams = [Stream(mesh.url, [10 + n, 20, 30], tokens) for n in range(STREAMS)]
        until(lambda: counts(mesh) == [STREAMS] * 3, what="all streams to run")
        began_s = time.monotonic()
        while (seen := [stream.is_over for stream in streams]) == [False] * STREAMS:
            now = counts(mesh)
            assert now == [STREAMS] * 3 or any(stream.is_over or len(stream.tokens) >= tokens for stream in streams), (
                now
            )
            time.sleep(min(LOOK_S, seconds / 20))  # between two looks; the streams take their time
        assert time.monotonic() - began_s > seconds / 2, seen
        for stream in streams:
            check_mock_answer(stream.join(timeout_s=seconds))
        until(lambda: counts(mesh) == [0, 0, 0], what="the counts to be zero again")
