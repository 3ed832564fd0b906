"""For all tests: what a property takes is no part of it, an example that fails can be tried again, and no module leaves
its environment variables to the next one (an engine in this process sets some, and workers inherit them)."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "kvmesh", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("kvmesh")

_PYTESTS_OWN = "PYTEST_CURRENT_TEST"


@pytest.fixture(scope="module", autouse=True)
def _environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys() - {_PYTESTS_OWN}:
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if name != _PYTESTS_OWN})
