"""List every metric that a process of the mesh can export: names are an interface, like messages.

Producers make their metrics by name (mesh/measure.py) and get kind, labels, buckets and help from here. docs/metrics.md
is written from this list, and a test compares it with the pages of a running mesh. An engine's own metrics pass under
their own names and are not listed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram", "info"]
Together = Literal["sum", "alike"]
"""`sum`: each process counts its own. `alike`: each reports the same thing; the largest counts, as some may lag."""


@dataclass(frozen=True, slots=True)
class LabelRule:
    """Say what a label means, and how many values a process gives it at most. Further values become `other`."""

    meaning: str
    most: int = 0  # 0: the values are a closed set, written in the code


@dataclass(frozen=True, slots=True)
class DeclaredMetric:
    """One metric. A counter's name ends with `_total`."""

    name: str
    kind: Kind
    unit: str
    labels: tuple[str, ...]
    help: str
    together: Together = "sum"  # of several processes that share a port, see mesh/merged_metrics.py
    buckets: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class MetricGroup:
    """The metrics of one part of the mesh."""

    title: str
    where: str  # which processes export them
    metrics: tuple[DeclaredMetric, ...]


OTHER = "other"  # the value of a label beyond the most that it may have
PROCESS_LABELS = ("component", "namespace", "model", "role", "worker")  # mesh/exposition.py adds them
LABELS: Mapping[str, LabelRule] = {
    "component": LabelRule("kind of process: frontend, router, worker, planner, picker or memory"),
    "namespace": LabelRule("name of the mesh, from `--namespace`"),
    "model": LabelRule("model that workers serve; a name that only a client knows is never a value", most=64),
    "role": LabelRule("prefill, decode or aggregated; `mixed` for a process with workers of several roles"),
    "worker": LabelRule("name of the worker, from `--name`: it stays the same when the worker restarts"),
    "endpoint": LabelRule("API: chat, completions, responses, messages, embeddings, ..."),
    "outcome": LabelRule("how it ended: ok, client_gone or the code of an error"),
    "missed": LabelRule("none, ttft, itl, both or failed"),
    "verdict": LabelRule("tried (again, alone), stopped, refused (the same request as one that was stopped)"),
    "found": LabelRule("yes or no"),
    "tier": LabelRule("storage of KV blocks below the device: host, disk or shared"),
    "where": LabelRule("device, or below: in any lower tier"),
    "reason": LabelRule("why: a word from the code"),
    "key": LabelRule("name of an API key in the file of keys, or the one name of all tokens", most=4096),
    "kind": LabelRule("placements: aggregated or disaggregated; tokens: prompt or completion"),
    "limit": LabelRule("limit of the key that was reached"),
    "code": LabelRule("code of an error, or of a planner's reason"),
    "of": LabelRule("first or last token (router); ttft or itl (planner)"),
    "what": LabelRule(
        "replays, snapshots, digests, divergences, resets, rests, dropped or unreadable; of a tier: reads or writes"
    ),
    "path": LabelRule("way to the bytes of a tier: memory, direct, buffered or s3"),
    "state": LabelRule("live or recovering (feeds); ready, starting or draining (workers); writing or ready (images)"),
    "route": LabelRule("path of the router's HTTP API, with names in braces"),
    "status": LabelRule("HTTP status"),
    "backend": LabelRule("what moves KV: nixl, shm, none"),
    "source": LabelRule("of weights: mapped (another worker wrote them), written (by this one) or own (not shared)"),
    "attention": LabelRule("paged (in place), gathered (from a copy) or bucket (from a copy, padded)"),
    "loop": LabelRule("which loop of the planner decided"),
    "action": LabelRule("scale, flip or hold"),
    "to_role": LabelRule("role that a worker was asked to take"),
    "certificate": LabelRule("own or ca"),
    "version": LabelRule("release of kvmesh"),
    "implementation": LabelRule("of Python"),
    "major": LabelRule("of Python"),
    "minor": LabelRule("of Python"),
    "patchlevel": LabelRule("of Python"),
    "generation": LabelRule("generation of the garbage collector"),
    "gen_ai_operation_name": LabelRule("chat, text_completion or embeddings"),
    "gen_ai_provider_name": LabelRule("kvmesh"),
    "gen_ai_request_model": LabelRule("as `model`"),
    "gen_ai_token_type": LabelRule("input or output"),
    "error_type": LabelRule("code of the error; missing if there was none"),
}

_GAPS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_WAITS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_WHOLE_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)
# Boundaries that OpenTelemetry's semantic conventions for generative AI ask for.
_OTEL_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_OTEL_GAPS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_OTEL_WHOLE_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_OTEL_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864)


def _counter(name: str, unit: str, labels: str, text: str) -> DeclaredMetric:
    return DeclaredMetric(name, "counter", unit, tuple(labels.split()), text)


def _gauge(name: str, unit: str, labels: str, text: str, together: Together = "sum") -> DeclaredMetric:
    return DeclaredMetric(name, "gauge", unit, tuple(labels.split()), text, together)


def _alike(name: str, unit: str, labels: str, text: str) -> DeclaredMetric:
    return _gauge(name, unit, labels, text, "alike")


def _histogram(name: str, unit: str, labels: str, text: str, buckets: tuple[float, ...]) -> DeclaredMetric:
    return DeclaredMetric(name, "histogram", unit, tuple(labels.split()), text, buckets=buckets)


_P = "kvmesh_frontend_"
_FRONTEND = (
    _counter(_P + "requests_total", "requests", "endpoint model outcome", "Requests that ended."),
    _counter(
        _P + "slo_requests_total", "requests", "endpoint model missed", "Requests by what they missed of the SLO."
    ),
    _alike(_P + "slo_seconds", "seconds", "of", "The SLO: longest TTFT and longest mean ITL."),
    _gauge(_P + "inflight", "requests", "", "Requests in progress."),
    _alike(_P + "models_ready", "models", "", "Models that can be asked."),
    _alike(_P + "workers_down", "workers", "", "Workers that end again and again, as their owners report."),
    _histogram(_P + "ttft_seconds", "seconds", "endpoint model", "Request received to first token sent.", _WAITS_S),
    _histogram(_P + "itl_seconds", "seconds", "endpoint model", "Mean gap between the tokens of one answer.", _GAPS_S),
    _histogram(_P + "request_duration_seconds", "seconds", "endpoint model", "Request received to its end.", _WHOLE_S),
    _histogram(_P + "input_sequence_tokens", "tokens", "endpoint model", "Tokens of the prompt.", _TOKENS),
    _histogram(_P + "output_sequence_tokens", "tokens", "endpoint model", "Tokens of the answer.", _TOKENS),
    _counter(_P + "cached_tokens_total", "tokens", "endpoint model", "Prompt tokens found in a prefix cache."),
    _counter(_P + "migrations_total", "streams", "endpoint model", "Streams that went on at another worker."),
    _counter(
        _P + "traces_total",
        "traces",
        "outcome",
        "Traces that were wanted: exported, dropped (too many waited), failed (no collector took them).",
    ),
    _counter(_P + "rejected_spans_total", "spans", "", "Spans of exported traces that the collector did not take."),
    _counter(
        _P + "suspects_total",
        "requests",
        "verdict",
        "Requests under which a worker's process ended before their first token.",
    ),
)
_P = "kvmesh_frontend_tokenizer_"
_TOKENIZER = (
    _counter(_P + "cache_pieces_total", "pieces", "found", "Pieces of prompts looked up in the tokenizer's cache."),
    _counter(_P + "encoded_chars_total", "characters", "", "Characters that were tokenized, not found in the cache."),
)
_P = "kvmesh_frontend_responses_"
_RESPONSES = (
    _alike(_P + "stored", "responses", "", "Responses in the store."),
    _alike(_P + "stored_bytes", "bytes", "", "Size of the store."),
    _counter(_P + "evicted_total", "responses", "reason", "Responses that left the store by themselves."),
    _counter(_P + "misses_total", "requests", "", "Requests for a response that is not stored."),
    _counter(_P + "store_failures_total", "responses", "", "Responses that could not be stored."),
    _gauge(_P + "background", "responses", "", "Background responses that are queued or in progress."),
)
_P = "kvmesh_frontend_key_"
_KEYS = (
    _counter(_P + "requests_total", "requests", "key outcome", "Requests of an API key that ended."),
    _counter(_P + "tokens_total", "tokens", "key kind", "Tokens of prompts and answers of an API key."),
    _counter(_P + "refused_total", "requests", "key limit", "Requests over a limit of their API key."),
    _gauge(_P + "streams", "requests", "key", "Requests of a limited API key that are in progress."),
    _counter(_P + "leases_total", "leases", "outcome", "Asks for a lease of another frontend's budget."),
    _alike(_P + "frontends", "frontends", "", "Frontends that share the limits of API keys."),
    _gauge(_P + "budgets", "budgets", "", "Budgets of API keys that this frontend owns."),
)
_P = "gen_ai_server_"
_NAMED = "gen_ai_operation_name gen_ai_provider_name gen_ai_request_model"
_GEN_AI = (
    _histogram(_P + "time_to_first_token_seconds", "seconds", _NAMED, "Request received to first token.", _OTEL_TTFT_S),
    _histogram(
        _P + "time_per_output_token_seconds", "seconds", _NAMED, "Mean time per token after the first.", _OTEL_GAPS_S
    ),
    _histogram(
        _P + "request_duration_seconds",
        "seconds",
        _NAMED + " error_type",
        "Request received to its end.",
        _OTEL_WHOLE_S,
    ),
    _histogram(
        "gen_ai_client_token_usage_tokens",
        "tokens",
        _NAMED + " gen_ai_token_type",
        "Tokens of prompts and of answers.",
        _OTEL_TOKENS,
    ),
)
_P = "kvmesh_router_"
_ROUTER = (
    _counter(_P + "placements_total", "requests", "kind model", "Requests placed."),
    _counter(_P + "failures_total", "requests", "code", "Requests that could not be placed."),
    _counter(_P + "refusals_total", "requests", "reason", "Requests that were refused because of the load."),
    _histogram(
        _P + "estimate_error",
        "ratio",
        "of",
        "Time from the placement to a token, as a share of the estimated time.",
        (0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0),
    ),
    _histogram(_P + "place_seconds", "seconds", "", "Time to choose workers.", (1e-5, 1e-4, 1e-3, 1e-2)),
    _histogram(
        _P + "wait_seconds", "seconds", "", "Time until a request was placed.", (1e-4, 1e-3, 1e-2, 0.1, 1, 10, 60)
    ),
    _counter(_P + "prompt_tokens_total", "tokens", "", "Prompt tokens of requests that have begun."),
    _counter(_P + "predicted_reuse_tokens_total", "tokens", "", "Of those, believed to be cached."),
    _counter(_P + "reused_tokens_total", "tokens", "", "Of those, found in the cache by the worker."),
    _gauge(_P + "waiting", "requests", "model", "Requests that wait because every worker is saturated."),
    _counter(
        _P + "unpaired_total",
        "requests",
        "reason",
        "Placements for which decode workers could not take the prefill worker's KV.",
    ),
    _counter(
        _P + "unknown_pairs_total", "requests", "", "Pairs of which a worker does not say what its KV is computed with."
    ),
    _gauge(_P + "expired_bookings", "bookings", "", "Bookings that ended because nothing was heard of them."),
    _gauge(_P + "in_flight", "bookings", "", "Bookings that stand."),
    _alike(_P + "index_blocks", "blocks", "model", "Distinct prefixes in the index."),
    _alike(_P + "index_orphan_blocks", "blocks", "model", "Blocks dropped because their parent is not known."),
    _alike(_P + "workers", "workers", "model role", "Workers known."),
    _alike(_P + "lapsed_workers", "workers", "", "Workers that answer although their lease has lapsed."),
    _counter(_P + "kv_events_total", "events", "", "KV events applied."),
    _counter(_P + "kv_recoveries_total", "recoveries", "what", "What was done to mend the followed KV events."),
    _alike(_P + "kv_feeds", "feeds", "state", "Workers' KV events that are followed."),
    _gauge(_P + "kv_pending_bytes", "bytes", "", "KV events that wait for what was lost before them."),
    _counter(
        _P + "kv_event_rests_total",
        "times",
        "",
        "Times that a publisher sent too many KV events and was disconnected.",
    ),
    _counter(_P + "kv_overfull_total", "times", "", "Times that a worker reported far more blocks than its card has."),
    _counter(_P + "http_requests_total", "requests", "route status", "HTTP requests answered."),
    _gauge(_P + "http_bookings", "bookings", "", "Bookings made over HTTP that stand."),
    _counter(_P + "resumed_total", "bookings", "", "Bookings taken over from a router that is gone."),
    _counter(_P + "fallbacks_total", "requests", "", "Requests that a frontend placed itself: no router answered."),
    _counter(_P + "gossip_sent_total", "messages", "", "Messages to other routers."),
    _counter(_P + "gossip_received_total", "messages", "", "Messages from other routers."),
    _counter(_P + "load_reports_total", "reports", "", "Reports of load from workers."),
    _alike(_P + "unbooked_requests", "requests", "", "Requests that workers report for outside callers."),
    _alike(_P + "unbooked_blocks", "blocks", "", "KV blocks that these requests hold."),
    _alike(_P + "unbooked_tokens", "tokens", "", "Prompt tokens that workers report beyond the bookings."),
    _alike(_P + "peers", "routers", "", "Other routers that gossip."),
)
_P = "kvmesh_picker_"
_PICKER = (
    _counter(_P + "requests_total", "requests", "outcome", "Requests that an endpoint was asked for."),
    _histogram(
        _P + "pick_seconds",
        "seconds",
        "",
        "Time to pick an endpoint: reading the prompt, placing it, waiting for room.",
        (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.1, 1, 10, 60),
    ),
    _counter(_P + "unread_total", "requests", "", "Requests placed by their length: the prompt was not read."),
    _gauge(_P + "streams", "requests", "", "Requests that gateways have open here."),
    _counter(
        _P + "unseen_total",
        "requests",
        "",
        "Requests whose streams ended before their answers: their load was let go early.",
    ),
    _alike(_P + "endpoints", "endpoints", "", "Endpoints that can be picked."),
)
_P = "kvmesh_worker_"
_OF_WORKER = "worker model role"
_OF_TIER = _OF_WORKER + " tier"
_WORKER = (
    _counter(_P + "requests_total", "requests", "outcome", "Requests ended."),
    _histogram(
        _P + "step_seconds",
        "seconds",
        "",
        "Time of one forward step.",
        (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1),
    ),
    _counter(_P + "hesitations_total", "steps", "", "Steps so late that their answers went to other workers."),
    _counter(_P + "canaries_total", "requests", "outcome", "Tokens that a quiet worker asked its engine for."),
    _counter(_P + "step_tokens_total", "tokens", "", "Tokens computed, prompts and answers together."),
    _counter(
        _P + "torch_steps_total", "steps", "attention", "Steps of the torch engine, by how it reads the KV cache."
    ),
    _counter(
        _P + "weights_total", "loads", "source", "Times weights were got with `--weights-service`, at start or wake."
    ),
    _counter(_P + "weights_moved_total", "loads", "", "Shared weights that are not at their address: it was taken."),
    _counter(_P + "kv_pulls_total", "pulls", "backend outcome", "KV pulls ended."),
    _counter(_P + "kv_pulled_bytes_total", "bytes", "backend", "KV bytes fetched from prefill workers and peers."),
    _histogram(
        _P + "kv_pull_seconds",
        "seconds",
        "backend",
        "Time of one KV pull.",
        (1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1, 3),
    ),
    _counter(
        _P + "kv_peer_pulls_total",
        "pulls",
        "outcome",
        "Prefixes pulled from peers: ok, a part of what was expected, gone there, late, or failed.",
    ),
    _counter(_P + "kv_peer_pulled_blocks_total", "blocks", "", "KV blocks of prefixes that came from peers."),
    _counter(
        _P + "kv_prefix_offers_total",
        "offers",
        "outcome",
        "Prefixes that peers asked for: ok, empty or an error.",
    ),
    _counter(_P + "kv_tier_loads_total", "loads", "tier outcome", "Loads of KV blocks from a lower tier ended."),
    _histogram(
        _P + "kv_tier_load_seconds",
        "seconds",
        "tier",
        "Time of one load from a lower tier, with the time that it waited for others.",
        (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1, 3),
    ),
    _counter(_P + "kv_tier_lookups_total", "lookups", _OF_TIER + " found", "Prompts looked up in a lower tier."),
    _counter(_P + "kv_tier_hit_blocks_total", "blocks", _OF_TIER, "KV blocks of prompts that were found there."),
    _counter(_P + "kv_tier_refused_total", "loads", _OF_TIER, "Loads not made: computing was expected to be faster."),
    _counter(_P + "kv_tier_loaded_bytes_total", "bytes", _OF_TIER, "KV bytes that came back from a lower tier."),
    _counter(_P + "kv_tier_saved_bytes_total", "bytes", _OF_TIER, "KV bytes copied to a lower tier."),
    _counter(
        _P + "kv_tier_collected_bytes_total",
        "bytes",
        _OF_TIER,
        "Bytes that this worker has removed from shared storage, because they were old or too many.",
    ),
    _counter(
        _P + "kv_tier_dropped_blocks_total",
        "blocks",
        _OF_TIER + " reason",
        "KV blocks that left the device without a copy, or whose copy was no use.",
    ),
    _counter(
        _P + "kv_tier_unreadable_blocks_total",
        "blocks",
        _OF_TIER + " reason",
        "KV blocks of a lower tier that could not be read: corrupt, failed or gone. They were computed.",
    ),
    _counter(
        _P + "kv_tier_io_total",
        "ios",
        _OF_TIER + " path",
        "Reads and writes of a lower tier: in memory, direct, or buffered where the file system takes no direct ones.",
    ),
    _gauge(
        _P + "kv_tier_off",
        "",
        _OF_TIER + " what",
        "Caches that do not use a lower tier any more, for reads or for writes, because it kept failing.",
    ),
    _gauge(_P + "kv_tier_blocks", "blocks", _OF_TIER, "KV blocks that a lower tier holds."),
    _gauge(_P + "kv_tier_used_bytes", "bytes", _OF_TIER, "Bytes of a lower tier that are taken."),
    _gauge(_P + "kv_tier_limit_bytes", "bytes", _OF_TIER, "Bytes that a lower tier may take."),
    _alike(
        _P + "kv_hit_share",
        "",
        _OF_WORKER + " where",
        "Share of the prompt blocks of the last 1,000 requests that was found, where a worker has lower tiers.",
    ),
    _counter(_P + "kv_redemptions_total", "tickets", "outcome", "Sealed tickets brought back to prefill workers."),
    _counter(_P + "role_changes_total", "changes", "role", "Times a worker of this process has changed its role."),
    _gauge(_P + "running_requests", "requests", _OF_WORKER, "Requests in the batch."),
    _gauge(_P + "waiting_requests", "requests", _OF_WORKER, "Requests that wait for a place."),
    _gauge(_P + "queued_tokens", "tokens", _OF_WORKER, "Prompt tokens that are still to compute."),
    _gauge(_P + "used_blocks", "blocks", _OF_WORKER, "KV blocks held by requests and offers."),
    _gauge(_P + "total_blocks", "blocks", _OF_WORKER, "All KV blocks: used, cached and free."),
    _gauge(_P + "cached_blocks", "blocks", _OF_WORKER, "KV blocks that hold a reusable prefix and no request."),
    _gauge(_P + "kv_offers", "offers", _OF_WORKER, "KV offers that wait for a decode worker."),
    _gauge(
        _P + "stalled_seconds",
        "seconds",
        _OF_WORKER,
        "Seconds since the engine last gave a part of an answer, while it has requests.",
    ),
    _gauge(_P + "serving", "workers", _OF_WORKER, "1 while the worker takes requests, 0 in every other state."),
)
_P = "kvmesh_planner_"
_PLANNER = (
    _gauge(_P + "replicas", "workers", "role state", "Workers that exist."),
    _gauge(_P + "target_replicas", "workers", "role", "Workers in the last decision."),
    _gauge(_P + "needed_replicas", "workers", "role", "Workers that the forecast asks for, before limits."),
    _gauge(_P + "observed_requests_per_second", "requests/s", "", "Requests that arrived, in the last interval."),
    _gauge(_P + "observed_isl_tokens", "tokens", "", "Mean tokens of a prompt, in the last interval."),
    _gauge(_P + "observed_osl_tokens", "tokens", "", "Mean tokens of an answer, in the last interval."),
    _gauge(_P + "observed_hit_share", "ratio", "", "Share of prompt tokens found in a cache, in the last interval."),
    _gauge(_P + "observed_ttft_seconds", "seconds", "", "Mean TTFT of the last interval."),
    _gauge(_P + "observed_itl_seconds", "seconds", "", "Mean ITL of the last interval."),
    _gauge(_P + "predicted_requests_per_second", "requests/s", "", "Forecast requests per second."),
    _gauge(_P + "correction", "ratio", "of", "Observed over expected times."),
    _counter(_P + "gpu_hours_total", "GPU-hours", "", "GPU-hours of all workers since the planner started to act."),
    _counter(_P + "decisions_total", "decisions", "loop action code", "Decisions, once for each of their reasons."),
    _counter(_P + "applied_total", "decisions", "outcome", "Decisions handed to the connector: ok, partial or error."),
    _counter(_P + "flips_total", "workers", "to_role", "Workers that were asked to change their role."),
    _counter(_P + "unknown_traffic_total", "steps", "", "Steps without traffic figures."),
    _gauge(_P + "is_acting", "1 or 0", "", "1: this planner holds the lease."),
    _gauge(_P + "slo_share", "ratio", "of", "Share of the requests in the window of `--slo` that kept its limit."),
    _gauge(_P + "slo_is_kept", "1 or 0", "of", "1: that share is at least the percentile of `--slo`."),
    _gauge(
        _P + "on_hold", "1 or 0", "code", "1: the last decision kept the fleet as it is for this reason, not by plan."
    ),
)
_P = "kvmesh_memory_"
_MEMORY = (
    _counter(
        _P + "answers_total",
        "answers",
        "outcome",
        "Answers to workers: mapped (an image), write (it is to write one), refused (there is no room), cut (it broke "
        "the rules or was too slow).",
    ),
    _counter(
        _P + "freed_images_total",
        "images",
        "reason",
        "Images freed: evicted to make room, or abandoned by their writers before they were complete.",
    ),
    _gauge(_P + "images", "images", "state", "Images of weights."),
    _gauge(_P + "image_bytes", "bytes", "state", "Bytes of images."),
    _gauge(_P + "limit_bytes", "bytes", "", "Bytes that images may take."),
    _gauge(_P + "users", "workers", "", "Workers that use an image."),
    _gauge(_P + "waiting", "workers", "", "Workers that wait for another one to write their image."),
)
_P = "kvmesh_plane_"
_PLANE = (
    _gauge(_P + "connections", "connections", "", "Connections that callers have to this process."),
    _gauge(_P + "assembling_bytes", "bytes", "", "Bytes that have come of frames that are not complete."),
    _gauge(_P + "unsent_bytes", "bytes", "", "Bytes that wait for peers which read too slowly."),
    _counter(_P + "hangups_total", "connections", "reason", "Connections that this process ended to keep a limit."),
    _counter(_P + "repeated_frames_total", "frames", "", "Frames that came again and were dropped."),
)
_SHARED = (
    _alike("kvmesh_build_info", "1", "version", "1: the release that runs."),
    _counter(
        "kvmesh_tls_handshakes_total",
        "connections",
        "outcome",
        "Connections that were accepted and what came of them: ok, plain (no TLS), left, slow, crowded, failed.",
    ),
    _alike(
        "kvmesh_tls_certificate_expiry_seconds",
        "seconds",
        "certificate",
        "Seconds until a certificate expires: own, that of this process; ca, the first of those it trusts.",
    ),
)
_PYTHON = (
    _gauge("process_virtual_memory_bytes", "bytes", "", "Virtual memory."),
    _gauge("process_resident_memory_bytes", "bytes", "", "Resident memory."),
    _alike("process_start_time_seconds", "unix seconds", "", "When the process started."),
    _counter("process_cpu_seconds_total", "seconds", "", "CPU time, user and system."),
    _gauge("process_open_fds", "descriptors", "", "Open file descriptors."),
    _alike("process_max_fds", "descriptors", "", "Most file descriptors that may be open."),
    _alike("python_info", "1", "implementation version major minor patchlevel", "1: the Python that runs."),
    _counter("python_gc_objects_collected_total", "objects", "generation", "Objects that the collector freed."),
    _counter("python_gc_objects_uncollectable_total", "objects", "generation", "Objects that it could not free."),
    _counter("python_gc_collections_total", "runs", "generation", "Runs of the garbage collector."),
)

_BY_ROUTER = "Processes with a router: those of `kvmesh router`, and frontends whose router is embedded."
GROUPS: tuple[MetricGroup, ...] = (
    MetricGroup("Frontend", "Frontends.", _FRONTEND),
    MetricGroup("Tokenizer", "Frontends and endpoint pickers.", _TOKENIZER),
    MetricGroup("Stored responses", "Frontends with `--responses-store`.", _RESPONSES),
    MetricGroup("API keys", "Frontends.", _KEYS),
    MetricGroup("OpenTelemetry's names", "Frontends with `--gen-ai-metrics`.", _GEN_AI),
    MetricGroup("Router", _BY_ROUTER, _ROUTER),
    MetricGroup("Endpoint picker", "Routers with `--ext-proc-port`.", _PICKER),
    MetricGroup("Worker", "Workers. Counters are of the process, which may host several workers.", _WORKER),
    MetricGroup("Planner", "The planner.", _PLANNER),
    MetricGroup("Memory service", "`kvmesh memory`.", _MEMORY),
    MetricGroup("Request plane", "Every process but the memory service.", _PLANE),
    MetricGroup("Release and certificates", "Every process.", _SHARED),
    MetricGroup("Process and Python", "Every process; prometheus_client makes them.", _PYTHON),
)
DECLARED: Mapping[str, DeclaredMetric] = {metric.name: metric for group in GROUPS for metric in group.metrics}
_FAMILIES = {name.removesuffix("_total"): metric for name, metric in DECLARED.items()} | dict(DECLARED)


def declared(name: str, kind: Kind) -> DeclaredMetric:
    """Return a metric. Raise ValueError if it is not in the list, or is there as another kind."""
    metric = DECLARED.get(name)
    if metric is None or metric.kind != kind:
        found = "nothing" if metric is None else f"a {metric.kind}"
        raise ValueError(f"mesh/metric_list.py has {found} called {name}, not a {kind}: declare it there")
    return metric


def metric_of(family: str) -> DeclaredMetric | None:
    """Return the metric of a family on a page: counters lack their `_total` there, and `_created` is a family too."""
    return _FAMILIES.get(family) or _FAMILIES.get(family.removesuffix("_created"))


def together_of(family: str) -> Together:
    """Return what a gauge says together. The time at which a counter was made is no count."""
    metric = metric_of(family)
    return "alike" if family.endswith("_created") else metric.together if metric is not None else "sum"
