"""Padded steps of decoding give the tokens of steps that are not padded."""

import pytest

torch = pytest.importorskip("torch")

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR  # noqa: E402
from kvmesh.protocol.errors import ConfigError  # noqa: E402
from kvmesh.protocol.messages import SamplingParams  # noqa: E402
from kvmesh.workers.config import WorkerConfig  # noqa: E402
from kvmesh.workers.engines.torch import kernels  # noqa: E402
from kvmesh.workers.engines.torch.batch import plan_step  # noqa: E402
from kvmesh.workers.engines.torch.buckets import Bucket, bucket_of, padded  # noqa: E402
from kvmesh.workers.engines.torch.config import bucket_sizes  # noqa: E402
from kvmesh.workers.engines.torch.executor import TorchExecutor  # noqa: E402
from kvmesh.workers.engines.torch.metrics import STEPS  # noqa: E402
from kvmesh.workers.executor import Row, Sampled  # noqa: E402

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.cuda,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU"),
        ],
    ),
]
BLOCK_SIZE = 4
SIZES = (2, 4, 8)


def decode(number: int, start: int, blocks: list[int], token: int = 7) -> Row:
    return Row(str(number), [token], start, blocks, True, SamplingParams(temperature=0.0), [token], [])


def prompt(number: int, tokens: list[int], blocks: list[int]) -> Row:
    return Row(str(number), tokens, 0, blocks, True, SamplingParams(temperature=0.0), tokens, [])


def test_a_step_takes_the_smallest_bucket_that_holds_it() -> None:
    rows = [decode(n, 1, [n]) for n in range(3)]
    assert bucket_of(plan_step(rows, BLOCK_SIZE), SIZES) == Bucket(4, 8)
    assert bucket_of(plan_step(rows[:1], BLOCK_SIZE), SIZES) == Bucket(2, 8)
    assert bucket_of(plan_step([decode(0, 35, list(range(9)))], BLOCK_SIZE), SIZES) == Bucket(2, 16)


def test_prompts_and_large_or_long_steps_take_no_bucket() -> None:
    many = [decode(n, 1, [n]) for n in range(9)]
    assert bucket_of(plan_step(many, BLOCK_SIZE), SIZES) is None
    assert bucket_of(plan_step([*many[:2], prompt(9, [1, 2], [10])], BLOCK_SIZE), SIZES) is None
    assert bucket_of(plan_step([decode(0, 40_000, [1] * 10_001)], BLOCK_SIZE), SIZES) is None
    assert bucket_of(plan_step(many[:2], BLOCK_SIZE), ()) is None


def test_padding_repeats_the_last_row_and_its_last_block() -> None:
    plan = plan_step([decode(0, 9, [5, 6, 7], token=3), decode(1, 2, [9], token=4), decode(2, 0, [8])], BLOCK_SIZE)
    rows = padded(plan, Bucket(4, 8)).tolist()
    assert rows == [
        [3, 9, 7, 5, 6, 7, 7, 7, 7, 7, 7],
        [4, 2, 9, 9, 9, 9, 9, 9, 9, 9, 9],
        [7, 0, 8, 8, 8, 8, 8, 8, 8, 8, 8],
        [7, 0, 8, 8, 8, 8, 8, 8, 8, 8, 8],
    ]


def answers(device: str, sizes: tuple[int, ...], lengths: list[int], steps: int) -> list[list[int]]:
    """Return the greedy answers to prompts of these lengths, computed together."""
    executor = TorchExecutor(
        CHECKPOINT_DIR, device=device, dtype="float32", block_size=BLOCK_SIZE, decode_buckets=sizes
    )
    executor.load()
    width = -(-(max(lengths) + steps) // BLOCK_SIZE)
    region = executor.allocate_kv(width * len(lengths) + 1, None)
    region.owner.fill_(float("nan"))  # what nobody may read
    tables = [list(range(n * width, (n + 1) * width)) for n in range(len(lengths))]
    prompts = [[(7 * n + i) % 200 + 3 for i in range(length)] for n, length in enumerate(lengths)]
    rows = [prompt(n, tokens, tables[n]) for n, tokens in enumerate(prompts)]
    found: list[list[int]] = [[] for _ in lengths]
    for step in range(steps):
        for answer, result in zip(found, executor.execute(rows), strict=True):
            assert isinstance(result, Sampled)
            answer.append(result.token_id)
        rows = [decode(n, lengths[n] + step, tables[n], found[n][-1]) for n in range(len(lengths))]
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths", [[11], [30, 3, 17], [5, 5, 5, 5, 40]], ids=str)
def test_padded_steps_give_the_same_tokens(lengths: list[int], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_NATIVE", None)
    expected = answers(device, (), lengths, 12)
    before = STEPS.labels("bucket")._value.get()
    assert answers(device, SIZES, lengths, 12) == expected
    assert STEPS.labels("bucket")._value.get() == before + 11


def test_a_cpu_with_kernels_needs_no_buckets(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "kvmesh.workers.engines.torch"):
        TorchExecutor(CHECKPOINT_DIR, device="cpu", decode_buckets=(1, 2)).load()
    assert "of use on a GPU alone" in caplog.text


def test_sizes_of_buckets_are_read_and_checked() -> None:
    assert bucket_sizes("") == ()
    assert bucket_sizes("8, 1,4") == (1, 4, 8)
    with pytest.raises(ConfigError, match="--decode-buckets is not for the engine mock"):
        WorkerConfig(model_path="m", engine="mock", decode_buckets="1,2")
    for wrong in ("0", "a", "1,,2", "5000", ",".join(map(str, range(1, 40)))):
        with pytest.raises(ConfigError, match="decode-buckets"):
            bucket_sizes(wrong)
