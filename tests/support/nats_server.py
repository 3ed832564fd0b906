"""A real NATS server with JetStream, on a free port and a store of its own."""

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from tests.support.patience import PATIENCE_S

_BINARY = shutil.which("nats-server") or shutil.which("nats-server", path="/usr/sbin:/usr/local/bin")
_START_S = PATIENCE_S

WHY_NONE = "" if _BINARY else "there is no nats-server: apt-get install nats-server"


class NatsProcess:
    """Runs from its making on. It listens on the same port and finds its store again after `restart`."""

    def __init__(self, store: Path, *options: str, jetstream: bool = True) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = int(probe.getsockname()[1])
        self.url = f"nats://127.0.0.1:{self.port}"
        self._store = store
        self._options = (*(("-js", "-sd", str(store)) if jetstream else ()), *options)
        self.start()

    def start(self) -> None:
        assert _BINARY is not None
        command = (_BINARY, "-a", "127.0.0.1", "-p", str(self.port), *self._options)
        with (self._store / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        end = time.monotonic() + _START_S
        while not self._answers():
            assert self._process.poll() is None, (self._store / "server.log").read_text()
            assert time.monotonic() < end, "nats-server does not answer"
            time.sleep(0.01)

    def kill(self) -> None:
        """End the server as if its machine had lost power."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def forget(self) -> None:
        """Its disk is gone. To be called while it does not run."""
        shutil.rmtree(self._store / "jetstream")

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as probe:
                return probe.recv(4) == b"INFO"
        except OSError:
            return False
