"""The rules of a router: everything that its settings decide, as plain data. router/config.py makes them."""

from dataclasses import dataclass, field
from functools import cached_property

from kvmesh.router.admission import AdmissionRules
from kvmesh.router.disaggregation import LocalPrefill
from kvmesh.router.policies import POLICIES, Policy
from kvmesh.router.prediction import APPROXIMATE_TTL_S, ON_ROUTE_TTL_S
from kvmesh.router.queue import QueueRules
from kvmesh.router.selection import Weights

DEFAULT_SLO_ITL_S = 0.1  # of frontends, which count by it; nobody has stated it, so no router keeps it


@dataclass(frozen=True, slots=True)
class Saturation:
    """The limits above which a worker is full: it is given no more requests, and these wait in the router.

    There they can still be re-ordered, go to another worker, or be refused. The limits leave enough with the worker to
    keep it busy until the next request comes.
    """

    queued_tokens: int = 2048  # prompt tokens placed there and not computed yet, for a capacity of 1
    requests_share: float = 1.0  # of the sequences that the worker runs at once
    blocks_share: float = 1.0  # of its KV blocks


@dataclass(frozen=True)
class RouterRules:
    policy: Policy = "kv"
    weights: Weights = field(default_factory=Weights)
    recompute_price: float = 0.0  # 0: worked out from load and demand
    temperature: float = 0.0
    local_prefill: LocalPrefill = field(default_factory=LocalPrefill)
    saturation: Saturation | None = field(default_factory=Saturation)  # None: no request waits in the router
    queue: QueueRules = field(default_factory=lambda: QueueRules(order="wspt"))
    admission: AdmissionRules = field(default_factory=AdmissionRules)
    slo_itl_s: float = 0.0  # decode workers help with prompts as far as it allows; 0: without a limit
    affinity_ttl_s: float = 0.0  # 0: sessions are not bound to workers
    predict_ttl_s: float = ON_ROUTE_TTL_S  # 0: only KV events are believed
    approximate_ttl_s: float = APPROXIMATE_TTL_S  # of predictions for workers without KV events
    lease_s: float = 120.0  # a booking without a sign of life for so long ends
    ramp_s: float = 10.0
    suspect_s: float = 2.0  # a worker that failed a request is avoided for so long

    @cached_property
    def waits_for_room(self) -> bool:
        """True if a request waits in the queue while no worker has room."""
        return self.saturation is not None and POLICIES[self.policy].waits_for_room

    @cached_property
    def may_shortlist(self) -> bool:
        """True if the cheapest candidate is chosen, so that candidates that cannot be it may be left out."""
        return POLICIES[self.policy].by_cost and self.temperature <= 0 and self.weights.prefers_less
