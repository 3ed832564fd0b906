"""A request of the simulation while it is in progress."""

from dataclasses import dataclass
from typing import NamedTuple

from kvmesh.protocol.messages import PrefixSource, RouteRequest
from kvmesh.simulator.requests import SimRequest
from kvmesh.simulator.worker import SimWorker
from kvmesh.workers.scheduler import SequenceState


class SimAnswer(NamedTuple):
    """The figures of one request that was answered."""

    number: int  # of the request, in order of arrival
    ttft_s: float
    itl_s: float | None  # (last - first token) / (OSL - 1)
    cached_tokens: int
    queue_s: float  # until it was placed
    prefill: str  # name of the worker that computed the prompt alone, "" for none
    decode: str


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request between its arrival and its end, and where its parts run."""

    request: SimRequest
    route: RouteRequest
    router: int
    arrival_s: float
    placed_s: float = 0.0
    first_s: float = -1.0
    cached_tokens: int = 0
    predicted_tokens: int = 0
    prefill: SimWorker | None = None
    decode: SimWorker | None = None
    source: PrefixSource | None = None  # from where the worker that computes its prompt may pull
    offer: tuple[int, ...] = ()  # blocks that `prefill` keeps for it
    sequence: SequenceState | None = None
    told_blocks: int = 1  # of its answer, to the router

    def answer(self, now: float, hop_s: float) -> SimAnswer:
        """Return what the client has seen of an answer whose last token was made now."""
        gaps = self.request.osl_tokens - 1
        itl_s = (now - self.first_s) / gaps if gaps > 0 else None
        ttft_s = self.first_s + hop_s - self.arrival_s
        prefill = "" if self.prefill is None else self.prefill.card.name
        decode = "" if self.decode is None else self.decode.card.name
        queue_s = self.placed_s - self.arrival_s
        return SimAnswer(int(self.route.request_id), ttft_s, itl_s, self.cached_tokens, queue_s, prefill, decode)
