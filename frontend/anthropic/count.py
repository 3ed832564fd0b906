"""POST /v1/messages/count_tokens: how long a prompt would be. No worker is asked."""

import asyncio

from frontend.anthropic.errors import error_body
from frontend.anthropic.parse import parse_count
from frontend.anthropic.shapes import TokenCount
from frontend.endpoints import CompletionService, client_request_id, request_id_headers, timeout_s
from frontend.pipeline import chat_prompt
from mesh.http.connection import refusal
from mesh.http.request import Reply, Request, json_reply
from protocol.errors import MeshError
from protocol.ids import new_request_id


async def count_tokens(service: CompletionService, request: Request) -> Reply:
    """A prompt that is sure not to fit is refused: counting that could take seconds."""
    shown_id = client_request_id(request) or new_request_id("count")
    headers = request_id_headers(shown_id)
    try:
        return json_reply(await _count(service, request), headers=headers)
    except MeshError as error:
        return refusal(error, error_body(error, shown_id), headers)


async def _count(service: CompletionService, request: Request) -> TokenCount:
    """Raises MeshError."""
    deadline = asyncio.get_running_loop().time() + timeout_s(request, service.limits)
    with service.admission.enter():
        async with service.admission.until(deadline):
            call = parse_count(request.body)
            prompt = await chat_prompt(call, await service.models.get(call.model))
    return TokenCount(prompt.num_tokens)
