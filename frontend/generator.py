"""The seam between the HTTP side and what computes answers: a dispatcher over workers, or a script in tests."""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct, field

from kvmesh.frontend.lane import TokenLane
from kvmesh.frontend.timeline import AnswerRecord, Attempt
from kvmesh.protocol.messages import (
    Delta,
    Embedding,
    EmbedRequest,
    Explanation,
    GenerateRequest,
    Placed,
    PullReport,
    RouteRequest,
    TokenLogprob,
)

MAX_EXPLANATIONS = 8  # of one request, the latest: it may be placed again and again


class PlacingNotes(Struct, gc=False):
    """Notes on the present placement of an answer, beside what its trace says.

    Where nobody has made an AnswerRecord, frontend/rebuilt.py makes it of these notes, if it is wanted after all.
    """

    route: RouteRequest
    block_size: int
    asked: float
    placed_at: float | None = None  # None: the router has not answered
    handed_over: float | None = None  # when the decode worker was asked, after a prefill worker
    first: float | None = None  # when the decode worker's first message came
    pull: PullReport | None = None
    prefilled: Delta | None = None  # the last message of the prefill worker
    last: Delta | None = None  # of the worker that ended the answer


class Trace(Struct):
    """Records what happened to one request on its way; it is filled while the request runs."""

    placed: Placed | None = None  # the last placement
    prefill_worker: str | None = None  # names of those that did their part
    decode_worker: str | None = None
    transfer: str | None = None  # backend of the KV pull
    kv_bytes_pulled: int = 0
    overlap_tokens: int = 0  # of the prompt, that the router expected in the cache where it was first computed
    cached_tokens: int = 0  # prompt tokens that no worker had to compute; what `usage` reports
    waited_s: float = 0.0  # for the router, most of it in its queue
    migrations: int = 0
    pull_error: str = ""
    record: AnswerRecord | None = None  # while somebody looks, see frontend/timeline.py
    explanations: deque[Explanation] = field(default_factory=lambda: deque(maxlen=MAX_EXPLANATIONS))
    placing: PlacingNotes | None = None  # while traces alone look; None: nothing was asked yet, or that one has failed
    failed: Sequence[Attempt] = ()  # placements before that one; while there is no `record`


class Hints(Struct, frozen=True):
    """Says what the caller asks of the mesh, beside the answer. The names are those of
    kvmesh.protocol.messages.RouteRequest."""

    disaggregate: bool | None = None  # None: the router decides
    pin: str | None = None  # the worker that has to decode
    pin_prefill: str | None = None
    pin_rank: int | None = None
    session: str = ""
    tenant: str = ""
    priority: int = 0
    explain: bool = False
    has_deadline: bool = False  # the client says how long it waits for the answer


class DeltaConsumer(Protocol):
    """Takes an answer as it is generated, where it is read from the network: no task is woken for a token."""

    lane: TokenLane | None  # a shorter way than `take`, once there is one; it asks for nothing but its `generated`

    def take(self, delta: Delta) -> bool:
        """Take a delta; return whether the next one is wanted at once. If not, the consumer is done or full."""
        ...

    def take_prompt_logprobs(self, logprobs: Sequence[TokenLogprob]) -> None:
        """Take the logprobs of the prompt's next tokens, from the second token on. All come before the first token of
        the answer, and only where the request asks for them."""
        ...

    @property
    def is_done(self) -> bool:
        """Return whether no more is wanted: what is still being generated is cancelled."""
        ...

    @property
    def is_full(self) -> bool:
        """Return whether nothing can be taken now; deltas wait, and grow where they are made."""
        ...

    async def until_ready(self) -> None: ...


class Generator(Protocol):
    async def generate(
        self, request: GenerateRequest, hints: Hints, trace: Trace, deadline: float, consumer: DeltaConsumer
    ) -> None:
        """Give the answer to `consumer`, up to the delta with the finish reason; `deadline` is in event-loop time.

        Cancelling this cancels the request everywhere, and so does a consumer that is done early. Raises MeshError.
        """
        ...

    async def preview(self, request: GenerateRequest, hints: Hints, deadline: float) -> Placed:
        """Return where the request would run if it came now, with the explanation. Nothing is booked or sent. Raise
        MeshError."""
        ...

    def check(self, model: str, hints: Hints, max_tokens: int, deadline: float) -> None:
        """Raise OverloadedError if such a request would certainly be refused, whatever its prompt is."""
        ...

    async def embed(
        self, request: EmbedRequest, hints: Hints, deadline: float, record: AnswerRecord | None = None
    ) -> Embedding:
        """Compute one vector; `record`: while somebody looks. Raises MeshError."""
        ...
