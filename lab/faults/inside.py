"""Run a service that can be told to do things wrong: `python -m kvmesh.lab.faults.inside SWITCHES MODULE FLAGS...`.

The service's own code runs. Only what faults need is put in between: a wall clock with an offset, and around the mock
engine what stalls, raises, babbles and takes its blocks. KV that is not a request's own makes wrong tokens here, as in
a real engine; the mock by itself would end instead. Its tokens and its KV depend on its weights, and it follows guides.
"""

import asyncio
import dataclasses
import gc
import os
import resource
import runpy
import sys
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import kvmesh.mesh.lifecycle
import kvmesh.workers.engines.mock.executor as mock_executor
import kvmesh.workers.engines.mock.opening as mock_opening
import kvmesh.workers.engines.mock.witness as mock_witness
import kvmesh.workers.engines.step as opening_steps
from kvmesh.kvcache.transfer.shm import ShmBackend
from kvmesh.lab.faults.room import die_with_parent
from kvmesh.lab.faults.switches import Switches
from kvmesh.lab.faults.weights import digest_of, key_of, read_weights
from kvmesh.protocol.errors import TransferError
from kvmesh.protocol.messages import Delta, GenerateRequest, Ticket, TokenLogprob
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.engines.mock.answers import answer_token
from kvmesh.workers.engines.mock.witness import Seen, Witness
from kvmesh.workers.executor import ModelInfo, Result, Row, Sampled
from kvmesh.workers.guides import open_guides
from kvmesh.workers.step_engine import StepEngine

LOOK_S = 0.05
WRONG_KV = 0x5EED  # turns the digest of a prompt into that of another answer
BABBLE = (11, 12, 13)
HOARDED_BYTES = 1 << 20  # more, at each look
MOST_BYTES = 6 << 30  # of a worker's addresses: a guide that takes more must not take the machine's memory


def put(owner: object, name: str, part: object) -> None:
    """Replace a part of the service."""
    setattr(owner, name, part)


def shift_clock(switches: Switches) -> None:
    """Make time.time wrong by the offset that was ordered. Monotonic clocks stay right, as on a real machine."""
    real = time.time

    def wrong() -> float:
        return real() + switches.read().clock_offset_s

    put(time, "time", wrong)


class GarbagePauses:
    """Measures how long the garbage collector holds a thread, in the CPU time of that thread.

    The first `settle` does not count: it collects before the work, so that later collections are short.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._began_s = 0.0
        gc.callbacks.append(self._on_gc)

    def _on_gc(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began_s = time.thread_time()
            return
        caller = sys._getframe().f_back  # None when the interpreter collects at its exit
        if gc.get_freeze_count() or caller is None or caller.f_code is not kvmesh.mesh.lifecycle.settle.__code__:
            self.longest_s = max(self.longest_s, time.thread_time() - self._began_s)


def watch_loop(switches: Switches) -> None:
    """Report the number of asyncio tasks and the longest pause for garbage, from the service's own event loop.

    Take memory if that is ordered.
    """
    until_done: Callable[[Any], Coroutine[Any, Any, Any]] = kvmesh.mesh.lifecycle._until_done

    hoard: list[bytearray] = []

    async def report() -> None:
        pauses = GarbagePauses()
        while True:
            switches.report(len(asyncio.all_tasks()) - 1, 1000 * pauses.longest_s)
            if switches.read().hoards == os.getpid():
                hoard.append(bytearray(b"x" * HOARDED_BYTES))
            await asyncio.sleep(LOOK_S)

    async def watched(main: Any) -> Any:
        reporting = asyncio.create_task(report(), name="report tasks")
        try:
            return await until_done(main)
        finally:
            reporting.cancel()

    put(kvmesh.mesh.lifecycle, "_until_done", watched)


class CarelessWitness(Witness):
    """Does not complain about KV that is not a row's own: the row's answer becomes another one."""

    _is_wrong = False

    def _complain(self, row: Row, keys: bytearray) -> None:
        self._is_wrong = True

    def _take(self, row: Row, seen: Seen | None) -> Seen:
        self._is_wrong = False
        taken = super()._take(row, seen)
        if self._is_wrong:
            taken.digest ^= WRONG_KV
        return taken


def spoil_engine(switches: Switches) -> None:
    """Put the ordered faults around the mock engine."""
    put(mock_executor, "Witness", CarelessWitness)
    execute = mock_executor.MockExecutor.execute
    raised = switches.read().raises

    def execute_or_raise(executor: mock_executor.MockExecutor, rows: Sequence[Row]) -> list[Result]:
        nonlocal raised
        if (ordered := switches.read().raises) != raised:
            raised = ordered
            raise RuntimeError("the fault machine has this engine raise")
        return execute(executor, rows)

    run_step = StepEngine._execute

    async def step_or_stall(engine: StepEngine, rows: Sequence[Row]) -> Sequence[Result]:
        while switches.read().stalls == os.getpid():  # noqa: ASYNC110 - another process writes the order
            await asyncio.sleep(LOOK_S)
        return await run_step(engine, rows)

    put(mock_executor.MockExecutor, "execute", execute_or_raise)
    put(StepEngine, "_execute", step_or_stall)
    spoil_answers(switches)
    spoil_pool(switches)
    spoil_pulls(switches)


def serve_weights(switches: Switches) -> None:
    """Make the mock's tokens and KV depend on the weights in its folder, which it reads when it starts and wakes."""
    opens = mock_opening._open_executor

    def open_executor(config: WorkerConfig) -> mock_executor.MockExecutor:
        folder = Path(config.model_path)
        weights = read_weights(folder)
        put(mock_witness, "_keys_of", lambda ids: array("f", [key_of(one, weights) for one in ids]).tobytes())
        put(mock_witness, "prompt_digest", lambda prompt, lora: digest_of(prompt, lora, weights))
        executor = opens(config)
        put(executor, "folder", folder)
        switches.report_weights(weights)
        return executor

    put(mock_opening, "_open_executor", open_executor)
    made: Callable[..., Any] = vars(opening_steps)["StepEngineConfig"]

    def with_weights(*fields: Any, **named: Any) -> Any:
        """Have the fingerprint count the weights: the mock has none by itself."""
        return made(*fields, **{name: name == "has_weights" or value for name, value in named.items()})

    put(opening_steps, "StepEngineConfig", with_weights)


def follow_guides() -> None:
    """Have the mock invent only tokens that a request's guide allows."""
    load, sampled = mock_executor.MockExecutor.load, mock_executor.MockExecutor._sampled

    def load_guided(executor: Any) -> ModelInfo:
        info = load(executor)
        return dataclasses.replace(
            info, guides=open_guides(executor.folder, info.vocab_size, info.eos_token_ids, "compact")
        )

    def sampled_guided(executor: mock_executor.MockExecutor, row: Row, seen: Seen) -> Sampled:
        free = sampled(executor, row, seen)
        if row.guide is None or (allowed := row.guide.allowed()) is None:
            return free
        tokens = np.flatnonzero(allowed)
        token = int(tokens[answer_token(seen.digest, len(row.output), range(len(tokens)))])
        wants = row.sampling.top_logprobs
        return Sampled(token, None if wants is None else mock_executor.mock_logprob(token, wants))

    put(mock_executor.MockExecutor, "load", load_guided)
    put(mock_executor.MockExecutor, "_sampled", sampled_guided)


def limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))


def spoil_answers(switches: Switches) -> None:
    push = StepEngine.push

    async def push_and_babble(
        engine: StepEngine, request: GenerateRequest, take: Callable[[Delta], bool]
    ) -> AsyncGenerator[Delta, None]:
        async for delta in push(engine, request, take):
            # A guide ends an answer without a last token, so nothing would show where the answer ended.
            if delta.finish_reason is not None and request.guide is None and switches.read().babbles:
                more = tuple(TokenLogprob(token, 0.0) for token in BABBLE)
                logprobs = None if delta.logprobs is None else (*delta.logprobs, *more)
                delta = msgspec.structs.replace(delta, token_ids=(*delta.token_ids, *BABBLE), logprobs=logprobs)
            yield delta

    put(StepEngine, "push", push_and_babble)


def spoil_pulls(switches: Switches) -> None:
    fetch = ShmBackend.fetch

    async def fetch_or_fail(backend: ShmBackend, ticket: Ticket, skip: int, into: Sequence[int]) -> int:
        if switches.read().fails_pulls:
            raise TransferError("the fault machine lets no KV through")
        return await fetch(backend, ticket, skip, into)

    put(ShmBackend, "fetch", fetch_or_fail)


def spoil_pool(switches: Switches) -> None:
    start = StepEngine.start

    async def take_blocks(engine: StepEngine) -> None:
        held: list[int] = []
        while True:
            await asyncio.sleep(LOOK_S)
            wants = switches.read().holds_blocks
            if wants:
                held += engine._pool.allocate(engine._pool.available_blocks)
            elif held:
                engine._pool.release(held)
                held = []
                engine._wake.set()

    async def start_and_watch(engine: StepEngine, *arguments: Any) -> Any:
        info = await start(engine, *arguments)
        _KEPT.append(asyncio.create_task(take_blocks(engine), name="take blocks"))
        return info

    put(StepEngine, "start", start_and_watch)


_KEPT: list[asyncio.Task[None]] = []


def main() -> None:
    die_with_parent()
    switches = Switches(Path(sys.argv[1]))
    module = sys.argv[2]
    shift_clock(switches)
    watch_loop(switches)
    if module == "kvmesh.workers":
        if "mock" in sys.argv:
            limit_memory()
        serve_weights(switches)
        follow_guides()
        spoil_engine(switches)
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
