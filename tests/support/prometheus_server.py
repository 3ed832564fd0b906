"""A real Prometheus server, on a free port and a store of its own."""

import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from tests.support.patience import PATIENCE_S

_BINARY = shutil.which("prometheus")

WHY_NONE = "" if _BINARY else "there is no Prometheus server: apt-get install prometheus"

_CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
- job_name: {job}
  static_configs: [{{targets: ["{target}"]}}]
"""


class PrometheusProcess:
    """Scrapes one page every second, from its making on."""

    def __init__(self, folder: Path, job: str, url: str, *, features: str = "") -> None:
        """`folder` is empty, and its own; `url`: of the server whose /metrics is scraped; `features`: to enable."""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        self.url = f"http://{address}"
        (folder / "prometheus.yml").write_text(_CONFIG.format(job=job, target=urlsplit(url).netloc))
        self._log = folder / "server.log"
        assert _BINARY is not None
        command = (_BINARY, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}")
        if features:
            command = (*command, f"--enable-feature={features}")
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                (*command, f"--web.listen-address={address}"), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._wait()

    def _wait(self) -> None:
        end = time.monotonic() + PATIENCE_S
        while not self._is_ready():
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < end, "Prometheus does not answer"
            time.sleep(0.02)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=PATIENCE_S):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()
