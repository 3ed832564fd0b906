"""Workers with other weights under one name: no answer is made of the KV of both, on any path."""

import asyncio
import json
import os
import shutil
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

pytest.importorskip("torch")

from tokenizers import Tokenizer

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.kv_content import PENDING
from kvmesh.protocol.messages import (
    Control,
    ControlAction,
    ControlReply,
    GenerateRequest,
    SamplingParams,
    StopConditions,
    WorkerCard,
    decode,
    pack_tokens,
)
from kvmesh.workers.engines.torch.executor import TorchExecutor
from kvmesh.workers.step_engine import StepEngine, StepEngineConfig
from tests.support import mesh_tls
from tests.support.mesh import until
from tests.support.services import NEW, Services

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(mesh_tls.IS_ON, reason="it asks an open frontend and orders workers without a certificate"),
]

TORCH = ("--engine", "torch", "--dtype", "float32", "--model", "tiny", "--kv-transfer", "shm")
PROMPTS = [[(7 * i + 31 * j) % 900 + 20 for i in range(100)] for j in range(4)]
FRESH = [(11 * i) % 900 + 20 for i in range(100)]
NEW_TOKENS = 12
SAMPLES, SAMPLE_BYTES = 32, 64 << 10  # a hash of samples alone would read these


def overwrite(folder: Path) -> None:
    """Change weights in place, at places that samples leave out, and set the file's time back."""
    path = folder / "model.safetensors"
    before = path.stat()
    content = bytearray(path.read_bytes())
    first = 8 + struct.unpack("<Q", content[:8])[0]
    sampled = [(len(content) - SAMPLE_BYTES) * number // (SAMPLES - 1) for number in range(SAMPLES)]
    for name, tensor in msgspec.json.decode(bytes(content[8:first])).items():
        if name == "__metadata__" or "proj" not in name:
            continue
        start, end = (first + offset for offset in tensor["data_offsets"])
        for place in range(start + 3, end, 16):
            if not any(begin <= place < begin + SAMPLE_BYTES for begin in sampled):
                content[place] ^= 0x80  # the sign of one number
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


async def plain(folder: Path) -> list[list[str]]:
    """Return what a model answers by itself, as texts of tokens."""
    config = StepEngineConfig("tiny", str(folder), 256, 8, 512, 30.0, 30.0)
    engine = StepEngine(TorchExecutor(folder, device="cpu", dtype="float32"), None, config)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    await engine.start(WorkerId("plain"), "")
    found = []
    for number, prompt in enumerate(PROMPTS):
        request = GenerateRequest(
            request_id=RequestId(str(number)),
            model="tiny",
            prompt=pack_tokens(prompt),
            sampling=SamplingParams(temperature=0),
            stop=StopConditions(max_tokens=NEW_TOKENS, ignore_eos=True),
        )
        tokens = [token async for delta in engine.generate(request) for token in delta.token_ids]
        found.append([tokenizer.decode([token], skip_special_tokens=False) for token in tokens])
    await engine.stop()
    return found


class Models:
    """The tiny model and one with other weights, and what each of them answers."""

    def __init__(self, folder: Path) -> None:
        self.other = folder / "other"
        shutil.copytree(CHECKPOINT_DIR, self.other)
        overwrite(self.other)
        self.answers = asyncio.run(plain(CHECKPOINT_DIR))
        self.other_answers = asyncio.run(plain(self.other))
        assert all(one != other for one, other in zip(self.answers, self.other_answers, strict=True))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


class Asking:
    """A mesh of single services, and a client of its frontend."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._discovery = folder / "discovery"
        self.services = Services(folder, f"file:{self._discovery}", stack)
        self.frontend = self.services.start("frontend", NEW)

    def start(self, role: str, *flags: str, name: str = "", model_path: Path = CHECKPOINT_DIR) -> str:
        return self.services.start(role, NEW, *flags, name=name or role, model_path=model_path, engine=TORCH)

    def until_ready(self, *workers: str) -> None:
        self.services.until_ready(self.frontend, *workers)
        self.services.until_joined(self.frontend, len(workers))

    def ask(self, prompt: list[int], worker: str = "", **kvmesh: Any) -> tuple[list[str], dict[str, Any]]:
        """Return the tokens of a greedy answer as texts, and its trace."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
        body |= {"logprobs": 0, "kvmesh": {"trace": True, **kvmesh}}
        url = f"{self.services.url(self.frontend)}/v1/completions"
        reply = httpx.post(url, json=body, headers={"x-kvmesh-worker": worker} if worker else {}, timeout=60)
        assert reply.status_code == 200, reply.text
        found = reply.json()
        return list(found["choices"][0]["logprobs"]["tokens"]), dict(found["kvmesh"])

    def why(self, prompt: list[int]) -> str:
        url = f"{self.services.url(self.frontend)}/kvmesh/route"
        reply = httpx.post(url, json={"model": "tiny", "prompt": prompt}, timeout=60)
        return str(reply.json()["explanation"]["why"]) if reply.status_code == 200 else reply.text

    def card(self, name: str) -> WorkerCard:
        values = [path.read_bytes() for path in self._discovery.glob("*.key")]
        cards = [decode(value, WorkerCard) for value in values if value and b"total_blocks" in value]
        return next(card for card in cards if card.name == name)

    def control(self, worker: str, action: ControlAction) -> None:
        async def ask() -> None:
            plane = PlaneClient()
            await plane.ask(self.card(worker).address, "control", Control(action=action), ControlReply, 60)
            await plane.close()

        asyncio.run(ask())


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Asking]:
    with ExitStack() as stack:
        yield Asking(tmp_path, stack)


def test_a_prefill_worker_with_other_weights_gives_no_kv(mesh: Asking, models: Models) -> None:
    mesh.until_ready(mesh.start("decode"), mesh.start("prefill", model_path=models.other))
    for prompt, expected in zip(PROMPTS, models.answers, strict=True):
        tokens, trace = mesh.ask(prompt, disaggregate=True)
        assert tokens == expected
        assert trace["prefill_worker"] is None
    assert mesh.services.metric("decode", "kvmesh_worker_kv_pulled_bytes_total") == 0
    assert "decode cannot take KV of prefill: other weights" in mesh.why(FRESH)
    assert mesh.services.metric(mesh.frontend, "kvmesh_router_unpaired_total") >= len(PROMPTS)


def test_weights_changed_in_place_use_no_old_kv_after_a_sleep(mesh: Asking, models: Models, tmp_path: Path) -> None:
    shutil.copytree(CHECKPOINT_DIR, tmp_path / "mine")
    mesh.until_ready(mesh.start("prefill"), mesh.start("decode", model_path=tmp_path / "mine"))
    before = mesh.card("decode")
    assert before.content_fingerprint == mesh.card("prefill").content_fingerprint not in ("", PENDING)
    tokens, trace = mesh.ask(FRESH, disaggregate=True)
    assert (trace["prefill_worker"], trace["pull_error"] or "") == ("prefill", "")
    assert (pulled := mesh.services.metric("decode", "kvmesh_worker_kv_pulled_bytes_total")) > 0
    assert mesh.services.metric(mesh.frontend, "kvmesh_router_unknown_pairs_total") == 0
    mesh.control("decode", ControlAction.SLEEP)
    overwrite(tmp_path / "mine")
    mesh.control("decode", ControlAction.WAKE)
    other = [token + 1 for token in FRESH]
    until(lambda: "cannot take KV" in mesh.why(other), what="the router to hear of the other weights")
    for prompt, expected in zip(PROMPTS, models.other_answers, strict=True):
        assert mesh.ask(prompt, disaggregate=True)[0] == expected
    assert mesh.ask(FRESH, disaggregate=True)[0] != tokens
    assert mesh.services.metric("decode", "kvmesh_worker_kv_pulled_bytes_total") == pulled
    after = mesh.card("decode")
    assert after.content_fingerprint not in (before.content_fingerprint, "", PENDING)
    assert after.kv_print not in (before.kv_print, "")


def test_shared_storage_has_no_kv_of_other_weights(mesh: Asking, models: Models, tmp_path: Path) -> None:
    flags = ("--kv-shared", f"dir:{tmp_path / 'kv'}", "--kv-shared-gib", "0.1")
    mesh.until_ready(mesh.start("aggregated", *flags, name="one"))
    for prompt, expected in zip(PROMPTS, models.answers, strict=True):
        for _ in range(3):
            assert mesh.ask(prompt, "one")[0] == expected
    until(lambda: mesh.services.metric("one", "kvmesh_worker_kv_tier_saved_bytes_total") > 0, what="blocks in storage")
    mesh.start("aggregated", *flags, name="two", model_path=models.other)
    mesh.services.until_ready("two")
    mesh.services.until_joined(mesh.frontend, 2)
    for prompt, expected in zip(PROMPTS, models.other_answers, strict=True):
        assert mesh.ask(prompt, "two")[0] == expected
    assert mesh.services.metric("two", "kvmesh_worker_kv_tier_loaded_bytes_total") == 0


async def test_an_answer_is_not_continued_with_other_weights(mesh: Asking, models: Models, tmp_path: Path) -> None:
    """Its worker is killed in mid-stream, and the only other one has other weights."""
    mesh.until_ready(
        mesh.start("aggregated", name="old"), mesh.start("aggregated", name="new", model_path=models.other)
    )
    body = {
        "model": "tiny",
        "prompt": PROMPTS[0],
        "max_tokens": 400,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    tokens, errors, killed = [], [], ""
    url = f"{mesh.services.url(mesh.frontend)}/v1/completions"
    async with (
        httpx.AsyncClient(timeout=60) as client,
        client.stream("POST", url, json=body | {"logprobs": 0}) as reply,
    ):
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            errors += [event["error"]["code"]] if "error" in event else []
            tokens += [token for choice in event.get("choices", ()) for token in choice["logprobs"]["tokens"]]
            if not killed and len(tokens) >= NEW_TOKENS:
                killed = "old" if tokens[:NEW_TOKENS] == models.answers[0] else "new"
                mesh.services.kill(killed)
    assert tokens[:NEW_TOKENS] in (models.answers[0], models.other_answers[0])
    assert len(tokens) < 400
    assert errors == ["other_weights"]
