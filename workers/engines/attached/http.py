"""Talk to one server: whole answers and streams of events, within bounds, failures as the mesh's own errors."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any

import aiohttp
import msgspec

from kvmesh.mesh.trace_context import trace_headers
from kvmesh.protocol.errors import PeerLostError, UnreachableError, WireError
from kvmesh.workers.engines.attached.refusals import refusal
from kvmesh.workers.engines.attached.sse import SseReader

CONNECT_S = 5.0
IDLE_CONNECTION_S = 2.0  # shorter than any server's own patience, 5 s for vLLM: it would close while we write
MAX_ANSWER_BYTES = 32 << 20
MAX_ERROR_BYTES = 64 << 10

_CLOSED_UNUSED = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionResetError)


class ServerHttp:
    """Belongs to the event loop it was made on. `url`: http(s)://host:port, and a path before /v1 if there is one."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self.url = url.rstrip("/")
        headers = {"accept-encoding": "identity"}  # a bound on bytes is worth nothing if they can be inflated
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            auto_decompress=False,
        )

    async def get(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        """Return status and body. Raises UnreachableError, PeerLostError, WireError for a body that is too large."""
        with _mesh_errors(self.url):
            async with asyncio.timeout(timeout_s), self._get(path) as response:
                return response.status, await _whole(response, MAX_ANSWER_BYTES)

    def _get(self, path: str) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self._session.get(self.url + path, allow_redirects=False)

    async def post(self, path: str, body: dict[str, Any]) -> bytes:
        """Return the whole answer. Raises as `get` does, and the error that `refusal` makes. Cancelling it closes."""
        async with self._posted(path, body) as response:
            return await _whole(response, MAX_ANSWER_BYTES)

    async def events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[list[bytes], None]:
        """Yield the data of server-sent events; those that came together, together. Raises as `post` does.

        Closing it closes the connection: servers take that for the end of the request.
        """
        reader = SseReader()
        async with self._posted(path, body) as response:
            async for piece in response.content.iter_any():
                if events := reader.feed(piece):
                    yield events

    async def close(self) -> None:
        """A second call does nothing."""
        await self._session.close()

    @asynccontextmanager
    async def _posted(self, path: str, body: dict[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        with _mesh_errors(self.url):
            response = await self._post(path, msgspec.json.encode(body))
            try:
                if response.status >= 300:
                    said = await _whole(response, MAX_ERROR_BYTES)
                    raise refusal(response.status, said, response.headers.get("retry-after", ""))
                yield response
            finally:
                if not response.content.at_eof():
                    response.close()
                response.release()

    async def _post(self, path: str, data: bytes) -> aiohttp.ClientResponse:
        """A connection that was kept may have been closed meanwhile: then once more."""
        headers = {"content-type": "application/json", **trace_headers()}
        try:
            return await self._session.post(self.url + path, data=data, headers=headers, allow_redirects=False)
        except aiohttp.ClientConnectorError:
            raise
        except _CLOSED_UNUSED:
            return await self._session.post(self.url + path, data=data, headers=headers, allow_redirects=False)


async def _whole(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Return the body. Raises WireError if it is larger than `max_bytes`."""
    parts, size = [], 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > max_bytes:
            response.close()
            raise WireError(f"{response.url.path} answered more than {max_bytes} bytes")
        parts.append(part)
    return b"".join(parts)


@contextmanager
def _mesh_errors(url: str) -> Iterator[None]:
    """Raise what goes wrong on the way to the server at `url` as a MeshError."""
    try:
        yield
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise UnreachableError(f"no connection to {url}: {error}") from error
    except TimeoutError as error:
        raise PeerLostError(f"{url} does not answer") from error
    except aiohttp.InvalidURL as error:
        raise UnreachableError(f"{url} is no URL", hint="http://host:port") from error
    except (aiohttp.ClientError, OSError) as error:
        raise PeerLostError(f"{url} closed the connection: {error or type(error).__name__}") from error
