"""The mock engine: answers that a test can foresee, at a pace that a bench can rely on, in a cache that is watched."""

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.protocol.errors import ConfigError, EngineError
from kvmesh.protocol.messages import Role, SamplingParams
from kvmesh.protocol.profile import DecodeTable, PrefillTable, Profile
from kvmesh.protocol.timing import PolynomialTiming, Timing, pull_s_per_token
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.engines.mock.alarm import Alarm
from kvmesh.workers.engines.mock.answers import mock_token, mock_vector
from kvmesh.workers.engines.mock.executor import MockExecutor
from kvmesh.workers.engines.mock.pace import MockPace
from kvmesh.workers.engines.mock.vocabulary import Vocabulary, read_vocabulary
from kvmesh.workers.engines.opening import open_engine
from kvmesh.workers.executor import Row, Sampled
from tests.support.patience import PATIENCE_S

BLOCK = 4
PROMPT = [11, 12, 13, 14, 15, 16]


def row(
    tokens: Sequence[int], start: int, table: Sequence[int], prompt: Sequence[int] = PROMPT, output: Sequence[int] = ()
) -> Row:
    return Row("r", tokens, start, table, True, SamplingParams(), prompt, output)


def ready(num_blocks: int = 64, **settings: Any) -> MockExecutor:
    executor = MockExecutor(block_size=BLOCK, **{"vocab_size": 100, "speedup": 0, **settings})
    executor.load()
    executor.allocate_kv(num_blocks, None)
    return executor


class Answer:
    """Runs one sequence as a scheduler would, a token in each step."""

    def __init__(self, executor: MockExecutor, prompt: Sequence[int], table: Sequence[int]) -> None:
        self.executor, self.prompt, self.table = executor, prompt, table
        self.output: list[int] = []
        self._step(prompt, 0)

    def next(self) -> None:
        self._step(self.output[-1:], len(self.prompt) + len(self.output) - 1)

    def _step(self, tokens: Sequence[int], start: int) -> None:
        [result] = self.executor.execute([row(tokens, start, self.table, self.prompt, self.output)])
        assert isinstance(result, Sampled)
        self.output.append(result.token_id)


# --- answers ---------------------------------------------------------------------------------------------------------


def test_an_answer_is_what_the_oracle_says() -> None:
    answer = Answer(ready(), PROMPT, [3, 1, 2, 9, 8])
    for _ in range(9):
        answer.next()
    assert answer.output == [mock_token(PROMPT, i, 100) for i in range(10)]


@given(prompt=st.lists(st.integers(0, 2**32 - 1), min_size=1), index=st.integers(0, 2**31), vocab=st.integers(4, 2**18))
def test_tokens_are_plain_and_in_the_vocabulary(prompt: list[int], index: int, vocab: int) -> None:
    assert 3 <= mock_token(prompt, index, vocab) < vocab


@given(prompt=st.lists(st.integers(0, 2**32 - 1), min_size=1))
def test_vectors_have_64_dimensions_and_length_1(prompt: list[int]) -> None:
    vector = np.frombuffer(mock_vector(prompt), "<f4")
    assert vector.shape == (64,)
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)
    assert mock_vector([*prompt, 1]) != mock_vector(prompt) != mock_vector(prompt, "adapter")


# --- the watched cache ------------------------------------------------------------------------------------------------


def test_cached_kv_is_compared_in_whole_before_use() -> None:
    executor = ready()
    executor.execute([row(PROMPT, 0, [0, 1])])
    executor.execute([row([15, 16], 4, [0, 5], output=[])])  # a shared block is the row's own
    with pytest.raises(EngineError, match="request r: the KV cache holds token 15 at position 0, not 11"):
        executor.execute([row([15, 16], 4, [1, 6])])


def test_a_pull_that_brought_nothing_is_noticed() -> None:
    with pytest.raises(EngineError, match="holds token 0 at position 0, not 11"):
        ready().execute([row([20], 6, [0, 1], output=[20])])


@pytest.mark.parametrize("position", [0, 3, 5, 8, 9])
def test_a_short_row_notices_overwritten_blocks_at_once(position: int) -> None:
    executor = ready()
    answer = Answer(executor, PROMPT, [0, 1, 2, 3])
    for _ in range(4):
        answer.next()
    written = [*(PROMPT + answer.output)[:position], 99]
    executor.execute([Row("thief", [99], position, answer.table, False, SamplingParams(), written, [])])
    with pytest.raises(EngineError, match=f"holds token 99 at position {position}"):
        answer.next()


def test_a_long_row_notices_a_lost_block_within_a_round() -> None:
    executor = ready()
    prompt = list(range(1, 81))  # 20 blocks
    answer = Answer(executor, prompt, list(range(40)))
    for _ in range(3):
        answer.next()
    executor.execute(
        [
            row(answer.output[-1:], 80 + len(answer.output) - 1, answer.table, prompt, answer.output),
            Row("thief", [99], 0, [7], False, SamplingParams(), [99], []),
        ]
    )
    answer.output.append(5)
    with pytest.raises(EngineError, match="holds token 99 at position 28, not 29"):
        for _ in range(11):
            answer.next()


def test_another_request_of_the_same_name_is_compared_anew() -> None:
    executor = ready()
    Answer(executor, PROMPT, [0, 1])
    other = [*PROMPT[:-1], 77]
    with pytest.raises(EngineError, match="holds token 16 at position 5, not 77"):
        executor.execute([row([20], 6, [0, 1], other, [20])])


# --- pace ------------------------------------------------------------------------------------------------------------


class Clock:
    """Time passes only while somebody waits."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    async def wait_until(self, due_s: float) -> None:
        assert due_s > self.now_s
        self.now_s = due_s


class PlainTiming:
    """A prompt takes 10 ms and 1 ms a token; a step that decodes takes 1 s a sequence and 1 ms a token held."""

    def prefill_s(self, new_tokens: int) -> float:
        return 0.010 + 0.001 * new_tokens

    def decode_s(self, sequences: int, kv_tokens: int) -> float:
        return sequences + 0.001 * kv_tokens


def pace(clock: Clock, timing: Timing | None, itl_ms: float = 0.0) -> MockPace:
    return MockPace(timing, itl_ms, clock.wait_until, block_size=BLOCK, clock=clock)


DECODES = [row([7], 6, [0, 1])]
PREFILLS = [row(PROMPT, 0, [0, 1])]


async def test_steps_end_on_a_schedule_whatever_comes_between_them() -> None:
    clock = Clock()
    kept = pace(clock, None, 5.0)
    ends = []
    for work_ms in (0.0, 0.1, 3.0, 4.9, 0.5):
        clock.now_s += work_ms / 1000
        await kept.keep(DECODES)
        ends.append(clock.now_s - 100)
    assert ends == pytest.approx([0.005, 0.010, 0.015, 0.020, 0.025])


@pytest.mark.parametrize("rest_s", [0.006, 10.0])
async def test_a_rest_longer_than_a_step_restarts_the_schedule(rest_s: float) -> None:
    clock = Clock()
    kept = pace(clock, None, 5.0)
    await kept.keep(DECODES)
    clock.now_s += rest_s
    await kept.keep(DECODES)
    assert clock.now_s == pytest.approx(100.010 + rest_s)


async def test_a_step_after_any_rest_takes_its_whole_time() -> None:
    clock = Clock()
    kept = pace(clock, None, 5.0)
    await kept.keep(DECODES)
    kept.rest()
    clock.now_s += 0.001
    await kept.keep(DECODES)
    assert clock.now_s == pytest.approx(100.011)


def test_a_fixed_pace_leaves_prompts_as_modelled() -> None:
    assert pace(Clock(), None, 5.0).step_s(PREFILLS) == 0
    assert pace(Clock(), PlainTiming(), 5.0).step_s(PREFILLS + DECODES) == pytest.approx(0.016 + 0.005)


def test_a_steps_time_depends_on_new_tokens_and_held_blocks() -> None:
    assert pace(Clock(), PlainTiming()).step_s(PREFILLS) == pytest.approx(0.016)
    assert pace(Clock(), PlainTiming()).step_s(DECODES) == pytest.approx(1 + 0.001 * 2 * BLOCK)
    assert pace(Clock(), PlainTiming()).step_s(PREFILLS + DECODES) == pytest.approx(0.016 + 1 + 0.001 * 4 * BLOCK)


def profile(**fields: Any) -> Profile:
    tables = {
        "prefill": PrefillTable(isl_tokens=[10, 20], ttft_s=[0.5, 1.0]),
        "decode": DecodeTable(kv_tokens=[1, 9], context_tokens=[4, 8], itl_s=[[1.0, 1.0], [3.0, 3.0]]),
    }
    return Profile(**{"model": "m", "engine": "e", "device": "d", "total_kv_tokens": 99, **tables, **fields})


@pytest.mark.parametrize("speedup", [1.0, 4.0])
def test_steps_are_timed_by_profile_or_published_fit(speedup: float) -> None:
    pace = ready(speedup=speedup, profile=profile()).load().pace
    assert isinstance(pace, MockPace)
    assert pace.step_s(PREFILLS) == pytest.approx(0.3 / speedup)
    assert pace.step_s(DECODES) == pytest.approx(2.75 / speedup)
    pace = ready(64, speedup=speedup).load().pace
    assert isinstance(pace, MockPace)
    assert pace.step_s(DECODES) == PolynomialTiming(64 * BLOCK, speedup).decode_s(1, 2 * BLOCK)
    assert ready(speedup=0, profile=profile()).load().pace.step_s(PREFILLS + DECODES) == 0  # type: ignore[union-attr]


def test_a_profile_says_which_roles_there_are_tables_for() -> None:
    assert ready(profile=profile()).load().roles == tuple(Role)
    assert ready(profile=profile(prefill=None)).load().roles == (Role.DECODE,)
    assert ready(profile=profile(decode=None)).load().roles == (Role.PREFILL,)


def test_a_profile_without_the_table_of_the_role_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(msgspec.json.encode(profile(prefill=None)))
    settings = {"engine": "mock", "model_path": str(CHECKPOINT_DIR), "kv_transfer": "shm", "mock_profile": str(path)}
    for role in (Role.PREFILL, Role.AGGREGATED):
        with pytest.raises(ConfigError, match=r"profile\.json has no prefill table.*role " + role.value):
            open_engine(WorkerConfig(role=role, **settings))
    with pytest.raises(ConfigError, match="no profile at"):
        open_engine(WorkerConfig(role=Role.DECODE, **{**settings, "mock_profile": str(tmp_path / "none")}))


def test_kv_comes_at_the_bandwidth_that_is_set() -> None:
    model_8b = pull_s_per_token(None, 64.0) * 1000  # 131 MB
    assert model_8b == pytest.approx(131_072_000 / 64e9)
    assert pull_s_per_token(profile(kv_bytes_per_token=64), 0.001, speedup=2) == pytest.approx(64 / 1e6 / 2)
    assert pull_s_per_token(profile(), 0.0) == pull_s_per_token(profile(), 64.0, speedup=0) == 0
    pace = ready(pull_s_per_token=0.25).load().pace
    assert pace is not None
    assert pace.pull_s(8) == 2


async def test_without_a_speed_nothing_waits_but_others_get_their_turn() -> None:
    clock, turns = Clock(), []
    asyncio.get_running_loop().call_soon(turns.append, 1)
    await pace(clock, None).keep(PREFILLS + DECODES)
    assert (clock.now_s, turns) == (100, [1])


async def test_an_alarm_rings_when_it_is_due_and_not_before() -> None:
    alarm = Alarm()
    due_s = time.monotonic() + 0.0043
    async with asyncio.timeout(PATIENCE_S):
        await alarm.wait_until(due_s)
        assert time.monotonic() >= due_s
        await alarm.wait_until(due_s)  # has passed
    alarm.close()
    alarm.close()


async def test_an_alarm_can_be_given_up_and_set_anew() -> None:
    alarm = Alarm()
    given_up = asyncio.create_task(alarm.wait_until(time.monotonic() + 0.003))
    await asyncio.sleep(0)
    given_up.cancel()
    due_s = time.monotonic() + 0.006
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.wait([given_up])
        await alarm.wait_until(due_s)
    assert time.monotonic() >= due_s
    alarm.close()


# --- vocabulary -------------------------------------------------------------------------------------------------------


def write_tokenizer(folder: Path, vocab: object, special: Sequence[int] = (), added: Sequence[int] = ()) -> None:
    tokens = [{"id": i, "special": True, "content": f"<{i}>"} for i in special]
    tokens += [{"id": i, "special": False, "content": f"+{i}"} for i in added]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": tokens}))


def test_the_mock_answers_with_the_plain_tokens_of_a_tokenizer() -> None:
    assert read_vocabulary(CHECKPOINT_DIR) == Vocabulary(2048, range(3, 2048))


def test_answers_have_no_special_tokens_but_prompts_may(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, {str(i): i for i in range(20)}, special=[10, 20, 21, 40], added=[22])
    assert read_vocabulary(tmp_path) == Vocabulary(41, range(11, 20))


def test_a_unigram_tokenizer_numbers_its_list(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, [["a", -1.0]] * 30, special=[0, 1, 2])
    assert read_vocabulary(tmp_path) == Vocabulary(30, range(3, 30))


def test_without_a_tokenizer_the_error_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json: .*; give --model-path a folder"):
        read_vocabulary(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(ConfigError, match="is no tokenizer"):
        read_vocabulary(tmp_path)
    write_tokenizer(tmp_path, {"a": 0, "b": 3}, special=[3])
    with pytest.raises(ConfigError, match="no token that is not special"):
        read_vocabulary(tmp_path)


def test_answers_stay_among_the_plain_tokens(tmp_path: Path) -> None:
    executor = ready(vocabulary=Vocabulary(1000, range(500, 510)))
    answer = Answer(executor, PROMPT, list(range(40)))
    for _ in range(60):
        answer.next()
    assert set(answer.output) == set(range(500, 510))
    assert executor.load().vocab_size == 1000
