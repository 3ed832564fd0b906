"""OpenAI's Responses API: create, count, and the responses that are stored."""

from kvmesh.frontend.extension import FrontendExtension
from kvmesh.frontend.responses import count, create, stored
from kvmesh.frontend.responses.opening import check, prepare

EXTENSION = FrontendExtension(
    endpoints=(create.ENDPOINT, count.ENDPOINT, *stored.ENDPOINTS),
    settings=("responses_store",),
    check=check,
    prepare=prepare,
)
