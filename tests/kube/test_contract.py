"""The contract of discovery, against a real API server."""

import pytest_asyncio

from kvmesh.mesh.discovery import Discovery
from tests.contracts.test_discovery import (  # noqa: F401
    test_a_backend_says_where_it_searches,
    test_a_new_value_is_news,
    test_a_second_withdrawal_does_nothing,
    test_a_watcher_sees_present_keys_and_all_changes,
    test_odd_keys_are_kept_apart,
)
from tests.kube.conftest import Space


@pytest_asyncio.fixture
async def discovery(space: Space) -> Discovery:
    return space.open("router", space.pod("pod-0"))
