"""Write the settings of the planner as TOML. Pure."""

import json
from typing import Any

from kvmesh.profiler.deployment.compose import PLAN_FOLDER
from kvmesh.profiler.deployment.deployment import Deployment


def planner_toml(deployment: Deployment, folder: str, connector: str) -> str:
    """Return planner.toml. The planner finds prefill.json and decode.json in `folder`; with compose, in its container.

    That planner has no rights over containers: `kvmesh planner apply` carries out what it decides.
    """
    folder = PLAN_FOLDER if connector == "compose" else folder
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
    if deployment.slo:
        settings |= {"slo": list(deployment.slo), "aim": deployment.aim}
    settings |= deployment.peak_settings
    if start_s:
        settings["start_s"] = start_s
    settings |= {
        "prefill_profile": f"{folder}/prefill.json",
        "decode_profile": f"{folder}/decode.json",
        "connector": "virtual" if connector == "compose" else connector,
    }
    if connector == "kubernetes":
        settings |= {"discovery": f"kubernetes:{deployment.namespace}/kvmesh"}
        settings |= {"kubernetes_namespace": deployment.namespace}
    if connector == "compose":
        settings |= {"virtual_host": "0.0.0.0", "virtual_token_file": "/run/secrets/planner_token", "flips": False}
        settings |= {"frontends": ["http://frontend:8000"], "record_file": "/tmp/planner.jsonl"}
        settings |= {"host": "0.0.0.0", "metrics_port": 9300}
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    return "\n".join([f"# For {deployment.option.title}.", "[planner]", *lines, ""])
