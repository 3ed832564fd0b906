"""Tests of what /health and a refusal say when no worker can be used."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from msgspec.structs import replace

from kvmesh.frontend.models import ONLY_PREFILLS, UNKNOWN_PARSER
from kvmesh.frontend.service import searched
from kvmesh.protocol.messages import Role, WorkerCard
from kvmesh.router.down import DownWorkers
from kvmesh.router.feeds import WorkerFeed
from tests.frontend import tiny
from tests.frontend.serving import TEXT, Served, serving


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(tiny.card("w", path=tiny.save_model(tmp_path))) as served:
        yield served


@pytest.mark.parametrize(
    ("card", "reason"),
    [
        (tiny.card("w", Role.PREFILL), ONLY_PREFILLS),
        (replace(tiny.card("w"), tool_parser="of-next-year"), UNKNOWN_PARSER),
    ],
)
async def test_a_worker_that_cannot_answer_is_named_with_the_reason(
    served: Served, card: WorkerCard, reason: str
) -> None:
    served.models.add(card)
    report = searched(WorkerFeed(), served.models, DownWorkers())
    assert [(one.key, one.reason) for one in report.ignored] == [("workers/w", reason)]


async def test_a_worker_that_can_answer_is_not_ignored(served: Served) -> None:
    served.models.add(tiny.card("p", Role.PREFILL))
    assert searched(WorkerFeed(), served.models, DownWorkers()).ignored == []


async def test_health_shows_the_search(served: Served) -> None:
    _, body = await served.get("/health")
    assert body["discovery"] == {"place": "", "status": "not reached yet", "workers_found": 0, "ignored": []}


async def test_a_refusal_names_health(served: Served) -> None:
    served.models.remove(tiny.card("w").worker_id)
    status, _, body = await served.post("/v1/completions", TEXT)
    assert (status, body["error"]["message"].endswith("GET /health says why")) == (503, True)
