"""Write what the answers of chat and text completions have in common: usage, the whole response, the chunks of a
stream."""

from collections.abc import Sequence
from typing import Final, TypeVar

import msgspec

from kvmesh.frontend.errors import error_event
from kvmesh.frontend.job import Job, TokenCounts
from kvmesh.frontend.openai.shapes import PromptTokensDetails, Response, Usage
from kvmesh.frontend.report import trace_report
from kvmesh.frontend.shapes import TraceReport, encode
from kvmesh.protocol.errors import MeshError

ChoiceT = TypeVar("ChoiceT")
DONE: Final = b"data: [DONE]\n\n"


def usage_of(counts: TokenCounts) -> Usage:
    return Usage(
        prompt_tokens=counts.prompt,
        completion_tokens=counts.completion,
        total_tokens=counts.total,
        prompt_tokens_details=PromptTokensDetails(counts.cached),
    )


def whole_response(kind: str, job: Job, choices: Sequence[ChoiceT], counts: TokenCounts) -> bytes:
    """Return the body of a reply that is not streamed; `kind`: the name of its object."""
    trace = trace_report(job)
    response = Response(
        id=job.heading.id,
        object=kind,
        created=job.heading.created,
        model=job.heading.model,
        choices=list(choices),
        usage=usage_of(counts),
        kvmesh=msgspec.UNSET if trace is None else trace,
    )
    return encode(response)


class ChunkWriter:
    """Writes the chunks of a stream; only what is new in a chunk is encoded each time."""

    def __init__(self, kind: str, job: Job) -> None:
        self._job = job
        self._heads: list[bytes] = []
        heading = job.heading
        fields = {"id": heading.id, "object": kind, "created": heading.created, "model": heading.model}
        self._event_head = b"data: " + encode(fields)[:-1] + b',"choices":['
        self._heads = [self._event_head + b'{"index":%d,' % n for n in range(len(job.branches))]
        self._set_usage(b',"usage":null' if job.parsed.include_usage else b"")  # as OpenAI's, in all but the last

    def _set_usage(self, usage: bytes) -> None:
        """Set what chunks report of the usage from now on."""
        self._event_tail = b"]" + usage + b"}\n\n"
        self._unfinished = b',"logprobs":null,"finish_reason":null}' + self._event_tail

    def _count_on(self) -> None:
        """Report the usage of the request so far, if every chunk has to."""
        if self._job.parsed.is_usage_continuous:
            self._set_usage(b',"usage":' + encode(usage_of(self._job.counts())))

    def chunk(self, index: int, content: bytes, logprobs: bytes = b"null", reason: bytes = b"null") -> bytes:
        """Return one chunk; `content` is the choice's own fields, `"text":"..."` or `"delta":{...}`."""
        rest = (content, b',"logprobs":', logprobs, b',"finish_reason":', reason, b"}", self._event_tail)
        return self._heads[index] + b"".join(rest)

    def plain(self, index: int, content: bytes) -> bytes:
        """A chunk without logprobs: nearly all are."""
        return self._heads[index] + content + self._unfinished

    def end(self, counts: TokenCounts) -> bytes:
        """Return what follows the last finish reason: usage if it was asked for, and what happened to the request."""
        trace = trace_report(self._job)
        if not self._job.parsed.include_usage and trace is None:
            return DONE
        usage = b',"usage":' + encode(usage_of(counts)) if self._job.parsed.include_usage else b""
        return self._event_head + b"]" + usage + _trace(trace) + b"}\n\n" + DONE

    def error(self, error: MeshError, request_id: str) -> bytes:
        return error_event(error)


def _trace(trace: TraceReport | None) -> bytes:
    return b"" if trace is None else b',"kvmesh":' + encode(trace)
