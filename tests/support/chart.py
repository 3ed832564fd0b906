"""Render the Helm chart with the real helm, and read what it would install."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "kvmesh"
TOOLS = ROOT / ".venv-kube" / "bin"
RELEASE, NAMESPACE = "demo", "llm"
EXAMPLES = sorted(path.name for path in CHART.glob("values-*.yaml"))
INSTALL = "python3 deploy/install_kube_tools.py installs it"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the one in C is several times faster
_WORKLOADS = ("Deployment", "LeaderWorkerSet")

Object = dict[str, Any]


def find_tool(name: str) -> str:
    """Return the path of helm, kubectl or kubernetes-validate, "" if it is not installed."""
    own = TOOLS / name
    return str(own) if own.exists() else shutil.which(name) or ""


needs_helm = pytest.mark.skipif(not find_tool("helm"), reason=f"no helm; {INSTALL}")


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"HELM_CACHE_HOME": "/nonexistent", "HELM_PLUGINS": "/nonexistent"}
    return subprocess.run([find_tool("helm"), *arguments], capture_output=True, text=True, check=False, env=environ)


@cache
def manifests(example: str, *settings: str) -> str:
    """Return what `helm template` prints for a values file of the chart and settings such as `router.separate=true`."""
    flags = [f"--set-json={setting}" for setting in settings]
    place = ("-n", NAMESPACE, "-f", str(CHART / example))  # a whole path stands for itself
    done = helm("template", RELEASE, str(CHART), "--include-crds", *place, *flags)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


@cache
def rendered(example: str, *settings: str) -> list[Object]:
    """Return the objects of `manifests`. They are shared: do not change them."""
    return [one for one in yaml.load_all(manifests(example, *settings), LOADER) if one]


def refused(*settings: str) -> str:
    """Return what helm says of settings that the chart must refuse."""
    with pytest.raises(RuntimeError) as caught:
        manifests("values-tiny.yaml", *settings)
    return str(caught.value)


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [one for one in objects if one["kind"] in kinds]


def named(objects: list[Object], kind: str, name: str) -> Object:
    [found] = [one for one in of_kind(objects, kind) if one["metadata"]["name"] == name]
    return found


def pods_of(workload: Object) -> list[Object]:
    """Return the templates of a workload's pods: a group of pods may have one for its leader."""
    if workload["kind"] == "LeaderWorkerSet":
        group = workload["spec"]["leaderWorkerTemplate"]
        return [group[name] for name in ("leaderTemplate", "workerTemplate") if name in group]
    return [workload["spec"]["template"]]


def pods(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """Yield the name of each workload, with the templates of its pods."""
    for workload in of_kind(objects, *_WORKLOADS):
        for pod in pods_of(workload):
            yield workload["metadata"]["name"], pod


def containers(objects: list[Object]) -> Iterator[tuple[str, Object, Object]]:
    """Yield each container of each pod template, with the workload's name."""
    for name, pod in pods(objects):
        for container in pod["spec"]["containers"]:
            yield name, pod, container


def container_of(objects: list[Object], workload: str, name: str = "") -> Object:
    """Return the container `name`, or the only one, of a workload's pods."""
    [found] = [one for owner, _, one in containers(objects) if owner == workload and name in ("", one["name"])]
    return found


def flags_of(container: Object) -> dict[str, str]:
    """Return the flags of the service, without the engine's."""
    arguments = [str(one) for one in container["args"]]
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return dict(flag.split("=", 1) for flag in own)


def in_a_pod(container: Object) -> tuple[list[str], dict[str, str]]:
    """Return the arguments and the environment that the container has when it runs as pod 1 of a group of 2."""
    facts = {"metadata.name": "pod-7", "metadata.uid": "0c6f6b5e", "status.podIP": "10.1.2.3"}
    environ = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "demo-0.demo.llm"}
    for variable in container["env"]:
        source = variable.get("valueFrom")
        text = facts[source["fieldRef"]["fieldPath"]] if source else _expanded(variable["value"], environ)
        assert variable["name"] not in environ, f"{variable['name']} is set twice"
        environ[variable["name"]] = text
    return [_expanded(str(one), environ) for one in container["args"]], environ


def _expanded(text: str, environ: Mapping[str, str]) -> str:
    """Replace $(NAME) as the kubelet does. A name that is not set would stay as it stands."""
    for name, value in environ.items():
        text = text.replace(f"$({name})", value)
    assert "$(" not in text, f"{text} is set by nobody"
    return text
