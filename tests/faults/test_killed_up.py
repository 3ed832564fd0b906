"""A real kill -9 of `kvmesh up`: its processes end by themselves, and the next start removes its folder."""

import signal
from pathlib import Path

import pytest

from tests.faults.prompts import prompt_of
from tests.faults.test_drain import OwnMesh
from tests.support.mesh import until
from tests.support.patience import PATIENCE_S
from tests.support.streams import Stream

pytestmark = pytest.mark.long


@pytest.mark.parametrize("while_it_answers", [False, True])
def test_a_mesh_that_was_killed_leaves_nothing(short_tmp: Path, while_it_answers: bool) -> None:
    killed = OwnMesh(short_tmp, "--drain-timeout-s", "8")
    stream = Stream(killed.mesh.url, prompt_of(30), 100_000) if while_it_answers else None
    if stream is not None:
        stream.until_tokens(5)
    children = [process for process in killed.processes if process.pid != killed.process.pid]
    assert len(children) >= 4
    folders = set(short_tmp.iterdir())  # two where the path of its control socket would be too long
    killed.process.send_signal(signal.SIGKILL)
    killed.process.wait()
    next_one = OwnMesh(short_tmp)
    try:
        until(lambda: not any(process.is_running() for process in children), what="the children to end")
        until(lambda: not folders & set(short_tmp.iterdir()), what="the folders to go")
    finally:
        next_one.process.send_signal(signal.SIGINT)
        assert next_one.process.wait(PATIENCE_S) == 0
    next_one.check_nothing_is_left()
