"""Write values for the Helm chart: both pools of workers, and the planner that scales them. Pure."""

import shlex
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

from kvmesh.profiler.deployment.deployment import BUILT_IN_MODEL, Deployment, sizing_flags, title_of
from kvmesh.profiler.deployment.planner_settings import planner_toml
from kvmesh.profiler.deployment.yaml_files import to_yaml

CHART = (Path(__file__).parent / "helm").resolve()  # in a checkout a link to deploy/helm/kvmesh; the wheel has a copy
PROFILES = "kvmesh-plan"  # the ConfigMap with both profiles
MOUNT = "/profiles"  # where the chart mounts it
MODELS_CLAIM = "kvmesh-models"
MODELS = "/models"  # where the chart mounts that
ENGINE_ARGS = "--engine-args="


def chart_values(deployment: Deployment) -> str:
    """Return values.yaml for the chart."""
    is_built_in = deployment.model_path == BUILT_IN_MODEL
    path = BUILT_IN_MODEL if is_built_in else f"{MODELS}/{PurePosixPath(deployment.model_path).name}"
    values: dict[str, Any] = {
        "model": {"name": deployment.decode.model, "path": path},
        **({} if is_built_in else {"modelsClaim": MODELS_CLAIM}),
        "images": {"worker": deployment.worker_image()},
        "pools": {role: _pool(deployment, role) for role in ("prefill", "decode")},
        "planner": {"enabled": True, "profilesConfigMap": PROFILES, "settings": _planner_settings(deployment)},
    }
    head = [
        title_of(deployment),
        "#",
        f"#   kubectl create configmap {PROFILES} --from-file=prefill.json --from-file=decode.json",
        "#   helm install kvmesh deploy/helm/kvmesh -f values.yaml",
        "#",
        *(
            []
            if is_built_in
            else [f"# The claim {MODELS_CLAIM} has the model in its folder {PurePosixPath(path).name}."]
        ),
        "# deploy/helm/kvmesh/values.yaml has all that can be set, among it memory, cores and RDMA devices of workers.",
        "",
    ]
    return "\n".join(head) + to_yaml(values)


def _pool(deployment: Deployment, role: str) -> dict[str, Any]:
    profile = deployment.profile(role)
    settings, engine_args = _sizing(deployment, role)
    return {
        "role": role,
        "engine": deployment.engine(role),
        "replicas": deployment.workers(role),
        **({"gpus": profile.gpus} if profile.gpus else {}),
        **({"settings": settings} if settings else {}),
        **({"engineArgs": engine_args} if engine_args else {}),
    }


def _sizing(deployment: Deployment, role: str) -> tuple[dict[str, int], list[str]]:
    """Return the worker's settings, and the flags of its engine, that make it the one of the profile."""
    flags = sizing_flags(deployment.profile(role), deployment.option.batch if role == "decode" else 0)
    engine_args = [word for flag in flags if flag.startswith(ENGINE_ARGS) for word in _words(flag)]
    own = [flag for flag in flags if not flag.startswith(ENGINE_ARGS)]
    names = [flag.removeprefix("--").replace("-", "_") for flag in own[::2]]
    return dict(zip(names, map(int, own[1::2]), strict=True)), engine_args


def _words(flag: str) -> list[str]:
    return shlex.split(flag.removeprefix(ENGINE_ARGS))


def _planner_settings(deployment: Deployment) -> dict[str, Any]:
    """Return the planner's settings but for those that the chart decides."""
    settings: dict[str, Any] = tomllib.loads(planner_toml(deployment, MOUNT, "dry-run"))["planner"]
    return {name: value for name, value in settings.items() if name != "connector"}
