"""Outlets: where the parts of the answers go. One keeps them for a whole reply, one writes them to the client."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from kvmesh.frontend.answer import Part
from kvmesh.frontend.dialect import StreamWriter
from kvmesh.frontend.job import Branch, Job
from kvmesh.frontend.lane import TokenLane
from kvmesh.frontend.report import placement_headers
from kvmesh.frontend.whole_answer import WholeAnswer
from kvmesh.mesh.http.request import ReplyStream, Request
from kvmesh.protocol.errors import MeshError

ERROR_WRITE_S = 1.0  # for telling a client that may not read any more that its request failed


class Outlet(Protocol):
    """Takes the parts of the answers."""

    has_lanes: bool

    def put(self, branch: Branch, part: Part) -> bool:
        """Take a part; return whether more can be taken."""
        ...

    def lane(self, branch: Branch, now: Callable[[], float]) -> TokenLane | None:
        """Return how tokens that are text alone can go out without `put`, until the last one; None if they cannot now.
        It is asked after a `put`, where the answer is plain."""
        ...

    @property
    def is_full(self) -> bool: ...

    async def until_ready(self) -> None: ...


class WholeOutlet:
    """Keeps all parts until the answers are complete."""

    is_full = False
    has_lanes = False

    __slots__ = ("_answers", "_job")

    def __init__(self, job: Job) -> None:
        self._job = job
        self._answers = [WholeAnswer(branch.index) for branch in job.branches]

    def put(self, branch: Branch, part: Part) -> bool:
        self._answers[branch.index].add(part)
        return True

    def lane(self, branch: Branch, now: Callable[[], float]) -> None:
        return None

    async def until_ready(self) -> None:
        return

    def finished(self) -> list[WholeAnswer]:
        for branch, answer in zip(self._job.branches, self._answers, strict=True):
            assert branch.answer.finish_reason is not None, "the answer is over"
            answer.finish_reason = branch.answer.finish_reason
        return self._answers


class SseOutlet:
    """Writes parts to the client in the call that brings them. The last part waits, to go out with the end."""

    has_lanes = True

    __slots__ = ("_headers", "_job", "_request", "_rest", "_unfinished", "_writer", "reply")

    def __init__(self, request: Request, job: Job, writer: StreamWriter, headers: dict[str, str]) -> None:
        self._request = request
        self._job = job
        self._writer = writer
        self._headers = headers
        self._unfinished = len(job.branches)
        self._rest = b""  # the end of the last answer
        self.reply: ReplyStream | None = None  # once its headers are on their way

    def put(self, branch: Branch, part: Part) -> bool:
        chunk = self._writer.part(branch.index, part)
        if (reason := branch.answer.finish_reason) is not None:
            chunk += self._writer.finish(branch.index, reason)
            self._unfinished -= 1
        reply = self.reply
        if reply is None:  # nobody waits for the first token longer than it takes, even where it is the last
            reply = self._open()
            reply.write(self._writer.opening() + chunk)
        elif not self._unfinished:
            self._rest = chunk
        elif chunk:
            reply.write(chunk)
        return not reply.is_full

    def lane(self, branch: Branch, now: Callable[[], float]) -> TokenLane | None:
        if self.reply is None or (frame := self._writer.frame(branch.index)) is None:
            return None
        return TokenLane(now, self.reply.write, *frame)

    def _open(self) -> ReplyStream:
        explained = placement_headers(self._job.branches[0].trace) if self._job.parsed.hints.explain else {}
        self.reply = self._request.open_stream(self._headers | explained)
        return self.reply

    @property
    def is_full(self) -> bool:
        return self.reply is not None and self.reply.is_full

    async def until_ready(self) -> None:
        if self.reply is not None:
            await self.reply.until_writable()

    def end(self) -> ReplyStream:
        assert self.reply is not None, "an answer has at least one part"
        self.reply.end(self._rest + self._writer.end(self._job.counts()))
        return self.reply

    async def break_off(self, error: MeshError, request_id: str) -> ReplyStream:
        assert self.reply is not None
        self.reply.end(self._writer.error(error, request_id))
        try:
            async with asyncio.timeout(ERROR_WRITE_S):
                await self.reply.until_writable()
        except TimeoutError:  # it does not read: nothing but the end of the connection can tell it
            self.reply.abort()
        return self.reply
