"""What happens to one request, as small steps: render, tokenize, limit, ask, read the answer.

A parsed `Call` becomes a `Job` (`prepare`); `parts` runs it. What is sent, and how, is `endpoints`' business.
"""

import re
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from frontend.answer import Answer, Part
from frontend.chunks import Heading
from frontend.generator import Generator, Trace
from frontend.models import Model
from frontend.openai import PromptTokensDetails, TraceReport, Usage
from frontend.parameters import Call, Endpoint
from protocol.errors import ContextLengthError, EngineError, InvalidRequestError
from protocol.ids import RequestId
from protocol.messages import GenerateRequest, StopConditions, pack_tokens
from router.api import explained

MAX_HEADER_CHARS = 512
_NOT_PRINTABLE = re.compile(r"[^\x20-\x7e]")


@dataclass(slots=True)
class Timing:
    """Event-loop times of one request."""

    started: float
    first_token: float | None = None
    last_token: float | None = None

    def on_tokens(self, now: float) -> None:
        if self.first_token is None:
            self.first_token = now
        self.last_token = now

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.started

    def itl_s(self, osl_tokens: int) -> float | None:
        """Mean gap between tokens; None for answers of fewer than two."""
        if self.first_token is None or self.last_token is None or osl_tokens < 2:
            return None
        return (self.last_token - self.first_token) / (osl_tokens - 1)


@dataclass(slots=True)
class Job:
    """One request on its way."""

    call: Call
    model: Model
    request: GenerateRequest
    prompt_tokens: int
    answer: Answer
    heading: Heading
    trace: Trace = field(default_factory=Trace)

    def usage(self) -> Usage:
        completion_tokens = self.answer.completion_tokens
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=self.prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(min(self.trace.cached_tokens, self.prompt_tokens)),
        )


async def prepare(call: Call, model: Model, request_id: RequestId) -> Job:
    """Raises InvalidRequestError, ContextLengthError."""
    tokens = await prompt_token_ids(call, model)
    return Job(
        call=call,
        model=model,
        request=generate_request(call, model, tokens, request_id),
        prompt_tokens=len(tokens),
        answer=Answer(
            model.tokenizer.detokenizer(),
            call.stops,
            call.min_tokens,
            logprobs=call.sampling.top_logprobs is not None,
        ),
        heading=Heading(request_id, int(time.time()), model.name),
    )


async def prompt_token_ids(call: Call, model: Model) -> list[int]:
    """Render and tokenize. A rendered chat holds its special tokens; a raw prompt gets the tokenizer's."""
    if call.token_ids is not None:
        tokens = call.token_ids
        if tokens and max(tokens) >= model.tokenizer.vocab_size:
            raise InvalidRequestError(
                f"prompt token {max(tokens)} does not exist",
                hint=f"the vocabulary of {model.name} has {model.tokenizer.vocab_size} tokens",
                param="prompt",
            )
    elif call.messages is not None:
        text = model.chat_template().render(call.messages)
        check_length(text, model)
        tokens = await model.tokenizer.encode(text, add_special_tokens=False)
    else:
        check_length(call.text or "", model)
        tokens = await model.tokenizer.encode(call.text or "", add_special_tokens=True)
    if not tokens:
        raise InvalidRequestError("the prompt is empty", param=_prompt_param(call))
    return tokens


def check_length(text: str, model: Model) -> None:
    """Refuse what cannot fit before tokenizing it, which would take seconds and gigabytes."""
    least_tokens = -(-len(text) // model.tokenizer.longest_token_chars)
    if least_tokens >= model.context_tokens:
        raise ContextLengthError(
            f"the prompt has {len(text)} characters, at least {least_tokens} tokens; "
            f"the context of {model.name} has {model.context_tokens}",
            hint="shorten the prompt",
            param="prompt",
        )


def generate_request(call: Call, model: Model, tokens: list[int], request_id: RequestId) -> GenerateRequest:
    max_tokens = answer_limit(call, model.context_tokens, len(tokens))
    # the seed is drawn here and not by an engine, so that a migrated stream goes on as it would have
    sampling = call.sampling
    if not call.has_seed:
        sampling = msgspec.structs.replace(sampling, seed=secrets.randbits(64))
    return GenerateRequest(
        request_id=request_id,
        model=model.name,
        prompt=pack_tokens(tokens),
        sampling=sampling,
        stop=StopConditions(
            max_tokens=max_tokens,
            min_tokens=min(call.min_tokens, max_tokens),
            stop_token_ids=call.stop_token_ids,
            ignore_eos=call.ignore_eos,
        ),
        cache_salt=call.cache_salt,
    )


def answer_limit(call: Call, context_tokens: int, prompt_tokens: int) -> int:
    """How many tokens the answer may have: what was asked for, cut to what the context leaves.

    Raises ContextLengthError if the prompt alone fills the context.
    """
    left = context_tokens - prompt_tokens
    if left <= 0:
        raise ContextLengthError(
            f"This model's maximum context length is {context_tokens} tokens. However, your prompt has "
            f"{prompt_tokens} tokens, and the answer needs at least one",
            hint="shorten the prompt",
            param=_prompt_param(call),
        )
    return left if call.max_tokens is None else min(call.max_tokens, left)


def _prompt_param(call: Call) -> str:
    return "messages" if call.endpoint is Endpoint.CHAT else "prompt"


async def parts(job: Job, generator: Generator, deadline: float) -> AsyncGenerator[Part, None]:
    """Run the job: a part for each delta with tokens, until the answer ends.

    Closing this, or a stop string, closes the generator, which cancels the request everywhere. Raises
    MeshError, also if the stream ends before the answer does: a cut-off answer must not look whole.
    """
    answer = job.answer
    stream = generator.generate(job.request, job.call.hints, job.trace, deadline)
    async with aclosing(stream):
        async for delta in stream:
            if not delta.token_ids and delta.finish_reason is None:
                continue
            part = answer.on_delta(delta)
            if answer.finish_reason is not None:
                break
            yield part
        else:
            raise EngineError(f"the answer broke off after {answer.completion_tokens} tokens", hint="try again")
        if delta.finish_reason is not None:  # ended by itself: let it end, so that nothing is cancelled
            async for _ in stream:
                pass
    yield part


def trace_report(job: Job, timing: Timing) -> TraceReport | None:
    """What happened to the request, if the caller wants to know."""
    explain = job.call.hints.explain
    if not (job.call.trace or explain):
        return None
    trace = job.trace
    return TraceReport(
        prefill_worker=trace.prefill_worker,
        decode_worker=trace.decode_worker,
        transfer=trace.transfer,
        kv_bytes_pulled=trace.kv_bytes_pulled,
        overlap_tokens=trace.overlap_tokens,
        cached_tokens=trace.cached_tokens,
        waited_ms=round(trace.waited_s * 1000, 3),
        ttft_ms=_ms(timing.ttft_s),
        itl_ms=_ms(timing.itl_s(job.answer.completion_tokens)),
        route_reason=trace.placed.reason if trace.placed else "",
        migrations=trace.migrations,
        pull_error=trace.pull_error,
        explanations=[explained(e) for e in trace.explanations] if explain else msgspec.UNSET,
    )


def placement_headers(trace: Trace) -> dict[str, str]:
    """The last placement, as headers of the reply."""
    if (placed := trace.placed) is None:
        return {}
    headers = {
        "x-kvmesh-worker": placed.decode.name,
        "x-kvmesh-overlap-tokens": str(trace.overlap_tokens),
        "x-kvmesh-route-reason": placed.reason,
    }
    if placed.prefill is not None:
        headers["x-kvmesh-prefill-worker"] = placed.prefill.name
    return {name: _NOT_PRINTABLE.sub("?", text)[:MAX_HEADER_CHARS] for name, text in headers.items()}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
