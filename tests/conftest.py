"""Configure all tests: how parallel workers share them, and how many examples a property tries.

An example may take any time, and a failed example can be tried again. No module leaves its environment variables to
the next one: an engine in this process sets some, and workers inherit them.
"""

import gc
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support import mesh_tls
from tests.support.budget import examples

# Children start with -P, and find this tree. No folder is found under a second name, with enums and metrics of its own.
ROOT = Path(__file__).parent.parent
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
sys.modules.update({path.name: None for path in (ROOT / "kvmesh").iterdir() if path.is_symlink()})  # their import fails

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's threads spin while they wait, and take the cores of the others

if mesh_tls.IS_ON:
    mesh_tls.close_all_meshes()

settings.register_profile(
    "kvmesh",
    settings.default,
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("kvmesh")

MOST_WORKERS = 8
_PYTESTS_OWN = "PYTEST_CURRENT_TEST"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return one worker more than cores: tests of running meshes wait more than they compute."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores + 1, MOST_WORKERS)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.support.distribution import ByFile  # needs pytest-xdist, which `-p no:xdist` leaves out

    return ByFile(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without the garbage collector: it would take half of the time, and find nothing.

    What was collected stays to the end. So a full collection in a test leaves these million objects out.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


# marker: the variable that runs its tests, and what else does
_SKIPPED_UNLESS = {
    "long": ("KVMESH_TEST_LONG", "takes long: make test-long"),
    "weekly": ("KVMESH_TEST_WEEKLY", "takes minutes: make test-weekly"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for marker, (variable, reason) in _SKIPPED_UNLESS.items():
        if os.environ.get(variable) != "1":
            skip = pytest.mark.skip(reason=f"{reason}, or {variable}=1")
            for item in items:
                if item.get_closest_marker(marker):
                    item.add_marker(skip)


@pytest.fixture(scope="module", autouse=True)
def _environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys() - {_PYTESTS_OWN}:
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if name != _PYTESTS_OWN})
