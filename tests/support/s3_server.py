"""A real S3 server, SeaweedFS, on free ports with a data folder of its own."""

import atexit
import os
import secrets
import shutil
import subprocess
import time
import urllib.request
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from kvmesh.kvcache.tiers.objects import Objects
from kvmesh.workers.shared_tier import SharedSettings, open_objects
from tests.support.patience import PATIENCE_S
from tests.support.ports import free_port

INSTALLED = Path(__file__).parents[2] / ".venv-s3"
WEED = shutil.which("weed") or shutil.which("weed", path=str(INSTALLED / "bin"))
WHY_NONE = "" if os.environ.get("KVMESH_TEST_S3") == "1" else "needs an S3 server: make test-s3"
BUCKET = "kv-of-tests"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}


class S3Server:
    """Runs from its making on."""

    def __init__(self, folder: Path) -> None:
        assert WEED is not None, "make test-s3 installs it"
        ports = {name: free_port() for name in ("master.port", "volume.port", "filer.port", "s3.port")}
        ports |= {f"{name}.grpc": free_port() for name in ports}  # by default 10,000 above
        self.endpoint = f"http://127.0.0.1:{ports['s3.port']}"
        folder.mkdir(parents=True)
        command = [
            WEED,
            "server",
            f"-dir={folder}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-filer",
            "-s3",
            "-s3.port.lance=0",
            "-s3.port.iceberg=0",
        ]
        command += ["-volume.max=20", "-master.volumeSizeLimitMB=64"]
        command += [f"-{name}={port}" for name, port in ports.items()]
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log, cwd=folder, env=_environment())

    def place(self) -> str:
        """Return a place in the bucket where nothing is yet."""
        return f"s3://{BUCKET}/{secrets.token_hex(4)}/kv"

    def make_bucket(self) -> None:
        """Make the one bucket; wait until the server does. It has space for few."""
        until_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/{BUCKET}", method="PUT"), timeout=5)
                return
            except OSError:
                if self._process.poll() is not None or time.monotonic() > until_s:
                    raise
                time.sleep(0.1)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


def the_server() -> S3Server:
    """Return the server of this process, which ends with it, and let this test in."""
    os.environ.update(CREDENTIALS)
    return _started()


@cache
def _started() -> S3Server:
    folder = TemporaryDirectory(prefix="kvmesh-s3-")
    server = S3Server(Path(folder.name) / "data")
    atexit.register(folder.cleanup)
    atexit.register(server.stop)
    server.make_bucket()
    return server


def new_objects() -> Objects:
    """Return an empty place of the server."""
    server = the_server()
    return open_objects(SharedSettings(server.place(), 1 << 30, endpoint=server.endpoint))


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
