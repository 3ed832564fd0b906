"""A request of the simulation while it is in progress."""

from dataclasses import dataclass

from protocol.messages import RouteRequest
from simulator.requests import SimRequest
from simulator.worker import SimWorker
from workers.scheduler import SequenceState


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
    offer: tuple[int, ...] = ()  # blocks that `prefill` keeps for it
    sequence: SequenceState | None = None
    told_blocks: int = 1  # of its answer, to the router
