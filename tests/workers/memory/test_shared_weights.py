"""Weights of the torch engine in an image: the same values, one copy, and weights of one's own when anything fails."""

import asyncio
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")
import torch

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.protocol.errors import ConfigError, EngineError
from kvmesh.protocol.messages import SamplingParams
from kvmesh.workers.engines.torch.config import read_config
from kvmesh.workers.engines.torch.executor import TorchExecutor
from kvmesh.workers.engines.torch.weights import ModelWeights, random_weights
from kvmesh.workers.executor import Row
from kvmesh.workers.memory import client
from kvmesh.workers.memory.service import ImageCounter, listening
from kvmesh.workers.memory.shelf import ImageShelf
from kvmesh.workers.memory.torch_weights import ImagePlan, read_image, share_weights, weights_key

CPU = torch.device("cpu")
GIB = 1 << 30


@pytest.fixture
def service(tmp_path: Path) -> Iterator[str]:
    """Run a service in a thread: executors block."""
    path, started, stop = tmp_path / "memory.sock", threading.Event(), threading.Event()

    async def serve() -> None:
        counter = ImageCounter(ImageShelf(GIB, 60.0), listening(path), 60.0)
        started.set()
        await asyncio.to_thread(stop.wait)
        counter.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    started.wait()
    yield str(path)
    stop.set()
    thread.join()


def tiny(dtype: torch.dtype = torch.float32) -> ModelWeights:
    return random_weights(read_config(CHECKPOINT_DIR), CPU, dtype)


def image_of(found: ModelWeights) -> bytearray:
    plan = ImagePlan()
    head = plan.describe(found)
    fd = os.memfd_create("test")
    os.ftruncate(fd, plan.first + plan.num_bytes)
    plan.write(fd, head)
    image = bytearray(os.pread(fd, plan.first + plan.num_bytes, 0))
    os.close(fd)
    return image


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_image_has_every_tensor_as_it_was(dtype: torch.dtype) -> None:
    expected, read = tiny(dtype), read_image(image_of(tiny(dtype)))
    assert torch.equal(read.embed, expected.embed)
    for mine, theirs in zip(read.layers, expected.layers, strict=True):
        assert (mine.qk_norm is None) == (theirs.qk_norm is None)
        assert torch.equal(mine.input_norm, theirs.input_norm)
        for name in ("qkv", "o", "gate_up", "down"):
            ours, other = getattr(mine, name), getattr(theirs, name)
            assert all(map(torch.equal, ours.weights, other.weights))
            assert [bias is None for bias in ours.biases] == [bias is None for bias in other.biases]
    assert read.embed.data_ptr() % 2 == 0


def test_a_tied_matrix_lies_there_once() -> None:
    found = tiny()
    assert found.lm_head.weights[0] is found.embed
    read = read_image(image_of(found))
    assert read.lm_head.weights[0].data_ptr() == read.embed.data_ptr()


def test_a_writer_frees_its_own_weights_as_it_copies() -> None:
    found = tiny()
    image_of(found)
    assert found.embed.untyped_storage().size() == 0


def test_a_damaged_image_is_refused() -> None:
    image = image_of(tiny())
    for at, value in ((0, b"x"), (8, b"\xff" * 8), (16, b"\xc1" * 64)):
        damaged = bytearray(image)
        damaged[at : at + len(value)] = value
        with pytest.raises((EngineError, msgspec.DecodeError)):
            read_image(damaged)
    with pytest.raises(EngineError, match="too short for a tensor"):
        read_image(image[: len(image) // 2])


def executor(service: str) -> TorchExecutor:
    made = TorchExecutor(CHECKPOINT_DIR, dtype="bfloat16", weights_service=service)
    made.load()
    made.allocate_kv(4, None)
    return made


def token(made: TorchExecutor) -> object:
    return made.execute([Row("r", [5, 6, 7], 0, [0], True, SamplingParams(temperature=0), [5, 6, 7], [])])


def test_workers_that_share_weights_answer_as_one_alone(service: str) -> None:
    alone, writer, reader = executor(""), executor(service), executor(service)
    assert token(alone) == token(writer) == token(reader)
    assert alone._weights is not None and alone._weights.lease is None
    for made in (writer, reader):
        assert made._weights is not None and made._weights.image is not None
        made.close()


def test_without_a_service_a_worker_loads_by_itself_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client, "START_S", 0.0)
    made = executor(str(tmp_path / "none"))
    assert token(made) == token(executor(""))
    assert [r.message for r in caplog.records if r.levelno == logging.WARNING and "this worker alone" in r.message]


def test_an_error_of_the_model_is_not_tried_twice(service: str) -> None:
    calls: list[int] = []

    def load() -> ModelWeights:
        calls.append(1)
        raise ConfigError("no such tensor")

    with pytest.raises(ConfigError, match="no such tensor"):
        share_weights(service, lambda: b"k" * 32, "m", load)
    assert len(calls) == 1


def test_files_that_change_while_they_are_read_are_not_shared(service: str) -> None:
    keys = iter([b"a" * 32, b"b" * 32])
    found = share_weights(service, lambda: next(keys), "m", tiny)
    assert found.lease is None and found.image is None
    assert torch.equal(found.weights.embed, tiny().embed), "it was loaded again"


def test_the_key_is_that_of_files_dtype_and_kernels(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(CHECKPOINT_DIR, folder)
    before = weights_key(folder, "float32", "avx2", False)
    assert before == weights_key(folder, "float32", "avx2", False)
    others = {weights_key(folder, "bfloat16", "avx2", False), weights_key(folder, "float32", "", False)}
    others.add(weights_key(folder, "float32", "avx2", True))
    [file] = folder.glob("*.safetensors")
    found = file.stat()
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns + 1))
    others.add(weights_key(folder, "float32", "avx2", False))
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    others.add(weights_key(folder, "float32", "avx2", False))
    assert len(others - {before}) == 5
