"""A frontend refuses a request that the mesh has no time for before it reads the prompt."""

import pytest

from kvmesh.frontend import job
from kvmesh.protocol.errors import OverloadedError
from tests.frontend.serving import CHAT, Served


async def test_a_hopeless_request_is_refused_before_its_prompt_is_read(
    able: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unread(*_: object) -> None:
        raise AssertionError("the prompt was read")

    monkeypatch.setattr(job, "read_prompts", unread)
    able.generator.refusal = OverloadedError("the answer would take too long", retry_after_s=7)
    status, headers, body = await able.post("/v1/chat/completions", CHAT)
    assert (status, headers["retry-after"]) == (429, "7")
    assert body["error"]["code"] == "overloaded"
    assert able.generator.requests == []


async def test_only_a_deadline_in_a_header_is_the_clients(able: Served) -> None:
    await able.post("/v1/chat/completions", CHAT)
    await able.post("/v1/chat/completions", CHAT, x_request_timeout_s="9")
    assert [hints.has_deadline for hints in able.generator.hints] == [False, True]
