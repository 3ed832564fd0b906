"""What the streams of chat and text completions have in common: server-sent events prepared once per stream."""

from typing import Final

from frontend.call import Heading, TokenCounts
from frontend.errors import error_event
from frontend.openai import PromptTokensDetails, TraceReport, Usage, encode
from frontend.pipeline import Job, trace_report
from protocol.errors import MeshError

DONE: Final = b"data: [DONE]\n\n"


def usage_of(counts: TokenCounts) -> Usage:
    return Usage(
        prompt_tokens=counts.prompt,
        completion_tokens=counts.completion,
        total_tokens=counts.total,
        prompt_tokens_details=PromptTokensDetails(counts.cached),
    )


class ChunkWriter:
    """Of a chunk only what is new in it is encoded anew."""

    def __init__(self, kind: str, job: Job) -> None:
        self._job = job
        self._heads: list[bytes] = []
        heading: Heading = job.heading
        fields = {"id": heading.id, "object": kind, "created": heading.created, "model": heading.model}
        self._event_head = b"data: " + encode(fields)[:-1] + b',"choices":['
        self._heads = [self._event_head + b'{"index":%d,' % n for n in range(len(job.branches))]
        self._set_usage(b',"usage":null' if job.call.include_usage else b"")  # as OpenAI's, in all but the last

    def _set_usage(self, usage: bytes) -> None:
        """What chunks say of it from now on."""
        self._event_tail = b"]" + usage + b"}\n\n"
        self._unfinished = b',"logprobs":null,"finish_reason":null}' + self._event_tail

    def _count_on(self) -> None:
        """Where every chunk tells the usage of the whole request so far."""
        if self._job.call.is_usage_continuous:
            self._set_usage(b',"usage":' + encode(usage_of(self._job.counts())))

    def chunk(self, index: int, content: bytes, logprobs: bytes = b"null", reason: bytes = b"null") -> bytes:
        """`content`: the choice's own fields, `"text":"..."` or `"delta":{...}`."""
        rest = (content, b',"logprobs":', logprobs, b',"finish_reason":', reason, b"}", self._event_tail)
        return self._heads[index] + b"".join(rest)

    def plain(self, index: int, content: bytes) -> bytes:
        """A chunk without logprobs: nearly all are."""
        return self._heads[index] + content + self._unfinished

    def end(self, counts: TokenCounts) -> bytes:
        """What follows the last finish reason: usage if it was asked for, and what happened to the request."""
        trace = trace_report(self._job)
        if not self._job.call.include_usage and trace is None:
            return DONE
        usage = b',"usage":' + encode(usage_of(counts)) if self._job.call.include_usage else b""
        return self._event_head + b"]" + usage + _trace(trace) + b"}\n\n" + DONE

    def error(self, error: MeshError, request_id: str) -> bytes:
        return error_event(error)


def _trace(trace: TraceReport | None) -> bytes:
    return b"" if trace is None else b',"kvmesh":' + encode(trace)
