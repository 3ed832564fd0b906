"""A dialect: how one API asks and answers. What is the same in all of them stands in the other rooms."""

from collections.abc import Sequence
from typing import Protocol

from kvmesh.frontend.answer import Part
from kvmesh.frontend.job import Job, TokenCounts
from kvmesh.frontend.request import ParsedRequest
from kvmesh.frontend.whole_answer import WholeAnswer
from kvmesh.protocol.errors import MeshError
from kvmesh.protocol.messages import FinishReason


class StreamWriter(Protocol):
    """Makes the bytes of one streamed answer. `index`: of the answer, where a request has several."""

    def opening(self) -> bytes:
        """Return what comes before anything else; may be empty."""
        ...

    def part(self, index: int, part: Part) -> bytes:
        """Return what is new in one answer; empty if there is nothing to say."""
        ...

    def frame(self, index: int) -> tuple[bytes, bytes] | None:
        """Return what stands before and behind the text, as the inside of a JSON string, of a part that is text alone;
        None if that is not always the same."""
        ...

    def finish(self, index: int, reason: FinishReason) -> bytes:
        """Return what says that one answer is complete."""
        ...

    def end(self, counts: TokenCounts) -> bytes:
        """Return what says that all answers are complete."""
        ...

    def error(self, error: MeshError, request_id: str) -> bytes:
        """Return what says that the stream broke off; nothing follows. `request_id`: the one in the headers."""
        ...


class Dialect(Protocol):
    """The way in which one API asks for answers and gets them."""

    name: str  # of its endpoint in metrics
    id_prefix: str  # of the ids of its requests

    def parse(self, body: bytes) -> ParsedRequest:
        """Return what the body asks for. Raise InvalidRequestError."""
        ...

    def whole(self, job: Job, answers: Sequence[WholeAnswer], counts: TokenCounts) -> bytes:
        """Return the body of a reply that is not streamed; `answers` in the order of their index."""
        ...

    def writer(self, job: Job) -> StreamWriter: ...

    def error_body(self, error: MeshError, request_id: str = "") -> bytes:
        """Return the body of a refusal. `request_id`: the one in the headers; empty if the request has none yet."""
        ...
