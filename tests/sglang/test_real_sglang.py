"""A real SGLang on the CPU behind the engine seam."""

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from prometheus_client import REGISTRY, generate_latest
from tokenizers import Tokenizer

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.protocol.events import Cleared, Digest, KvEvent, Removed, Stored
from kvmesh.protocol.hashing import hash_seed, sequence_hashes
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import (
    Control,
    ControlAction,
    Delta,
    Guide,
    GuideKind,
    SamplingParams,
    StopConditions,
)
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.engines.sglang.engine import SglangEngine
from tests.support.asking import asked, prompt_tokens
from tests.support.listening import open_to_others
from tests.support.patience import PATIENCE_S
from tests.support.sglang_cpu import ENV, FLAGS, needs_sglang
from tests.support.vllm_adapters import write_adapter

pytestmark = [needs_sglang, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

BLOCK = 16
NUM_BLOCKS = 64
ADAPTERS = ("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj", "v_proj")
ADAPTERS += ("--lora-backend", "torch_native", "--max-loras-per-batch", "2")


class Worker:
    """The engine, and a follower that knows only what it announces."""

    def __init__(self, engine: SglangEngine) -> None:
        self.engine = engine
        self.held: set[int] = set()
        self.told: Counter[str] = Counter()
        engine.on_kv_events(self.follow)

    def follow(self, events: Sequence[KvEvent]) -> None:
        for event in events:
            self.told[type(event).__name__] += 1
            match event:
                case Stored():
                    self.held |= set(event.hashes)
                case Removed():
                    self.held -= set(event.hashes)
                case Cleared():
                    self.held.clear()

    def overlap_tokens(self, tokens: Sequence[int]) -> int:
        """Return how much of a prompt is held; its last token is always computed."""
        hashes = sequence_hashes(tokens[: len(tokens) - 1], BLOCK)
        return BLOCK * len(list(itertools.takewhile(self.held.__contains__, hashes)))

    async def settled(self) -> None:
        """SGLang tells its events from a thread of its own: wait until there are no more."""
        before: Digest | None = None
        while (now := self.engine.kv_digest()) != before:
            before = now
            await asyncio.sleep(0.3)

    async def run(self, tokens: Sequence[int], max_tokens: int = 8, **fields: Any) -> list[Delta]:
        return [delta async for delta in self.engine.generate(asked(tokens, max_tokens, **fields))]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker() -> AsyncIterator[Worker]:
    flags = [*FLAGS, "--max-total-tokens", str(NUM_BLOCKS * BLOCK), "--grammar-backend", "xgrammar", *ADAPTERS]
    config = WorkerConfig(model_path=str(CHECKPOINT_DIR), block_size=BLOCK, engine_args=" ".join(flags))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENV.items():
            patch.setenv(name, value)
        worker = Worker(SglangEngine(config, "tiny"))
        try:
            await worker.engine.start(WorkerId("w"), "127.0.0.1:1")
            yield worker
        finally:
            await worker.engine.stop()


@pytest.mark.parametrize(
    ("guide", "is_in_form"),
    [
        (Guide(kind=GuideKind.CHOICE, value='["red", "green"]'), lambda text: text in ("red", "green")),
        (Guide(kind=GuideKind.REGEX, value="[0-9]{3}-[ab]c"), lambda text: len(text) == 6 and text[:3].isdigit()),
        (Guide(kind=GuideKind.GRAMMAR, value='root ::= "x" | "yy"'), lambda text: text in ("x", "yy")),
        (
            Guide(kind=GuideKind.JSON_SCHEMA, value='{"enum": ["only", "these"]}'),
            lambda text: json.loads(text) in ("only", "these"),
        ),
    ],
    ids=["choice", "regex", "grammar", "schema"],
)
async def test_a_guide_holds_the_answer_to_its_form(
    worker: Worker, guide: Guide, is_in_form: Callable[[str], bool]
) -> None:
    deltas = await worker.run(prompt_tokens(40), guide=guide, stop=StopConditions(max_tokens=40))
    tokens = [token for delta in deltas for token in delta.token_ids]
    assert is_in_form(Tokenizer.from_file(str(CHECKPOINT_DIR / "tokenizer.json")).decode(tokens))


async def test_what_is_announced_is_what_sglang_finds_through_evictions(worker: Worker) -> None:
    found = []
    for turn in range(12):
        for tokens in (prompt_tokens(150 + turn, 31 * (turn % 8)), prompt_tokens(60 + 16 * turn, 31 * (turn % 8))):
            await worker.settled()
            expected = worker.overlap_tokens(tokens)
            deltas = await worker.run(tokens)
            assert deltas[0].cached_tokens == expected
            found.append(expected)
    assert worker.told["Removed"] and 0 in found and max(found) > 100
    assert len(worker.held) <= NUM_BLOCKS


async def test_an_emptied_cache_is_announced(worker: Worker) -> None:
    await worker.run(prompt_tokens(100))
    await until(lambda: bool(worker.held))
    await worker.engine.control(Control(action=ControlAction.RESET_PREFIX_CACHE))
    await until(lambda: not worker.held)
    assert worker.engine.kv_digest() == Digest(0, 0) and worker.engine.kv_snapshot() == []


async def test_an_adapter_loaded_again_with_other_weights_reuses_no_kv(worker: Worker, tmp_path: Path) -> None:
    """The same folder and name hold other weights at the second load; `fresh` has them from the start."""
    prompt, answers = prompt_tokens(100, 5), []
    names = {*sequence_hashes(prompt[:96], BLOCK, hash_seed("muse"))}
    for seed in (3, 4):
        await load(worker, "muse", write_adapter(tmp_path / "muse", seed))
        assert not worker.held & names, "no block of the old weights is announced"
        first = await worker.run(prompt, lora="muse")
        again = await worker.run(prompt, lora="muse")
        assert (first[0].cached_tokens, again[0].cached_tokens) == (0, 96)
        assert tokens_of(first) == tokens_of(again)
        await until(lambda: worker.held >= names)
        answers.append(tokens_of(first))
        await worker.engine.control(Control(action=ControlAction.UNLOAD_LORA, arguments={"name": "muse"}))
    await load(worker, "fresh", write_adapter(tmp_path / "fresh", 4))
    assert tokens_of(await worker.run(prompt, lora="fresh")) == answers[1] != answers[0]
    await worker.engine.control(Control(action=ControlAction.UNLOAD_LORA, arguments={"name": "fresh"}))


async def load(worker: Worker, name: str, path: str) -> None:
    await worker.engine.control(Control(action=ControlAction.LOAD_LORA, arguments={"name": name, "path": path}))


def tokens_of(deltas: Sequence[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


async def test_nobody_outside_of_this_host_can_reach_its_ports(worker: Worker) -> None:
    """Public advisories of SGLang: CVE-2026-92972 and CVE-2026-86793. Its processes read pickles from some of them.

    torch.distributed knows no other address for its store than all of them; docs/security.md says so.
    """
    process, runtime = psutil.Process(), worker.engine._runtime
    assert runtime is not None
    found = open_to_others([process, *process.children(recursive=True)])
    assert [(name, port) for name, port in found if port != runtime.port_args.nccl_port] == []


async def test_its_load_is_told_while_it_computes_and_is_none_when_it_rests(worker: Worker) -> None:
    """SGLang counts what is held with every prompt and every 40 tokens, and not when it has come to rest."""
    seen = [worker.engine.load() async for _ in worker.engine.generate(asked(prompt_tokens(100), 130))]
    assert {load.running for load in seen} == {1}
    assert 200 // BLOCK <= max(load.used_blocks for load in seen) <= 256 // BLOCK
    await until(lambda: worker.engine.load().running == worker.engine.load().used_blocks == 0)


@pytest.mark.parametrize("top", [0, 3])
async def test_each_token_has_its_logprob_and_the_top(worker: Worker, top: int) -> None:
    deltas = await worker.run(prompt_tokens(40), sampling=SamplingParams(temperature=0, top_logprobs=top))
    logprobs = [entry for delta in deltas for entry in delta.logprobs or ()]
    assert [entry.token_id for entry in logprobs] == [token for delta in deltas for token in delta.token_ids]
    assert all(len(entry.top) == top for entry in logprobs)


async def test_its_metrics_stand_beside_the_workers_each_once(worker: Worker) -> None:
    types = [line for line in generate_latest(REGISTRY).decode().splitlines() if line.startswith("# TYPE")]
    assert any(line.startswith("# TYPE sglang:num_running_reqs ") for line in types)
    assert [line for line, count in Counter(types).items() if count > 1] == []
