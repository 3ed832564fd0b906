"""POST /v1/messages/count_tokens: how long a prompt would be. No worker is asked."""

import asyncio

from frontend.anthropic.parse import parse_count
from frontend.anthropic.shapes import TokenCount
from frontend.endpoints import CompletionService, timeout_s
from frontend.pipeline import chat_prompt
from mesh.http.request import Reply, Request, json_reply


async def count_tokens(service: CompletionService, request: Request) -> Reply:
    """A prompt that is sure not to fit is refused: counting that could take seconds. Raises MeshError."""
    deadline = asyncio.get_running_loop().time() + timeout_s(request, service.limits)
    with service.admission.enter(), service.admission.until(deadline):
        call = parse_count(request.body)
        prompt = await chat_prompt(call, await service.models.get(call.model))
    return json_reply(TokenCount(prompt.num_tokens))
