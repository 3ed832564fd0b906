"""A real vLLM on the CPU behind the engine seam, against the same vLLM asked directly."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import pytest_asyncio
from prometheus_client import REGISTRY
from tokenizers import Tokenizer

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.protocol.errors import ContextLengthError, EngineError, InvalidRequestError
from kvmesh.protocol.events import Cleared, KvEvent, Removed, Stored
from kvmesh.protocol.hashing import hash_seed, sequence_hashes
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import (
    Control,
    ControlAction,
    Delta,
    FinishReason,
    GenerateRequest,
    Guide,
    GuideKind,
    SamplingParams,
)
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.engine import EngineInfo
from kvmesh.workers.engines.vllm.engine import VllmEngine
from tests.support.asking import asked, prompt_tokens
from tests.support.vllm_adapters import write_adapter
from tests.support.vllm_mesh import BLOCK, ENV, FLAGS, needs_vllm

pytestmark = [needs_vllm, pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="module")]

NUM_BLOCKS = 96


class Worker:
    """The engine, and a follower that knows only what it announces."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self.info: EngineInfo
        self.held: set[int] = set()
        self.num_removed = 0
        engine.on_kv_events(self.follow)

    def follow(self, events: Sequence[KvEvent]) -> None:
        for event in events:
            match event:
                case Stored():
                    self.held |= set(event.hashes)
                case Removed():
                    self.held -= set(event.hashes)
                    self.num_removed += len(event.hashes)
                case Cleared():
                    self.held.clear()

    async def settled(self) -> None:
        """Wait until there are no more events: vLLM publishes them from a thread of its own."""
        before = None
        while (now := self.engine.kv_digest()) != before:
            before = now
            await asyncio.sleep(0.3)

    def overlap_blocks(self, tokens: Sequence[int]) -> int:
        """Return how much of a prompt is held; its last token is always computed."""
        hashes = sequence_hashes(tokens[: len(tokens) - 1], BLOCK)
        return len(list(itertools.takewhile(self.held.__contains__, hashes)))

    async def run(self, tokens: Sequence[int], max_tokens: int = 12, **fields: Any) -> list[Delta]:
        return [delta async for delta in self.engine.generate(asked(tokens, max_tokens, **fields))]

    async def control(self, action: ControlAction, **arguments: str) -> tuple[str, ...]:
        return (await self.engine.control(Control(action=action, arguments=arguments))).loras


def tokens_of(deltas: Sequence[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def text_of(deltas: Sequence[Delta]) -> str:
    return str(Tokenizer.from_file(str(CHECKPOINT_DIR / "tokenizer.json")).decode(tokens_of(deltas)))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Worker]:
    folder = tmp_path_factory.mktemp("adapters")
    poet, cook = write_adapter(folder / "poet", 1), write_adapter(folder / "cook", 2)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENV.items():
            patch.setenv(name, value)
        flags = [*FLAGS, "--num-gpu-blocks-override", str(NUM_BLOCKS)]
        settings = {"model_path": str(CHECKPOINT_DIR), "model": "tiny", "dtype": "float32", "engine": "vllm"}
        settings |= {"engine_args": " ".join(flags), "loras": f"poet={poet},cook={cook}"}
        worker = Worker(VllmEngine(msgspec.convert(settings, WorkerConfig), "tiny"))
        try:
            worker.info = await worker.engine.start(WorkerId("w"), "127.0.0.1:1")
            yield worker
        finally:
            await worker.engine.stop()


async def test_greedy_answers_are_those_of_vllm_alone(worker: Worker) -> None:
    from vllm import SamplingParams as VllmParams
    from vllm.inputs import TokensPrompt

    llm = worker.engine._driver._llm  # type: ignore[union-attr]
    for length in (1, 31, 32, 33, 200):
        alone: list[int] = []
        params = VllmParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        async for output in llm.generate(
            TokensPrompt(prompt_token_ids=prompt_tokens(length)), params, f"alone-{length}"
        ):
            alone = list(output.outputs[0].token_ids)
        assert tokens_of(await worker.run(prompt_tokens(length))) == alone


async def test_no_process_beside_its_engine_waits_for_it_by_spinning(worker: Worker) -> None:
    """The worker chooses vLLM's executor of one process; vLLM's default takes seconds for a step on busy cores."""
    titles = [" ".join(process.cmdline()) for process in psutil.Process().children(recursive=True)]
    assert any("EngineCore" in title for title in titles)
    assert not any("VLLM::Worker" in title for title in titles)


async def test_an_answer_goes_on_elsewhere_as_it_would_have(worker: Worker) -> None:
    whole = tokens_of(await worker.run(prompt_tokens(100), 12))
    assert tokens_of(await worker.run(prompt_tokens(100), 12, generated=tuple(whole[:5]))) == whole[5:]


async def test_a_seed_draws_the_same_answer_again(worker: Worker) -> None:
    draws = [
        tokens_of(await worker.run(prompt_tokens(50), 12, sampling=SamplingParams(temperature=1.0, seed=seed)))
        for seed in (2**64 - 1, 2**64 - 1, 7)
    ]
    assert draws[0] == draws[1] != draws[2]


async def test_logprobs_are_sorted_and_belong_to_the_tokens(worker: Worker) -> None:
    for delta in await worker.run(prompt_tokens(50), 4, sampling=SamplingParams(temperature=0, top_logprobs=3)):
        assert delta.logprobs is not None
        for token, entry in zip(delta.token_ids, delta.logprobs, strict=True):
            assert entry.top[0] == (token, entry.logprob)  # greedy: the likeliest is chosen
            assert [logprob for _, logprob in entry.top] == sorted((p for _, p in entry.top), reverse=True)
            assert len(entry.top) == 3


async def test_logprobs_of_a_prompt_are_those_of_decoding_it(worker: Worker) -> None:
    """Each token of the prompt has the logprob that it has as the only allowed next token; a cached prompt, too."""
    prompt = prompt_tokens(80)
    sampling = SamplingParams(temperature=0, top_logprobs=2, prompt_logprobs=2)
    for _ in range(2):
        deltas = await worker.run(prompt, 2, sampling=sampling)
        assert [len(delta.logprobs or ()) - len(delta.token_ids) for delta in deltas] == [len(prompt) - 1, 0]
        scores = (deltas[0].logprobs or ())[: len(prompt) - 1]
        assert [entry.token_id for entry in scores] == prompt[1:]
        assert all(len(entry.top) == 2 and entry.logprob <= entry.top[0][1] for entry in scores)
    for n in (1, 40, 79):
        only = SamplingParams(temperature=0, top_logprobs=0, allowed_token_ids=(prompt[n],))
        [delta] = await worker.run(prompt[:n], 1, sampling=only)
        assert delta.logprobs is not None
        assert delta.logprobs[0].logprob == pytest.approx(scores[n - 1].logprob, abs=1e-3)


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
async def test_a_guide_holds_the_answer_to_its_form(worker: Worker, guide: Guide, is_in_form: Any) -> None:
    deltas = await worker.run(prompt_tokens(40), 40, guide=guide, ignore_eos=False)
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert is_in_form(text_of(deltas))


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (asked([99_999]), InvalidRequestError),
        (asked([]), InvalidRequestError),
        (asked([5] * 2000), ContextLengthError),
        (asked([5], guide=Guide(kind=GuideKind.JSON_SCHEMA, value='{"type": 3}')), InvalidRequestError),
        (asked([5], sampling=SamplingParams(temperature=-1.0)), InvalidRequestError),
        (asked([5], lora="nobody"), InvalidRequestError),
    ],
)
async def test_what_vllm_cannot_do_is_the_callers_error(
    worker: Worker, request_: GenerateRequest, error: type[Exception]
) -> None:
    with pytest.raises(error):
        async for _ in worker.engine.generate(request_):
            pass
    worker.engine.check_health()


async def test_an_answer_that_nobody_wants_leaves_vllm(worker: Worker) -> None:
    deltas = worker.engine.generate(asked(prompt_tokens(50), 900))
    await anext(deltas)
    await deltas.aclose()
    assert worker.engine._driver._llm.get_num_unfinished_requests() == 0  # type: ignore[union-attr]
    assert worker.engine.load().running == worker.engine.load().waiting == 0


async def test_adapters_answer_differently_and_share_no_cache(worker: Worker) -> None:
    assert worker.info.loras == ("poet", "cook")
    answers = {name: tokens_of(await worker.run(prompt_tokens(100, 5), lora=name)) for name in (None, "poet", "cook")}
    assert len({tuple(answer) for answer in answers.values()}) == 3
    again = await worker.run(prompt_tokens(100, 5), lora="poet")
    assert (tokens_of(again), again[0].cached_tokens) == (answers["poet"], 96)


async def test_tenants_share_no_cache(worker: Worker) -> None:
    await worker.run(prompt_tokens(100, 6), cache_salt="a")
    assert [(await worker.run(prompt_tokens(100, 6), cache_salt=salt))[0].cached_tokens for salt in ("b", "a")] == [
        0,
        96,
    ]


async def test_what_is_announced_is_what_vllm_finds_through_evictions(worker: Worker) -> None:
    """Forty prompts of ten blocks, of which some begin alike, in 96 blocks: every hit of vLLM is foreseen."""
    await worker.settled()
    hits_before, foreseen, removed_before = hits(), 0, worker.num_removed
    for turn in range(40):
        tokens = prompt_tokens(200, first=turn % 7) + prompt_tokens(140, first=turn % 13)
        overlap = worker.overlap_blocks(tokens)
        [first, *_] = await worker.run(tokens, 2)
        assert first.cached_tokens == overlap * BLOCK, f"turn {turn}"
        foreseen += overlap * BLOCK
        await worker.settled()
        assert worker.engine.kv_digest().blocks == len(worker.held) <= NUM_BLOCKS
    assert worker.num_removed > removed_before
    assert hits() - hits_before == foreseen > 0


def hits() -> float:
    """Return vLLM's own count of hit tokens, from the worker's metrics."""
    return sum(
        sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == "vllm:prefix_cache_hits_total"
    )


async def test_an_emptied_cache_is_announced(worker: Worker) -> None:
    tokens = prompt_tokens(100, 77)
    await worker.run(tokens)
    await worker.settled()
    assert worker.overlap_blocks(tokens) == 3
    await worker.control(ControlAction.RESET_PREFIX_CACHE)
    await worker.run(prompt_tokens(40, 78))  # vLLM tells of it with its next step
    await worker.settled()
    assert worker.overlap_blocks(tokens) == 0


async def test_it_sleeps_and_wakes_with_the_same_mind(worker: Worker) -> None:
    before = tokens_of(await worker.run(prompt_tokens(60)))
    await worker.control(ControlAction.SLEEP)
    await worker.control(ControlAction.WAKE)
    assert tokens_of(await worker.run(prompt_tokens(60))) == before


async def test_adapters_can_be_taken_away_and_bad_ones_do_no_harm(worker: Worker) -> None:
    assert await worker.control(ControlAction.UNLOAD_LORA, name="cook") == ("poet",)
    with pytest.raises(InvalidRequestError, match="cannot load adapter 'bad'"):
        await worker.control(ControlAction.LOAD_LORA, name="bad", path="/nowhere")
    worker.engine.check_health()
    assert await worker.control(ControlAction.LIST_LORAS) == ("poet",)


async def test_an_adapter_loaded_again_with_other_weights_reuses_no_kv(worker: Worker, tmp_path: Path) -> None:
    """Public reports of vLLM: 42125 and 45981. The same folder and name hold other weights at the second load."""
    prompt, answers = prompt_tokens(100, 5), []
    names = sequence_hashes(prompt[:96], BLOCK, hash_seed("muse"))
    for seed in (3, 4):
        await worker.control(ControlAction.LOAD_LORA, name="muse", path=write_adapter(tmp_path / "muse", seed))
        assert not worker.held & {*names}, "no block of the old weights is announced"
        first = await worker.run(prompt, lora="muse")
        again = await worker.run(prompt, lora="muse")
        assert (first[0].cached_tokens, again[0].cached_tokens) == (0, 96)
        assert tokens_of(first) == tokens_of(again)
        await worker.settled()
        assert worker.held >= {*names}
        answers.append(tokens_of(first))
        await worker.control(ControlAction.UNLOAD_LORA, name="muse")
    await worker.control(ControlAction.LOAD_LORA, name="fresh", path=write_adapter(tmp_path / "fresh", 4))
    fresh = await worker.run(prompt, lora="fresh")
    assert (fresh[0].cached_tokens, tokens_of(fresh)) == (0, answers[1])
    assert answers[0] != answers[1]
    await worker.control(ControlAction.UNLOAD_LORA, name="fresh")


async def test_the_death_of_its_engine_process_is_noticed(worker: Worker) -> None:
    """The last test: nothing is left to ask."""
    deltas = worker.engine.generate(asked(prompt_tokens(50), 900))
    await anext(deltas)
    for process in psutil.Process().children():
        if "EngineCore" in " ".join(process.cmdline()):
            process.kill()
    with pytest.raises(EngineError, match="died"):
        async for _ in deltas:
            pass
    with pytest.raises(EngineError, match="died"):
        worker.engine.check_health()
