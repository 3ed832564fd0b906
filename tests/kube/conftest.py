"""A real kube-apiserver, with what the Helm chart installs in a namespace for each test."""

import copy
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio

from kvmesh.mesh.discovery.kubernetes.api import Account
from kvmesh.mesh.discovery.kubernetes.discovery import KubernetesDiscovery
from tests.support.chart import INSTALL, NAMESPACE, RELEASE, find_tool, of_kind, rendered
from tests.support.kube_apiserver import WHY_NO_API, KubeApiserver

LABELS = {"kvmesh.dev/mesh": RELEASE}
INSTALLED = ("CustomResourceDefinition", "ServiceAccount", "Role", "RoleBinding")


@dataclass
class Space:
    """A namespace with the chart's service accounts and rights, and the label of its mesh."""

    server: KubeApiserver
    namespace: str
    folder: Path
    mesh: str = RELEASE
    opened: list[KubernetesDiscovery] = field(default_factory=list)

    def token(self, service: str) -> Path:
        path = self.folder / f"{service}.token"
        path.write_text(self.server.account_token(self.namespace, f"{self.mesh}-{service}"))
        return path

    def account(self, service: str) -> Account:
        return Account(self.server.url, self.namespace, self.token(service), self.server.ca_file)

    def url(self, service: str, mesh: str = "") -> str:
        options = f"api={self.server.url}&token-file={self.token(service)}&ca={self.server.ca_file}"
        return f"kubernetes:{self.namespace}/{mesh or self.mesh}?{options}"

    def pod(self, name: str, *, is_ready: bool = True, node: str = "") -> dict[str, str]:
        """Make a pod of the mesh, and return the environment of its container."""
        uid = self.server.add_pod(self.namespace, name, LABELS, node=node)
        if is_ready:
            self.server.set_ready(self.namespace, name)
        return {"KVMESH_POD_NAME": name, "KVMESH_POD_UID": uid}

    def set_ready(self, name: str, is_ready: bool) -> None:
        self.server.set_ready(self.namespace, name, is_ready)

    def open(self, service: str, environ: dict[str, str] | None = None) -> KubernetesDiscovery:
        """Open discovery as a service does in a pod with that environment."""
        before = {name: os.environ.pop(name, None) for name in ("KVMESH_POD_NAME", "KVMESH_POD_UID")}
        try:
            os.environ.update(environ or {})
            found = KubernetesDiscovery(self.url(service).removeprefix("kubernetes:"))
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
        self.opened.append(found)
        return found

    @property
    def cards(self) -> str:
        return f"apis/kvmesh.dev/v1/namespaces/{self.namespace}/meshcards"

    def user(self, service: str) -> str:
        return f"system:serviceaccount:{self.namespace}:{self.mesh}-{service}"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubeApiserver]:
    if not os.environ.get("KVMESH_TEST_KUBE"):
        pytest.skip("a real kube-apiserver: run `make test-kube`")
    if problem := WHY_NO_API or ("" if find_tool("helm") else f"no helm; {INSTALL}"):
        pytest.fail(problem)
    running = KubeApiserver(tmp_path_factory.mktemp("kube"))
    yield running
    running.stop()


@pytest_asyncio.fixture
async def space(server: KubeApiserver, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Space]:
    """Install what concerns rights of the chart, with an enabled planner."""
    namespace = f"test-{abs(hash(request.node.nodeid)) % 10**10}"
    server.add_namespace(namespace)
    install_chart(server, namespace)
    made = Space(server, namespace, tmp_path)
    yield made
    for discovery in made.opened:
        await discovery.close()


def install_chart(server: KubeApiserver, namespace: str, *settings: str) -> None:
    """Install accounts, rights and definitions of the chart, with `settings` as of `--set-json`."""
    objects = copy.deepcopy(of_kind(rendered("values-tiny.yaml", "planner.enabled=true", *settings), *INSTALLED))
    for one in objects:
        if "namespace" in one["metadata"]:
            one["metadata"]["namespace"] = namespace
        for subject in one.get("subjects", ()):
            assert subject["namespace"] == NAMESPACE
            subject["namespace"] = namespace
    server.install(objects)
