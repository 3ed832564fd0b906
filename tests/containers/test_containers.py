"""docker-compose.yml in real containers, from the images to `down`: the tests run in the order of this file.

They run the commands of docs/cluster.md, "Compose".
"""

import json
import os
import re
import signal
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.containers.engine import Engine
from tests.containers.images import COMPOSE, Images
from tests.containers.mesh import EAGER_PLANNER, PROJECT, ComposedMesh, guide_line, guide_lines

pytestmark = pytest.mark.timeout(2400)

CONTROL, WORKER = "kvmesh/control:0.3.0", "kvmesh/worker:0.3.0"
MOST_MB = {CONTROL: 300, WORKER: 1000}
SERVICES = [name for name, service in COMPOSE.items() if "profiles" not in service and service["restart"] != "no"]


# --- the images ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("image", [CONTROL, WORKER])
def test_an_image_is_small(engine: Engine, images: Images, image: str) -> None:
    size_mb = int(engine.run("image", "inspect", "--format", "{{.Size}}", image)) / 1e6
    print(f"{image}: {size_mb:.0f} MB")
    assert size_mb <= MOST_MB[image]


@pytest.mark.parametrize("image", [CONTROL, WORKER])
def test_an_image_has_an_ordinary_user_and_no_compiler(engine: Engine, images: Images, image: str) -> None:
    script = "id -u; id -g; for one in gcc g++ cc make pip; do command -v $one; done; true"
    assert engine.run("run", "--rm", image, "sh", "-c", script).split() == ["10001", "10001"]


def test_the_control_image_has_neither_torch_nor_a_model(engine: Engine, images: Images) -> None:
    script = (
        "import importlib.util as u;"
        "import kvmesh.frontend.service, kvmesh.router.service, kvmesh.planner.service, kvmesh.router._native;"
        "print([name for name in ('torch', 'nixl', 'transformers') if u.find_spec(name)])"
    )
    assert engine.run("run", "--rm", CONTROL, "python", "-c", script).strip() == "[]"
    assert engine.run("run", "--rm", CONTROL, "sh", "-c", "ls /models 2>/dev/null; true").strip() == ""


def test_images_carry_the_labels_of_their_release(engine: Engine, images: Images) -> None:
    for image in (CONTROL, WORKER):
        [read] = engine.inspect(image)
        labels = (read.get("Config") or read)["Labels"]
        assert labels["org.opencontainers.image.version"] == image.rpartition(":")[2]
        assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"


def test_every_command_of_the_guide_is_run_by_a_test_of_this_file() -> None:
    named = re.findall(
        r'(?:guided|guide_line)\("(.*?)"\)|"((?:python3|docker compose) [^"]*)"', Path(__file__).read_text()
    )
    run = {one or other for one, other in named}
    for line in guide_lines():
        assert any(line == one or (one.endswith("...") and line.startswith(one[:-3])) for one in run), line


# --- from nothing to the first token ------------------------------------------------------------------


def test_the_first_token_comes_over_prefill_and_decode(mesh: ComposedMesh) -> None:
    for command in ("python3 deploy/make_secrets.py", "docker compose build", "docker compose up -d"):
        mesh.guided(command)
    joined_s = mesh.until(lambda: mesh.workers() == {"aggregated": 0, "prefill": 1, "decode": 2}, "three workers")
    reply = json.loads(mesh.guided("curl -s ..."))
    assert reply["choices"][0]["message"]["content"].strip()
    trace = reply["kvmesh"]
    assert trace["prefill_worker"].startswith("prefill-")
    assert trace["decode_worker"].startswith("decode-")
    assert (trace["transfer"], trace["pull_error"]) == ("nixl", "")
    assert trace["kv_bytes_pulled"] > 0
    pulled = mesh.pulls()
    assert pulled["kv_pulls_total"] == 1
    assert pulled["kv_pulled_bytes_total"] == trace["kv_bytes_pulled"]
    print(f"three workers {joined_s:.0f} s after `up`, {trace['kv_bytes_pulled']} bytes pulled over nixl")


def test_every_service_becomes_healthy(mesh: ComposedMesh) -> None:
    for service in SERVICES:
        count = COMPOSE[service].get("scale", 1)
        mesh.until(lambda s=service, n=count: mesh.are_healthy(s, n), f"{service} is healthy")  # type: ignore[misc]
    assert "healthy" in mesh.guided("docker compose ps") or mesh.engine.is_podman


def test_containers_have_no_rights_and_a_root_that_cannot_be_written(mesh: ComposedMesh) -> None:
    for container in mesh.containers(*SERVICES):
        script = "grep -E '^(Uid|CapEff|CapBnd|NoNewPrivs)' /proc/1/status; touch /x 2>&1; true"
        said = mesh.engine.run("exec", container["Id"], "sh", "-c", script) if has_shell(container) else ""
        if said:
            fields = dict(line.split(":", 1) for line in said.splitlines() if re.match(r"[A-Z]\w+:", line))
            assert fields["Uid"].split() == ["10001"] * 4, container["Name"]
            assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0, container["Name"]
            assert fields["NoNewPrivs"].strip() == "1", container["Name"]
            assert "Read-only file system" in said, container["Name"]
        assert container["HostConfig"]["ReadonlyRootfs"], container["Name"]
        assert container["HostConfig"]["Memory"] > 0, container["Name"]


def has_shell(container: dict[str, dict[str, str]]) -> bool:
    """etcd's own image has none."""
    return "coreos/etcd" not in container["Config"]["Image"]


def test_etcd_and_nats_let_nobody_in_without_a_password(mesh: ComposedMesh) -> None:
    router = mesh.engine.ids(PROJECT, "router")[0]
    script = (
        "import asyncio, nats, grpc; from aetcd import rpc\n"
        "try: rpc.KVStub(grpc.insecure_channel('etcd:2379')).Range(rpc.RangeRequest(key=b'/kvmesh/'), timeout=5)\n"
        "except grpc.RpcError as error: print(error.details())\n"
        "async def no(error): pass\n"
        "try: asyncio.run(nats.connect('nats://nats:4222', allow_reconnect=False, error_cb=no))\n"
        "except Exception as error: print(error)\n"
    )
    said = mesh.engine.run("exec", router, "python", "-c", script)
    assert "user name is empty" in said
    assert "Authorization Violation" in said


def test_one_router_places_and_the_other_hears_and_takes_over(mesh: ComposedMesh) -> None:
    for number in range(8):
        mesh.ask(f"Which boat is number {number}?", max_tokens=4)
    placed = {router: mesh.counted(router, 9200, "kvmesh_router_placements_total") for router in routers(mesh)}
    busy, idle = sorted(placed, key=lambda router: -placed[router])
    assert placed[busy] >= 8
    assert placed[idle] == 0
    assert [mesh.counted(one, 9200, "kvmesh_router_peers") for one in (busy, idle)] == [1, 1]
    assert mesh.counted(idle, 9200, "kvmesh_router_gossip_received_total") > 0
    with questions(mesh) as failures:
        kill(mesh.engine, mesh.engine.inspect(busy)[0])
        mesh.until(lambda: mesh.counted(idle, 9200, "kvmesh_router_placements_total") > 0, "the other router places")
        mesh.until(lambda: mesh.are_healthy("router", 2), "two routers again")
    assert failures == []


def routers(mesh: ComposedMesh) -> list[str]:
    return mesh.engine.ids(PROJECT, "router")


# --- faults -------------------------------------------------------------------------------------------


def test_a_killed_worker_is_started_again_and_nobody_notices(mesh: ComposedMesh) -> None:
    victim = mesh.containers("decode")[0]
    with questions(mesh) as failures:
        kill(mesh.engine, victim)
        mesh.until(lambda: pid_of(mesh, victim) not in (0, victim["State"]["Pid"]), "the container runs again")
        back_s = mesh.until(lambda: mesh.are_healthy("decode", 2) and mesh.workers().get("decode") == 2, "it is back")
    print(f"healthy again {back_s:.0f} s after its start")
    assert failures == []


def test_the_mesh_serves_while_etcd_restarts_and_after(mesh: ComposedMesh) -> None:
    with questions(mesh) as failures:
        mesh.compose("restart", "etcd")
        mesh.until(lambda: mesh.are_healthy("etcd", 1), "etcd is healthy again")
    assert failures == []
    assert mesh.workers() == {"aggregated": 0, "prefill": 1, "decode": 2}


@contextmanager
def questions(mesh: ComposedMesh) -> Iterator[list[str]]:
    """Ask all the time; the failures are in the list."""
    failures: list[str] = []
    stop = threading.Event()

    def ask() -> None:
        number = 0
        while not stop.wait(0.05):
            number += 1
            try:
                mesh.ask(f"Tell me about lighthouse number {number}.", max_tokens=32, ignore_eos=True)
            except Exception as error:
                failures.append(repr(error))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield failures
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def pid_of(mesh: ComposedMesh, container: dict[str, str]) -> int:
    [found] = mesh.engine.inspect(container["Id"])
    return int(found["State"]["Pid"])


def kill(engine: Engine, container: dict[str, dict[str, int]]) -> None:
    """Kill the process of a container from outside: after `docker kill` the restart policy does not hold."""
    pid = container["State"]["Pid"]
    try:
        os.kill(pid, signal.SIGKILL)
    except (PermissionError, ProcessLookupError):  # not root, or a daemon in a machine of its own
        words = ("run", "--rm", "--pid=host", "--user=0", "--cap-add=KILL", CONTROL)
        engine.run(*words, "python", "-c", f"import os; os.kill({pid}, 9)")


# --- scaling ------------------------------------------------------------------------------------------


def test_a_service_is_scaled_by_hand(mesh: ComposedMesh) -> None:
    mesh.guided("docker compose up -d --no-recreate --scale decode=3 decode")
    mesh.until(lambda: mesh.workers().get("decode") == 3, "three decode workers")
    mesh.compose("up", "-d", "--no-recreate", "--scale", "decode=2", "decode")
    mesh.until(lambda: mesh.workers().get("decode") == 2, "two decode workers")


def test_the_planner_scales_the_decode_workers(mesh: ComposedMesh, scratch: Path) -> None:
    files = ("-f", "docker-compose.yml", "-f", str(EAGER_PLANNER))
    mesh.guided("KVMESH_PLANNER_CONNECTOR=virtual docker compose up -d --no-deps planner")
    mesh.compose(*files, "up", "-d", "--no-deps", "planner", KVMESH_PLANNER_CONNECTOR="virtual")
    mesh.until(lambda: mesh.are_healthy("planner", 1), "the planner is healthy")
    hands = mesh.start(guide_line(".venv/bin/kvmesh planner apply ..."), scratch / "apply.log")
    try:
        with load(mesh, streams=48) as failures:
            scaled_s = mesh.until(lambda: mesh.workers().get("decode", 0) >= 3, "the planner orders a third worker")
            mesh.until(lambda: len(mesh.engine.ids(PROJECT, "decode")) >= 3, "a third container")
        print(f"a third decode worker has joined {scaled_s:.0f} s after the load began")
        assert failures == []
        assert hands.poll() is None, (scratch / "apply.log").read_text()
    finally:
        hands.terminate()
        hands.wait()
    assert re.search(r"decision \d+ is carried out: prefill 1, decode [3-6]", (scratch / "apply.log").read_text())
    assert "decode-" in mesh.guided("docker compose exec planner ...")


@contextmanager
def load(mesh: ComposedMesh, streams: int) -> Iterator[list[str]]:
    """Keep so many long answers under way."""
    failures: list[str] = []
    stop = threading.Event()

    def ask(name: int) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            try:
                mesh.ask(f"Tell me story {number} of captain {name}.", max_tokens=300, ignore_eos=True)
            except Exception as error:
                failures.append(repr(error))
                return

    threads = [threading.Thread(target=ask, args=(name,)) for name in range(streams)]
    for thread in threads:
        thread.start()
    try:
        yield failures
    finally:
        stop.set()
        for thread in threads:
            thread.join()


# --- observability ------------------------------------------------------------------------------------


def test_prometheus_scrapes_every_container_and_has_the_rules(mesh: ComposedMesh) -> None:
    mesh.guided("docker compose --profile observability up -d prometheus")
    until_all_are_scraped(mesh)
    with urllib.request.urlopen(f"{prometheus_of(mesh)}/rules", timeout=5) as answer:
        groups = json.load(answer)["data"]["groups"]
    assert {rule["health"] for group in groups for rule in group["rules"]} <= {"ok", "unknown"}
    assert {group["name"] for group in groups} == {"kvmesh-recorded", "kvmesh-alerts"}


def prometheus_of(mesh: ComposedMesh) -> str:
    return f"http://127.0.0.1:{mesh.ports['9090']}/api/v1"


def until_all_are_scraped(mesh: ComposedMesh) -> None:
    wanted = sum(len(mesh.engine.ids(PROJECT, s)) for s in ("frontend", "router", "prefill", "decode", "planner"))

    def up() -> int:
        try:
            with urllib.request.urlopen(f"{prometheus_of(mesh)}/query?query=count(up==1)", timeout=5) as answer:
                found = json.load(answer)["data"]["result"]
        except OSError:
            return 0
        return int(found[0]["value"][1]) if found else 0

    mesh.until(lambda: up() == wanted, f"{wanted} containers are scraped")


# --- and nothing is left ------------------------------------------------------------------------------


def test_down_leaves_nothing(mesh: ComposedMesh) -> None:
    assert leftovers(mesh.engine), "the mesh has containers, a network and volumes until now"
    mesh.guided("docker compose --profile observability down --volumes")
    assert leftovers(mesh.engine) == []


# --- with mutual TLS, from nothing again ----------------------------------------------------------------


def test_a_mesh_with_certificates_serves_and_shows_strangers_nothing(mesh: ComposedMesh) -> None:
    mesh.guided("docker compose -f docker-compose.yml -f deploy/compose/mesh-tls.yml up -d")
    for service in SERVICES:
        count = COMPOSE[service].get("scale", 1)
        mesh.until(lambda s=service, n=count: mesh.are_healthy(s, n), f"{service} is healthy")  # type: ignore[misc]
    mesh.until(lambda: answers_over_prefill(mesh), "an answer over prefill and decode")
    [decode, *_] = mesh.engine.ids(PROJECT, "decode")
    assert mesh.engine.run("exec", decode, "sh", "-c", "cd /run/kvmesh/tls; ls */key.pem").split() == ["worker/key.pem"]
    [router, *_] = mesh.engine.ids(PROJECT, "router")
    script = (
        "import ssl, urllib.request as u\n"
        "blind = ssl._create_unverified_context()\n"
        "for url in ('http://decode:9100/metrics', 'https://decode:9100/metrics', 'https://decode:9100/health'):\n"
        "    try: print(u.urlopen(url, timeout=5, context=blind if 's:' in url else None).read().decode().strip())\n"
        "    except OSError as error: print('refused')\n"
    )
    assert mesh.engine.run("exec", router, "python", "-c", script).split() == ["refused", "refused", "ok"]


def answers_over_prefill(mesh: ComposedMesh) -> bool:
    try:
        return bool(mesh.ask("Tell me about a lighthouse that nobody has seen.")["kvmesh"]["kv_bytes_pulled"])
    except OSError:
        return False


def test_prometheus_has_a_certificate_too(mesh: ComposedMesh) -> None:
    line = guide_line("docker compose -f docker-compose.yml -f deploy/compose/mesh-tls.yml up -d")
    mesh.shell(line.replace(" up -d", " --profile observability up -d prometheus"))
    until_all_are_scraped(mesh)
    mesh.shell(line.replace(" up -d", " --profile observability down --volumes"))
    assert leftovers(mesh.engine) == []


def leftovers(engine: Engine) -> list[str]:
    """Return what of this project is still there: containers, networks, volumes; of podman also bridges and rules."""
    label = f"label=com.docker.compose.project={PROJECT}"
    found = [f"container {one}" for one in engine.ids(PROJECT)]
    networks = engine.run("network", "ls", "-q", "--filter", label).split()
    found += [f"network {one}" for one in networks]
    found += [f"volume {one}" for one in engine.run("volume", "ls", "-q", "--filter", label).split()]
    if engine.is_podman:
        links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
        found += [f"link {name}" for name in re.findall(r"\d+: (podman\d+|veth[^:@]+)", links)]
        rules = subprocess.run(["iptables-save"], capture_output=True, text=True, check=True).stdout
        found += [f"rule {line}" for line in rules.splitlines() if re.search(r"-[sd] 10\.89\.", line)]
    return found
