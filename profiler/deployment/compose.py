"""Write the compose override: replicas, GPUs and engine flags of both roles. Pure."""

from typing import Any

from profiler.deployment.deployment import BUILT_IN_MODEL, Deployment, title_of, worker_flags
from profiler.deployment.yaml_files import to_yaml

COMPOSE_FILES = ["docker-compose.yml", "docker-compose.planner.yml", "compose.override.yml"]


def compose_override(deployment: Deployment) -> str:
    """Return an override of docker-compose.yml and docker-compose.planner.yml, whose workers can be scaled."""
    services = {role: _compose_worker(deployment, role) for role in ("prefill", "decode")}
    if deployment.model_path != BUILT_IN_MODEL:
        services["frontend"] = {"volumes": [_model_volume_of_compose(deployment)]}  # beside its own: the tokenizer
    files = " ".join(f"-f {name}" for name in COMPOSE_FILES)
    head = [
        title_of(deployment),
        "#",
        "#   mkdir -p .run/compose",
        f"#   docker compose {files} up --detach",
        "",
    ]
    return "\n".join(head) + to_yaml({"services": services})


def _compose_worker(deployment: Deployment, role: str) -> dict[str, Any]:
    """Return a service with replicas. Each worker takes its name and address from its container."""
    words = ["python", "-m", "workers", "--name", f"{role}-$$(hostname)", "--advertise-host", "$$(hostname -i)"]
    line = " ".join([*words, *map(_shell_word, worker_flags(deployment, role))])
    profile = deployment.profile(role)
    deploy: dict[str, Any] = {"replicas": deployment.workers(role)}
    if profile.gpus:
        device = {"driver": "nvidia", "count": profile.gpus, "capabilities": ["gpu"]}
        deploy["resources"] = {"reservations": {"devices": [device]}}
    service: dict[str, Any] = {
        "image": deployment.image,
        "command": ["sh", "-c", f"exec {line}"],
        "deploy": deploy,
    }
    if deployment.model_path != BUILT_IN_MODEL:
        service["volumes"] = [_model_volume_of_compose(deployment)]
    return service


def _model_volume_of_compose(deployment: Deployment) -> str:
    return f"${{KVMESH_MODEL_FOLDER:?set it to the model's folder}}:{deployment.model_path}:ro"


def _shell_word(word: str) -> str:
    if word and all(char.isalnum() or char in "-_./:=," for char in word):
        return word
    return "'" + word.replace("'", "'\\''").replace("$", "$$") + "'"
