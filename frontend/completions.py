"""POST /v1/completions: how a text is gone on with."""

from collections.abc import Sequence

import msgspec

from frontend.answer import Part, PlacedLogprob
from frontend.call import Call, Endpoint, TokenCounts
from frontend.chunks import ChunkWriter, usage_of
from frontend.logprobs import completion_logprobs
from frontend.openai import CompletionChoice, CompletionLogprobs, Response, encode
from frontend.parameters import parse_completion
from frontend.pipeline import Job, trace_report
from frontend.whole import Whole
from mesh.http.errors import error_body
from protocol.errors import MeshError
from protocol.messages import FinishReason


class CompletionsDialect:
    endpoint = Endpoint.COMPLETIONS
    id_prefix = "cmpl"

    def parse(self, body: bytes) -> Call:
        return parse_completion(body)

    def whole(self, job: Job, answers: Sequence[Whole], counts: TokenCounts) -> bytes:
        trace = trace_report(job)
        response = Response(
            id=job.heading.id,
            object="text_completion",
            created=job.heading.created,
            model=job.heading.model,
            choices=[completion_choice(job, n, answer) for n, answer in enumerate(the_likeliest(job.call, answers))],
            usage=usage_of(counts),
            kvmesh=msgspec.UNSET if trace is None else trace,
        )
        return encode(response)

    def writer(self, job: Job) -> "CompletionWriter":
        return CompletionWriter(job)

    def error_body(self, error: MeshError, request_id: str = "") -> bytes:
        return error_body(error)


def the_likeliest(call: Call, answers: Sequence[Whole]) -> Sequence[Whole]:
    """Of the `best_of` answers to each prompt, the `n` with the largest mean logprob, likeliest first."""
    if call.best_of == call.n:
        return answers
    chosen: list[Whole] = []
    for first in range(0, len(answers), call.best_of):
        siblings = answers[first : first + call.best_of]
        chosen += sorted(siblings, key=lambda answer: answer.mean_logprob, reverse=True)[: call.n]
    return chosen


def completion_choice(job: Job, index: int, answer: Whole) -> CompletionChoice:
    return CompletionChoice(
        index=index,
        text=job.branches[answer.index].echo + answer.content,
        logprobs=_logprobs(job, answer.logprobs),
        finish_reason=answer.finish_reason.value,
    )


def _logprobs(job: Job, placed: Sequence[PlacedLogprob]) -> CompletionLogprobs | None:
    """None if the caller did not ask for them: choosing between answers takes them as well."""
    if job.call.sampling.top_logprobs is None:
        return None
    return completion_logprobs(job.model.tokenizer, placed)


class CompletionWriter(ChunkWriter):
    def __init__(self, job: Job) -> None:
        super().__init__("text_completion", job)

    def opening(self) -> bytes:
        """The prompts, where they are to be echoed."""
        echoes = [(branch.index, branch.echo) for branch in self._job.branches if branch.echo]
        return b"".join([self.plain(index, b'"text":' + encode(echo)) for index, echo in echoes])

    def part(self, index: int, part: Part) -> bytes:
        self._count_on()
        text = part.text
        if part.logprobs:
            return self.chunk(index, b'"text":' + encode(text), encode(_logprobs(self._job, part.logprobs)))
        return self.plain(index, b'"text":' + encode(text)) if text else b""

    def frame(self, index: int) -> tuple[bytes, bytes] | None:
        if self._job.call.is_usage_continuous:
            return None
        return self._heads[index] + b'"text":"', b'"' + self._unfinished

    def finish(self, index: int, reason: FinishReason) -> bytes:
        return self.chunk(index, b'"text":""', reason=encode(reason.value))
