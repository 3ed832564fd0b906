"""Operators give a real worker two orders, every pair of them, while clients ask: no request fails, none hangs."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from kvmesh.frontend.keys.keyfile import KeyLine, hashed, written
from tests.support import mesh_tls
from tests.support.mesh import TRUSTED, Mesh, running_mesh, until

pytestmark = pytest.mark.e2e

KEY = "sk-operator"
SENT = {"authorization": f"Bearer {KEY}"}
STOP = "SIGTERM"
ORDERS = ("sleep", "wake", "drain", "resume", "prefill", "decode", "aggregated")
QUICK = list(zip(ORDERS, ORDERS[2:] + ORDERS[:2], strict=True))
STOPPED = [(STOP, STOP), *((STOP, order) for order in ORDERS), *((order, STOP) for order in ORDERS)]
VICTIMS = 5  # of STOPPED in turn: a worker that ends five times within 20 s of its starts counts as down
SETTLED = ("serving", "drained", "asleep")
LONGEST_S = 15.0  # of a short request on a busy machine; one that hangs takes its deadline of 600 s
REFUSED = (200, 404, 409, 503)  # of an order; 404: it has no card while it turns


class Clients:
    """Ask without pause, and remember what did not get a whole answer in time."""

    def __init__(self, mesh: Mesh, count: int = 3) -> None:
        self.mesh, self.answered, self.faults = mesh, 0, list[str]()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,), daemon=True) for number in range(count)]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        body = {"model": "tiny", "max_tokens": 8, "ignore_eos": True}
        with httpx.Client(base_url=self.mesh.url, timeout=60, verify=TRUSTED) as http:
            turn = 0
            while not self._stop.is_set():
                turn += 1
                began = time.monotonic()
                prompt = [100 + number, *range(100, 140), turn % 2000]
                reply = http.post("/v1/completions", json=body | {"prompt": prompt}, headers=SENT)
                took_s = time.monotonic() - began
                if reply.status_code != 200 or took_s > LONGEST_S:
                    self.faults.append(f"{reply.status_code} after {took_s:.1f} s: {reply.text[:300]}")
                self.answered += 1

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)


class Operator:
    def __init__(self, mesh: Mesh, worker: str = "aggregated-0") -> None:
        self.mesh, self.worker = mesh, worker
        self.pid = mesh.pid(worker)  # now: a worker that turns has no card for a moment
        self.http = httpx.Client(base_url=mesh.url, timeout=60, verify=TRUSTED, headers=SENT)

    def order(self, word: str) -> int:
        """Return the status of the answer, 0 for a signal."""
        if word == STOP:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
            return 0
        is_role = word in ("prefill", "decode", "aggregated")
        body = {"action": "set_role", "arguments": {"role": word}} if is_role else {"action": word}
        reply = self.http.post(f"/kvmesh/workers/{self.worker}/control", json=body)
        return reply.status_code

    def state(self) -> str:
        """Return what the worker itself says, "" while it does not answer."""
        found = self.http.get("/kvmesh/workers").json()["workers"]
        states = [one["status"]["state"] for one in found if one["name"] == self.worker and one["status"]]
        return str(states[0]) if len(states) == 1 else ""

    def check(self) -> str:
        """Return the state, in which worker, card and /health agree."""
        until(lambda: self.state() in SETTLED, what="the worker is in a state that lasts")
        state = self.state()
        card = self.mesh.workers()[self.worker]
        health = httpx.get(card.metrics_url.replace("/metrics", "/health"), timeout=30, verify=mesh_tls.verify())
        assert card.resting == ("" if state == "serving" else state)
        assert health.status_code == (200 if state == "serving" else 503), health.text
        if state != "serving":
            began = time.monotonic()
            body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 2}
            reply = self.http.post("/v1/completions", json=body, headers={"x-kvmesh-worker": self.worker})
            assert (reply.status_code, time.monotonic() - began < LONGEST_S) == (503, True), reply.text
        return state

    def put_back(self) -> None:
        for word in ("wake", "resume", "aggregated"):
            self.order(word)
        until(lambda: self.state() == "serving", what="the worker serves again")
        until(lambda: self.mesh.workers_seen() == len(self.mesh.workers()), what="the frontend uses it again")


@contextmanager
def mesh_of(folder: Path, workers: int) -> Iterator[Mesh]:
    keys = folder / "keys"
    keys.write_text(written(KeyLine(name="ops", sha256=hashed(KEY), admin=True)) + "\n")
    keys.chmod(0o600)
    flags = ("--engine=mock", "--mock-itl-ms=5", "--prefill=0", "--decode=0", "--kv-transfer=shm")
    with running_mesh(folder / "run", *flags, f"--aggregated={workers}", f"--api-keys-file={keys}") as mesh:
        yield mesh


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    with mesh_of(tmp_path_factory.mktemp("mesh"), 2) as mesh:
        yield mesh


@contextmanager
def clients_of(mesh: Mesh) -> Iterator[None]:
    clients = Clients(mesh)
    try:
        yield
    finally:
        clients.close()
    assert clients.answered > 0 and clients.faults == []


def try_pair(operator: Operator, first: str, second: str, *, at_once: bool) -> None:
    """Give two orders under load, then look at the worker, and put it back."""
    mesh, before = operator.mesh, operator.pid
    with ThreadPoolExecutor(1) as other:
        if at_once:
            asked = other.submit(operator.order, first)
            statuses = [operator.order(second), asked.result()]
        else:
            statuses = [operator.order(first), operator.order(second)]
    where = f"{first}, {second}, {'at once' if at_once else 'in turn'}"
    if STOP in (first, second):
        mesh.until_replaced(operator.worker, before)
        assert operator.check() == "serving"
        return
    assert all(status in REFUSED for status in statuses), (where, statuses)
    state = operator.check()
    assert mesh.pid(operator.worker) == before, f"{where}: the process has ended"
    assert state == "asleep" or second != "sleep" or at_once or statuses[-1] != 200, (where, statuses)
    operator.put_back()


def test_pairs_of_orders_lose_no_request(mesh: Mesh) -> None:
    with clients_of(mesh):
        for first, second in QUICK:
            try_pair(Operator(mesh), first, second, at_once=False)


def test_a_worker_that_was_drained_asleep_does_not_serve_when_resumed(mesh: Mesh) -> None:
    operator = Operator(mesh)
    assert [operator.order(word) for word in ("sleep", "drain", "resume", "decode")] == [200, 200, 409, 409]
    assert operator.check() == "asleep"
    operator.put_back()


@pytest.mark.long
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("first", ORDERS)
def test_every_pair_of_orders_loses_no_request(mesh: Mesh, first: str, at_once: bool) -> None:
    with clients_of(mesh):
        for second in ORDERS:
            try_pair(Operator(mesh), first, second, at_once=at_once)


@pytest.mark.long
@pytest.mark.parametrize("at_once", [False, True])
def test_an_order_and_a_sigterm_lose_no_request(tmp_path: Path, at_once: bool) -> None:
    with mesh_of(tmp_path, VICTIMS + 1) as mesh, clients_of(mesh):
        for number, (first, second) in enumerate(STOPPED):
            try_pair(Operator(mesh, f"aggregated-{number % VICTIMS}"), first, second, at_once=at_once)
