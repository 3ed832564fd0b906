"""Run a real Prometheus server for a check, and ask a Prometheus server."""

import asyncio
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

from kvmesh.lab.faults.servers import free_port
from kvmesh.protocol.errors import EngineError, UnreachableError

START_S = 30.0
POLL_S = 0.05
ASK_S = 10.0


def prometheus_program() -> str | None:
    return shutil.which("prometheus")


class PrometheusProgram:
    """A Prometheus server of this check, on a free port of this machine."""

    def __init__(self, folder: Path, jobs: Sequence[Mapping[str, Any]], rules: str, scrape_ms: int) -> None:
        """Take `jobs`, the scrape configurations, and the text of the file of rules."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        interval = f"{scrape_ms}ms"
        config = {
            "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
            "rule_files": ["rules.yml"],
            "scrape_configs": list(jobs),
        }
        (folder / "prometheus.yml").write_text(json.dumps(config), encoding="utf-8")  # YAML contains JSON
        (folder / "rules.yml").write_text(rules, encoding="utf-8")
        self._address = f"127.0.0.1:{free_port()}"
        self._process: asyncio.subprocess.Process | None = None
        self.url = f"http://{self._address}"

    async def start(self, http: aiohttp.ClientSession) -> None:
        """Start it, and return when it answers. Raises EngineError with its log if it ends."""
        log = self._folder / "server.log"
        with log.open("wb") as out:
            self._process = await asyncio.create_subprocess_exec(
                *(prometheus_program() or "prometheus", f"--config.file={self._folder / 'prometheus.yml'}"),
                *(f"--storage.tsdb.path={self._folder / 'tsdb'}", f"--web.listen-address={self._address}"),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        ends_s = asyncio.get_running_loop().time() + START_S
        while not await self._answers(http):
            if self._process.returncode is not None or asyncio.get_running_loop().time() > ends_s:
                raise EngineError(f"Prometheus does not answer: {log.read_text(errors='replace')[-800:]}")
            await asyncio.sleep(POLL_S)

    async def _answers(self, http: aiohttp.ClientSession) -> bool:
        try:
            async with http.get(f"{self.url}/-/ready") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def close(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.terminate()
            await self._process.wait()


class PrometheusQueries:
    """Asks a Prometheus server."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url.rstrip("/")

    async def has_values(self, query: str) -> bool:
        """Return whether a query gives a number now."""
        result = (await self._get("query", query=query))["result"]
        return any(not math.isnan(float(series["value"][1])) for series in result)

    async def metric_names(self) -> set[str]:
        return set(await self._get("label/__name__/values"))

    async def alert_rules(self) -> set[str]:
        groups = (await self._get("rules", type="alert"))["groups"]
        return {rule["name"] for group in groups for rule in group["rules"]}

    async def firing(self) -> set[str]:
        alerts = (await self._get("alerts"))["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    async def _get(self, path: str, **params: str) -> Any:
        url = f"{self._url}/api/v1/{path}"
        try:
            async with asyncio.timeout(ASK_S), self._http.get(url, params=params) as response:
                answer = json.loads(await response.read())
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise UnreachableError(f"{url} does not answer: {error!r}") from error
        if answer.get("status") != "success":
            raise EngineError(f"Prometheus refuses {params or path}: {answer.get('error', answer)}")
        return answer["data"]
