"""A real kube-apiserver with an etcd of its own. There is no kubelet, no scheduler and no controller.

Tests set what a kubelet would: the state of pods. Owned objects are not deleted with their owners, that is a
controller's work. deploy/install_kube_apiserver.py builds the server.
"""

import json
import os
import shutil
import signal
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from datetime import datetime
from pathlib import Path
from typing import Any

from deploy.install_kube_apiserver import binary
from tests.support.etcd_server import EtcdProcess
from tests.support.patience import PATIENCE_S
from tests.support.ports import free_port

ADMIN = "admin-token"
_MASTERS = f'{ADMIN},admin,1,"system:masters"\n'
_ISSUER = "https://kubernetes.default.svc"

WHY_NO_API = (
    "no kube-apiserver: python3 deploy/install_kube_apiserver.py builds it"
    if not binary().exists()
    else "no openssl, which makes the key of service accounts"
    if shutil.which("openssl") is None
    else ""
)


class ApiRefusedError(Exception):
    """The server's answer is no 2xx."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class KubeApiserver:
    """Runs from its making on. It listens on the same port and finds its data again after `restart`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.etcd = EtcdProcess(folder)
        self._port = free_port()
        self.url = f"https://127.0.0.1:{self._port}"
        self.ca_file = folder / "certs" / "apiserver.crt"
        (folder / "tokens.csv").write_text(_MASTERS)
        self._key = folder / "sa.key"
        subprocess.run(["openssl", "genrsa", "-out", str(self._key), "2048"], check=True, capture_output=True)
        self.start()

    # --- the process ----------------------------------------------------------------------------------

    def start(self) -> None:
        options = {
            "etcd-servers": f"http://{self.etcd.endpoint}",
            "secure-port": self._port,
            "bind-address": "127.0.0.1",
            "cert-dir": self._folder / "certs",
            "token-auth-file": self._folder / "tokens.csv",
            "authorization-mode": "RBAC",
            "service-account-issuer": _ISSUER,
            "service-account-key-file": self._key,
            "service-account-signing-key-file": self._key,
            "service-cluster-ip-range": "10.0.0.0/24",
            "endpoint-reconciler-type": "none",
            "disable-admission-plugins": "ServiceAccount",  # wants a secret for each, which a controller makes
            "audit-log-path": self._folder / "audit.log",
            "audit-policy-file": self._audit_policy(),
        }
        command = [str(binary()), *(f"--{name}={value}" for name, value in options.items())]
        with (self._folder / "apiserver.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        end = time.monotonic() + PATIENCE_S
        while not self._is_ready():
            assert self._process.poll() is None, (self._folder / "apiserver.log").read_text()[-3000:]
            assert time.monotonic() < end, "kube-apiserver does not get ready"
            time.sleep(0.1)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self.resume()
        self.kill()
        self.etcd.stop()

    def rss_mib(self) -> float:
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def _audit_policy(self) -> Path:
        path = self._folder / "audit.json"
        rules = {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "rules": [{"level": "Metadata"}]}
        path.write_text(json.dumps(rules | {"omitStages": ["RequestReceived"]}))
        return path

    def _is_ready(self) -> bool:
        try:
            return self.ask("GET", "readyz", is_json=False) == "ok"
        except (OSError, ApiRefusedError):
            return False

    # --- as its admin ---------------------------------------------------------------------------------

    def ask(
        self, method: str, path: str, body: Any = None, *, token: str = ADMIN, body_type: str = "application/json",
        accept: str = "application/json", is_json: bool = True,
    ) -> Any:  # fmt: skip
        """Return what the server answers. Raises ApiRefusedError."""
        request = urllib.request.Request(f"{self.url}/{path}", method=method)
        request.add_header("Authorization", f"Bearer {token}")
        request.add_header("Content-Type", body_type)
        request.add_header("Accept", accept)
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(request, data, timeout=10, context=self._tls()) as answer:
                content = answer.read().decode()
        except urllib.error.HTTPError as error:
            raise ApiRefusedError(error.code, error.read().decode()) from error
        return json.loads(content) if is_json else content

    def install(self, objects: list[dict[str, Any]]) -> None:
        """Make objects, or replace them, and wait until custom resources are served."""
        for one in objects:
            path = f"{collection_of(one)}/{one['metadata']['name']}?fieldManager=test&force=true"
            self.ask("PATCH", path, one, body_type="application/apply-patch+yaml")
        for one in objects:
            if one["kind"] == "CustomResourceDefinition":
                self._until_served(one["spec"])

    def add_namespace(self, name: str) -> None:
        self.install([{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}])

    def account_token(self, namespace: str, name: str) -> str:
        """Return a token as the kubelet would put it into a pod of that service account."""
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
        answer = self.ask("POST", f"api/v1/namespaces/{namespace}/serviceaccounts/{name}/token", body)
        return str(answer["status"]["token"])

    def add_pod(self, namespace: str, name: str, labels: dict[str, str], *, node: str = "") -> str:
        """Make a pod that is not ready, and return its uid. One with a node stays until `remove_pod` forces it."""
        spec: dict[str, Any] = {"containers": [{"name": "kvmesh", "image": "none"}]}
        spec |= {"nodeName": node} if node else {}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}
        return str(self.ask("POST", f"api/v1/namespaces/{namespace}/pods", pod)["metadata"]["uid"])

    def set_ready(self, namespace: str, name: str, is_ready: bool = True) -> None:
        """Set what a kubelet would."""
        status = {"conditions": [{"type": "Ready", "status": "True" if is_ready else "False"}]}
        path = f"api/v1/namespaces/{namespace}/pods/{name}/status"
        self.ask("PATCH", path, {"status": status}, body_type="application/strategic-merge-patch+json")

    def remove_pod(self, namespace: str, name: str, *, grace_s: int = 0) -> None:
        self.ask("DELETE", f"api/v1/namespaces/{namespace}/pods/{name}?gracePeriodSeconds={grace_s}")

    def requests(self, user: str) -> list[tuple[str, str]]:
        """Return verb and resource of all requests of a user that were answered, in order, from the audit log."""
        found = []
        for line in (self._folder / "audit.log").read_text().splitlines():
            event = json.loads(line)
            if event["user"].get("username", "") == user and event["stage"] != "ResponseStarted":
                found.append((event["verb"], event.get("objectRef", {}).get("resource", "")))
        return found

    def requests_since(self, unix_s: float, users: set[str]) -> list[tuple[str, str, str]]:
        """Return user, verb and resource of what users have asked since then, watches that go on among it."""
        found: dict[str, tuple[str, str, str]] = {}
        for line in (self._folder / "audit.log").read_text().splitlines():
            event = json.loads(line)
            user, since = event["user"].get("username", ""), event["requestReceivedTimestamp"]
            if user in users and datetime.fromisoformat(since).timestamp() >= unix_s:
                found[event["auditID"]] = (user, event["verb"], event.get("objectRef", {}).get("resource", ""))
        return list(found.values())

    def _until_served(self, spec: dict[str, Any]) -> None:
        path = f"apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                self.ask("GET", path)
                return
            except ApiRefusedError:
                assert time.monotonic() < end, f"{path} is not served"
                time.sleep(0.1)

    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.ca_file))


def collection_of(content: dict[str, Any]) -> str:
    """Return the path of an object's collection."""
    version, kind = content["apiVersion"], content["kind"]
    root = f"apis/{version}" if "/" in version else f"api/{version}"
    plural = f"{kind.lower()}s"
    namespace = content["metadata"].get("namespace")
    return f"{root}/namespaces/{namespace}/{plural}" if namespace else f"{root}/{plural}"
