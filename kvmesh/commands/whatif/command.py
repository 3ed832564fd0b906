"""Run `kvmesh whatif`: what recent requests would have seen from another fleet, cache or routing policy."""

import asyncio
import gc
import os
import re
import sys
from collections.abc import Iterator
from heapq import merge
from pathlib import Path
from typing import Annotated

import aiohttp
import msgspec
from msgspec import Meta
from rich.console import Console

from kvmesh.commands.http_client import ClientConfig, open_session, refusal_of
from kvmesh.commands.whatif.view import told
from kvmesh.frontend.whatif.question import PastMesh, WhatIfQuestion
from kvmesh.mesh.config import load
from kvmesh.mesh.lifecycle import GC_THRESHOLDS
from kvmesh.protocol.errors import ConfigError, UnreachableError
from kvmesh.router.policies import Policy
from kvmesh.simulator.access_log import AccessLine, read_lines
from kvmesh.simulator.whatif.answer import WhatIfReport, answer
from kvmesh.simulator.whatif.traffic import is_generation

TIMEOUT_S = 180.0
UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_SPAN = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)([smh]?)")
_COUNT = "+1, -1, or how many, as a list: each combination of lists is a case"


class WhatIfConfig(ClientConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_WHATIF_<NAME>`, that over the TOML file of `--config`, that over the default."""

    last: Annotated[str, Meta(description="requests of this time before the latest: 90s, 10m, 1h")] = "10m"
    prefill: Annotated[str, Meta(description=f"prefill workers: {_COUNT}")] = ""
    decode: Annotated[str, Meta(description=f"decode workers: {_COUNT}")] = ""
    aggregated: Annotated[str, Meta(description=f"aggregated workers: {_COUNT}")] = ""
    blocks: Annotated[str, Meta(description="KV blocks of each worker: 4096, or x2 for twice as many; a list")] = ""
    policy: Annotated[str, Meta(description="routing policies, a list")] = ""
    access_log: Annotated[
        tuple[str, ...], Meta(description="instead: logs of --access-log-file; repeat it for those of all frontends")
    ] = ()
    model: Annotated[str, Meta(description="of several: the one to simulate")] = ""
    limit: Annotated[int, Meta(ge=40, le=100_000, description="requests at most; the latest count")] = 1000
    mesh_policy: Annotated[Policy, Meta(description="--access-log: routing policy of the mesh as it was")] = "kv"
    mesh_blocks: Annotated[int, Meta(ge=2, description="--access-log: KV blocks of each worker as it was")] = 2048
    mesh_seqs: Annotated[int, Meta(ge=1, description="--access-log: sequences that a worker ran at once")] = 32
    step_tokens: Annotated[int, Meta(ge=1, description="prompt tokens of one step of the workers")] = 512
    slo_ttft_s: Annotated[float, Meta(gt=0, description="--access-log: TTFT to keep")] = 2.0
    slo_itl_s: Annotated[float, Meta(gt=0, description="--access-log: mean gap between tokens to keep")] = 0.1
    json: Annotated[bool, Meta(description="print one JSON object")] = False


def main(argv: list[str]) -> int:
    """Return 0 if there is an answer, 3 if it is not known."""
    config = load(
        WhatIfConfig,
        argv,
        os.environ,
        prefix="KVMESH_WHATIF_",
        prog="kvmesh whatif",
        description="Simulate the requests that a mesh has answered lately with other workers, caches or policies. "
        "First the simulation has to reproduce what really happened; beyond 20 % of error nothing is answered. "
        "Without --prefill, --decode, --aggregated, --blocks and --policy: one worker more and one less of each role.",
        section="whatif",
    )
    console = Console(stderr=config.json, width=None if sys.stdout.isatty() else 160)
    report = from_logs(config, console) if config.access_log else asyncio.run(ask(config))
    if config.json:
        print(msgspec.json.encode(report).decode())
    else:
        for part in told(report):
            console.print(part, highlight=False)
    return 0 if report.is_known else 3


def question_of(config: WhatIfConfig) -> WhatIfQuestion:
    """Return what is asked. Raise ConfigError."""
    return WhatIfQuestion(
        last_s=span_s(config.last),
        limit=config.limit,
        model=config.model,
        prefill=config.prefill,
        decode=config.decode,
        aggregated=config.aggregated,
        blocks=config.blocks,
        policy=config.policy,
    )


def span_s(text: str) -> float:
    """Return the seconds of `10m`. Raise ConfigError."""
    found = _SPAN.fullmatch(text)
    seconds = float(found[1]) * UNITS[found[2]] if found is not None else 0.0
    if not 0 < seconds <= 86_400:
        raise ConfigError(f"--last is {text[:40]!r}", hint="write a time up to 24h, as in 90s, 10m or 1h")
    return seconds


def from_logs(config: WhatIfConfig, console: Console) -> WhatIfReport:
    """Answer from access logs, in this process. Raise ConfigError."""
    gc.set_threshold(*GC_THRESHOLDS)
    mesh = PastMesh(
        model="",
        block_size=16,
        blocks=config.mesh_blocks,
        max_num_seqs=config.mesh_seqs,
        max_step_tokens=config.step_tokens,
        policy=config.mesh_policy,
        ttft_slo_s=config.slo_ttft_s,
        itl_slo_s=config.slo_itl_s,
    )
    with console.status("reading") as status:
        return answer(lines_of(config), question_of(config), [mesh], status.update)


def lines_of(config: WhatIfConfig) -> Iterator[tuple[float, AccessLine]]:
    """Return the lines of all logs in order of arrival."""
    logs = [read_lines(Path(log), is_generation) for log in config.access_log]
    return merge(*logs, key=lambda found: found[0])


async def ask(config: WhatIfConfig) -> WhatIfReport:
    """Ask a frontend. Raise MeshError for a refusal, UnreachableError."""
    url = f"{config.url.rstrip('/')}/kvmesh/whatif"
    asked = msgspec.to_builtins(question_of(config)) | {"step_tokens": config.step_tokens}
    query = {name: str(value) for name, value in asked.items() if value != ""}
    try:
        async with (
            open_session(config.api_key, config.ca_file, TIMEOUT_S) as http,
            http.get(url, params=query) as reply,
        ):
            body = await reply.read()
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        why = str(error) or f"it took more than {TIMEOUT_S:g} s"
        hint = "start a mesh with `kvmesh up`, or set --url or --access-log"
        raise UnreachableError(f"no mesh answers at {url}: {why}", hint=hint) from error
    if reply.status != 200:
        raise refusal_of(url, reply.status, body, "the frontend is of an older release; use --access-log")
    return msgspec.json.decode(body, type=WhatIfReport)
