"""An upgrade keeps the counts that planner and autoscaler have set."""

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml

from tests.support.chart import CHART, LOADER, NAMESPACE, RELEASE, Object, find_tool, named, needs_helm

pytestmark = needs_helm

PLANNED = ("planner.enabled=true", "frontend.autoscaling.enabled=true")
GROUPS = {  # of the API, with their kinds
    "apps": ("v1", ["Deployment"]),
    "leaderworkerset.x-k8s.io": ("v1", ["LeaderWorkerSet"]),
    "rbac.authorization.k8s.io": ("v1", ["Role", "RoleBinding"]),
    "networking.k8s.io": ("v1", ["NetworkPolicy"]),
    "policy": ("v1", ["PodDisruptionBudget"]),
    "autoscaling": ("v2", ["HorizontalPodAutoscaler"]),
    "monitoring.coreos.com": ("v1", ["PodMonitor"]),
}


class Cluster(BaseHTTPRequestHandler):
    """Answers what helm asks before it renders a chart: the API's groups, and workloads, which have 7 pods each."""

    def do_GET(self) -> None:
        path = self.path.split("?")[0].strip("/")
        answer = answer_to(path)
        body = json.dumps(answer or {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}).encode()
        self.send_response(404 if answer is None else 200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def answer_to(path: str) -> Object | None:
    match path.split("/"):
        case ["version"]:
            return {"major": "1", "minor": "30", "gitVersion": "v1.30.0"}
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"]}
        case ["api", "v1"]:
            return resources("v1", ["Service", "ServiceAccount"])
        case ["apis"]:
            groups = [{"name": name, "versions": [version_of(name)]} for name in GROUPS]
            return {"kind": "APIGroupList", "groups": groups}
        case ["apis", group, version]:
            return resources(f"{group}/{version}", GROUPS[group][1])
        case ["apis", group, version, "namespaces", namespace, kinds, name] if namespace == NAMESPACE:
            kind = "LeaderWorkerSet" if kinds == "leaderworkersets" else "Deployment"
            spec = {"replicas": 7}
            return {"apiVersion": f"{group}/{version}", "kind": kind, "metadata": {"name": name}, "spec": spec}
    return None


def version_of(group: str) -> dict[str, str]:
    version = GROUPS[group][0]
    return {"groupVersion": f"{group}/{version}", "version": version}


def resources(group_version: str, kinds: list[str]) -> Object:
    found = [{"name": plural(kind), "namespaced": True, "kind": kind, "verbs": ["get", "list"]} for kind in kinds]
    return {"kind": "APIResourceList", "groupVersion": group_version, "resources": found}


def plural(kind: str) -> str:
    return f"{kind.lower().removesuffix('y')}{'ies' if kind.endswith('y') else 's'}"


@pytest.fixture
def cluster() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Cluster)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def rendered_at(cluster: str, example: str, *settings: str) -> list[Object]:
    flags = [f"--set-json={setting}" for setting in settings]
    command = ["template", RELEASE, str(CHART), "-n", NAMESPACE, "-f", str(CHART / example), *flags, "--dry-run=server"]
    command += ["--is-upgrade", "--disable-openapi-validation"]
    environ = os.environ | {"KUBECONFIG": os.devnull}
    done = subprocess.run(
        [find_tool("helm"), *command, f"--kube-apiserver={cluster}"],
        capture_output=True,
        text=True,
        env=environ,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.load_all(done.stdout, LOADER) if one]


def replicas(objects: list[Object], kind: str, name: str) -> int:
    return int(named(objects, kind, name)["spec"]["replicas"])


def test_counts_of_planner_and_autoscaler_stay(cluster: str) -> None:
    objects = rendered_at(cluster, "values-tiny.yaml", *PLANNED)
    for workload in ("demo-frontend", "demo-prefill", "demo-decode"):
        assert replicas(objects, "Deployment", workload) == 7, workload


def test_counts_of_engines_over_nodes_stay(cluster: str) -> None:
    objects = rendered_at(cluster, "values-70b-two-node-engines.yaml", *PLANNED)
    assert replicas(objects, "LeaderWorkerSet", "demo-decode") == 7


def test_counts_that_nobody_else_sets_are_those_of_the_values(cluster: str) -> None:
    objects = rendered_at(cluster, "values-tiny.yaml", "planner.enabled=true", 'planner.settings.mode="aggregated"')
    assert replicas(objects, "Deployment", "demo-prefill") == 1, "this planner has one pool"
    assert replicas(objects, "Deployment", "demo-decode") == 7
    assert replicas(objects, "Deployment", "demo-frontend") == 2
