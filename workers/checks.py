"""Check a request before an engine sees it: what the engine cannot do is refused by name. Pure."""

from collections.abc import Iterator

from kvmesh.protocol.errors import ContextLengthError, InvalidRequestError
from kvmesh.protocol.messages import EmbedRequest, Feature, GenerateRequest
from kvmesh.workers.engine import EngineInfo
from kvmesh.workers.guide_checks import check_guide


def check_generation(request: GenerateRequest, info: EngineInfo) -> None:
    """Raise InvalidRequestError for a feature or an adapter that the engine lacks, and for a guide that is too large or
    certain to be too costly."""
    if Feature.COMPLETIONS not in info.features:
        raise InvalidRequestError(
            "this worker's engine computes no completions", hint="use /v1/embeddings", param="model"
        )
    for feature, param in _wanted(request):
        if feature not in info.features:
            able = ", ".join(sorted(info.features)) or "nothing"
            raise InvalidRequestError(
                f"this worker's engine cannot honour {param}; it can do: {able}",
                hint="send it to a worker whose card lists it",
                param=param,
            )
    if request.guide is not None:
        check_guide(request.guide)
    _check_lora(request.lora, info)


def check_embedding(request: EmbedRequest, info: EngineInfo) -> None:
    """Raise InvalidRequestError if the engine computes no embeddings, or lacks the adapter."""
    if Feature.EMBEDDINGS not in info.features:
        raise InvalidRequestError(
            "this worker's engine computes no embeddings", hint="send it to a worker whose card lists them"
        )
    _check_lora(request.lora, info)


def check_prompt(num_prompt: int, num_generated: int, context_tokens: int) -> None:
    """Raise InvalidRequestError for an empty prompt, ContextLengthError if no token can follow it.

    `num_generated`: tokens of the answer that exist already; they continue the prompt.
    """
    if not num_prompt:
        raise InvalidRequestError("the prompt is empty", hint="send at least one token", param="prompt")
    if (num_tokens := num_prompt + num_generated) >= context_tokens:
        raise ContextLengthError(
            f"the prompt has {num_tokens} tokens, the context of this model {context_tokens}",
            hint="shorten the prompt",
        )


def _wanted(request: GenerateRequest) -> Iterator[tuple[Feature, str]]:
    """Yield each feature that the request needs, with the parameter that needs it."""
    if request.sampling.top_logprobs is not None:
        yield Feature.LOGPROBS, "logprobs"
    if request.sampling.prompt_logprobs is not None:
        yield Feature.PROMPT_LOGPROBS, "prompt_logprobs"
    if request.sampling.logit_bias:
        yield Feature.LOGIT_BIAS, "logit_bias"
    if request.sampling.allowed_token_ids:
        yield Feature.ALLOWED_TOKENS, "allowed_token_ids"
    if request.guide is not None:
        yield Feature.GUIDED, "guide"


def _check_lora(lora: str | None, info: EngineInfo) -> None:
    if lora is not None and lora not in info.loras:
        raise InvalidRequestError(
            f"there is no adapter {lora!r} on this worker; it has: {', '.join(info.loras) or 'none'}",
            hint="route by the workers' cards",
            param="model",
        )
