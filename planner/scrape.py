"""Fetch /metrics pages and read samples from them."""

import asyncio
from collections.abc import Iterator

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvmesh.mesh.bodies import bounded
from kvmesh.protocol.errors import MeshError, UnreachableError, WireError

MAX_PAGE_BYTES = 8 << 20


def samples(page: str, prefix: str) -> Iterator[Sample]:
    """Yield the samples whose names begin with `prefix`. Pure. Raise WireError if the page cannot be read."""
    lines = [line for line in page.splitlines() if line.startswith(prefix)]  # most lines of a page are not needed
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            yield from family.samples
    except (ValueError, KeyError, IndexError) as error:
        raise WireError(f"this is no page of metrics: {error}") from error


async def fetch_page(http: aiohttp.ClientSession, url: str, timeout_s: float, **params: str) -> str:
    """Return a page. Raise UnreachableError, WireError if it is too large, MeshError for a status other than 200."""
    try:
        async with asyncio.timeout(timeout_s), http.get(url, params=params or None) as response:
            body = await bounded(response, MAX_PAGE_BYTES)
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise UnreachableError(f"{url} does not answer: {error or f'not within {timeout_s:g} s'}") from error
    if response.status != 200:
        raise MeshError(f"{url} answered {response.status}: {body[:200].decode(errors='replace')}")
    return body.decode(errors="replace")
