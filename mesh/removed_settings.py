"""Settings that this release has no longer. They are accepted for one release, with a warning, and have no effect.

The code that used a setting has a constant instead. An entry leaves this table with the release after `REMOVED_IN`.
"""

from collections.abc import Mapping
from typing import NamedTuple

REMOVED_IN, REFUSED_FROM = "0.3", "0.4"


class RemovedSettings(NamedTuple):
    """The former settings of one service or command."""

    names: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()  # flags without a value


REMOVED: Mapping[str, RemovedSettings] = {  # by the prefix of their environment variables
    "KVMESH_ROUTER_": RemovedSettings(
        (
            *("prefill_weight", "decode_weight", "request_weight", "transfer_weight", "host_weight", "disk_weight"),
            *("object_weight", "local_prefill_max_share", "queue_order", "queue_aging_tokens_per_s"),
            *("queue_standing_wait_s", "predict_ttl_s", "approximate_ttl_s", "kv_events_per_s", "kv_events_mib_per_s"),
            *("max_bookings", "ext_proc_max_streams", "ext_proc_max_body_mib"),
        )
    ),
    "KVMESH_WORKER_": RemovedSettings(("max_calls",)),
    "KVMESH_MEMORY_": RemovedSettings(("writer_deadline_s",)),
    "KVMESH_REPLAY_": RemovedSettings(("period_s", "arrival_speedup", "hop_s", "load_report_interval_s")),
    "KVMESH_PROFILE_MEASURE_": RemovedSettings(("lowest_token", "token_range")),
    "KVMESH_PLANNER_": RemovedSettings(
        (
            *("max_step_up", "max_step_down", "season_s", "prometheus_window_s", "mock_kv_tokens", "mock_num_seqs"),
            *("mock_step_tokens", "kubernetes_account", "record_mib"),
        ),
        switches=("predictive", "reactive"),
    ),
}
PASSED_ON_BY_UP = ("KVMESH_WORKER_", "KVMESH_FRONTEND_", "KVMESH_ROUTER_")


def removed_settings(prefix: str) -> RemovedSettings:
    """Return the former settings of a service or command. `kvmesh up` has those of the services that it starts."""
    prefixes = PASSED_ON_BY_UP if prefix == "KVMESH_UP_" else (prefix,)
    found = [REMOVED.get(one, RemovedSettings()) for one in prefixes]
    return RemovedSettings(
        tuple(name for one in found for name in one.names), tuple(name for one in found for name in one.switches)
    )
