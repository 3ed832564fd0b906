"""A stranger gets nothing from any port of a closed mesh, whatever it sends, and honest traffic goes on meanwhile.

The ports are those that the processes of the mesh listen on, by the kernel's table. KV transfer (NIXL) is the one
exception that docs/security.md names: its own port asks nobody, so here it has only to survive and to say nothing.
"""

import asyncio
import importlib.util
import json
import re
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
import zmq

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.frontend.keys.keyfile import hashed
from kvmesh.frontend.table import ENDPOINTS
from kvmesh.mesh.http.door import PLAIN_REFUSAL
from kvmesh.mesh.identity.names import MeshRole
from kvmesh.mesh.identity.rights import METHODS, ROUTES
from kvmesh.mesh.plane import frames
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.protocol import messages
from kvmesh.protocol.errors import MeshError
from kvmesh.protocol.ids import RequestId
from tests.support.certificates import TestCa
from tests.support.mesh import START_S, until
from tests.support.patience import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.long]

SECRET = "the-prompt-nobody-may-read"
AT_ONCE = 24  # connections of the stranger
READ_S = 0.4  # for an answer; who refuses does so at once
MOST_BYTES = 4096  # of an answer
MOST_LOG_LINES, LOG_LINES_PER_S = 40, 6  # of one process, for all its refusals
FRONTENDS = ("front-a", "front-b")
ROOT = Path(__file__).parents[2]
HAS_NIXL = importlib.util.find_spec("nixl") is not None


@dataclass
class ClosedMesh:
    folder: Path
    ca: TestCa
    key: str
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    ports: dict[int, str] = field(default_factory=dict)  # of all processes: who listens
    public: set[int] = field(default_factory=set)  # ports of the frontends' API

    def start(self, folder: str, name: str, role: MeshRole, *flags: str) -> None:
        argv = [
            sys.executable,
            "-m",
            f"kvmesh.{folder}",
            "--name",
            name,
            "--mesh-tls",
            str(self.ca.issue(role, name)),
            *flags,
        ]
        argv += ["--discovery", f"file:{self.folder / 'discovery'}"]
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(argv, cwd=ROOT, stdout=log, stderr=log)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def is_ready(self, name: str) -> bool:
        assert self.processes[name].poll() is None, self.log(name)
        return " ready" in self.log(name)

    def url(self, frontend: str) -> str:
        found = re.search(r"\burl=(https?://\S+)", self.log(frontend))
        assert found is not None, self.log(frontend)
        return found[1]

    def ask(self, frontend: str) -> httpx.Response:
        prompt = f"{SECRET} {time.monotonic_ns()} " + "word " * 60
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 8}
        headers = {"authorization": f"Bearer {self.key}"}
        return httpx.post(f"{self.url(frontend)}/v1/completions", json=body, headers=headers, timeout=PATIENCE_S)

    def serves(self, frontend: str) -> bool:
        with suppress(httpx.HTTPError):
            return self.ask(frontend).status_code == 200
        return False

    def listening(self) -> dict[int, str]:
        """Return the ports of all processes as they are now, and who listens."""
        return {port: name for name, process in self.processes.items() for port in listening(process.pid)}

    def planes(self) -> dict[str, tuple[str, MeshRole]]:
        """Return the request plane of each service that has one, by name."""
        found = {}
        for path in (self.folder / "discovery").glob("*.key"):
            kind, role = (messages.WorkerCard, MeshRole.WORKER), (messages.RouterCard, MeshRole.ROUTER)
            for card_type, server in (kind, role):
                with suppress(MeshError):
                    card = messages.decode(path.read_bytes(), card_type)
                    if card.address:
                        found[card.name] = (card.address, server)
                        break
        return found

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


def listening(pid: int) -> set[int]:
    """Return the TCP ports on which a process or a child of it listens."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return {c.laddr.port for p in family for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClosedMesh]:
    folder = tmp_path_factory.mktemp("closed")
    key = "sk-" + "k" * 40
    (folder / "keys").write_text(f'{{"name":"honest","sha256":"{hashed(key)}"}}\n')
    (folder / "keys").chmod(0o600)
    mesh = ClosedMesh(folder, TestCa(folder / "ca"), key)
    try:
        mesh.start("router", "router", MeshRole.ROUTER)
        for role in ("prefill", "decode"):
            served = ("--engine", "torch", "--model", "tiny", "--model-path", str(CHECKPOINT_DIR))
            more = ("--kv-transfer", "nixl") if HAS_NIXL else ()
            mesh.start("workers", role, MeshRole.WORKER, "--role", role, *served, *more)
        for name in FRONTENDS:
            flags = ("--port", "0", "--router", "remote", "--api-keys-file", str(folder / "keys"))
            mesh.start("frontend", name, MeshRole.FRONTEND, *flags)
        mesh.start("planner", "planner", MeshRole.PLANNER, "--connector", "dry-run", "--prefill-profile", "mock")
        until(lambda: all(map(mesh.is_ready, mesh.processes)), START_S, what="the mesh to be ready")
        until(lambda: all(map(mesh.serves, FRONTENDS)), START_S, what="the mesh to serve")
        mesh.ports = mesh.listening()
        mesh.public = {int(mesh.url(name).rsplit(":", 1)[1]) for name in FRONTENDS}
        yield mesh
    finally:
        mesh.close()


# --- what a stranger sends ------------------------------------------------------------------------------


def plane_messages() -> dict[str, bytes]:
    """Return one byte stream for each kind of frame and each method of the request plane."""
    hello = frames.encode_frame(frames.OUR_HELLO)
    generate = messages.GenerateRequest(RequestId("r"), "tiny", messages.pack_tokens([1, 2, 3]))
    bodies = {
        "generate": generate,
        "place": messages.RouteRequest(RequestId("r"), "tiny", 3),
        "control": messages.Control(messages.ControlAction.SLEEP),
        "release": messages.ReleaseOffer(1, 1),
    }
    methods = sorted({method for rights in METHODS.values() for method in rights} | {"nothing", ""})
    found = {
        f"call {method}": hello
        + frames.encode_frame(frames.Open(1, method, 5.0, 100, msgspec.Raw(messages.encode(bodies.get(method, {})))))
        for method in methods
    }
    raw = msgspec.Raw(b"\xc0")
    others = [
        frames.Cancel(1),
        frames.Credit(1, 5),
        frames.Batch([(1, raw)], [(1, None)]),
        frames.Ping(),
        frames.Pong(),
    ]
    found |= {type(frame).__name__: hello + frames.encode_frame(frame) for frame in others}
    found["no hello"] = frames.encode_frame(frames.Open(1, "identify", 5.0, 100, raw))
    found["a huge frame"] = hello + struct.pack("<I", 0xFFFF_FFFF)
    found["no frame"] = hello + struct.pack("<I", 3) + b"\xc1\xc1\xc1"
    return found


def http_messages() -> dict[str, bytes]:
    """Return a request for every route of every HTTP port, and some that are no requests."""
    routes = {route for table in ROUTES.values() for route in table}
    routes |= {f"{endpoint.method} {endpoint.path}" for endpoint in ENDPOINTS}
    routes |= {"GET /", "OPTIONS *", "TRACE /", "CONNECT h:1", "GET /../../etc/passwd", "HEAD /metrics", "POST /health"}
    body = json.dumps({"model": "tiny", "prompt": "hi", "messages": [{"role": "user", "content": "hi"}]}).encode()
    found = {}
    for route in routes:
        method, path = route.split(" ", 1)
        sent = body if method in ("POST", "PUT", "PATCH") else b""
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(sent)}\r\n\r\n"
        found[route] = head.encode() + sent
    return found


def zmtp_greetings() -> dict[str, bytes]:
    def greeting(mechanism: bytes, *, is_server: bool) -> bytes:
        return b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes([is_server]) + bytes(31)

    ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB"
    found = {
        f"zmtp {name.decode()} {is_server}": greeting(name, is_server=is_server) + ready + b"\x00\x01\x01"
        for name in (b"NULL", b"PLAIN", b"CURVE", b"GSSAPI")
        for is_server in (False, True)
    }
    return found | {"zmtp 2": b"\xff" + bytes(8) + b"\x7f\x01\x02\x00\x00", "zmtp 1": b"\x01\x00\x02\x00a"}


NOISE = {
    "nothing": b"",
    "zeros": bytes(2000),
    "half a handshake": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40),
    "text": b"HELP\r\nINFO\r\nSTATUS\r\n",
    "http 2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
    "nixl": b"NIXL_MD_REQ " + bytes(64),
}


async def said(port: int, data: bytes, tls: ssl.SSLContext | None) -> bytes:
    """Return what a port answers to `data`; without an answer what it says to the handshake, which is nothing."""
    heard = bytearray()
    with suppress(OSError, ssl.SSLError, TimeoutError, asyncio.IncompleteReadError):
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
        try:
            writer.write(data)
            while len(heard) < MOST_BYTES:
                async with asyncio.timeout(READ_S):
                    if not (piece := await reader.read(MOST_BYTES)):
                        break
                heard += piece
        finally:
            writer.transport.abort()
    return bytes(heard)


async def try_all(
    ports: dict[int, str], sent: dict[str, bytes], tls: ssl.SSLContext | None
) -> list[tuple[int, str, bytes]]:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(port: int, name: str, data: bytes) -> tuple[int, str, bytes]:
        async with gate:
            return port, name, await said(port, data, tls)

    return await asyncio.gather(*(one(port, name, data) for port in ports for name, data in sent.items()))


# --- who the stranger is --------------------------------------------------------------------------------


def client_context(folder: Path | None) -> ssl.SSLContext:
    """Return a context that takes any server, with the certificate of `folder` if there is one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if folder is not None:
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context


def strangers(mesh: ClosedMesh, folder: Path) -> dict[str, ssl.SSLContext | None]:
    foreign = TestCa(folder / "foreign").issue(MeshRole.OPERATOR)
    expired = mesh.ca.issue(MeshRole.OPERATOR, "late", life_s=1.0)
    mesh.ca.until_expired(expired)
    return {
        "plain": None,
        "no certificate": client_context(None),
        "another CA": client_context(foreign),
        "expired": client_context(expired),
    }


def must_say_nothing(mesh: ClosedMesh, answers: list[tuple[int, str, bytes]], who: str) -> None:
    """Fail if an answer has anything of the mesh in it, or is anything but a refusal."""
    secrets = [SECRET.encode(), mesh.key.encode(), b"kvmesh_", b"tcp://", b"worker_id", b"block_size", b"/discovery"]
    secrets += [str(mesh.ca.folder).encode(), b"BlockStored", b"model_path"]
    for port, what, heard in answers:
        where = f"{who}: {what!r} to {mesh.ports[port]} at {port} was answered {heard[:300]!r}"
        assert not any(secret in heard for secret in secrets), where
        assert is_refusal(heard) or (port in mesh.public and is_public(heard, what)), where


def is_refusal(heard: bytes) -> bool:
    """Tell if this is silence, an alert of TLS, or words that say why."""
    if not heard or heard[:1] == b"\x15":
        return True
    if heard.startswith(b"HTTP/1.1 "):
        return heard[9:10] == b"4" or heard.endswith((b"\r\n\r\nok\n", b"\r\n\r\nnot ok\n"))
    return is_bare_greeting(heard) or is_ending(heard)


def is_bare_greeting(heard: bytes) -> bool:
    """Tell if this is the greeting of a ZMTP socket that wants CURVE, or a part of it: it says nothing else."""
    whole = b"\xff" + bytes(8) + b"\x7f\x03"
    return heard[:1] == b"\xff" and (len(heard) <= 11 or b"CURVE" in heard[:40]) and heard[9:10] in (whole[9:10], b"")


def is_ending(heard: bytes) -> bool:
    """Tell if this is one frame of the request plane that ends the call with a refusal."""
    try:
        found = frames.FrameReader().feed(heard)
    except MeshError:
        return False
    return all(
        isinstance(frame, frames.Hello | frames.Pong)
        or (isinstance(frame, frames.Batch) and not frame.messages and all(failure for _, failure in frame.ends))
        for frame in found
    )


def is_public(heard: bytes, what: str) -> bool:
    """Tell if a public port may say this without a key: that it lives, its documentation, what methods there are."""
    return what.split(" ")[-1] in ("/live", "/health", "/openapi.json", "/docs", "*", "/") or b" 204 " in heard[:20]


# --- the rules ------------------------------------------------------------------------------------------


def test_every_port_of_the_mesh_is_known(mesh: ClosedMesh) -> None:
    by_name = {name: sum(owner == name for owner in mesh.ports.values()) for name in mesh.processes}
    assert all(count >= 1 for count in by_name.values()), by_name


def test_a_stranger_gets_nothing_from_any_port(mesh: ClosedMesh, tmp_path: Path) -> None:
    everything = plane_messages() | http_messages() | zmtp_greetings() | NOISE
    some = {name: data for number, (name, data) in enumerate(everything.items()) if number % 9 == 0}
    before = {name: len(mesh.log(name).splitlines()) for name in mesh.processes}
    began, tried = time.monotonic(), 0
    with honest_traffic(mesh) as statuses:
        for who, tls in strangers(mesh, tmp_path).items():
            sent = everything if who in ("plain", "no certificate") else some
            answers = asyncio.run(try_all(mesh.ports, sent, tls))
            must_say_nothing(mesh, answers, who)
            tried += len(answers)
    assert statuses and set(statuses) == {200}, statuses
    assert tried > 100 * len(mesh.ports)
    most_lines = MOST_LOG_LINES + LOG_LINES_PER_S * (time.monotonic() - began)
    for name, process in mesh.processes.items():
        log = mesh.log(name)
        assert process.poll() is None, log[-2000:]
        assert len(log.splitlines()) - before[name] < most_lines, log[-3000:]
        assert SECRET not in log and mesh.key not in log


class honest_traffic:  # noqa: N801 - reads as a phrase
    """Ask the frontends in turn as long as the block runs; yields the statuses of the answers."""

    def __init__(self, mesh: ClosedMesh) -> None:
        self._mesh = mesh
        self._stop = threading.Event()
        self._statuses: list[int] = []
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            for name in FRONTENDS:
                try:
                    self._statuses.append(self._mesh.ask(name).status_code)
                except httpx.HTTPError:
                    self._statuses.append(0)

    def __enter__(self) -> list[int]:
        self._thread.start()
        return self._statuses

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()


def test_no_zmq_socket_of_a_stranger_hears_events(mesh: ClosedMesh) -> None:
    context = zmq.Context()
    poller, dialled_by = zmq.Poller(), {}
    try:
        # Public ports speak HTTP with everybody. A port that was closed since may belong to another test's mesh.
        for port in mesh.listening().keys() & mesh.ports.keys() - mesh.public:
            for mechanism in ("null", "plain", "curve"):
                for kind in (zmq.SUB, zmq.DEALER):
                    socket = dialled(context, kind, mechanism, port)
                    dialled_by[socket] = f"{mechanism} {kind} to {mesh.ports[port]} at {port}"
                    poller.register(socket, zmq.POLLIN)
        with honest_traffic(mesh) as statuses:
            until(lambda: len(statuses) >= 4, what="honest answers")
            heard = {dialled_by[socket]: socket.recv_multipart() for socket, _ in poller.poll(1000)}
        # ZMTP takes words of HTTP for messages
        assert {who: news for who, news in heard.items() if b"".join(news) not in PLAIN_REFUSAL} == {}
        assert set(statuses) == {200}
    finally:
        context.destroy(linger=0)


def dialled(context: zmq.Context[Any], kind: int, mechanism: str, port: int) -> zmq.Socket[Any]:
    socket = context.socket(kind)
    socket.linger = 0
    socket.reconnect_ivl = -1  # the port may be closed meanwhile, and belong to another test's mesh
    if mechanism == "plain":
        socket.plain_username, socket.plain_password = b"admin", b"admin"
    elif mechanism == "curve":
        public, secret = zmq.curve_keypair()
        server, _ = zmq.curve_keypair()
        socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = public, secret, server
    socket.connect(f"tcp://127.0.0.1:{port}")
    if kind == zmq.SUB:
        socket.subscribe(b"")
    else:
        socket.send_multipart([b"", bytes(8)], zmq.NOBLOCK)
    return socket


async def test_no_member_may_call_what_its_role_may_not(mesh: ClosedMesh) -> None:
    planes = mesh.planes()
    assert {"router", "prefill", "decode"} <= planes.keys()
    methods, tried = {method for rights in METHODS.values() for method in rights}, 0
    for role in MeshRole:
        client = PlaneClient(credentials=mesh.ca.member(role, f"stranger-{role}"))
        try:
            for address, server in planes.values():
                for method in methods & METHODS[server].keys():
                    if role in METHODS[server][method]:
                        continue
                    with pytest.raises(MeshError) as refused:
                        await client.ask(address, method, {}, object, PATIENCE_S)
                    assert refused.value.code == "identity", (role, method, refused.value)
                    tried += 1
        finally:
            await client.close()
    assert tried > 50


def test_no_member_may_ask_for_a_page_that_its_role_may_not(mesh: ClosedMesh) -> None:
    tried, pages = 0, [port for port in mesh.ports if port not in mesh.public and speaks_http(mesh, port)]
    for role in MeshRole:
        context = client_context(mesh.ca.issue(role, f"stranger-{role}"))
        http = httpx.Client(verify=context, timeout=PATIENCE_S)
        for port in pages:
            name, server = mesh.ports[port], mesh_role_of(mesh.ports[port])
            for route, allowed in ROUTES[server].items():
                if role in allowed:
                    continue
                method, path = route.split(" ")
                reply = http.request(method, f"https://127.0.0.1:{port}{path}")
                if reply.text.startswith("# HELP"):  # a port of pages alone has one page at every path
                    assert role in ROUTES[server]["GET /metrics"], (role, name, route)
                else:
                    assert reply.status_code in (403, 404, 405), (role, name, route, reply.text[:200])
                tried += 1
        http.close()
    assert tried > 20


def mesh_role_of(name: str) -> MeshRole:
    kinds = {"front": MeshRole.FRONTEND, "router": MeshRole.ROUTER, "planner": MeshRole.PLANNER}
    return kinds.get(name.split("-")[0], MeshRole.WORKER)


def speaks_http(mesh: ClosedMesh, port: int) -> bool:
    """Tell if an operator gets a page from this port."""
    context = client_context(mesh.ca.issue(MeshRole.OPERATOR, "page-reader"))
    with suppress(httpx.HTTPError), httpx.Client(verify=context, timeout=2.0) as http:
        return http.get(f"https://127.0.0.1:{port}/health").status_code in (200, 503)
    return False
