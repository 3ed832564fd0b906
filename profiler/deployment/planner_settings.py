"""Write the settings of the planner as TOML. Pure."""

import json
from typing import Any

from profiler.deployment.compose import COMPOSE_FILES
from profiler.deployment.deployment import DISCOVERY, Deployment


def planner_toml(deployment: Deployment, folder: str, connector: str) -> str:
    """Return planner.toml. The planner finds prefill.json and decode.json in `folder`."""
    goal = deployment.goal
    start_s = max(deployment.prefill.start_s, deployment.decode.start_s)
    settings: dict[str, Any] = {
        "ttft_slo_s": goal.ttft_slo_s,
        "itl_slo_s": goal.itl_slo_s,
        "min_prefill": 1,
        "min_decode": 1,
        "max_gpus": goal.gpus,
        "target_utilization": goal.utilization,
    }
    if start_s:
        settings["start_s"] = start_s
    settings |= {
        "prefill_profile": f"{folder}/prefill.json",
        "decode_profile": f"{folder}/decode.json",
        "connector": connector,
    }
    if connector == "kubernetes":
        settings |= {"discovery": DISCOVERY, "kubernetes_namespace": deployment.namespace}
        settings |= {"record_file": "/run/kvmesh/planner.jsonl", "host": "0.0.0.0"}
        settings["frontends"] = ["http://kvmesh-frontend:8000"]  # the frontend's card says 0.0.0.0
    if connector == "compose":
        settings |= {"compose_files": COMPOSE_FILES, "discovery": "file:.run/compose/discovery"}
        settings["frontends"] = ["http://127.0.0.1:8000"]
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    return "\n".join([f"# For {deployment.option.title}.", "[planner]", *lines, ""])
