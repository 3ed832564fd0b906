"""A real etcd on free ports with a data folder of its own."""

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from tests.support.patience import PATIENCE_S
from tests.support.ports import free_port

_BINARY = shutil.which("etcd")
_CTL = shutil.which("etcdctl")

WHY_NONE = "" if _BINARY and _CTL else "there is no etcd: apt-get install etcd-server etcd-client"


class EtcdProcess:
    """Runs from its making on. It listens on the same port and finds its data again after `restart`."""

    def __init__(self, folder: Path, *options: str, scheme: str = "http") -> None:
        self.port, self._peer_port = free_port(), free_port()
        self.endpoint = f"127.0.0.1:{self.port}"
        self._scheme = scheme
        self._folder = folder
        self._options = options
        self.start()

    def start(self) -> None:
        assert _BINARY is not None
        client, peer = f"{self._scheme}://{self.endpoint}", f"http://127.0.0.1:{self._peer_port}"
        command = [_BINARY, "--data-dir", str(self._folder / "etcd"), "--logger", "zap", "--log-level", "error"]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        command += ["--initial-cluster", f"default={peer}", "--unsafe-no-fsync", *self._options]
        with (self._folder / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        end = time.monotonic() + PATIENCE_S
        while not self._answers():
            assert self._process.poll() is None, (self._folder / "etcd.log").read_text()
            assert time.monotonic() < end, "etcd does not answer"
            time.sleep(0.02)

    def kill(self) -> None:
        """End the server as if its machine had lost power."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def forget(self) -> None:
        """Its disk is gone. To be called while it does not run."""
        shutil.rmtree(self._folder / "etcd")

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self.resume()
        self.kill()

    def ctl(self, *arguments: str) -> str:
        """Run etcdctl and return what it prints."""
        assert _CTL is not None
        command = [_CTL, "--endpoints", f"{self._scheme}://{self.endpoint}", *arguments]
        return subprocess.run(command, env={"ETCDCTL_API": "3"}, check=True, capture_output=True, text=True).stdout

    def compact(self) -> None:
        revision = self.ctl("get", "nothing", "-w", "fields").split('"Revision" : ')[1].split()[0]
        self.ctl("compact", revision)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0):
                return True
        except OSError:
            return False
