"""Scale Deployments, StatefulSets or LeaderWorkerSets through their scale subresource, as the pod's service account.

The account needs `get` on the workloads, `get` and `patch` on their /scale: docs/planner-operations.md has the Role.
"""

from typing import Any

from kvmesh.mesh.discovery.kubernetes.api import Account, ApiTarget, KubernetesApi, KubernetesError, account_of
from kvmesh.planner.config import ServiceConfig, has_prefill_role
from kvmesh.planner.connectors.connector import Applied, ConnectorError, Fleets, Present, check_distinct
from kvmesh.planner.connectors.steps import applied_of, steps_to
from kvmesh.planner.model import RoleFleet, ScalingDecision
from kvmesh.protocol.errors import ConfigError

TRIES = 3  # of a patch that conflicts with another change
_KINDS = {
    "deployment": "apis/apps/v1/namespaces/{namespace}/deployments/{name}",
    "statefulset": "apis/apps/v1/namespaces/{namespace}/statefulsets/{name}",
    "leaderworkerset": "apis/leaderworkerset.x-k8s.io/v1/namespaces/{namespace}/leaderworkersets/{name}",
}


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
        self._prefill = workload_path(prefill, account.namespace) if prefill else ""
        self._decode = workload_path(decode, account.namespace)
        self._api = KubernetesApi(account)

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
        await self._api.close()

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
        target = ApiTarget(path, method.lower(), resource_of(path))
        try:
            return await self._api.ask_json(method, target, body=body, body_type="application/merge-patch+json")
        except KubernetesError as error:
            if error.status == 409:
                raise ConflictError(f"{method} {path}: another change came first") from error
            raise ConnectorError(error.message, hint=error.hint) from error


def resource_of(path: str) -> str:
    """Return the resource of a workload's path as a Role names it, with its API group."""
    _, group, _, _, _, kind, _, *sub = path.split("/")
    return "/".join([f"{kind}.{group}", *sub])


async def open_connector(config: ServiceConfig, present: Present) -> KubernetesConnector:
    """Raise ConfigError outside of a cluster, or for settings that do not fit together."""
    setting = "--kubernetes-url and --kubernetes-namespace"
    account = account_of(config.kubernetes_account, config.kubernetes_url, config.kubernetes_namespace, setting=setting)
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
