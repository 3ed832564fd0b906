"""Requests are counted by endpoint and model, against the SLO, and on demand under OpenTelemetry's names."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from kvmesh.frontend.http import HttpSettings
from kvmesh.frontend.service_level import ServiceLevel
from kvmesh.protocol.errors import EngineError
from tests.frontend import tiny
from tests.frontend.serving import Served, serving
from tests.support.counted import counted_in

PATH = "/v1/chat/completions"
ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
SETTINGS = HttpSettings(slo=ServiceLevel(ttft_s=1e-9, itl_s=60.0), counts_gen_ai=True)
_F = "kvmesh_frontend_"


def counted(name: str, **labels: str) -> float:
    return counted_in(REGISTRY, name, **labels)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(tiny.card("w", path=tiny.save_model(tmp_path)), SETTINGS) as served:
        yield served


async def test_the_label_is_the_model_of_the_workers(served: Served) -> None:
    before = counted(_F + "requests_total", model="tiny", outcome="ok")
    await served.post(PATH, ASKED)
    assert counted(_F + "requests_total", model="tiny", outcome="ok") == before + 1


async def test_a_model_that_a_client_invents_makes_no_series(served: Served) -> None:
    before = counted(_F + "requests_total", model="", outcome="model_not_found")
    await asyncio.gather(*(served.post(PATH, ASKED | {"model": f"invented-{n}"}) for n in range(3)))
    assert counted(_F + "requests_total", model="", outcome="model_not_found") == before + 3
    told = {s.labels.get("model", "") for family in REGISTRY.collect() for s in family.samples}
    assert not [name for name in told if name.startswith("invented")]


async def test_the_slo_counts_what_was_missed(served: Served) -> None:
    before = {missed: counted(_F + "slo_requests_total", missed=missed) for missed in ("ttft", "failed", "none")}
    await served.post(PATH, ASKED)
    await served.post(PATH, ASKED | {"model": "invented"})
    served.generator.script = [EngineError("broken")]
    await served.post(PATH, ASKED)
    after = {missed: counted(_F + "slo_requests_total", missed=missed) - n for missed, n in before.items()}
    assert after == {"ttft": 1, "failed": 1, "none": 0}


async def test_opentelemetrys_names_count_beside_ours(served: Served) -> None:
    of = {"gen_ai_operation_name": "chat", "gen_ai_provider_name": "kvmesh", "gen_ai_request_model": "tiny"}
    before = counted("gen_ai_server_request_duration_seconds_count", **of)
    tokens = counted("gen_ai_client_token_usage_tokens_sum", gen_ai_token_type="output", **of)
    _, _, answer = await served.post(PATH, ASKED)
    assert counted("gen_ai_server_request_duration_seconds_count", **of) == before + 1
    assert counted("gen_ai_server_time_to_first_token_seconds_count", **of) > 0
    written = counted("gen_ai_client_token_usage_tokens_sum", gen_ai_token_type="output", **of) - tokens
    assert written == answer["usage"]["completion_tokens"]
