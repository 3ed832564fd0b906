"""Write the compose override: replicas, GPUs and engine flags of both roles. Pure."""

from typing import Any

from kvmesh.profiler.deployment.deployment import BUILT_IN_MODEL, Deployment, title_of, worker_flags
from kvmesh.profiler.deployment.yaml_files import to_yaml

PLAN_FOLDER = "/etc/kvmesh/plan"  # of the planner's container
SHARED_MEMORY = "8g"  # for the processes of one engine


def compose_override(deployment: Deployment) -> str:
    """Return an override of docker-compose.yml: its workers, the settings of its planner, and the SLO of all parts."""
    services = {role: _compose_worker(deployment, role) for role in ("prefill", "decode")}
    ttft_slo_s, itl_slo_s = f"{deployment.goal.ttft_slo_s:g}", f"{deployment.goal.itl_slo_s:g}"
    counting = {"KVMESH_FRONTEND_SLO_TTFT_S": ttft_slo_s, "KVMESH_FRONTEND_SLO_ITL_S": itl_slo_s}
    services["frontend"] = {"environment": counting}
    services["router"] = {"environment": {"KVMESH_ROUTER_SLO_ITL_S": itl_slo_s}}
    services["planner"] = {
        "command": ["kvmesh", "planner", "--config", f"{PLAN_FOLDER}/planner.toml", "--log-format", "json"],
        "volumes": [f"${{KVMESH_PLAN:?set it to the folder of this file}}:{PLAN_FOLDER}:ro"],
    }
    head = [
        title_of(deployment),
        "#",
        "#   export KVMESH_PLAN=FOLDER_OF_THIS_FILE    # as an absolute path",
        "#   docker compose -f docker-compose.yml -f $KVMESH_PLAN/compose.override.yml up --detach",
        "",
    ]
    return "\n".join(head) + to_yaml({"services": services})


def _compose_worker(deployment: Deployment, role: str) -> dict[str, Any]:
    """Return a scaled service. Each worker takes its name and address from its container."""
    words = ["kvmesh", "worker", "--name", f"{role}-$$(hostname)", "--advertise-host", "$$(hostname -i)"]
    line = " ".join([*words, *map(_shell_word, worker_flags(deployment, role))])
    profile = deployment.profile(role)
    service: dict[str, Any] = {
        "image": deployment.worker_image(),
        "command": ["sh", "-c", f"exec {line}"],
        "scale": deployment.workers(role),
    }
    if profile.gpus:
        device = {"driver": "nvidia", "count": profile.gpus, "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
        service |= {"shm_size": SHARED_MEMORY, "pids_limit": 8192}
    if deployment.model_path != BUILT_IN_MODEL:
        service["volumes"] = [_model_volume_of_compose(deployment)]
        service["mem_limit"] = "${KVMESH_WORKER_MEMORY:?set it to the memory of a worker, such as 64g}"
        service["cpus"] = "${KVMESH_WORKER_CPUS:?set it to the cores of a worker, such as 8}"
    return service


def _model_volume_of_compose(deployment: Deployment) -> str:
    return f"${{KVMESH_MODEL_FOLDER:?set it to the model's folder}}:{deployment.model_path}:ro"


def _shell_word(word: str) -> str:
    if word and all(char.isalnum() or char in "-_./:=," for char in word):
        return word
    return "'" + word.replace("'", "'\\''").replace("$", "$$") + "'"
