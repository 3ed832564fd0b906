"""A request belongs to the tenant of its API key."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvmesh.frontend.keys.guard import ApiKeyGuard
from tests.frontend.serving import CHAT, Served, able_card, serving


@pytest.fixture
async def guarded(tmp_path: Path, able_folder: Path) -> AsyncIterator[Served]:
    keys = tmp_path / "keys"
    keys.write_text("sk-acme acme\nsk-ajax ajax\nsk-gateway\n")
    async with serving(able_card(able_folder)) as served:
        served.app.guard = ApiKeyGuard(str(keys))
        yield served


@pytest.mark.parametrize(("key", "tenant"), [("sk-acme", "acme"), ("sk-ajax", "ajax"), ("sk-gateway", "mine")])
async def test_the_api_keys_tenant_wins_over_the_headers(guarded: Served, key: str, tenant: str) -> None:
    status, _, _ = await guarded.post("/v1/chat/completions", CHAT, x_api_key=key, x_kvmesh_tenant="mine")
    assert status == 200
    assert guarded.generator.hints[-1].tenant == tenant


async def test_tenants_share_no_cache_whatever_salt_they_send(guarded: Served) -> None:
    salts = set()
    for key, salt in [("sk-acme", None), ("sk-ajax", None), ("sk-acme", "ajax "), ("sk-acme", "x"), ("sk-ajax", "x")]:
        await guarded.post("/v1/chat/completions", CHAT | ({"cache_salt": salt} if salt else {}), x_api_key=key)
        salts.add(guarded.generator.requests[-1].cache_salt)
    assert len(salts) == 5
    await guarded.post("/v1/chat/completions", CHAT, x_api_key="sk-gateway")
    assert guarded.generator.requests[-1].cache_salt is None
