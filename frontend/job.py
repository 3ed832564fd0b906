"""A job: one request on its way, with a branch for each answer. `prepare` makes it of a parsed request."""

import time
from collections.abc import Sequence

import msgspec
from xxhash import xxh3_64_intdigest

from kvmesh.frontend.answer import GrowingAnswer
from kvmesh.frontend.echo import PromptAlone, PromptEcho
from kvmesh.frontend.generator import Trace
from kvmesh.frontend.models import Model
from kvmesh.frontend.prompts import TokenizedPrompt, answer_limit, check_each_token, check_token_ids, read_prompts
from kvmesh.frontend.request import ParsedRequest
from kvmesh.protocol.errors import InvalidRequestError
from kvmesh.protocol.ids import RequestId, draw
from kvmesh.protocol.messages import MAX_PROMPT_LOGPROBS, Feature, GenerateRequest, SamplingParams, StopConditions

Context = tuple[str, str]  # traceparent and tracestate, as mesh/trace_context.py has them; "": none
NO_CONTEXT = ("", "")


class AnswerTiming(msgspec.Struct):
    """Event-loop times of one request, or of one of its answers."""

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
        """Return the mean gap between tokens; None for answers of fewer than two."""
        if self.first_token is None or self.last_token is None or osl_tokens < 2:
            return None
        return (self.last_token - self.first_token) / (osl_tokens - 1)


class Heading(msgspec.Struct, frozen=True):
    """The fields at the top of every chunk and of the whole answer."""

    id: str
    created: int  # unix seconds
    model: str


class TokenCounts(msgspec.Struct, frozen=True):
    """Tokens of all prompts and answers of one request."""

    prompt: int
    completion: int
    cached: int  # of the prompt, that no worker had to compute

    @property
    def total(self) -> int:
        return self.prompt + self.completion


class Branch(msgspec.Struct):
    """A branch is one answer of a request."""

    index: int
    request: GenerateRequest
    answer: GrowingAnswer
    trace: Trace
    timing: AnswerTiming
    echo: str = ""  # the text the answer begins with
    scored_echo: PromptEcho | None = None  # that text, where it comes with logprobs


class Job(msgspec.Struct):
    """A job is one request on its way."""

    parsed: ParsedRequest
    model: Model
    prompts: Sequence[TokenizedPrompt]
    branches: Sequence[Branch]  # those of the first prompt first
    heading: Heading
    timing: AnswerTiming

    def counts(self) -> TokenCounts:
        """Count tokens; a prompt counts once, however many answers it has."""
        if len(self.branches) == 1:
            branch, prompt = self.branches[0], self.prompts[0].num_tokens
            return TokenCounts(prompt, branch.answer.completion_tokens, min(branch.trace.cached_tokens, prompt))
        prompt = sum(prompt.num_tokens for prompt in self.prompts)
        firsts = self.branches[:: self.parsed.best_of]
        return TokenCounts(
            prompt=prompt,
            completion=sum(branch.answer.completion_tokens for branch in self.branches),
            cached=min(sum(branch.trace.cached_tokens for branch in firsts), prompt),
        )


async def prepare(
    parsed: ParsedRequest, model: Model, request_id: RequestId, started: float, context: Context = NO_CONTEXT
) -> Job:
    """Make the job of a request that came at `started`, in event-loop time; `context`: of its trace.

    Raise InvalidRequestError, ContextLengthError.
    """
    require_features(parsed, model)
    prompts = await read_prompts(parsed, model)
    heading = Heading(request_id, int(time.time()), model.name)
    if parsed.sampling.prompt_logprobs is not None:
        check_prompt_logprobs(parsed, prompts)
    branches = [
        make_branch(parsed, model, prompts[number // parsed.best_of], number, request_id, started, context)
        for number in range(len(prompts) * parsed.best_of)
    ]
    return Job(parsed, model, prompts, branches, heading, AnswerTiming(started))


def check_prompt_logprobs(parsed: ParsedRequest, prompts: Sequence[TokenizedPrompt]) -> None:
    """Raise InvalidRequestError if the logprobs of the prompts would take too much memory."""
    each = 1 + (parsed.sampling.prompt_logprobs or 0)
    count = sum([prompt.num_tokens for prompt in prompts]) * parsed.best_of * each
    if count > MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            f"the logprobs of the prompts' tokens are {count}, with {each - 1} likeliest ones for each, "
            f"more than {MAX_PROMPT_LOGPROBS}",
            hint="send fewer or shorter prompts, or lower logprobs",
            param="logprobs",
        )


def require_features(parsed: ParsedRequest, model: Model) -> None:
    """Raise InvalidRequestError that names what the engine cannot do."""
    if Feature.COMPLETIONS not in model.features and Feature.EMBEDDINGS in model.features:
        raise InvalidRequestError(
            f"the model {model.name!r} computes embeddings only", hint="use /v1/embeddings", param="model"
        )
    if parsed.guide is not None:
        forced = parsed.tools is not None and not parsed.tools.is_free
        model.require(Feature.GUIDED, "tool_choice" if forced else parsed.names.format)
    if parsed.sampling.logit_bias:
        model.require(Feature.LOGIT_BIAS, "logit_bias")
        check_token_ids([token for token, _ in parsed.sampling.logit_bias], model, "logit_bias")
    if parsed.sampling.prompt_logprobs is not None:
        model.require(Feature.PROMPT_LOGPROBS, "echo")
    if parsed.sampling.allowed_token_ids:
        model.require(Feature.ALLOWED_TOKENS, "allowed_token_ids")
        check_each_token(parsed.sampling.allowed_token_ids, model, "allowed_token_ids")
    if parsed.stop_token_ids:
        check_each_token(parsed.stop_token_ids, model, "stop_token_ids")


def make_branch(
    parsed: ParsedRequest,
    model: Model,
    prompt: TokenizedPrompt,
    number: int,
    request_id: RequestId,
    started: float,
    context: Context,
) -> Branch:
    parser = None
    if parsed.messages is not None:
        parser = model.format.parser(parsed.tools, prompt.tail, is_guided=parsed.guide is not None)
    name = request_id if number == 0 else RequestId(f"{request_id}-{number}")
    request = generate_request(parsed, model, prompt, name, number, context)
    is_scored = parsed.sampling.prompt_logprobs is not None
    answer = (PromptAlone if parsed.max_tokens == 0 else GrowingAnswer)(
        model.tokenizer.detokenizer(model.format.markers if parser is not None else frozenset()),
        parsed.stops,
        parsed.min_tokens,
        logprobs=request.sampling.top_logprobs is not None,
        parser=parser,
        only_one_call=parsed.tools is not None and not parsed.tools.parallel,
        echoed_chars=len(prompt.text) if is_scored else None,
    )
    branch = Branch(number, request, answer, Trace(), AnswerTiming(started), prompt.text)
    if is_scored:
        branch.echo, branch.scored_echo = "", PromptEcho(model.tokenizer, prompt.tokens, prompt.text)
    return branch


def generate_request(
    parsed: ParsedRequest, model: Model, prompt: TokenizedPrompt, name: RequestId, number: int, context: Context
) -> GenerateRequest:
    """Return what workers are asked for answer `number`."""
    max_tokens = answer_limit(parsed, model.context_tokens, prompt.num_tokens)
    return GenerateRequest(
        request_id=name,
        model=model.base,
        lora=model.lora,
        prompt=prompt.tokens,
        sampling=sampling_of(parsed, number % parsed.best_of),
        stop=StopConditions(
            max_tokens=max(max_tokens, 1),  # of 0 the answer keeps nothing
            min_tokens=min(parsed.min_tokens, max_tokens),
            stop_token_ids=parsed.stop_token_ids,
            ignore_eos=parsed.ignore_eos,
        ),
        cache_salt=parsed.cache_salt,
        guide=parsed.guide,
        traceparent=context[0],
        tracestate=context[1],
        tenant=parsed.hints.tenant if parsed.guide is not None else "",
    )


def sampling_of(parsed: ParsedRequest, sibling: int) -> SamplingParams:
    """Return the sampling parameters of one of the answers to a prompt; the first has the seed that was asked for.

    Seeds differ between siblings. They are drawn here, so that a stream that migrates continues as it would have.
    """
    sampling = parsed.sampling
    if not parsed.has_seed:
        sampling = msgspec.structs.replace(sampling, seed=int.from_bytes(draw()[:8]))
    elif sibling:
        seed = xxh3_64_intdigest(sibling.to_bytes(8, "little"), sampling.seed)
        sampling = msgspec.structs.replace(sampling, seed=seed)
    if parsed.best_of > parsed.n and sampling.top_logprobs is None:
        sampling = msgspec.structs.replace(sampling, top_logprobs=0)  # by which the likeliest are told
    return sampling
