"""Measure a service that follows 1,000 cards of a real API server."""

import asyncio
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from kvmesh.mesh.discovery.kubernetes.objects import CardOwner, card_object, name_of
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import Role, WorkerCard, encode
from tests.kube.conftest import Space
from tests.support.patience import PATIENCE_S

CARDS = 1000
READER = """
import asyncio, json, resource, sys, time
from pathlib import Path
from kvmesh.mesh.discovery.kubernetes.discovery import KubernetesDiscovery
def rss_mib():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20
async def main():
    discovery = KubernetesDiscovery(sys.argv[1])
    before, began = rss_mib(), time.monotonic()
    changes, seen = discovery.watch("workers/"), 0
    while seen < int(sys.argv[2]):
        await anext(changes)
        seen += 1
    listed_s, used_s = time.monotonic() - began, time.process_time()
    await asyncio.sleep(10.0)
    idle_s = time.process_time() - used_s
    print(json.dumps({"list_s": round(listed_s, 2), "rss_mib": round(rss_mib() - before, 1),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before, 1),
        "idle_cpu_percent": round(idle_s * 10, 2)}))
    await discovery.close()
asyncio.run(main())
"""


def card(number: int) -> bytes:
    return encode(
        WorkerCard(
            worker_id=WorkerId(f"decode-{number}"), name=f"decode-{number}", role=Role.DECODE, model="tiny",
            model_path="/models/tiny", address=f"10.0.{number // 250}.{number % 250}:7000", block_size=16,
            total_blocks=4096, context_tokens=8192, max_num_seqs=64, kv_events="tcp://10.0.0.1:5700",
            kv_replay="tcp://10.0.0.1:5701", transfer="nixl", dp_size=1, pid=1, metrics_url="http://10.0.0.1:9100/metrics",
        )
    )  # fmt: skip


def put_worker(space: Space, number: int) -> None:
    """Make a ready pod with a card, as its kubelet and its worker would."""
    name, key = f"decode-{number}", f"workers/decode-{number}"
    uid = space.pod(name)["KVMESH_POD_UID"]
    path = f"{space.cards}/{name_of(space.mesh, key)}?fieldManager=kvmesh&force=true"
    content = card_object(space.mesh, key, card(number), CardOwner(name, uid))
    space.server.ask("PATCH", path, content, body_type="application/apply-patch+yaml")


async def test_a_thousand_cards_are_listed_within_seconds(space: Space) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: put_worker(space, number), range(CARDS)))
    began_s = time.time()
    url = space.url("frontend").removeprefix("kubernetes:")
    reader = await asyncio.create_subprocess_exec(
        sys.executable, "-c", READER, url, str(CARDS), stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await asyncio.wait_for(reader.communicate(), 2 * PATIENCE_S)
    found = json.loads(printed)
    asked = space.server.requests_since(began_s, {space.user("frontend")})
    found["requests"] = len(asked)
    print(f"{CARDS} cards and pods: {found}; the API server has {space.server.rss_mib():.0f} MiB")
    assert found["list_s"] < 20
    assert found["rss_mib"] < 64
    assert [verb for _, verb, _ in asked].count("list") <= 8 + 2  # four pages of each, and none again
