"""Four frontends in processes of their own hold a key to its limits together, and go on when one of them dies."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from urllib.parse import unquote

import aiohttp
import pytest

from kvmesh.frontend.keys.keyfile import KeyLine, hashed, written
from kvmesh.frontend.keys.owners import Owners
from tests.support.mesh import until
from tests.support.patience import PATIENCE_S
from tests.support.services import NEW, Services

pytestmark = [pytest.mark.e2e, pytest.mark.long]
FRONTENDS = tuple(f"f{n}" for n in range(4))
PER_MINUTE = 400
STREAMS = 6
BODY = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 1, "ignore_eos": True}
TOKENS = 4  # of such a request


def write_keys(path: Path) -> None:
    keys = [
        KeyLine(name="requests", sha256=hashed("sk-requests"), requests_per_minute=PER_MINUTE),
        KeyLine(name="tokens", sha256=hashed("sk-tokens"), tokens_per_minute=PER_MINUTE * TOKENS),
        KeyLine(name="streams", sha256=hashed("sk-streams"), streams=STREAMS),
        KeyLine(name="free", sha256=hashed("sk-free")),
    ]
    path.write_text("".join(f"{written(line)}\n" for line in keys))
    path.chmod(0o600)


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    folder = tmp_path_factory.mktemp("limits")
    write_keys(folder / "keys")
    with ExitStack() as stack:
        services = Services(folder, f"file:{folder / 'discovery'}", stack)
        services.start("aggregated", NEW, "--mock-speedup", "0", "--kv-transfer", "shm")
        for name in FRONTENDS:
            services.start("frontend", NEW, "--api-keys-file", str(folder / "keys"), name=name)
        for name in FRONTENDS:
            services.until_ready(name)
            services.until_joined(name, 1)
            until(lambda name=name: services.metric(name, "kvmesh_frontend_key_frontends") == 4, what="all frontends")
        yield services


def owner_of(services: Services, key: str) -> str:
    """Return the frontend that owns a key's budget."""
    folder = Path(services.discovery.removeprefix("file:"))
    names = [unquote(path.stem).removeprefix("limiters/") for path in folder.glob("limiters*.key")]
    assert len(names) == len(FRONTENDS)
    owners = Owners(names[0])
    for name in names:
        owners.put(0.0, name, "")
    return owners.owner(key).partition("-")[0]


@asynccontextmanager
async def asking(key: str) -> AsyncIterator[aiohttp.ClientSession]:
    headers = {"authorization": f"Bearer sk-{key}"}
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(20)) as session:
        yield session


async def flood(services: Services, names: tuple[str, ...], key: str, seconds: float) -> list[float]:
    """Ask all frontends for as long as is said; return when requests were let in. Nothing but 200 and 429 comes."""
    admitted: list[float] = []
    end = time.monotonic() + seconds

    async def ask(session: aiohttp.ClientSession, url: str) -> None:
        while time.monotonic() < end:
            async with session.post(f"{url}/v1/completions", json=BODY) as reply:
                await reply.read()
                assert reply.status in (200, 429), await reply.text()
                assert reply.headers["x-ratelimit-limit-" + key]
                if reply.status == 200:
                    admitted.append(time.monotonic())
                else:
                    assert int(reply.headers["retry-after"]) >= 1
                    await asyncio.sleep(0.02)

    async with asking(key) as session:
        await asyncio.gather(*[ask(session, services.url(name)) for name in names for _ in range(4)])
    return admitted


@pytest.mark.parametrize("key", ["requests", "tokens"])
async def test_under_overload_four_frontends_admit_one_limit(services: Services, key: str) -> None:
    admitted = await flood(services, FRONTENDS, key, 15.0)
    assert 0.95 * PER_MINUTE <= len(admitted) <= PER_MINUTE


async def test_streams_are_counted_over_all_frontends(services: Services) -> None:
    async with asking("streams") as session:
        body = BODY | {"max_tokens": 4000, "stream": True}
        replies: list[aiohttp.ClientResponse] = []

        async def ask_all() -> list[int]:
            replies.extend(
                [await session.post(f"{services.url(name)}/v1/completions", json=body) for name in FRONTENDS]
            )
            return [reply.status for reply in replies]

        async with asyncio.timeout(PATIENCE_S):
            while (await ask_all()).count(200) < STREAMS:  # some may lie unused in a lease for a moment
                await asyncio.sleep(0.02)
        statuses = await ask_all()
        assert statuses.count(200) == STREAMS, statuses
        assert set(statuses) == {200, 429}
        for reply in replies:
            reply.close()


async def test_a_frontend_that_is_killed_takes_no_limit_away(services: Services) -> None:
    """The last of these tests. What the others used without the owner, until another one owned the key, is too much.

    The limit is used up before, whichever tests have run in this process.
    """
    await flood(services, FRONTENDS, "requests", 3.0)
    owner = owner_of(services, "requests")
    rest = tuple(name for name in FRONTENDS if name != owner)
    services.kill(owner)
    began = time.monotonic()
    admitted = await flood(services, rest, "requests", 30.0)
    assert len(admitted) <= 1.5 * PER_MINUTE  # seen: 1.21 at most, on a busy machine
    assert time.monotonic() - began < 35.0
