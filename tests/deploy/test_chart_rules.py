"""The chart keeps its rules for all values: flags, ports, rights, grace periods and selectors fit each other."""

import json
import re
from collections.abc import Iterator

import pytest
from prometheus_client import generate_latest

import kvmesh.frontend.metrics  # noqa: F401  # its metrics register themselves
from kvmesh.frontend.config import FrontendConfig
from kvmesh.mesh.config import load
from kvmesh.planner.config import ServiceConfig
from kvmesh.planner.connectors.kubernetes.connector import workload_path
from kvmesh.router.config import RouterConfig
from kvmesh.workers.config import WorkerConfig, with_engine_args
from kvmesh.workers.engines.registry import STARTED
from kvmesh.workers.engines.sglang.arguments import read_flags
from kvmesh.workers.engines.vllm.arguments import Surroundings, leads, plan_start
from tests.support.chart import (
    CHART,
    EXAMPLES,
    NAMESPACE,
    RELEASE,
    Object,
    container_of,
    containers,
    flags_of,
    in_a_pod,
    named,
    needs_helm,
    of_kind,
    pods,
    refused,
    rendered,
)

pytestmark = needs_helm

SGLANG = ('pools.decode.engine="sglang"', "pools.decode.nodes=2", 'pools.decode.engineArgs=["--tp", "16"]')
NATS = ('events.transport="nats"', 'events.natsSecrets={"worker": "nats-worker", "router": "nats-router"}')
PICKER = (
    *("endpointPicker.enabled=true", 'endpointPicker.tlsSecret="tls"', 'endpointPicker.failureMode="FailOpen"'),
    "endpointPicker.gatewaysNeedCertificates=true",
)
CASES = [
    *((example, ()) for example in EXAMPLES),
    ("values-tiny.yaml", ("router.separate=true", "planner.enabled=true", 'planner.settings.prefill_profile="mock"')),
    ("values-tiny.yaml", ("planner.enabled=true", 'planner.settings={"mode": "aggregated", "max_gpus": 1048576}')),
    ("values-tiny.yaml", (*NATS, 'frontend.apiKeysSecret="keys"', *SGLANG)),
    ("values-tiny.yaml", (*PICKER, *NATS, "router.separate=true")),
    ("values-70b-two-node-engines.yaml", PICKER),
]
every_case = pytest.mark.parametrize(("example", "settings"), CASES)


def parsed(container: Object) -> FrontendConfig | RouterConfig | ServiceConfig | WorkerConfig:
    """Read the container's flags and variables as its service does. Raise ConfigError as the service would."""
    argv, environ = in_a_pod(container)
    match container["command"]:
        case ["kvmesh", "frontend"]:
            load(RouterConfig, [], environ, prefix="KVMESH_ROUTER_", prog="router", section="router")
            return load(FrontendConfig, argv, environ, prefix="KVMESH_FRONTEND_", prog="frontend")
        case ["kvmesh", "router"]:  # or an endpoint picker
            return load(RouterConfig, argv, environ, prefix="KVMESH_ROUTER_", prog="router")
        case ["kvmesh", "planner"]:
            return load(ServiceConfig, argv, environ, prefix="KVMESH_PLANNER_", prog="planner")
        case ["kvmesh", "worker"]:
            return load(WorkerConfig, with_engine_args(argv), environ, prefix="KVMESH_WORKER_", prog="worker")
    raise AssertionError(container["command"])


@every_case
def test_every_flag_and_variable_is_one_of_the_service(example: str, settings: tuple[str, ...]) -> None:
    for name, _, container in containers(rendered(example, *settings)):
        config = parsed(container)
        assert config.discovery == f"kubernetes:{NAMESPACE}/{RELEASE}", name
        if isinstance(config, WorkerConfig) and config.engine == "vllm":
            plan_start(config, config.model, (), Surroundings(5600, 8))
            assert leads(config) == ("--nnodes" not in config.engine_args)  # in_a_pod says: pod 1 of 2
        if isinstance(config, WorkerConfig) and config.engine == "sglang":
            assert read_flags(config).node_rank == 1


def test_pools_may_have_the_engines_that_workers_start() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert set(schema["definitions"]["pool"]["properties"]["engine"]["enum"]) == set(STARTED)


def test_large_numbers_arrive_as_they_were_written() -> None:
    objects = rendered("values-tiny.yaml", "pools.decode.settings.num_blocks=104857600")
    config = parsed(container_of(objects, "demo-decode"))
    assert isinstance(config, WorkerConfig) and config.num_blocks == 104857600


@pytest.mark.parametrize("place", ["frontend", "router", "planner", "pools.decode"])
def test_what_the_chart_decides_cannot_be_set_again(place: str) -> None:
    objects = rendered("values-tiny.yaml", "router.separate=true", "planner.enabled=true")
    container = container_of(objects, f"demo-{place.removeprefix('pools.')}")
    decided = [flag.removeprefix("--").replace("-", "_") for flag in flags_of(container)]
    values = ", ".join(f'"{one}": 1' for one in decided)
    text = refused("router.separate=true", "planner.enabled=true", f"{place}.settings={{{values}}}")
    assert f"{place}.settings: the chart itself decides" in text
    assert all(re.search(rf"\b{one}\b", text) for one in decided)


@every_case
def test_a_pod_has_more_time_to_stop_than_a_drain_takes(example: str, settings: tuple[str, ...]) -> None:
    """Requests in flight have the drain's time, and KV that others still fetch once more."""
    for name, pod, container in containers(rendered(example, *settings)):
        drain_s = float(flags_of(container).get("--drain-timeout-s", "0"))  # a planner has nothing to drain
        program, before_s = container["lifecycle"]["preStop"]["exec"]["command"]
        assert pod["spec"]["terminationGracePeriodSeconds"] >= float(before_s) + 2 * drain_s + 10, name
        assert program == "sleep" and float(before_s) > 0


@every_case
def test_selectors_find_the_pods_and_no_others(example: str, settings: tuple[str, ...]) -> None:
    objects = rendered(example, *settings)
    labels_of = {name: pod["metadata"]["labels"] for name, pod in pods(objects)}
    assert all(labels["kvmesh.dev/mesh"] == RELEASE for labels in labels_of.values())
    for one in of_kind(objects, "Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy", "PodMonitor"):
        spec, name = one["spec"], one["metadata"]["name"]
        selector = spec.get("podSelector") or spec["selector"]
        found = [owner for owner, labels in labels_of.items() if selector_fits(selector, labels)]
        is_of_all_workers = one["kind"] == "PodMonitor" and name == "demo-worker"
        workers = [owner for owner, labels in labels_of.items() if "kvmesh.dev/pool" in labels]
        assert found == (workers if is_of_all_workers else [name]), (one["kind"], name)
    for _, pod in pods(objects):
        [constraint] = pod["spec"]["topologySpreadConstraints"]
        assert selector_fits(constraint["labelSelector"], pod["metadata"]["labels"])


def selector_fits(selector: Object, labels: dict[str, str]) -> bool:
    wanted = selector.get("matchLabels", selector)
    return wanted.items() <= labels.items()


@every_case
def test_policies_open_the_ports_on_which_pods_listen(example: str, settings: tuple[str, ...]) -> None:
    objects = rendered(example, *settings)
    wanted: dict[str, set[tuple[int, int]]] = {}
    for name, _, container in containers(objects):
        own = listening(container)
        wanted.setdefault(name, set()).update(own)
        assert {(port["containerPort"], port["containerPort"]) for port in container["ports"]} <= own
    assert {name: set(ports_of(named(objects, "NetworkPolicy", name))) for name in wanted} == wanted


def ports_of(policy: Object) -> Iterator[tuple[int, int]]:
    for rule in policy["spec"].get("ingress", []):
        for port in rule.get("ports", []):
            yield port["port"], port.get("endPort", port["port"])


def listening(container: Object) -> set[tuple[int, int]]:
    """Return the first and last port of each range on which the flags and variables of a container have it listen."""
    config, (_, environ) = parsed(container), in_a_pod(container)
    singles: set[int] = set()
    ranges: set[tuple[int, int]] = set()
    match config:
        case FrontendConfig():
            router = load(RouterConfig, [], environ, prefix="KVMESH_ROUTER_", prog="router")
            singles = {config.port} | ({router.gossip_port} if config.router == "embedded" else set())
            if config.api_keys_file or config.jwt_keys:
                singles.add(config.limits_port)
        case RouterConfig(ext_proc_port=None):
            singles = {config.port, config.http_port, config.gossip_port}
        case RouterConfig():
            singles = {config.ext_proc_port or 0, config.http_port, config.gossip_port}
        case ServiceConfig():
            singles = {config.metrics_port}
        case WorkerConfig():
            singles = {config.port, config.metrics_port}
            if config.kv_events_transport == "zmq":
                ranges.add(both_ends(config.kv_events_ports))
            if config.engine not in ("sglang", "trtllm"):
                ranges.add(both_ends(environ["UCX_TCP_PORT_RANGE"]))
            if config.engine == "vllm":
                first = int(environ["VLLM_NIXL_SIDE_CHANNEL_PORT"])
                ranges.add((first, first + 63))  # a port for each of at most 64 ranks: --dp-size
    assert 0 not in singles
    return {(port, port) for port in singles} | ranges


def both_ends(ports: str) -> tuple[int, int]:
    first, last = ports.split("-")
    return int(first), int(last)


@every_case
def test_pods_run_without_rights_on_their_host(example: str, settings: tuple[str, ...]) -> None:
    for name, pod, container in containers(rendered(example, *settings)):
        spec, security = pod["spec"], container["securityContext"]
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] == 10001, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not security["allowPrivilegeEscalation"] and security["readOnlyRootFilesystem"]
        has_rdma = any(resource.startswith("rdma/") for resource in container["resources"]["limits"])
        wanted = {"drop": ["ALL"]} | ({"add": ["IPC_LOCK"]} if has_rdma else {})
        assert security["capabilities"] == wanted
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()


@every_case
def test_no_pod_gets_variables_named_after_services(example: str, settings: tuple[str, ...]) -> None:
    """Kubernetes would set KVMESH_FRONTEND_PORT=tcp://... for a release called kvmesh: a bad setting."""
    assert all(pod["spec"]["enableServiceLinks"] is False for _, pod in pods(rendered(example, *settings)))


@every_case
def test_what_a_process_writes_to_lies_on_a_volume(example: str, settings: tuple[str, ...]) -> None:
    for name, pod in pods(rendered(example, *settings)):
        used = {mount["name"] for one in pod["spec"]["containers"] for mount in one["volumeMounts"]}
        assert used == {volume["name"] for volume in pod["spec"]["volumes"]}, name
    for name, _, container in containers(rendered(example, *settings)):
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        for flag in (
            "--model-cache",
            "--record-file",
            "--api-keys-file",
            "--ext-proc-tls-cert",
            "--ext-proc-client-ca",
        ):
            if path := flags_of(container).get(flag):
                assert any(path.startswith(mount) for mount in mounts), (name, flag)
        if "--kv-events-transport" in flags_of(container):
            assert "/dev/shm" in mounts


@every_case
def test_a_probe_asks_a_port_of_the_container(example: str, settings: tuple[str, ...]) -> None:
    for name, _, container in containers(rendered(example, *settings)):
        ports = {port["name"] for port in container["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"]["port"] in ports, (name, probe)
        assert container["livenessProbe"]["httpGet"]["path"] != "/health", "a mesh without workers is no reason to die"


@every_case
def test_accounts_and_roles_belong_to_pods_of_the_chart(example: str, settings: tuple[str, ...]) -> None:
    objects = rendered(example, *settings)
    accounts = {one["metadata"]["name"] for one in of_kind(objects, "ServiceAccount")}
    assert {pod["spec"]["serviceAccountName"] for _, pod in pods(objects)} <= accounts
    for role in of_kind(objects, "Role"):
        for rule in role["rules"]:
            assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]], role["metadata"]["name"]
            assert "secrets" not in rule["resources"]
    assert not of_kind(objects, "ClusterRole", "ClusterRoleBinding")


def test_the_planner_scales_workloads_that_its_role_names() -> None:
    for settings in ((), ('pools.decode.engine="vllm"', "pools.decode.nodes=2")):
        objects = rendered("values-tiny.yaml", "planner.enabled=true", *settings)
        flags = flags_of(container_of(objects, "demo-planner"))
        pools = {one["metadata"]["name"]: one for one in of_kind(objects, "Deployment", "LeaderWorkerSet")}
        rules = named(objects, "Role", "demo-planner")["rules"]
        for flag in ("--kubernetes-prefill", "--kubernetes-decode"):
            kind, name = flags[flag].split("/")
            assert pools[name]["kind"].lower() == kind
            workload_path(flags[flag], NAMESPACE)
            for resource, verbs in ((f"{kind}s", {"get"}), (f"{kind}s/scale", {"get", "patch"})):
                [rule] = [one for one in rules if resource in one["resources"]]
                assert name in rule["resourceNames"] and set(rule["verbs"]) == verbs


SLO = ("planner.enabled=true", 'planner.settings={"ttft_slo_s":0.7,"itl_slo_s":0.03}')
SEPARATE = "router.separate=true"


def slo_of(part: str, *settings: str) -> dict[str, str]:
    """Return what the variables of a part's container say of the SLO."""
    _, environ = in_a_pod(container_of(rendered("values-tiny.yaml", *settings), f"demo-{part}"))
    return {name.removeprefix("KVMESH_"): text for name, text in environ.items() if "SLO" in name}


def test_frontends_and_routers_have_the_slo_of_the_planner() -> None:
    assert slo_of("frontend") == slo_of("frontend", SLO[1]) == slo_of("router", SEPARATE) == {}
    assert slo_of("frontend", *SLO) == {"FRONTEND_SLO_TTFT_S": "0.7", "FRONTEND_SLO_ITL_S": "0.03"}
    assert slo_of("router", SEPARATE, *SLO) == {"ROUTER_SLO_ITL_S": "0.03"}
    assert slo_of("picker", "endpointPicker.enabled=true", *SLO) == {"ROUTER_SLO_ITL_S": "0.03"}


def test_an_slo_of_their_own_wins() -> None:
    own = 'frontend.settings={"slo_itl_s":0.2}'
    assert slo_of("frontend", own, *SLO) == {"FRONTEND_SLO_TTFT_S": "0.7", "FRONTEND_SLO_ITL_S": "0.2"}
    assert slo_of("router", SEPARATE, own, *SLO) == {"ROUTER_SLO_ITL_S": "0.2"}
    assert slo_of("router", SEPARATE, 'router.settings={"slo_itl_s":0}', own, *SLO) == {"ROUTER_SLO_ITL_S": "0"}


def test_workers_and_routers_have_users_of_their_own_at_nats() -> None:
    objects = rendered("values-tiny.yaml", *NATS, "router.separate=true")
    for workload, user in (("demo-prefill", "worker"), ("demo-decode", "worker"), ("demo-router", "router")):
        assert f"?user={user}&" in flags_of(container_of(objects, workload))["--nats-url"]
        [volume] = [
            one
            for one in named(objects, "Deployment", workload)["spec"]["template"]["spec"]["volumes"]
            if one["name"] == "nats"
        ]
        assert volume["secret"]["secretName"] == f"nats-{user}"


def test_frontends_are_scaled_by_a_metric_that_they_have() -> None:
    objects = rendered("values-tiny.yaml", "frontend.autoscaling.enabled=true")
    scaler = named(objects, "HorizontalPodAutoscaler", "demo-frontend")["spec"]
    [metric] = scaler["metrics"]
    assert f"\n{metric['pods']['metric']['name']} ".encode() in generate_latest()
    assert scaler["scaleTargetRef"]["name"] == "demo-frontend"


def test_gpus_and_rdma_devices_are_asked_for_by_name() -> None:
    objects = rendered("values-8b-4-nodes.yaml")
    limits = container_of(objects, "demo-decode")["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == limits["rdma/hca_shared_devices_a"] == "1"


def test_an_engine_over_two_nodes_is_one_group_of_pods() -> None:
    objects = rendered("values-70b-two-node-engines.yaml")
    group = named(objects, "LeaderWorkerSet", "demo-decode")["spec"]["leaderWorkerTemplate"]
    assert group["size"] == 2 and group["restartPolicy"] == "RecreateGroupOnPodRestart"
    argv, _ = in_a_pod(container_of(objects, "demo-decode"))
    assert {"--nnodes=2", "--node-rank=1", "--master-addr=demo-0.demo.llm"} <= set(argv)


def test_a_gateway_finds_pods_with_a_frontend_and_its_picker() -> None:
    objects = rendered("values-tiny.yaml", *PICKER, 'endpointPicker.parentRefs=[{"name": "front-door"}]')
    [pool], [route] = of_kind(objects, "InferencePool"), of_kind(objects, "HTTPRoute")
    assert route["spec"]["rules"][0]["backendRefs"][0]["name"] == pool["metadata"]["name"] == RELEASE
    selected = {
        name for name, pod in pods(objects) if selector_fits(pool["spec"]["selector"], pod["metadata"]["labels"])
    }
    assert selected == {"demo-decode"}
    [target] = pool["spec"]["targetPorts"]
    worker, frontend = container_of(objects, "demo-decode", "worker"), container_of(objects, "demo-decode", "frontend")
    assert flags_of(worker)["--http-endpoint"] == f"$(KVMESH_POD_IP):{target['number']}"
    assert flags_of(frontend)["--router"] == "direct" and int(flags_of(frontend)["--port"]) == target["number"]
    service = named(objects, "Service", pool["spec"]["endpointPickerRef"]["name"])
    assert service["spec"]["ports"][0]["port"] == pool["spec"]["endpointPickerRef"]["port"]["number"]
    assert int(flags_of(container_of(objects, "demo-picker"))["--ext-proc-port"]) == 9002


def test_a_pod_is_ready_without_being_known_to_others() -> None:
    """The frontend beside a worker is ready at once: it waits for the worker, which counts once the pod is ready."""
    probe = container_of(rendered("values-tiny.yaml", *PICKER), "demo-decode", "frontend")["readinessProbe"]
    assert probe["httpGet"]["path"] == "/live"


def test_headers_of_a_picker_are_believed_from_gateways_alone() -> None:
    policy = named(rendered("values-tiny.yaml", *PICKER), "NetworkPolicy", "demo-decode")
    [rule] = [one for one in policy["spec"]["ingress"] if {"protocol": "TCP", "port": 8000} in one["ports"]]
    gateway, planner = rule["from"]
    assert gateway["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "envoy-gateway-system"}
    assert planner["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "planner"


def test_of_an_engine_over_nodes_the_leader_alone_is_an_endpoint() -> None:
    objects = rendered("values-70b-two-node-engines.yaml", *PICKER)
    found = [[one["name"] for one in pod["spec"]["containers"]] for name, pod in pods(objects) if name == "demo-decode"]
    assert found == [["worker", "frontend"], ["worker"]]
