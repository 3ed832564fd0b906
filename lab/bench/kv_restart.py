"""Fill a tier in a process of its own, which is then killed with SIGKILL: what it has not written is gone."""

import asyncio
import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection

from kvmesh.lab.bench.kv_engines import BenchedEngine, KvBenchConfig, running
from kvmesh.protocol.errors import EngineError
from kvmesh.workers.tiers import TierSettings

PATIENCE_S = 300.0


def fill_and_kill(config: KvBenchConfig, tiers: TierSettings, prompts: Sequence[list[int]]) -> None:
    """Ask an engine of another process for prompts until the tier has all, and kill it. Raise EngineError."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_fill, args=(config, tiers, prompts, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(PATIENCE_S) or ours.recv() != "filled":
            raise EngineError("the engine that fills the tier gave no sign of life")
    except EOFError as error:
        raise EngineError("the engine that fills the tier ended before it was killed") from error
    finally:
        process.kill()
        process.join()


def _fill(config: KvBenchConfig, tiers: TierSettings, prompts: Sequence[list[int]], told: Connection) -> None:
    asyncio.run(_serve(config, tiers, prompts, told))


async def _serve(config: KvBenchConfig, tiers: TierSettings, prompts: Sequence[list[int]], told: Connection) -> None:
    async with running(config, tiers) as engine:
        side = BenchedEngine(engine)
        for prompt in prompts:
            for _ in range(2):  # what is asked for twice goes there
                await side.ask(prompt)
                await side.rest()
        told.send("filled")
        await asyncio.sleep(2 * PATIENCE_S)
