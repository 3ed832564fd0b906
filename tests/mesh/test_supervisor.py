"""Processes that are kept running, and none that is left behind."""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from kvmesh.mesh import supervisor as supervisor_module
from kvmesh.mesh.supervisor import (
    DOWN_S,
    MAX_QUICK_EXITS,
    MOST_DOWN_S,
    STABLE_S,
    ProcessSpec,
    Supervisor,
    describe_exit,
    down_delay_s,
    restart_delay_s,
)
from kvmesh.protocol.errors import ConfigError, EngineError, MeshError
from tests.support.patience import PATIENCE_S

FOREVER = "import time; print('up', flush=True); time.sleep(60)"
STUBBORN = "import signal; signal.signal(15, lambda *_: print('asked', flush=True)); " + FOREVER


class Watched:
    def __init__(self, log_dir: Path) -> None:
        self.told: list[str] = []
        self._before = set(children())  # meshes of other tests
        self.supervisor = Supervisor(log_dir, self.told.append)

    def children(self) -> list[psutil.Process]:
        """Processes that were started since, whoever did."""
        return [process for process in children() if process not in self._before]

    def start(self, code: str, name: str = "p", **env: str) -> None:
        self.supervisor.start(ProcessSpec(name, ["-c", code], env))

    async def up(self, name: str = "p", times: int = 1) -> int:
        """Wait until it has said so; its pid."""
        await until(lambda: self.supervisor.log_tail(name, 100).count("up") == times)
        pid = self.supervisor.pid(name)
        assert pid is not None
        return pid

    async def failed(self) -> Exception:
        async with asyncio.timeout(PATIENCE_S):
            await self.supervisor.failed.wait()
        assert self.supervisor.failure is not None
        return self.supervisor.failure


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@pytest_asyncio.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    watched = Watched(tmp_path / "logs")
    yield watched
    await watched.supervisor.stop_all(2)
    assert watched.children() == []
    assert watched.supervisor.pids() == {}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives up after three ends, without waiting between."""
    monkeypatch.setattr(supervisor_module, "restart_delay_s", lambda times: None if len(times) >= 3 else 0.0)


# --- when to start again ------------------------------------------------------------------------------


def test_a_process_that_ran_well_starts_again_at_once() -> None:
    assert restart_delay_s([STABLE_S]) == 0.0
    assert restart_delay_s([0.1] * 10 + [STABLE_S]) == 0.0
    assert restart_delay_s([STABLE_S, 1.0]) == 0.0, "once may happen"


def test_quick_exits_are_restarted_after_a_pause_and_then_given_up() -> None:
    delays = [restart_delay_s([1.0] * n) for n in range(1, MAX_QUICK_EXITS + 2)]
    assert delays == [0.0, 1.0, 1.0, 1.0, None, None]


def test_a_process_that_stays_down_is_tried_more_and_more_rarely() -> None:
    delays = [down_delay_s(n) for n in (1, 2, 3, 50)]
    assert delays == [DOWN_S, 2 * DOWN_S, 4 * DOWN_S, MOST_DOWN_S]


def test_an_exit_is_described() -> None:
    assert (describe_exit(3), describe_exit(-9)) == ("exit code 3", "signal SIGKILL")


# --- running ------------------------------------------------------------------------------------------


async def test_a_killed_process_is_started_again(watched: Watched) -> None:
    watched.start(FOREVER)
    first = await watched.up()
    os.kill(first, signal.SIGKILL)
    assert await watched.up(times=2) != first
    assert watched.told == ["p ended with signal SIGKILL, starting it again"]


async def test_a_process_that_ended_with_code_0_is_restarted(watched: Watched) -> None:
    watched.start("print('up', flush=True)")
    await until(lambda: watched.told == ["p ended with exit code 0, starting it again"])


async def test_bad_settings_are_not_tried_again(watched: Watched) -> None:
    watched.start("import sys; print('error: no such model'); sys.exit(2)")
    failure = await watched.failed()
    assert isinstance(failure, ConfigError)
    assert "error: no such model" in str(failure)
    assert watched.told == []


async def test_a_failed_process_is_reported_with_its_last_lines(watched: Watched, impatient: None) -> None:
    watched.start("raise SystemExit('device lost')")
    failure = await watched.failed()
    assert isinstance(failure, EngineError)
    assert "p does not run" in str(failure)
    assert "device lost" in str(failure)
    assert len(watched.told) == 2


async def test_a_process_that_others_can_spare_is_tried_again_after_a_pause(
    watched: Watched, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "down_delay_s", lambda times: 0.0)
    downs: list[tuple[str, float]] = []

    def on_down(failure: MeshError, retry_s: float) -> bool:
        downs.append((type(failure).__name__, retry_s))
        return len(downs) < 3

    spec = ProcessSpec("p", ["-c", "raise SystemExit('device lost')"])
    watched.supervisor.start(spec, on_down=on_down)
    assert "device lost" in str(await watched.failed()), "it is given up once nobody can spare it"
    assert downs == [("EngineError", 0.0)] * 3


async def test_one_that_cannot_be_started_is_given_up_too(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    watched.start(FOREVER)
    assert "p cannot be started" in str(await watched.failed())


async def test_a_failure_of_one_leaves_the_others_running(watched: Watched) -> None:
    watched.start(FOREVER, "good")
    watched.start("import sys; sys.exit(2)", "bad")
    await watched.failed()
    pid = await watched.up("good")
    assert psutil.pid_exists(pid)
    assert watched.supervisor.pids() == {"good": pid}


async def test_the_log_of_a_process_is_kept_over_restarts(watched: Watched) -> None:
    watched.start("import sys; print('up', flush=True); print('oops', file=sys.stderr, flush=True)" + "; sys.exit(1)")
    await until(lambda: watched.supervisor.log_tail("p").count("oops") == 2)
    assert watched.supervisor.log_tail("p", 1) == "oops"
    assert watched.supervisor.log_tail("nobody") == "(no log)"


async def test_a_log_directory_that_was_removed_is_made_again(watched: Watched) -> None:
    watched.start(FOREVER)
    first = await watched.up()
    shutil.rmtree(watched.supervisor.log_file("p").parent)
    os.kill(first, signal.SIGKILL)
    assert await watched.up(times=1) != first


async def test_a_process_knows_its_parent_and_its_environment(watched: Watched) -> None:
    watched.start("import os; print(os.environ['KVMESH_PARENT_PID'], os.environ['A'], flush=True); " + FOREVER, A="b")
    await watched.up()
    assert f"{os.getpid()} b" in watched.supervisor.log_tail("p")


async def test_a_ctrl_c_in_the_terminal_does_not_reach_it(watched: Watched) -> None:
    watched.start(FOREVER)
    assert os.getpgid(await watched.up()) != os.getpgid(0)


# --- stopping -----------------------------------------------------------------------------------------


async def test_stopping_ends_a_process_politely(watched: Watched) -> None:
    watched.start("import signal, time; signal.signal(15, lambda *a: exit(print('bye'))); " + FOREVER)
    pid = await watched.up()
    await watched.supervisor.stop(["p"], 5)
    assert not psutil.pid_exists(pid)
    assert watched.supervisor.log_tail("p").endswith("bye")
    assert watched.told == []


@pytest.mark.parametrize("hang", [False, True], ids=["ignores SIGTERM", "is stopped"])
async def test_one_that_does_not_listen_is_killed(watched: Watched, hang: bool) -> None:
    watched.start(STUBBORN)
    pid = await watched.up()
    if hang:
        os.kill(pid, signal.SIGSTOP)
    await watched.supervisor.stop(["p"], 0.1)
    assert not psutil.pid_exists(pid)
    assert watched.told == ["p does not end: killed"]


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 10, 50])
async def test_stopping_in_the_middle_of_a_start_leaves_no_process(watched: Watched, turns: int) -> None:
    watched.start(FOREVER)
    for _ in range(turns):
        await asyncio.sleep(0)
    await watched.supervisor.stop_all(2)
    assert watched.supervisor.pids() == {}
    assert watched.children() == []


async def test_stopping_between_two_starts_leaves_no_process(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "restart_delay_s", lambda times: 60.0)
    watched.start("print('up', flush=True)")
    await until(lambda: bool(watched.told))
    await watched.supervisor.stop_all(1)
    assert watched.children() == []


async def test_all_are_stopped_at_once(watched: Watched) -> None:
    """Each stubborn process is asked to end before any of them has ended."""
    for name in "abc":
        watched.start(STUBBORN, name)
    pids = [await watched.up(name) for name in "abc"]
    stopping = asyncio.create_task(watched.supervisor.stop_all(PATIENCE_S))
    for name in "abc":
        await until(lambda name=name: "asked" in watched.supervisor.log_tail(name))
    assert not stopping.done()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    await stopping


async def test_who_cannot_wait_kills_all(watched: Watched) -> None:
    for name in "abc":
        watched.start(STUBBORN, name)
    for name in "ab":
        await watched.up(name)
    polite = asyncio.create_task(watched.supervisor.stop(["a"], 60))
    await asyncio.sleep(0)
    polite.cancel()
    await asyncio.wait([polite])
    await watched.supervisor.kill_all()
    assert watched.children() == []
    assert watched.supervisor.pids() == {}


async def test_stopping_one_leaves_the_others(watched: Watched) -> None:
    watched.start(FOREVER, "a")
    watched.start(FOREVER, "b")
    await watched.up("a")
    await watched.up("b")
    await watched.supervisor.stop(["a", "nobody"], 1)
    await watched.supervisor.stop(["a"], 1)
    assert list(watched.supervisor.pids()) == ["b"]
    assert watched.supervisor.pid("a") is None


async def test_a_second_stop_sends_no_second_signal(watched: Watched) -> None:
    """A second one would tell it to hurry, and cut off what it still answers."""
    code = "import signal, time; signal.signal(15, lambda *a: print('told', flush=True)); print('up', flush=True); "
    watched.start(code + "time.sleep(0.3); time.sleep(0.3)")
    await watched.up()
    await asyncio.gather(watched.supervisor.stop(["p"], 5), watched.supervisor.stop_all(5))
    assert watched.supervisor.log_tail("p").count("told") == 1
    assert watched.supervisor.pids() == {}


# --- while it runs ------------------------------------------------------------------------------------


async def test_started_anew_it_runs_as_it_was_respecified(watched: Watched) -> None:
    watched.start(FOREVER)
    first = await watched.up()
    watched.supervisor.respecify(ProcessSpec("p", ["-c", "print('changed', flush=True); " + FOREVER]))
    watched.supervisor.respecify(ProcessSpec("nobody", ["-c", FOREVER]))
    os.kill(first, signal.SIGKILL)
    await watched.up(times=2)
    assert "changed" in watched.supervisor.log_tail("p")
    assert list(watched.supervisor.pids()) == ["p"]


async def test_an_optional_process_reports_its_failure_to_its_owner(watched: Watched) -> None:
    failures: list[Exception] = []
    watched.supervisor.start(ProcessSpec("extra", ["-c", "import sys; sys.exit(2)"]), failures.append)
    await until(lambda: bool(failures))
    assert isinstance(failures[0], ConfigError)
    assert not watched.supervisor.failed.is_set()


async def test_a_pid_is_known_before_the_words_of_a_process_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop hears of a new process late: that one is up meanwhile."""
    really_create, may_return = asyncio.create_subprocess_exec, asyncio.Event()

    async def create_slowly(*argv: Any, **options: Any) -> asyncio.subprocess.Process:
        process = await really_create(*argv, **options)
        await may_return.wait()
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", create_slowly)
    supervisor = Supervisor(tmp_path)
    supervisor.start(ProcessSpec("p", ["-c", FOREVER]))
    try:
        await until(lambda: "up" in supervisor.log_tail("p"))
        asking = asyncio.create_task(supervisor.settled_pid("p"))
        await asyncio.sleep(0)
        assert supervisor.pid("p") is None and not asking.done()
        may_return.set()
        assert await asking == supervisor.pid("p") is not None
        assert await supervisor.settled_pid("of nobody") is None
    finally:
        may_return.set()
        await supervisor.kill_all()
