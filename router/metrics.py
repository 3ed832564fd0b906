"""All metrics of the router. Label values come from closed sets: never a request id."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from kvmesh.mesh.measure import AtScrape, Reading, bounded, counter, histogram, locked_counter, locked_gauge
from kvmesh.mesh.tally import Tally
from kvmesh.protocol.messages import Placed
from kvmesh.router.core import RouterState, waiting_by_model
from kvmesh.router.pairing import REASONS, UNKNOWN_PAIRS

_P = "kvmesh_router_"
PLACEMENTS = counter(_P + "placements_total")  # aggregated, disaggregated
FAILURES = locked_counter(_P + "failures_total")
REFUSALS = counter(  # reason: late (on arrival), hopeless (later), wait (too long in the queue), full (the queue)
    _P + "refusals_total"
)
ESTIMATE_ERROR = histogram(_P + "estimate_error")  # of: first, last
PLACE_SECONDS = histogram(_P + "place_seconds").labels()
WAIT_SECONDS = histogram(_P + "wait_seconds").labels()
PROMPT_TOKENS = counter(_P + "prompt_tokens_total").labels()
PREDICTED_TOKENS = counter(_P + "predicted_reuse_tokens_total").labels()
REUSED_TOKENS = counter(_P + "reused_tokens_total").labels()
LAPSED_WORKERS = locked_gauge(_P + "lapsed_workers")
EVENTS = counter(_P + "kv_events_total").labels()
EVENT_RESTS = locked_counter(_P + "kv_event_rests_total")
OVERFULL = locked_counter(_P + "kv_overfull_total")
HTTP_REQUESTS = locked_counter(_P + "http_requests_total")
HTTP_BOOKINGS = locked_gauge(_P + "http_bookings")
RESUMED = locked_counter(_P + "resumed_total")
FALLBACKS = locked_counter(_P + "fallbacks_total")
GOSSIP_SENT = locked_counter(_P + "gossip_sent_total")
GOSSIP_RECEIVED = locked_counter(_P + "gossip_received_total")
LOAD_REPORTS = counter(_P + "load_reports_total").labels()
STATE = AtScrape(
    [
        _P + name
        for name in (
            "in_flight",
            "waiting",
            "expired_bookings",
            "unpaired_total",
            "unknown_pairs_total",
            "index_blocks",
            "index_orphan_blocks",
            "workers",
            "unbooked_requests",
            "unbooked_blocks",
            "unbooked_tokens",
            "peers",
            "kv_feeds",
            "kv_pending_bytes",
            "kv_recoveries_total",
        )
    ]
)
RECOVERIES = ("replays", "snapshots", "digests", "divergences", "resets", "rests", "dropped", "unreadable")


class FeedFacts(NamedTuple):
    """Facts about the KV events that a router follows."""

    live: int
    recovering: int
    pending_bytes: int
    stats: Mapping[str, int]


_placed: dict[tuple[bool, str], Tally] = {}


def count_placement(placed: Placed, model: str) -> None:
    key = (placed.prefill is None, model)
    if (tally := _placed.get(key)) is None:
        tally = PLACEMENTS.labels("aggregated" if key[0] else "disaggregated", bounded("model", model))
        if len(_placed) < 1024:
            _placed[key] = tally
    tally.inc()


def watch_state(state: RouterState, feeds: Callable[[], FeedFacts], peers: Callable[[], int]) -> None:
    """Read the state of this process's router when Prometheus asks."""
    STATE.read("router", lambda: read_state(state, feeds(), peers()))


def read_state(state: RouterState, feeds: FeedFacts, peers: int) -> Iterator[Reading]:
    reported, plain = state.reported.total, ()
    for name, value in {
        "in_flight": len(state.load),
        "expired_bookings": state.stats["expired"],
        "unknown_pairs_total": state.stats[UNKNOWN_PAIRS],
        "unbooked_requests": reported.requests,
        "unbooked_blocks": reported.held_blocks,
        "unbooked_tokens": reported.queued_tokens,
        "peers": peers,
        "kv_pending_bytes": feeds.pending_bytes,
    }.items():
        yield Reading(_P + name, plain, value)
    for reason in REASONS:
        yield Reading(_P + "unpaired_total", (reason,), state.stats[reason])
    yield Reading(_P + "kv_feeds", ("live",), feeds.live)
    yield Reading(_P + "kv_feeds", ("recovering",), feeds.recovering)
    for what in RECOVERIES:
        yield Reading(_P + "kv_recoveries_total", (what,), feeds.stats.get(what, 0))
    yield from read_models(state)


def read_models(state: RouterState) -> Iterator[Reading]:
    """Yield the samples of each model that has, or has had, workers here."""
    waiting: Counter[str] = Counter()
    blocks: Counter[str] = Counter()
    orphans: Counter[str] = Counter()
    for model, count in waiting_by_model(state).items():
        waiting[bounded("model", model)] += count
    for model, index in list(state.fleet.indexes.items()):
        known = bounded("model", model)
        waiting[known] += 0
        blocks[known] += index.num_blocks
        orphans[known] += index.stats.orphan_blocks
    for name, counts in (("waiting", waiting), ("index_blocks", blocks), ("index_orphan_blocks", orphans)):
        for model, count in counts.items():
            yield Reading(_P + name, (model,), count)
    workers = Counter((bounded("model", card.model), card.role.value) for card in state.fleet.cards)
    for labels, count in workers.items():
        yield Reading(_P + "workers", labels, count)
