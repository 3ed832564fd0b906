"""Read the bodies of answers that others send us, up to a size."""

import aiohttp

from kvmesh.protocol.errors import WireError


async def bounded(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Return the body of a response. Raise WireError if it is larger than `max_bytes`."""
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_chunked(1 << 16):
        size += len(part)
        if size > max_bytes:
            raise WireError(f"{response.url} sends more than {max_bytes} bytes")
        parts.append(part)
    return b"".join(parts)
