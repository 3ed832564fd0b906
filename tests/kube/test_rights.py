"""The rights of each service: what the chart's Roles do not grant, a real API server refuses."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from kvmesh.planner.connectors.connector import ConnectorError
from kvmesh.planner.connectors.kubernetes.connector import KubernetesConnector
from kvmesh.planner.model import Action, Reason, ScalingDecision
from tests.kube.conftest import Space, install_chart
from tests.support.kube_apiserver import ApiRefusedError
from tests.support.patience import PATIENCE_S

SERVICES = ("frontend", "router", "planner", "worker")
DISCOVERY = {(verb, "meshcards.kvmesh.dev") for verb in ("create", "patch", "delete", "list", "watch")}
FOLLOWS_PODS = {(verb, "pods") for verb in ("get", "list", "watch")}
GRANTED = {
    "frontend": DISCOVERY | FOLLOWS_PODS,
    "router": DISCOVERY | FOLLOWS_PODS,
    "planner": DISCOVERY | FOLLOWS_PODS,
    "worker": DISCOVERY | {("get", "pods")},
}
VERBS = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")
RESOURCES = (
    "meshcards.kvmesh.dev", "pods", "pods/exec", "pods/log", "pods/status", "secrets", "configmaps", "services",
    "serviceaccounts", "serviceaccounts/token", "nodes", "events", "deployments.apps", "deployments.apps/scale",
    "statefulsets.apps/scale", "leaderworkersets.leaderworkerset.x-k8s.io/scale", "leases.coordination.k8s.io",
    "roles.rbac.authorization.k8s.io", "rolebindings.rbac.authorization.k8s.io",
    "customresourcedefinitions.apiextensions.k8s.io",
)  # fmt: skip
LWS = "leaderworkerset.x-k8s.io"


def may(space: Space, token: str, verb: str, resource: str, *, name: str = "", namespace: str = "") -> bool:
    """Ask the API server itself, as that account."""
    kind, _, sub = resource.partition("/")
    plural, _, group = kind.partition(".")
    asked = {"verb": verb, "resource": plural, "group": group, "subresource": sub, "name": name}
    spec = {"resourceAttributes": asked | {"namespace": namespace or space.namespace}}
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "spec": spec}
    answer = space.server.ask("POST", "apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body, token=token)
    return bool(answer["status"]["allowed"])


@pytest.mark.parametrize("service", SERVICES)
async def test_a_service_may_do_what_it_needs_and_nothing_else(space: Space, service: str) -> None:
    token = space.token(service).read_text()
    allowed = {(verb, what) for what in RESOURCES for verb in VERBS if may(space, token, verb, what)}
    assert allowed == GRANTED[service]
    assert not any(may(space, token, verb, what, namespace="default") for verb, what in GRANTED[service])


async def test_a_worker_with_a_frontend_beside_it_may_follow_pods(space: Space) -> None:
    """Such pods are the endpoints of a gateway."""
    install_chart(space.server, space.namespace, "endpointPicker.enabled=true")
    token = space.token("worker").read_text()
    assert {verb for verb in VERBS if may(space, token, verb, "pods")} == {"get", "list", "watch"}


def forbidden(space: Space) -> Iterator[tuple[str, str, str, Any]]:
    """Yield service, method, path and body of requests that must be refused."""
    scale = f"apis/apps/v1/namespaces/{space.namespace}/deployments/demo-decode/scale"
    for service in ("worker", "router", "frontend"):
        yield service, "PATCH", scale, {"spec": {"replicas": 9}}
        yield service, "GET", scale, None
    yield "planner", "PATCH", scale.replace("demo-decode", "other"), {"spec": {"replicas": 9}}
    yield "planner", "PATCH", scale.removesuffix("/scale"), {"spec": {"replicas": 9}}
    pods = f"api/v1/namespaces/{space.namespace}/pods"
    for service in SERVICES:
        yield service, "POST", pods, {"metadata": {"name": "x"}, "spec": {"containers": [{"name": "x", "image": "x"}]}}
        yield service, "GET", f"api/v1/namespaces/{space.namespace}/secrets", None
        yield service, "GET", space.cards.replace(space.namespace, "default"), None
    yield "worker", "GET", pods, None


async def test_what_is_not_granted_is_refused(space: Space) -> None:
    for name in ("demo-decode", "other"):
        space.server.install([deployment(space, name, 2)])
    for service, method, path, body in forbidden(space):
        with pytest.raises(ApiRefusedError) as refused:
            token = space.token(service).read_text()
            space.server.ask(method, path, body, token=token, body_type=type_of(method))
        assert refused.value.code == 403, (service, method, path)


def type_of(method: str) -> str:
    return "application/merge-patch+json" if method == "PATCH" else "application/json"


# --- the planner's connector --------------------------------------------------------------------------


def deployment(space: Space, name: str, replicas: int) -> dict[str, Any]:
    pod = {"metadata": {"labels": {"app": name}}, "spec": {"containers": [{"name": "x", "image": "x"}]}}
    spec = {"replicas": replicas, "selector": {"matchLabels": {"app": name}}, "template": pod}
    meta = {"name": name, "namespace": space.namespace}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta, "spec": spec}


def leader_worker_sets() -> dict[str, Any]:
    """Return a definition with what the connector uses of the real one. Its controller does not run here."""
    whole = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    scale = {"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas"}
    version = {
        "name": "v1",
        "served": True,
        "storage": True,
        "subresources": {"status": {}, "scale": scale},
        "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": whole, "status": whole}}},
    }
    names = {"kind": "LeaderWorkerSet", "plural": "leaderworkersets", "singular": "leaderworkerset"}
    spec = {"group": LWS, "scope": "Namespaced", "names": names, "versions": [version]}
    kind = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition"}
    return kind | {"metadata": {"name": f"leaderworkersets.{LWS}"}, "spec": spec}


def decision(prefill: int, decode: int) -> ScalingDecision:
    return ScalingDecision(
        at_s=0.0,
        loop="reactive",
        action=Action.SCALE,
        prefill=prefill,
        decode=decode,
        flip=None,
        reasons=(Reason(code="test", text="a test wants it"),),
    )


def replicas(space: Space, kind: str, name: str) -> int:
    group = "apps/v1" if kind == "deployments" else f"{LWS}/v1"
    found = space.server.ask("GET", f"apis/{group}/namespaces/{space.namespace}/{kind}/{name}")
    return int(found["spec"]["replicas"])


async def test_the_planner_scales_its_pools(space: Space) -> None:
    install_chart(space.server, space.namespace, 'pools.decode.engine="vllm"', "pools.decode.nodes=2")
    meta = {"name": "demo-decode", "namespace": space.namespace}
    space.server.install([leader_worker_sets(), deployment(space, "demo-prefill", 2)])
    group = {"apiVersion": f"{LWS}/v1", "kind": "LeaderWorkerSet", "metadata": meta, "spec": {"replicas": 3}}
    space.server.install([group])
    names = {"prefill": "deployment/demo-prefill", "decode": "leaderworkerset/demo-decode"}
    planner = KubernetesConnector(space.account("planner"), **names)
    await planner.apply(decision(4, 5))
    fleets = await planner.fleets()
    assert (fleets.prefill.ordered, fleets.decode.ordered) == (4, 5)
    assert (replicas(space, "deployments", "demo-prefill"), replicas(space, "leaderworkersets", "demo-decode")) == (
        4,
        5,
    )
    await planner.close()


async def test_planners_that_conflict_leave_a_count_that_was_ordered(space: Space) -> None:
    space.server.install([deployment(space, "demo-prefill", 1), deployment(space, "demo-decode", 1)])
    names = {"prefill": "deployment/demo-prefill", "decode": "deployment/demo-decode"}
    planners = [KubernetesConnector(space.account("planner"), **names) for _ in range(12)]
    orders = [planner.apply(decision(1, 2 + number)) for number, planner in enumerate(planners)]
    done = await asyncio.gather(*orders, return_exceptions=True)
    assert all(not isinstance(one, Exception) or isinstance(one, ConnectorError) for one in done)
    assert replicas(space, "deployments", "demo-decode") in range(2, 14)
    for planner in planners:
        await planner.close()


async def test_a_planner_without_rights_says_which(space: Space) -> None:
    space.server.install([deployment(space, "demo-prefill", 1), deployment(space, "demo-decode", 1)])
    names = {"prefill": "deployment/demo-prefill", "decode": "deployment/demo-decode"}
    planner = KubernetesConnector(space.account("worker"), **names)
    with pytest.raises(ConnectorError) as refused:
        await planner.fleets()
    who = f"system:serviceaccount:{space.namespace}:demo-worker"
    assert f"{who} may not get deployments.apps in the namespace {space.namespace}" in str(refused.value)
    await planner.close()


async def test_a_planner_outlives_an_api_server(space: Space) -> None:
    space.server.install([deployment(space, "demo-prefill", 1), deployment(space, "demo-decode", 1)])
    names = {"prefill": "deployment/demo-prefill", "decode": "deployment/demo-decode"}
    planner = KubernetesConnector(space.account("planner"), **names)
    await planner.fleets()
    space.server.kill()
    with pytest.raises(ConnectorError):
        await planner.apply(decision(2, 2))
    await asyncio.to_thread(space.server.start)
    await asyncio.wait_for(planner.apply(decision(2, 3)), PATIENCE_S)
    assert replicas(space, "deployments", "demo-decode") == 3
    await planner.close()
