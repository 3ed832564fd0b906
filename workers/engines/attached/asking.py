"""Ask a server what it is and whether it lives."""

import asyncio
import logging
from dataclasses import replace
from urllib.parse import urlsplit

from kvmesh.protocol.errors import ConfigError, EngineError, MeshError
from kvmesh.workers.engines.attached.completions import COMPLETIONS, EMBEDDINGS, as_engine_errors
from kvmesh.workers.engines.attached.http import ServerHttp
from kvmesh.workers.engines.attached.kinds import kind_of
from kvmesh.workers.engines.attached.probe import read_models
from kvmesh.workers.engines.attached.server import AttachedServer, Body

log = logging.getLogger(__name__)

MODELS = "/v1/models"
START_S = 25.0  # a server that is not there yet is waited for so long; the supervisor then starts the worker again
ANSWER_S = 5.0  # for a look at the server's health and metrics
PROBE_S = 30.0
API_KEY = "KVMESH_ATTACH_API_KEY"


class HealthCheck:
    """Looks at the health of one server. A server without /health is asked for its models."""

    def __init__(self, http: ServerHttp) -> None:
        self._http = http
        self._path = "/health"

    async def look(self) -> str | None:
        """Return what is wrong with the server now, None if nothing is."""
        try:
            status, _ = await self._http.get(self._path, ANSWER_S)
            if status == 404 and self._path == "/health":
                self._path = MODELS
                status, _ = await self._http.get(self._path, ANSWER_S)
        except MeshError as error:
            return str(error)
        return None if status < 300 else f"{self._path} answers {status}"

    async def until_healthy(self, poll_s: float) -> None:
        """Raise EngineError if the server is not there within START_S."""
        deadline = asyncio.get_running_loop().time() + START_S
        is_reported = False
        while (problem := await self.look()) is not None:
            if asyncio.get_running_loop().time() > deadline:
                raise EngineError(f"no server at {self._http.url}: {problem}", hint="is it running there?")
            if not is_reported:
                log.warning("waiting for the server: %s", problem)
                is_reported = True
            await asyncio.sleep(poll_s)


async def probe_server(http: ServerHttp, model: str) -> AttachedServer:
    """Ask what the server says of `model`, "" for the only one it has, and what its kind can be asked beside that.

    Raise ConfigError if the server lacks what the settings want, EngineError if its answers cannot be read.
    """
    with as_engine_errors():
        status, body = await http.get(MODELS, PROBE_S)
        if status != 200:
            raise ConfigError(
                f"{http.url}{MODELS} answers {status}, 200 was expected",
                hint=f"is it an OpenAI-compatible server? Its key, if it wants one, goes into {API_KEY}",
            )
        server = read_models(body, model, kind_of)
        host = urlsplit(http.url).hostname or ""
        for probe in server.kind.probes:
            for path in probe.paths:
                status, body = await http.get(path, PROBE_S)
                if status == 200:
                    server = probe.read(server, body, host)
                    break
    return server


async def probe_tasks(http: ServerHttp, server: AttachedServer) -> AttachedServer:
    """Find out by asking: a server without a task refuses in words of its own. Most generate and do not embed."""
    text = [1] if server.kind.takes_token_ids else "a"
    if not await _can(http, EMBEDDINGS, {"model": server.model, "input": text}):
        return server
    generates = await _can(http, COMPLETIONS, {"model": server.model, "prompt": text, "max_tokens": 1})
    return replace(server, embeds=True, generates=generates)


async def _can(http: ServerHttp, path: str, body: Body) -> bool:
    try:
        async with asyncio.timeout(PROBE_S):
            await http.post(path, body)
    except (MeshError, TimeoutError) as error:
        log.debug("%s of %s: %s", path, http.url, error)
        return False
    return True
