"""Write Kubernetes manifests: frontend, prefill and decode workers, and a planner that may scale these two. Pure."""

from typing import Any

import msgspec

from profiler.deployment.deployment import BUILT_IN_MODEL, DISCOVERY, Deployment, title_of, worker_flags
from profiler.deployment.planner_settings import planner_toml
from profiler.deployment.yaml_files import to_yaml
from protocol.profile import Profile

# The worker's card lies in the discovery folder, and its lease was renewed lately (it is, every 1.7 s).
HAS_JOINED = 'find /run/kvmesh/discovery -name "workers%2F$POD_NAME-*" -mmin -0.1 | grep -q .'
PLANNER_FOLDER = "/etc/kvmesh-planner"


def kubernetes_manifests(deployment: Deployment) -> str:
    """Return the manifests of a frontend with its service, both kinds of workers, and the planner."""
    documents = [
        _claim(deployment),
        _frontend(deployment),
        _service(deployment),
        _workers(deployment, "prefill"),
        _workers(deployment, "decode"),
        *_planner(deployment),
    ]
    head = [
        title_of(deployment),
        "#",
        "#   kubectl apply -f kubernetes.yaml",
        "#",
        "# The services meet in a volume that several nodes can write (ReadWriteMany). The model is looked for in the",
        f"# claim `kvmesh-model`, unless it is the one in the image ({BUILT_IN_MODEL}).",
        "",
    ]
    return "\n".join(head) + to_yaml(*documents)


def _meta(deployment: Deployment, name: str, part: str = "") -> dict[str, Any]:
    labels = {"app.kubernetes.io/part-of": "kvmesh"} | ({"app.kubernetes.io/component": part} if part else {})
    return {"name": name, "namespace": deployment.namespace, "labels": labels}


def _claim(deployment: Deployment) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _meta(deployment, "kvmesh-run"),
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
    }


def _replicated(
    deployment: Deployment, part: str, replicas: int, container: dict[str, Any], **pod: Any
) -> dict[str, Any]:
    labels = {"app.kubernetes.io/part-of": "kvmesh", "app.kubernetes.io/component": part}
    run = {"name": "run", "persistentVolumeClaim": {"claimName": "kvmesh-run"}}
    mount = {"name": "run", "mountPath": "/run/kvmesh"}
    container = {"name": part, "image": deployment.image} | container
    container["volumeMounts"] = [mount, *container.get("volumeMounts", [])]
    template = {"terminationGracePeriodSeconds": 50} | pod | {"containers": [container]}
    template["volumes"] = [run, *pod.get("volumes", [])]
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _meta(deployment, f"kvmesh-{part}", part),
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": template},
        },
    }


def _frontend(deployment: Deployment) -> dict[str, Any]:
    flags = ["--host", "0.0.0.0", "--port", "8000", "--discovery", DISCOVERY, "--log-format", "json"]
    container = {
        "command": ["python", "-m", "frontend", *flags],
        "ports": [{"name": "http", "containerPort": 8000}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 5},
    }
    return _replicated(deployment, "frontend", 1, container | _model_mount(deployment), **_model_volume(deployment))


def _service(deployment: Deployment) -> dict[str, Any]:
    labels = {"app.kubernetes.io/part-of": "kvmesh", "app.kubernetes.io/component": "frontend"}
    ports = [{"name": "http", "port": 8000, "targetPort": "http"}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _meta(deployment, "kvmesh-frontend", "frontend"),
        "spec": {"selector": labels, "ports": ports},
    }


def _workers(deployment: Deployment, role: str) -> dict[str, Any]:
    own = ["--name", "$(POD_NAME)", "--advertise-host", "$(POD_IP)"]
    container: dict[str, Any] = {
        "command": ["python", "-m", "workers", *own, *worker_flags(deployment, role)],
        "env": [_from_pod("POD_NAME", "metadata.name"), _from_pod("POD_IP", "status.podIP")],
        "ports": [{"name": "metrics", "containerPort": 9100}],
        "readinessProbe": {"exec": {"command": ["sh", "-c", HAS_JOINED]}, "periodSeconds": 5},
    }
    if gpus := deployment.profile(role).gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": gpus}}
    container |= _model_mount(deployment)
    return _replicated(deployment, role, deployment.workers(role), container, **_model_volume(deployment))


def _from_pod(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _model_mount(deployment: Deployment) -> dict[str, Any]:
    if deployment.model_path == BUILT_IN_MODEL:
        return {}
    return {"volumeMounts": [{"name": "model", "mountPath": deployment.model_path, "readOnly": True}]}


def _model_volume(deployment: Deployment) -> dict[str, Any]:
    if deployment.model_path == BUILT_IN_MODEL:
        return {}
    return {"volumes": [{"name": "model", "persistentVolumeClaim": {"claimName": "kvmesh-model", "readOnly": True}}]}


def _planner(deployment: Deployment) -> list[dict[str, Any]]:
    """Return the planner's manifests. It gets the right to scale the two worker Deployments, and no other right."""
    name = "kvmesh-planner"
    files = {
        "planner.toml": planner_toml(deployment, PLANNER_FOLDER, "kubernetes"),
        "prefill.json": _compact(deployment.prefill),
        "decode.json": _compact(deployment.decode),
    }
    names = ["kvmesh-prefill", "kvmesh-decode"]
    rules = [
        {"apiGroups": ["apps"], "resources": ["deployments"], "resourceNames": names, "verbs": ["get"]},
        {"apiGroups": ["apps"], "resources": ["deployments/scale"], "resourceNames": names, "verbs": ["get", "patch"]},
    ]
    container = {
        "command": ["python", "-m", "planner", "--config", f"{PLANNER_FOLDER}/planner.toml"],
        "volumeMounts": [{"name": "config", "mountPath": PLANNER_FOLDER, "readOnly": True}],
    }
    volume = {"name": "config", "configMap": {"name": name}}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _meta(deployment, name, "planner"), "data": files},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _meta(deployment, name, "planner")},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": _meta(deployment, name, "planner"),
            "rules": rules,
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": _meta(deployment, name, "planner"),
            "roleRef": role,
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": deployment.namespace}],
        },
        _replicated(deployment, "planner", 1, container, serviceAccountName=name, volumes=[volume]),
    ]


def _compact(profile: Profile) -> str:
    return msgspec.json.encode(profile).decode()
