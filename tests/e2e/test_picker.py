"""The endpoint picker as a process, before servers of others: it sends requests where their KV events say."""

import asyncio
import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from msgspec.structs import replace

from kvmesh.mesh.discovery import open_discovery
from kvmesh.protocol.messages import encode_card
from tests.e2e.test_attach import attached, prompt_of
from tests.frontend import tiny
from tests.frontend.test_security import Certificates
from tests.support import mesh_tls
from tests.support.etcd_server import WHY_NONE, EtcdProcess
from tests.support.fake_servers import BLOCK, VllmServer, served
from tests.support.gateway import Picked, connected
from tests.support.mesh import until
from tests.support.patience import PATIENCE_S
from tests.support.ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.long]


class PickerProcess:
    """A picker that was started as an operator would."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.port, self.http_port = free_port(), free_port()
        ports = ["--ext-proc-port", str(self.port), "--http-port", str(self.http_port)]
        self.http_url = f"{'https' if mesh_tls.IS_ON else 'http'}://127.0.0.1:{self.http_port}"
        self.log = folder / "picker.log"
        with self.log.open("wb") as log:
            argv = [sys.executable, "-m", "kvmesh.router", *ports, *flags]
            self.process = subprocess.Popen(argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def knows(self, workers: int) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return bool(self.health()["workers"] == workers)
        except httpx.TransportError:
            return False

    def health(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.http_url}/health", verify=mesh_tls.verify()).json()
        return found

    def serve(self, body: object, path: str, credentials: Any = None) -> Picked:
        """Have an endpoint picked for a request that is answered."""

        async def ask() -> Picked:
            async with connected(self.port, credentials) as gateway:
                return await gateway.serve(body, path)

        return asyncio.run(asyncio.wait_for(ask(), PATIENCE_S))

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            self.process.wait()


@contextmanager
def picker(folder: Path, *flags: str, workers: int) -> Iterator[PickerProcess]:
    """Run a picker that knows so many workers; it must end well."""
    found = PickerProcess(folder, *flags)
    try:
        until(lambda: found.knows(workers), what="the picker knows the workers")
        yield found
    except BaseException:
        print(found.log.read_text())
        raise
    finally:
        code = found.end()
    assert code == 0, found.log.read_text()


def complete(server: VllmServer, prompt: Sequence[int]) -> None:
    """Ask a server directly, as somebody outside of the mesh would."""
    body = json.dumps({"model": "tiny", "prompt": list(prompt), "max_tokens": 2}).encode()
    request = urllib.request.Request(f"{server.url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
        assert reply.status == 200


def test_a_prompt_goes_to_the_server_that_has_it_cached(tmp_path: Path) -> None:
    servers = [VllmServer(), VllmServer()]
    discovery = f"file:{tmp_path / 'discovery'}"
    with (
        served(*servers),
        attached(tmp_path, *(server.url for server in servers), workers=2),
        picker(tmp_path, "--discovery", discovery, workers=2) as found,
    ):
        for number, server in enumerate([*servers, *reversed(servers)]):
            prompt = prompt_of(5 * BLOCK + 3, first=331 * number)
            complete(server, prompt)
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 4}
            overlap = {"model": "tiny", "prompt_tokens": prompt}

            def is_told() -> bool:
                url = f"{found.http_url}/overlap"
                rows = httpx.post(url, verify=mesh_tls.verify(), json=overlap).json()["workers"]  # noqa: B023
                return max(row["overlap_blocks"]["device"] for row in rows) == 5

            until(is_told, what="KV events")
            picked = found.serve(body, "/v1/completions")
            assert f"http://{picked.endpoint}" == server.url
        assert found.health()["in_flight"] == 0


@pytest.mark.skipif(bool(WHY_NONE), reason=WHY_NONE)
def test_a_picker_follows_workers_in_etcd(tmp_path: Path) -> None:
    folder = tiny.save_model(tmp_path / "model")
    etcd = EtcdProcess(tmp_path)
    place = f"etcd:{etcd.endpoint}/picker"

    async def joined() -> None:
        discovery = open_discovery(place)
        card = replace(tiny.card("w1", path=folder), http_endpoint="10.0.0.1:8000")
        await discovery.put("workers/w1", encode_card(card))
        try:
            await asyncio.to_thread(picks_twice)
        finally:
            await discovery.close()

    def picks_twice() -> None:
        with picker(tmp_path, "--discovery", place, workers=1) as found:
            for _ in range(2):
                picked = found.serve({"model": "tiny", "prompt": "hi"}, "/v1/completions")
                assert picked.endpoint == "10.0.0.1:8000"

    try:
        asyncio.run(joined())
    finally:
        etcd.stop()


def test_gateways_ask_over_tls_and_with_certificates_where_they_have_to(tmp_path: Path) -> None:
    made = Certificates(tmp_path)
    place = ["--discovery", f"file:{tmp_path / 'discovery'}"]
    files = ["--ext-proc-tls-cert", made.file("server.pem"), "--ext-proc-tls-key", made.file("server.key")]
    body, path = {"model": "tiny", "prompt": "hi"}, "/v1/completions"
    ca, key, certificate = (Path(made.file(name)).read_bytes() for name in ("ca.pem", "client.key", "client.pem"))
    anybody, known = grpc.ssl_channel_credentials(ca), grpc.ssl_channel_credentials(ca, key, certificate)
    with picker(tmp_path, *place, *files, workers=0) as found:
        assert found.serve(body, path, anybody).status == 503
    with picker(tmp_path, *place, *files, "--ext-proc-client-ca", made.file("ca.pem"), workers=0) as found:
        assert found.serve(body, path, known).status == 503
        with pytest.raises(grpc.RpcError):
            found.serve(body, path, anybody)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--ext-proc-objectives", "chat=high"], "--ext-proc-objectives has 'chat=high'; write name=priority"),
        (["--ext-proc-tls-cert", "/no/such/file"], "--ext-proc-tls-cert cannot be read"),
        (["--ext-proc-client-ca", "/no/such/file"], "--ext-proc-client-ca is of no use without --ext-proc-tls-cert"),
        (["--ext-proc-wait-s", "-1"], "--ext-proc-wait-s"),
        (["--host", "10.255.255.1", "--no-gossip"], "cannot listen on 10.255.255.1"),
    ],
)
def test_a_bad_setting_is_one_clear_line(tmp_path: Path, flags: list[str], says: str) -> None:
    found = PickerProcess(tmp_path, "--discovery", f"file:{tmp_path / 'discovery'}", *flags)
    try:
        assert found.process.wait(PATIENCE_S) == 2
    finally:
        found.process.kill()
    [line] = [line for line in found.log.read_text().splitlines() if "error:" in line or line.startswith("kvmesh")]
    assert says in line
