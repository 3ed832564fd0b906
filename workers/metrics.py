"""All metrics of a worker. Label values come from small sets: never a request id."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from kvmesh.mesh.measure import AtScrape, Reading, locked_counter, locked_histogram
from kvmesh.workers.engine import EngineLoad, TierUse

MIXED = "mixed"
_P = "kvmesh_worker_"
_places: dict[str, Callable[[], tuple[str, str]]] = {}  # by name of the worker
REQUESTS = locked_counter(_P + "requests_total")  # "ok" or a MeshError.code
STEP_SECONDS = locked_histogram(_P + "step_seconds")
HESITATIONS = locked_counter(_P + "hesitations_total")
CANARIES = locked_counter(_P + "canaries_total")  # "ok" or a MeshError.code
STEP_TOKENS = locked_counter(_P + "step_tokens_total")
PULLS = locked_counter(_P + "kv_pulls_total")
PULL_BYTES = locked_counter(_P + "kv_pulled_bytes_total")
PULL_SECONDS = locked_histogram(_P + "kv_pull_seconds")
PEER_PULLS = locked_counter(_P + "kv_peer_pulls_total")  # ok, part, gone, late, failed
PEER_PULL_BLOCKS = locked_counter(_P + "kv_peer_pulled_blocks_total")
PREFIX_OFFERS = locked_counter(_P + "kv_prefix_offers_total")  # ok, empty or a MeshError.code
TIER_LOADS = locked_counter(_P + "kv_tier_loads_total")  # ok, late, failed, cancelled
TIER_LOAD_SECONDS = locked_histogram(_P + "kv_tier_load_seconds")
REDEMPTIONS = locked_counter(_P + "kv_redemptions_total")  # ok, failed, refused
TURNS = locked_counter(_P + "role_changes_total")
# By name of the worker: one process may host many, and these say how each of them is. All else is their sum.
LOADS = AtScrape(
    [
        _P + name
        for name in (
            "running_requests",
            "waiting_requests",
            "queued_tokens",
            "used_blocks",
            "total_blocks",
            "cached_blocks",
            "kv_offers",
            "stalled_seconds",
            "serving",
            "kv_tier_lookups_total",
            "kv_tier_hit_blocks_total",
            "kv_tier_refused_total",
            "kv_tier_loaded_bytes_total",
            "kv_tier_saved_bytes_total",
            "kv_tier_collected_bytes_total",
            "kv_tier_dropped_blocks_total",
            "kv_tier_unreadable_blocks_total",
            "kv_tier_io_total",
            "kv_tier_off",
            "kv_tier_blocks",
            "kv_tier_used_bytes",
            "kv_tier_limit_bytes",
            "kv_hit_share",
        )
    ]
)
DROPPED = "dropped_"  # begins the names of counts of dropped blocks
UNREADABLE = "unreadable_"  # ... and of blocks that could not be read


def read_load(
    labels: tuple[str, str, str], load: EngineLoad, stalled_s: float, *, serves: bool = True
) -> Iterator[Reading]:
    """Yield the samples of one worker, whose name, model and role are `labels`.

    `stalled_s`: for how long no answer has advanced, of an engine whose steps are not watched.
    """
    values = {
        "running_requests": load.running,
        "waiting_requests": load.waiting,
        "queued_tokens": load.queued_tokens,
        "used_blocks": load.used_blocks,
        "cached_blocks": load.cached_blocks,
        "total_blocks": load.total_blocks,
        "kv_offers": load.offers,
        "stalled_seconds": max(load.stalled_s, stalled_s),
        "serving": serves,
    }
    for name, value in values.items():
        if value is not None:
            yield Reading(_P + name, labels, value)
    if load.tiers:
        yield from read_tiers(labels, load.tiers)


def read_tiers(labels: tuple[str, str, str], uses: Sequence[TierUse]) -> Iterator[Reading]:
    """Yield the samples of the tiers of one worker. Its data-parallel ranks are added up."""
    for tier in dict.fromkeys(use.tier for use in uses):
        mine = [use for use in uses if use.tier == tier]
        counts = Counter[str]()
        for use in mine:
            counts.update(use.counts)
        where, block_bytes = (*labels, tier), mine[0].block_bytes
        yield Reading(_P + "kv_tier_lookups_total", (*where, "yes"), counts["hits"])
        yield Reading(_P + "kv_tier_lookups_total", (*where, "no"), counts["misses"])
        for name, value in {
            "kv_tier_hit_blocks_total": counts["hit_blocks"],
            "kv_tier_refused_total": counts["refused"],
            "kv_tier_loaded_bytes_total": counts["loaded"] * block_bytes,
            "kv_tier_saved_bytes_total": counts["saved"] * block_bytes,
            "kv_tier_collected_bytes_total": counts["collected_bytes"],
            "kv_tier_blocks": sum([use.blocks for use in mine]),
            "kv_tier_used_bytes": sum([use.used_bytes for use in mine]),
            "kv_tier_limit_bytes": sum([use.limit_bytes for use in mine]),
        }.items():
            yield Reading(_P + name, where, value)
        for name, value in sorted(counts.items()):
            if name.startswith(DROPPED):
                yield Reading(_P + "kv_tier_dropped_blocks_total", (*where, name.removeprefix(DROPPED)), value)
            elif name.startswith(UNREADABLE):
                yield Reading(_P + "kv_tier_unreadable_blocks_total", (*where, name.removeprefix(UNREADABLE)), value)
        ios = Counter[str]()
        for use in mine:
            ios.update(use.ios)
        for path, value in sorted(ios.items()):
            yield Reading(_P + "kv_tier_io_total", (*where, path), value)
        for what, count in {
            "reads": sum([not use.is_readable for use in mine]),
            "writes": sum([not use.is_writable for use in mine]),
        }.items():
            yield Reading(_P + "kv_tier_off", (*where, what), count)
    for number, place in enumerate(("device", "below")):
        shares = [use.hit_shares[number] for use in uses]
        yield Reading(_P + "kv_hit_share", (*labels, place), sum(shares) / len(shares))


def watch_load(
    name: str,
    place: Callable[[], tuple[str, str]],
    load: Callable[[], EngineLoad],
    stalled_s: Callable[[], float],
    serves: Callable[[], bool] = lambda: True,
) -> None:
    """Read the load of a worker when Prometheus asks. `place` returns its model and its present role."""
    _places[name] = place
    LOADS.read(name, lambda: read_load((name, *place()), load(), stalled_s(), serves=serves()))


def forget_load(name: str) -> None:
    """Stop reading the load of a worker that has ended."""
    _places.pop(name, None)
    LOADS.forget(name)


def labels_of_workers() -> dict[str, str]:
    """Return what the workers of this process have in common, for the metrics that are their sum."""
    places = [place() for place in list(_places.values())]
    models, roles = ({place[i] for place in places} for i in (0, 1))
    return {
        "model": "".join(models) if len(models) <= 1 else MIXED,
        "role": "".join(roles) if len(roles) <= 1 else MIXED,
        "worker": "".join(_places) if len(places) == 1 else "",
    }
