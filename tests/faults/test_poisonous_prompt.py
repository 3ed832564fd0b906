"""A prompt that ends the process that computes it costs two workers; what runs beside it continues elsewhere."""

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.faults.prompts import prompt_of
from tests.support.mesh import until
from tests.support.poison_worker import POISON
from tests.support.services import NEW, Release, Services
from tests.support.streams import Stream, check_mock_answer

FRAGILE = Release("fragile", (sys.executable, "-m", "tests.support.poison_worker"))
PROMPT = [*POISON, *prompt_of(40)]


@pytest.mark.parametrize("kind", ["aggregated", "decode"])
def test_a_poisonous_prompt_costs_two_workers(tmp_path: Path, kind: str) -> None:
    with ExitStack() as stack:
        mesh = Services(tmp_path, f"file:{tmp_path / 'discovery'}", stack)
        flags = ["--kv-transfer", "shm"]
        names = [mesh.start(kind, FRAGILE, *flags, name=f"w{i}") for i in range(3)]
        if kind == "decode":  # here the prefill worker is the first that ends
            names.append(mesh.start("prefill", FRAGILE, *flags, name="p0"))
        frontend = mesh.start("frontend", NEW)
        mesh.until_ready(frontend, *names)
        mesh.until_joined(frontend, len(names))
        url = mesh.url(frontend)
        streams = [Stream(url, prompt_of(30, seed), 200) for seed in range(12)]
        for stream in streams:
            stream.until_tokens(3)
        poison = Stream(url, PROMPT, 20).join()
        assert (poison.status, poison.error and poison.error["code"]) == (502, "engine")
        again = [Stream(url, PROMPT, 20).join() for _ in range(3)]  # as a client's own retries
        assert [stream.status for stream in again] == [502] * 3
        assert all(float(stream.headers["retry-after"]) > 0 for stream in again)
        ended = [name for name in names if mesh.has_ended(name)]
        assert len(ended) == 2, ended
        for stream in streams:
            check_mock_answer(stream.join())
        assert any(stream.trace["migrations"] for stream in streams)
        check_mock_answer(Stream(url, prompt_of(30, 99), 5).join())
        until(lambda: mesh.metric(frontend, "kvmesh_frontend_inflight") == 0)


@pytest.mark.long
def test_innocent_prompts_beside_the_poison_are_answered(tmp_path: Path) -> None:
    """Requests that had no token yet when the worker ended are suspected as well, and cleared one by one."""
    with ExitStack() as stack:
        mesh = Services(tmp_path, f"file:{tmp_path / 'discovery'}", stack)
        names = [mesh.start("aggregated", FRAGILE, name=f"w{i}") for i in range(3)]
        frontend = mesh.start("frontend", NEW)
        mesh.until_ready(frontend, *names)
        mesh.until_joined(frontend, len(names))
        url = mesh.url(frontend)
        beside = [Stream(url, prompt_of(200, seed), 10) for seed in range(9)]
        poison = Stream(url, PROMPT, 20)
        beside += [Stream(url, prompt_of(200, seed), 10) for seed in range(20, 29)]
        assert poison.join().status == 502
        for stream in beside:
            check_mock_answer(stream.join())
        assert sum(mesh.has_ended(name) for name in names) == 2
