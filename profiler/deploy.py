"""The files of a deployment: compose override, Kubernetes manifests, the planner's settings. Pure: text comes out."""

import json
from typing import Any

import msgspec
from msgspec import Struct

from planner.model import Reason
from profiler.mapping import MappingKind, parse_mapping
from profiler.picks import Goal, Option
from profiler.yaml_text import to_yaml, to_yaml_documents
from protocol.errors import ConfigError
from protocol.profile import Profile
from workers.engines.registry import ENGINES, STARTED

DISCOVERY = "file:/run/kvmesh/discovery"
BUILT_IN_MODEL = "/models/tiny"  # lies in the image
COMPOSE_FILES = ["docker-compose.yml", "docker-compose.planner.yml", "compose.override.yml"]
IN_THE_IMAGE = {kind.name for kind in ENGINES.values() if kind.is_bundled}
# While the worker's card lies in the discovery folder and its lease is renewed (every 1.7 s).
HAS_JOINED = 'find /run/kvmesh/discovery -name "workers%2F$POD_NAME-*" -mmin -0.1 | grep -q .'
PLANNER_FOLDER = "/etc/kvmesh-planner"
MAX_VLLM_RANKS = 64  # of `kvmesh worker --dp-size`


class Deployment(Struct, frozen=True, kw_only=True):
    option: Option
    prefill: Profile
    decode: Profile
    goal: Goal
    image: str = "kvmesh:0.1.0"
    model_path: str = BUILT_IN_MODEL  # in the container
    namespace: str = "default"

    def profile(self, role: str) -> Profile:
        return self.prefill if role == "prefill" else self.decode

    def engine(self, role: str) -> str:
        """Raises ConfigError for one that cannot be started: a server that did not tell what it runs."""
        if (engine := self.profile(role).engine) not in STARTED:
            raise ConfigError(
                f"the {role} profile is of the engine {engine!r}, workers have {', '.join(STARTED)}",
                hint="name the engine when you measure: `kvmesh profile measure --url ... --engine vllm`",
            )
        return engine

    def workers(self, role: str) -> int:
        return self.option.prefill_workers if role == "prefill" else self.option.decode_workers


def warnings_of(deployment: Deployment) -> list[Reason]:
    """What the files cannot bring about."""
    found = []
    if deployment.model_path == BUILT_IN_MODEL and {deployment.prefill.engine, deployment.decode.engine} - IN_THE_IMAGE:
        found.append(
            Reason(
                code="model",
                text=f"the containers are told to serve {BUILT_IN_MODEL}, with {deployment.decode.engine}: name the "
                "model's folder with --model-path, and an image that has the engine with --image",
            )
        )
    for role in ("prefill", "decode"):
        profile = deployment.profile(role)
        if profile.engine == "vllm" and parse_mapping(profile.mapping).ranks > MAX_VLLM_RANKS:
            found.append(
                Reason(
                    code="dep",
                    text=f"{profile.mapping}: `kvmesh worker --engine vllm` has at most {MAX_VLLM_RANKS} data-parallel "
                    f"ranks; start the {role} servers yourself and attach them, docs/attach.md",
                )
            )
        if profile.provider != "measured":
            found.append(
                Reason(
                    code="estimate",
                    text=f"the {role} profile is an estimate ({profile.provider}): measure one worker before you "
                    "rely on it",
                )
            )
    return found


def worker_flags(deployment: Deployment, role: str) -> list[str]:
    """Of `python -m workers`, but for its name and addresses."""
    profile = deployment.profile(role)
    flags = ["--role", role, "--engine", deployment.engine(role), "--model-path", deployment.model_path]
    flags += ["--model", profile.model, "--host", "0.0.0.0", "--metrics-port", "9100", "--discovery", DISCOVERY]
    flags += ["--log-format", "json"]
    ranks = parse_mapping(profile.mapping).ranks
    if profile.engine == "vllm" and ranks > 1:
        flags += ["--dp-size", str(ranks)]  # the worker tells vLLM: it has to know the ranks too
    if engine_args := engine_flags(profile, deployment.option.batch if role == "decode" else 0):
        flags.append(f"--engine-args={' '.join(engine_args)}")
    elif profile.engine in IN_THE_IMAGE:
        flags += ["--max-num-seqs", str(profile.max_num_seqs), "--max-step-tokens", str(profile.max_step_tokens)]
    return flags


def engine_flags(profile: Profile, batch: int) -> list[str]:
    """Return a mapping in the engine's own words. `batch`: sequences at once; 0: the engine decides.

    vLLM and TensorRT-LLM count the sequences of one data-parallel rank, SGLang those of all ranks.
    """
    mapping = parse_mapping(profile.mapping)
    gpus, of_a_rank = str(mapping.gpus), str(-(-batch // mapping.ranks))
    has_experts_apart, has_ranks = mapping.kind != MappingKind.TP, mapping.kind == MappingKind.DEP
    match profile.engine:
        case "vllm":
            flags = ["--tensor-parallel-size", "1" if has_ranks else gpus]
            flags += ["--enable-expert-parallel"] if has_experts_apart else []
            return flags + (["--max-num-seqs", of_a_rank] if batch else [])
        case "sglang":
            flags = ["--tp-size", gpus] + (["--ep-size", gpus] if has_experts_apart else [])
            flags += ["--dp-size", gpus, "--enable-dp-attention"] if has_ranks else []
            return flags + (["--max-running-requests", str(batch)] if batch else [])
        case "trtllm":
            flags = ["--tensor-parallel-size", gpus]
            flags += ["--moe-expert-parallel-size", gpus] if has_experts_apart else []
            flags += ["--enable-attention-dp", "true"] if has_ranks else []
            return flags + (["--max-batch-size", of_a_rank] if batch else [])
    return []


# --- docker compose ---------------------------------------------------------------------------------------


def compose_override(deployment: Deployment) -> str:
    """To be laid over docker-compose.yml and docker-compose.planner.yml, whose workers can be scaled."""
    services = {role: _compose_worker(deployment, role) for role in ("prefill", "decode")}
    if deployment.model_path != BUILT_IN_MODEL:
        services["frontend"] = {"volumes": [_model_volume_of_compose(deployment)]}  # beside its own: the tokenizer
    files = " ".join(f"-f {name}" for name in COMPOSE_FILES)
    head = [
        f"# {deployment.option.title}: {deployment.option.rps:.2f} requests/s by its profiles.",
        "#",
        "#   mkdir -p .run/compose",
        f"#   docker compose {files} up --detach",
        "",
    ]
    return "\n".join(head) + to_yaml({"services": services})


def _compose_worker(deployment: Deployment, role: str) -> dict[str, Any]:
    """Replicas of one service: named and addressed as compose does their containers."""
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


# --- Kubernetes -------------------------------------------------------------------------------------------


def kubernetes_manifests(deployment: Deployment) -> str:
    """A frontend with its service, prefill and decode workers, and a planner that may scale these two."""
    documents = [
        _claim(deployment),
        _frontend(deployment),
        _service(deployment),
        _workers(deployment, "prefill"),
        _workers(deployment, "decode"),
        *_planner(deployment),
    ]
    head = [
        f"# {deployment.option.title}: {deployment.option.rps:.2f} requests/s by its profiles.",
        "#",
        "#   kubectl apply -f kubernetes.yaml",
        "#",
        "# The services meet in a volume that several nodes can write (ReadWriteMany). The model is looked for in the",
        f"# claim `kvmesh-model`, unless it is the one in the image ({BUILT_IN_MODEL}).",
        "",
    ]
    return "\n".join(head) + to_yaml_documents(documents)


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
    """With the right to change how many workers there are, and no other."""
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


# --- the planner ------------------------------------------------------------------------------------------


def planner_toml(deployment: Deployment, folder: str, connector: str) -> str:
    """`folder`: where prefill.json and decode.json lie for the planner."""
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
        settings["frontends"] = ["http://kvmesh-frontend:8000"]  # who listens on 0.0.0.0 tells just that
    if connector == "compose":
        settings |= {"compose_files": COMPOSE_FILES, "discovery": "file:.run/compose/discovery"}
        settings["frontends"] = ["http://127.0.0.1:8000"]
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    return "\n".join([f"# For {deployment.option.title}.", "[planner]", *lines, ""])
