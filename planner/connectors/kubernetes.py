"""Scale Deployments, StatefulSets or LeaderWorkerSets through their scale subresource, as the pod's service account.

The account needs `get` on the workloads, `get` and `patch` on their /scale: docs/planner-operations.md has the Role.
"""

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from planner.config import ServiceConfig, has_prefill_role
from planner.connectors.connector import Applied, ConnectorError, Fleets, Present, check_distinct
from planner.connectors.steps import applied_of, steps_to
from planner.model import RoleFleet, ScalingDecision
from planner.scrape import bounded
from protocol.errors import ConfigError, WireError
from protocol.messages import UNREADABLE

TIMEOUT_S = 15.0
MAX_BODY_BYTES = 4 << 20
TRIES = 3  # of a patch that conflicts with another change
_KINDS = {
    "deployment": "apis/apps/v1/namespaces/{namespace}/deployments/{name}",
    "statefulset": "apis/apps/v1/namespaces/{namespace}/statefulsets/{name}",
    "leaderworkerset": "apis/leaderworkerset.x-k8s.io/v1/namespaces/{namespace}/leaderworkersets/{name}",
}


@dataclass(frozen=True, slots=True)
class Account:
    """The address of the API server, and the credentials for it."""

    url: str
    namespace: str
    token_file: Path  # Kubernetes renews it while we run
    ca_file: Path | None


def account_of(folder: str, url: str, namespace: str) -> Account:
    """Read the account from the files that Kubernetes puts into a pod. Raise ConfigError outside of a pod."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not url and not host:
        raise ConfigError("there is no Kubernetes here", hint="run the planner in a pod, or set --kubernetes-url")
    files = Path(folder)
    if not namespace:
        try:
            namespace = (files / "namespace").read_text().strip()
        except OSError as error:
            raise ConfigError(f"no namespace in {folder}: {error}", hint="set --kubernetes-namespace") from error
    shown = f"[{host}]" if ":" in host else host
    ca_file = files / "ca.crt"
    return Account(
        url.rstrip("/") or f"https://{shown}:{port}", namespace, files / "token", ca_file if ca_file.exists() else None
    )


def workload_path(workload: str, namespace: str) -> str:
    """Return the path of a workload such as `deployment/decode`. Raise ConfigError if it is not one."""
    kind, _, name = workload.partition("/")
    if kind not in _KINDS or not name or not all(c.isalnum() or c in "-." for c in name):
        raise ConfigError(f"no workload {workload!r}", hint=f"write <kind>/<name>, kind: {', '.join(_KINDS)}")
    return _KINDS[kind].format(namespace=namespace, name=name)


class KubernetesConnector:
    name = "kubernetes"

    def __init__(self, account: Account, *, prefill: str, decode: str) -> None:
        """Raise ConfigError if a workload cannot be read, or both roles are one workload.

        `prefill` and `decode` are <kind>/<name>; "" means no prefill workers.
        """
        check_distinct(self.name, prefill, decode)
        self._account = account
        self._prefill = workload_path(prefill, account.namespace) if prefill else ""
        self._decode = workload_path(decode, account.namespace)
        self._http: aiohttp.ClientSession | None = None
        self._tls: ssl.SSLContext | bool = True  # True: the certificates of this host

    async def fleets(self) -> Fleets:
        prefill = fleet_of(await self._call("GET", self._prefill)) if self._prefill else RoleFleet(ready=0)
        return Fleets(prefill=prefill, decode=fleet_of(await self._call("GET", self._decode)))

    async def apply(self, decision: ScalingDecision) -> Applied:
        fleets = await self.fleets()
        steps = steps_to(decision, fleets, name=self.name, can_flip=False, can_choose=False)
        changes = [(self._decode, fleets.decode, steps.decode)]
        changes += [(self._prefill, fleets.prefill, steps.prefill)] if self._prefill else []
        # Scale up before down: if the second call fails, there are too many workers rather than too few.
        for path, fleet, count in sorted(changes, key=lambda change: change[2] < change[1].ordered):
            if count != fleet.ordered:
                await self._scale(path, count)
        return applied_of(decision, steps.prefill, steps.decode, 0, steps.notes)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def _scale(self, path: str, count: int) -> None:
        for tries in range(TRIES):
            try:
                scale = await self._call("PATCH", f"{path}/scale", {"spec": {"replicas": count}})
            except ConflictError:
                if tries + 1 == TRIES:
                    raise
                continue
            if (told := _number(scale, "spec", "replicas")) != count:
                raise ConnectorError(f"{path} was asked to have {count} replicas, and has {told} in its spec")
            return

    async def _call(self, method: str, path: str, body: object = None) -> Any:
        """Return the JSON object of the answer. Raise ConnectorError for any other answer."""
        if self._http is None:
            self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(TIMEOUT_S))
            if self._account.ca_file is not None:
                self._tls = ssl.create_default_context(cafile=str(self._account.ca_file))
        url = f"{self._account.url}/{path}"
        data = None if body is None else msgspec.json.encode(body)
        try:
            headers = {"authorization": f"Bearer {self._account.token_file.read_text().strip()}"}
            headers |= {} if body is None else {"content-type": "application/merge-patch+json"}
            async with self._http.request(method, url, data=data, headers=headers, ssl=self._tls) as response:
                content = await bounded(response, MAX_BODY_BYTES)
            answer = msgspec.json.decode(content)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ConnectorError(f"{method} {url}: {error or f'no answer within {TIMEOUT_S:g} s'}") from error
        except (*UNREADABLE, WireError) as error:
            raise ConnectorError(f"{method} {url} answered {response.status}, not with JSON: {error}") from error
        if response.status == 409:
            raise ConflictError(f"{method} {url}: another change came first")
        if response.status != 200 or not isinstance(answer, dict):
            said = answer.get("message", "") if isinstance(answer, dict) else content[:200].decode(errors="replace")
            hint = "give the planner's service account the Role of docs/planner-operations.md"
            raise ConnectorError(
                f"{method} {url} answered {response.status}: {said}", hint=hint if response.status in (401, 403) else ""
            )
        return answer


async def open_connector(config: ServiceConfig, present: Present) -> KubernetesConnector:
    """Raise ConfigError outside of a cluster, or for settings that do not fit together."""
    account = account_of(config.kubernetes_account, config.kubernetes_url, config.kubernetes_namespace)
    prefill = config.kubernetes_prefill if has_prefill_role(config) else ""
    return KubernetesConnector(account, prefill=prefill, decode=config.kubernetes_decode)


class ConflictError(ConnectorError):
    """Another client has changed the workload at the same time."""


def fleet_of(workload: Any) -> RoleFleet:
    """Count the pods of a Deployment, StatefulSet or LeaderWorkerSet. Raise ConnectorError for any other object.

    `status.replicas` counts all pods that exist, ready or not. Pods beyond `spec.replicas` are draining.
    """
    wanted = _number(workload, "spec", "replicas", default=1)
    exist = _number(workload, "status", "replicas", default=0)
    ready = min(_number(workload, "status", "readyReplicas", default=0), wanted)
    return RoleFleet(ready=ready, starting=wanted - ready, draining=max(0, exist - wanted))


def _number(content: Any, *keys: str, default: int | None = None) -> int:
    try:
        for key in keys:
            content = content[key]
        value = int(content)
    except (KeyError, TypeError, ValueError) as error:
        if default is not None and isinstance(error, KeyError):
            return default
        raise ConnectorError(f"the API server's answer has no number at {'.'.join(keys)}") from error
    if value < 0:
        raise ConnectorError(f"the API server's answer has {value} at {'.'.join(keys)}")
    return value
