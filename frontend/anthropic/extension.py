"""Anthropic's API: POST /v1/messages, its count of tokens, its shape of errors and of the list of models."""

from kvmesh.frontend.anthropic import count, messages
from kvmesh.frontend.anthropic.errors import error_body
from kvmesh.frontend.anthropic.models import MODELS
from kvmesh.frontend.extension import FrontendExtension

EXTENSION = FrontendExtension(
    endpoints=(messages.ENDPOINT, count.ENDPOINT), errors_below={"/v1/messages": error_body}, models=MODELS
)
