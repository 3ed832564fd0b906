"""What happens to one request, as small steps: render, tokenize, limit, ask, read the answers.

A parsed `Call` becomes a `Job` with a branch for each answer (`prepare`); `run` carries it out. What is sent, and
how, is `endpoints`' business.
"""

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
from xxhash import xxh3_64_intdigest

from frontend.answer import Answer, Part
from frontend.call import Call, Heading, TokenCounts
from frontend.generator import Generator, Trace
from frontend.lane import TokenLane
from frontend.models import Model
from frontend.openai import TraceReport
from protocol.errors import ContextLengthError, EngineError, InvalidRequestError, MeshError
from protocol.ids import RequestId, draw
from protocol.messages import Delta, Feature, GenerateRequest, SamplingParams, StopConditions, pack_tokens
from router.api import explained

MAX_HEADER_CHARS = 512
PROMPTS_AT_ONCE = 16  # tokenized in one turn of the event loop
LONG_TURNS = 512  # messages and calls in them; rendering more in the event loop would hold it up for milliseconds
PROMPT_TAIL_CHARS = 64  # of a rendered chat, to see whether it opens thoughts
_NOT_PRINTABLE = re.compile(r"[^\x20-\x7e]")


class Timing(msgspec.Struct):
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


class Prompt(msgspec.Struct):
    """What the model reads, for one or more answers."""

    tokens: bytes  # u32 little endian
    tail: str = ""  # of a rendered chat
    text: str = ""  # for the echo

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4


class Branch(msgspec.Struct):
    """One answer of a request."""

    index: int
    request: GenerateRequest
    answer: Answer
    trace: Trace
    timing: Timing
    echo: str = ""  # the text the answer begins with


class Job(msgspec.Struct):
    """One request on its way."""

    call: Call
    model: Model
    prompts: Sequence[Prompt]
    branches: Sequence[Branch]  # those of the first prompt first
    heading: Heading
    timing: Timing

    def counts(self) -> TokenCounts:
        """A prompt counts once, however many answers it has."""
        if len(self.branches) == 1:
            branch, prompt = self.branches[0], self.prompts[0].num_tokens
            return TokenCounts(prompt, branch.answer.completion_tokens, min(branch.trace.cached_tokens, prompt))
        prompt = sum(prompt.num_tokens for prompt in self.prompts)
        firsts = self.branches[:: self.call.best_of]
        return TokenCounts(
            prompt=prompt,
            completion=sum(branch.answer.completion_tokens for branch in self.branches),
            cached=min(sum(branch.trace.cached_tokens for branch in firsts), prompt),
        )


async def prepare(call: Call, model: Model, request_id: RequestId, started: float) -> Job:
    """`started`: when the request came, in event-loop time. Raises InvalidRequestError, ContextLengthError."""
    require_features(call, model)
    prompts = await read_prompts(call, model)
    heading = Heading(request_id, int(time.time()), model.name)
    branches = [
        make_branch(call, model, prompts[number // call.best_of], number, request_id, started)
        for number in range(len(prompts) * call.best_of)
    ]
    return Job(call, model, prompts, branches, heading, Timing(started))


def require_features(call: Call, model: Model) -> None:
    """Raises InvalidRequestError that names what the engine cannot do."""
    if call.guide is not None:
        forced = call.tools is not None and not call.tools.is_free
        model.require(Feature.GUIDED, "tool_choice" if forced else call.format_param)
    if call.sampling.logit_bias:
        model.require(Feature.LOGIT_BIAS, "logit_bias")
        check_token_ids([token for token, _ in call.sampling.logit_bias], model, "logit_bias")
    if call.sampling.allowed_token_ids:
        model.require(Feature.ALLOWED_TOKENS, "allowed_token_ids")
        check_token_ids(call.sampling.allowed_token_ids, model, "allowed_token_ids")


def check_token_ids(token_ids: Sequence[int], model: Model, param: str) -> None:
    """Raises InvalidRequestError."""
    if token_ids and (largest := max(token_ids)) >= model.tokenizer.vocab_size:
        raise InvalidRequestError(
            f"{param} holds the token {largest}, which does not exist",
            hint=f"the vocabulary of {model.name} has {model.tokenizer.vocab_size} tokens",
            param=param,
        )


def make_branch(call: Call, model: Model, prompt: Prompt, number: int, request_id: RequestId, started: float) -> Branch:
    parser = None
    if call.messages is not None:
        parser = model.format.parser(call.tools, prompt.tail, is_guided=call.guide is not None)
    name = request_id if number == 0 else RequestId(f"{request_id}-{number}")
    request = generate_request(call, model, prompt, name, number)
    answer = Answer(
        model.tokenizer.detokenizer(model.format.markers if parser is not None else frozenset()),
        call.stops,
        call.min_tokens,
        logprobs=request.sampling.top_logprobs is not None,
        parser=parser,
        only_one_call=call.tools is not None and not call.tools.parallel,
    )
    return Branch(number, request, answer, Trace(), Timing(started), prompt.text)


# --- prompts ------------------------------------------------------------------------------------------


async def read_prompts(call: Call, model: Model) -> list[Prompt]:
    """Raises InvalidRequestError, ContextLengthError."""
    if call.messages is not None:
        prompts = [await chat_prompt(call, model)]
    else:
        prompts = []
        for number, prompt in enumerate(call.prompts, 1):
            prompts.append(await text_prompt(call, model, prompt))
            if number % PROMPTS_AT_ONCE == 0:
                await asyncio.sleep(0)  # short ones are tokenized without a pause, and there may be thousands
    for read in prompts:
        if not read.tokens:
            raise InvalidRequestError("the prompt is empty", param=call.prompt_param)
    return prompts


async def chat_prompt(call: Call, model: Model) -> Prompt:
    """A rendered chat holds its special tokens."""
    assert call.messages is not None
    turns = sum([1 + len(message.get("tool_calls") or ()) for message in call.messages])
    text = render(call, model) if turns <= LONG_TURNS else await asyncio.to_thread(render, call, model)
    check_length(text, call, model)
    tokens = await model.tokenizer.encode_packed(text, add_special_tokens=False, salt=call.cache_salt or "")
    return Prompt(tokens, text[-PROMPT_TAIL_CHARS:])


def render(call: Call, model: Model) -> str:
    """Raises InvalidRequestError."""
    assert call.messages is not None
    return model.chat_template().render(
        call.messages,
        tools=call.tools.shown if call.tools is not None else None,
        add_generation_prompt=call.add_generation_prompt,
        continue_final_message=call.continue_final_message,
        options=call.template_options,
        param=call.prompt_param,
    )


async def text_prompt(call: Call, model: Model, prompt: str | Sequence[int]) -> Prompt:
    """A raw prompt gets the special tokens that the tokenizer adds."""
    if not isinstance(prompt, str):
        check_token_ids(prompt, model, call.prompt_param)
        if call.suffix:
            raise InvalidRequestError("'suffix' needs a prompt of text", param="suffix")
        if call.echo:
            answer_limit(call, model.context_tokens, len(prompt))  # before what cannot fit is decoded
        text = model.tokenizer.decode(list(prompt)) if call.echo else ""
        return Prompt(pack_tokens(prompt), text=text)
    text = with_suffix(prompt, call.suffix, model) if call.suffix else prompt
    check_length(text, call, model)
    tokens = await model.tokenizer.encode_packed(text, add_special_tokens=True, salt=call.cache_salt or "")
    return Prompt(tokens, text=prompt if call.echo else "")


INFILL_TOKENS = (  # before the prompt, before the suffix, before the answer: in Qwen's, StarCoder's, DeepSeek's words
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)


def with_suffix(prompt: str, suffix: str, model: Model) -> str:
    """The prompt of a model that was trained to fill a gap. Raises InvalidRequestError for others."""
    for prefix_token, suffix_token, middle_token in INFILL_TOKENS:
        tokens = (prefix_token, suffix_token, middle_token)
        if all(model.tokenizer.special_token_id(token) is not None for token in tokens):
            return f"{prefix_token}{prompt}{suffix_token}{suffix}{middle_token}"
    raise InvalidRequestError(
        f"The parameter 'suffix' is not supported by {model.name!r}: its tokenizer has no tokens for filling a gap",
        hint="leave it out",
        param="suffix",
    )


def check_length(text: str, call: Call, model: Model) -> None:
    """Refuse what cannot fit before tokenizing it, which would take seconds and gigabytes."""
    least_tokens = -(-len(text) // model.tokenizer.longest_token_chars)
    if least_tokens >= model.context_tokens:
        raise ContextLengthError(
            f"the prompt has {len(text)} characters, at least {least_tokens} tokens; "
            f"the context of {model.name} has {model.context_tokens}",
            hint="shorten the prompt",
            param=call.prompt_param,
        )


# --- what workers are asked -----------------------------------------------------------------------------


def generate_request(call: Call, model: Model, prompt: Prompt, name: RequestId, number: int) -> GenerateRequest:
    max_tokens = answer_limit(call, model.context_tokens, prompt.num_tokens)
    return GenerateRequest(
        request_id=name,
        model=model.base,
        lora=model.lora,
        prompt=prompt.tokens,
        sampling=sampling_of(call, number % call.best_of),
        stop=StopConditions(
            max_tokens=max_tokens,
            min_tokens=min(call.min_tokens, max_tokens),
            stop_token_ids=call.stop_token_ids,
            ignore_eos=call.ignore_eos,
        ),
        cache_salt=call.cache_salt,
        guide=call.guide,
    )


def sampling_of(call: Call, sibling: int) -> SamplingParams:
    """Answers to one prompt differ in their seeds, which are drawn here, so that a migrated stream goes on as it
    would have. The first has the seed that was asked for."""
    sampling = call.sampling
    if not call.has_seed:
        sampling = msgspec.structs.replace(sampling, seed=int.from_bytes(draw()[:8]))
    elif sibling:
        seed = xxh3_64_intdigest(sibling.to_bytes(8, "little"), sampling.seed)
        sampling = msgspec.structs.replace(sampling, seed=seed)
    if call.best_of > call.n and sampling.top_logprobs is None:
        sampling = msgspec.structs.replace(sampling, top_logprobs=0)  # by which the likeliest are told
    return sampling


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
            param=call.prompt_param,
        )
    return left if call.max_tokens is None else min(call.max_tokens, left)


# --- running --------------------------------------------------------------------------------------------


class Outlet(Protocol):
    """Where the parts of the answers go."""

    has_lanes: bool

    def put(self, branch: Branch, part: Part) -> bool:
        """Whether it is not full."""
        ...

    def lane(self, branch: Branch, now: Callable[[], float]) -> TokenLane | None:
        """After a `put`, where the answer is plain: how tokens that are text alone can go out without it, until the
        last. None: not now."""
        ...

    @property
    def is_full(self) -> bool: ...

    async def until_ready(self) -> None: ...


class _Feed:
    """Implements frontend.generator.DeltaConsumer for one branch."""

    __slots__ = ("_answer", "_branch", "_now", "_of_all", "_outlet", "_put", "_timing", "lane", "on_begin")

    def __init__(self, branch: Branch, job: Job, outlet: Outlet) -> None:
        self._branch = branch
        self._answer = branch.answer
        self._timing = branch.timing
        self._of_all = job.timing
        self._outlet = outlet
        self._put = outlet.put
        self._now = asyncio.get_running_loop().time
        self.lane: TokenLane | None = None
        self.on_begin: Callable[[], None] | None = None  # with the first token

    def take(self, delta: Delta) -> bool:
        if not delta.token_ids and delta.finish_reason is None:
            return not (self.is_done or self.is_full)
        self.settle()
        answer, timing = self._answer, self._timing
        timing.last_token = self._of_all.last_token = now = self._now()
        if timing.first_token is None:
            timing.first_token = now
            self._of_all.on_tokens(now)
            if self.on_begin is not None:
                self.on_begin()
        wants_more = self._put(self._branch, answer.on_delta(delta)) and answer.finish_reason is None
        if self.lane is None and self._outlet.has_lanes and answer.is_plain and answer.finish_reason is None:
            self.lane = self._outlet.lane(self._branch, self._now)
        if self.lane is not None:
            self.lane.texts = answer.plain_texts()
        return wants_more

    def settle(self) -> None:
        """Note what has passed by the lane."""
        if (lane := self.lane) is not None and (count := lane.take_count()):
            self._answer.completion_tokens += count
            self._timing.last_token = lane.last_token_s
            self._of_all.last_token = max(self._of_all.last_token or 0.0, lane.last_token_s)

    @property
    def is_done(self) -> bool:
        return self._answer.finish_reason is not None

    @property
    def is_full(self) -> bool:
        return self._outlet.is_full

    async def until_ready(self) -> None:
        await self._outlet.until_ready()


async def run(job: Job, generator: Generator, outlet: Outlet, deadline: float) -> None:
    """Have all answers generated. Raises MeshError, also if a stream ends before its answer does: a cut-off answer
    must not look whole."""
    if len(job.branches) == 1:
        branch = job.branches[0]
        await _feed(job, branch, generator, _Feed(branch, job, outlet), deadline)
        return
    try:
        async with asyncio.TaskGroup() as group:
            for first in range(0, len(job.branches), job.call.best_of):
                siblings = job.branches[first : first + job.call.best_of]
                name = f"answers of {siblings[0].request.request_id}"
                group.create_task(_run_siblings(job, siblings, generator, outlet, deadline), name=name)
    except BaseExceptionGroup as failures:
        raise first_failure(failures) from failures


async def _run_siblings(
    job: Job, siblings: Sequence[Branch], generator: Generator, outlet: Outlet, deadline: float
) -> None:
    """The answers to one prompt. The others wait for the first one's first token: then its prompt is cached, and
    they need not compute it again."""
    first, has_begun = _Feed(siblings[0], job, outlet), asyncio.Event()
    first.on_begin = has_begun.set
    async with asyncio.TaskGroup() as group:
        leading = group.create_task(_feed(job, siblings[0], generator, first, deadline))
        leading.add_done_callback(lambda _: has_begun.set())
        await has_begun.wait()
        for branch in siblings[1:]:
            group.create_task(_run(job, branch, generator, outlet, deadline))


async def _run(job: Job, branch: Branch, generator: Generator, outlet: Outlet, deadline: float) -> None:
    await _feed(job, branch, generator, _Feed(branch, job, outlet), deadline)


async def _feed(job: Job, branch: Branch, generator: Generator, feed: _Feed, deadline: float) -> None:
    try:
        await generator.generate(branch.request, job.call.hints, branch.trace, deadline, feed)
    finally:
        feed.settle()
    if branch.answer.finish_reason is None:
        raise EngineError(f"the answer broke off after {branch.answer.completion_tokens} tokens", hint="try again")


def first_failure(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """Of several answers that failed one is told; a MeshError rather than a bug's."""
    flat: list[BaseException] = []
    todo: list[BaseException] = [failures]
    while todo:
        error = todo.pop(0)
        if isinstance(error, BaseExceptionGroup):
            todo.extend(error.exceptions)
        else:
            flat.append(error)
    return next((error for error in flat if isinstance(error, MeshError)), flat[0])


def trace_report(job: Job) -> TraceReport | None:
    """What happened to the request (to its first answer, where it has several), if the caller wants to know."""
    explain = job.call.hints.explain
    if not (job.call.trace or explain):
        return None
    branch = job.branches[0]
    trace = branch.trace
    return TraceReport(
        prefill_worker=trace.prefill_worker,
        decode_worker=trace.decode_worker,
        transfer=trace.transfer,
        kv_bytes_pulled=trace.kv_bytes_pulled,
        overlap_tokens=trace.overlap_tokens,
        cached_tokens=trace.cached_tokens,
        waited_ms=round(trace.waited_s * 1000, 3),
        ttft_ms=_ms(branch.timing.ttft_s),
        itl_ms=_ms(branch.timing.itl_s(branch.answer.completion_tokens)),
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
