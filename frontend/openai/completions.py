"""POST /v1/completions: how a text is continued."""

from collections.abc import Sequence

from kvmesh.frontend.answer import Part, PlacedLogprob
from kvmesh.frontend.endpoint import generating
from kvmesh.frontend.job import Job, TokenCounts
from kvmesh.frontend.openai.answers import ChunkWriter, whole_response
from kvmesh.frontend.openai.logprobs import completion_logprobs
from kvmesh.frontend.openai.parameters import parse_completion
from kvmesh.frontend.openai.shapes import (
    Chunk,
    CompletionChoice,
    CompletionChunkChoice,
    CompletionLogprobs,
    CompletionRequest,
    ErrorBody,
    Response,
)
from kvmesh.frontend.operation import ASKED_FAILURES, Operation, ShapeNotes
from kvmesh.frontend.request import ParsedRequest
from kvmesh.frontend.shapes import encode
from kvmesh.frontend.whole_answer import WholeAnswer
from kvmesh.mesh.http.errors import error_body
from kvmesh.protocol.errors import MeshError
from kvmesh.protocol.messages import FinishReason


class CompletionsDialect:
    name = "completions"
    id_prefix = "cmpl"

    def parse(self, body: bytes) -> ParsedRequest:
        return parse_completion(body)

    def whole(self, job: Job, answers: Sequence[WholeAnswer], counts: TokenCounts) -> bytes:
        kept = the_likeliest(job.parsed, answers)
        choices = [completion_choice(job, n, answer) for n, answer in enumerate(kept)]
        return whole_response("text_completion", job, choices, counts)

    def writer(self, job: Job) -> "CompletionWriter":
        return CompletionWriter(job)

    def error_body(self, error: MeshError, request_id: str = "") -> bytes:
        return error_body(error)


def the_likeliest(parsed: ParsedRequest, answers: Sequence[WholeAnswer]) -> Sequence[WholeAnswer]:
    """Return the `n` likeliest of the `best_of` answers to each prompt, by their mean logprob, likeliest first."""
    if parsed.best_of == parsed.n:
        return answers
    chosen: list[WholeAnswer] = []
    for first in range(0, len(answers), parsed.best_of):
        siblings = answers[first : first + parsed.best_of]
        chosen += sorted(siblings, key=lambda answer: answer.mean_logprob, reverse=True)[: parsed.n]
    return chosen


def completion_choice(job: Job, index: int, answer: WholeAnswer) -> CompletionChoice:
    return CompletionChoice(
        index=index,
        text=job.branches[answer.index].echo + answer.content,
        logprobs=_logprobs(job, answer.logprobs),
        finish_reason=answer.finish_reason.value,
    )


def _logprobs(job: Job, placed: Sequence[PlacedLogprob]) -> CompletionLogprobs | None:
    """Return the logprobs, None if the caller did not ask for them: choosing between answers takes them as well."""
    if job.parsed.sampling.top_logprobs is None:
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
        if self._job.parsed.is_usage_continuous:
            return None
        return self._heads[index] + b'"text":"', b'"' + self._unfinished

    def finish(self, index: int, reason: FinishReason) -> bytes:
        return self.chunk(index, b'"text":""', reason=encode(reason.value))


ENDPOINT = generating(
    "/v1/completions",
    CompletionsDialect(),
    Operation(
        summary="Go on with a text",
        request=(CompletionRequest,),
        reply=Response[CompletionChoice],
        events=(Chunk[CompletionChunkChoice], ErrorBody),
        ends_with_done=True,
        failures=ASKED_FAILURES,
        is_asked=True,
        takes_hints=True,
        notes=ShapeNotes(
            token_id_keys=((CompletionRequest, "logit_bias"),),
            examples={(CompletionRequest, "prompt"): "Once upon a time"},
        ),
    ),
)
