"""A closed mesh of the chart: every container has a certificate of its own name and role, and probes go over TLS."""

import re

import pytest

from kvmesh.mesh.identity.names import MeshRole, identity_of_uri
from tests.support.chart import (
    NAMESPACE,
    RELEASE,
    Object,
    needs_helm,
    of_kind,
    pods_of,
    refused,
    rendered,
)

pytestmark = needs_helm

CLOSED = (
    "meshTls.enabled=true",
    'meshTls.issuer={"name": "mesh-ca", "kind": "Issuer"}',
    "router.separate=true",
    "planner.enabled=true",
    "podMonitors.enabled=true",
    "endpointPicker.enabled=true",
)
FILES = [
    {"key": "ca.crt", "path": "ca.pem"},
    {"key": "tls.crt", "path": "cert.pem"},
    {"key": "tls.key", "path": "key.pem"},
]
ROLES = {
    "frontend": MeshRole.FRONTEND,
    "router": MeshRole.ROUTER,
    "planner": MeshRole.PLANNER,
    "worker": MeshRole.WORKER,
}


def containers(*settings: str) -> list[tuple[Object, Object, Object]]:
    """Return (workload, pod, container) of all containers."""
    workloads = of_kind(rendered("values-tiny.yaml", *settings), "Deployment", "LeaderWorkerSet")
    return [
        (workload, pod["spec"], container)
        for workload in workloads
        for pod in pods_of(workload)
        for container in pod["spec"]["containers"]
    ]


def secret_of(pod: Object, container: Object) -> Object:
    """Return the secret that a container has at the place that its settings name."""
    variables = {one["name"]: one.get("value") for one in container["env"]}
    [place] = [value for name, value in variables.items() if name.endswith("_MESH_TLS")]
    [mount] = [one for one in container["volumeMounts"] if one["mountPath"] == place]
    [volume] = [one for one in pod["volumes"] if one["name"] == mount["name"]]
    secret: Object = volume["secret"]
    return secret


def test_every_container_has_the_certificate_of_its_role_and_name() -> None:
    certificates = of_kind(rendered("values-tiny.yaml", *CLOSED), "Certificate")
    uris = {one["spec"]["secretName"]: one["spec"]["uris"] for one in certificates}
    found = containers(*CLOSED)
    assert len(found) >= 6
    for workload, pod, container in found:
        secret = secret_of(pod, container)
        assert (secret["items"], secret["defaultMode"]) == (FILES, 0o440)  # a key that others can read is refused
        [uri] = uris[secret["secretName"]]
        member = identity_of_uri(uri)
        assert member.role is ROLES[container["command"][-1]]
        assert member.namespace == f"{NAMESPACE}-{RELEASE}"
        assert member.stands_for(f"{workload['metadata']['name']}-7f9c-x2x")


def test_nothing_of_it_is_there_by_default() -> None:
    assert not of_kind(rendered("values-tiny.yaml"), "Certificate")
    text = str(rendered("values-tiny.yaml"))
    assert "MESH_TLS" not in text
    assert "HTTPS" not in text


def test_without_an_issuer_the_secrets_are_yours() -> None:
    objects = rendered("values-tiny.yaml", "meshTls.enabled=true", 'meshTls.secrets={"decode": "mine"}')
    assert not of_kind(objects, "Certificate")
    names = {
        secret_of(pod, container)["secretName"]
        for _, pod, container in containers("meshTls.enabled=true", 'meshTls.secrets={"decode": "mine"}')
    }
    assert names == {"mine", f"{RELEASE}-prefill-mesh-tls", f"{RELEASE}-frontend-mesh-tls"}


def test_probes_of_ports_within_the_mesh_are_over_tls() -> None:
    """The port for clients of a frontend is not within the mesh."""
    for workload, _, container in containers(*CLOSED):
        is_frontend = container["command"][-1] == "frontend"
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container[kind]
            if "tcpSocket" in probe:
                continue
            scheme = probe["httpGet"].get("scheme", "HTTP")
            assert scheme == ("HTTP" if is_frontend else "HTTPS"), (workload["metadata"]["name"], kind)
            assert probe["httpGet"]["path"] in ("/live", "/health"), "members alone may read the rest"


def test_prometheus_reads_with_a_certificate() -> None:
    for monitor in of_kind(rendered("values-tiny.yaml", *CLOSED), "PodMonitor"):
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            assert endpoint["scheme"] == "https"
            assert endpoint["tlsConfig"]["cert"]["secret"]["name"] == f"{RELEASE}-observer-mesh-tls"


def test_policies_open_the_port_for_members() -> None:
    text = [str(one["spec"]) for one in of_kind(rendered("values-tiny.yaml", *CLOSED), "NetworkPolicy")]
    assert sum("'port': 8001" in one for one in text) == 2  # frontends, and those beside decode workers


@pytest.mark.parametrize("name", ["mesh_tls", "mesh_probes", "mesh_port"])
def test_the_chart_alone_decides_where_certificates_are(name: str) -> None:
    said = refused(f'frontend.settings={{"{name}": "x"}}')
    assert re.search(rf"the chart itself decides {name}", said)
