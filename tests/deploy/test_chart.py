"""The chart passes the checks of Kubernetes' own tools, and refuses what it does not know."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.chart import (
    CHART,
    EXAMPLES,
    INSTALL,
    NAMESPACE,
    Object,
    find_tool,
    helm,
    needs_helm,
    of_kind,
    pods_of,
    refused,
    rendered,
)

pytestmark = needs_helm

GOLDEN = Path(__file__).parent / "golden"
# Kinds of other projects: Kubernetes has no schema for them.
FOREIGN = ("LeaderWorkerSet", "PodMonitor", "PrometheusRule", "InferencePool", "HTTPRoute")
ALL = (
    "router.separate=true",
    "planner.enabled=true",
    "podMonitors.enabled=true",
    "prometheusRule.enabled=true",
    "dashboards.enabled=true",
    "frontend.autoscaling.enabled=true",
    'frontend.apiKeysSecret="keys"',
    'planner.profilesConfigMap="profiles"',
    'modelsClaim="models"',
    'images.pullSecrets=["registry"]',
    'networkPolicy.clients=[{"namespaceSelector": {"matchLabels": {"team": "web"}}}]',
    'frontend.podAnnotations={"a": "b"}',
    'poolDefaults.podAnnotations={"a": "b"}',
    'poolDefaults.priorityClassName="gpu"',
    'poolDefaults.rdma={"resource": "rdma/hca", "count": 1}',
    'events.transport="nats"',
    'events.natsSecrets={"worker": "nats-worker", "router": "nats-router"}',
    "endpointPicker.enabled=true",
    'endpointPicker.tlsSecret="tls"',
    'endpointPicker.podAnnotations={"a": "b"}',
)


@pytest.mark.parametrize("example", EXAMPLES)
def test_helm_lint_finds_nothing(example: str) -> None:
    done = helm("lint", "--strict", str(CHART), "-n", NAMESPACE, "-f", str(CHART / example))
    assert done.returncode == 0 and "WARNING" not in done.stdout, done.stdout + done.stderr


@pytest.mark.skipif(not find_tool("kubernetes-validate"), reason=f"no kubernetes-validate; {INSTALL}")
@pytest.mark.parametrize("version", ["1.28", "1.37"])
def test_every_object_fits_the_schemas_of_kubernetes(version: str, tmp_path: Path) -> None:
    files = []
    for number, (example, settings) in enumerate([*((one, ()) for one in EXAMPLES), ("values-tiny.yaml", ALL)]):
        objects = [one for one in rendered(example, *settings) if one["kind"] not in FOREIGN]
        files.append(tmp_path / f"{number}.yaml")
        files[-1].write_text(yaml.safe_dump_all(objects))
        assert len(objects) > 15
    tool = find_tool("kubernetes-validate")
    done = subprocess.run(
        [tool, "--strict", "-k", version, *map(str, files)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "WARN" not in done.stdout + done.stderr, done.stdout + done.stderr


def test_a_misspelled_value_is_refused_by_its_place() -> None:
    assert "at '/frontend': additional properties 'replica' not allowed" in refused("frontend.replica=3")
    assert "at '/pools/decode': additional properties 'gpu' not allowed" in refused("pools.decode.gpu=1")
    assert "at '/pools/decode/role'" in refused('pools.decode.role="both"')


def test_contradictions_are_refused_with_what_to_do() -> None:
    assert "pools.decode: the engine torch cannot span 2 nodes; take vllm or" in refused("pools.decode.nodes=2")
    assert "engineArgs are flags of vllm, sglang and trtllm" in refused('pools.decode.engineArgs=["--x"]')
    assert "pools.router: another part has this name" in refused('pools.router={"replicas": 1}')
    assert 'there is no pool "big"; set planner.prefillPool' in refused(
        "planner.enabled=true", 'planner.decodePool="big"'
    )


def test_without_a_pool_nothing_is_installed() -> None:
    done = helm("template", "demo", str(CHART))
    assert done.returncode and "pools: there is no worker; name at least one pool" in done.stderr


@pytest.mark.parametrize("example", EXAMPLES)
def test_what_an_example_installs(example: str) -> None:
    """KVMESH_WRITE_GOLDEN=1 writes the files again; read the difference before you commit it."""
    file = GOLDEN / example
    text = yaml.safe_dump([summary(one) for one in rendered(example)], sort_keys=False, width=120)
    if os.environ.get("KVMESH_WRITE_GOLDEN"):
        file.write_text(text)
    assert file.read_text() == text


def summary(one: Object) -> Object:
    """Return what one would look for first in an object; the rest is checked by rules."""
    spec = one.get("spec", {})
    said: Object = {"object": f"{one['kind']} {one['metadata']['name']}"}
    if of_kind([one], "Deployment", "LeaderWorkerSet"):
        [pod] = [template["spec"] for template in pods_of(one)]
        [container] = pod["containers"]
        said["replicas"] = spec["replicas"]
        said["nodes"] = spec.get("leaderWorkerTemplate", {}).get("size", 1)
        said["image"] = container["image"]
        said["run"] = " ".join([*container["command"], *container["args"]])
        said["env"] = " ".join(f"{v['name']}={v['value']}" for v in container["env"] if "value" in v)
        said["resources"] = container["resources"]
        said["ends within"] = f"{pod['terminationGracePeriodSeconds']} s"
        said["may start for"] = "{periodSeconds} s * {failureThreshold}".format_map(container["startupProbe"])
        said["volumes"] = " ".join(sorted(mount["mountPath"] for mount in container["volumeMounts"]))
    elif one["kind"] == "NetworkPolicy":
        said["ingress"] = [rule_text(rule) for rule in spec.get("ingress", [])]
    elif one["kind"] == "Role":
        said["rules"] = [
            f"{', '.join(rule['verbs'])}: {', '.join([*rule['resources'], *rule.get('resourceNames', [])])}"
            for rule in one["rules"]
        ]
    elif one["kind"] == "HorizontalPodAutoscaler":
        said["replicas"] = f"{spec['minReplicas']}-{spec['maxReplicas']}"
        said["metrics"] = spec["metrics"]
    elif one["kind"] == "PodDisruptionBudget":
        said["maxUnavailable"] = spec["maxUnavailable"]
    return said


def rule_text(rule: Object) -> str:
    ports = ", ".join(
        "-".join(str(port[end]) for end in ("port", "endPort") if end in port) for port in rule.get("ports", [])
    )
    peers = []
    for peer in rule.get("from", []):
        labels = (peer.get("podSelector") or peer.get("namespaceSelector"))["matchLabels"]
        pool = labels.get("kvmesh.dev/pool")
        peers.append(f"pool {pool}" if pool else labels.get("app.kubernetes.io/component") or f"namespaces {labels}")
    return f"{ports or 'all ports'} from {', '.join(peers) or 'everybody'}"
