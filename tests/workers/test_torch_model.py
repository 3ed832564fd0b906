"""The torch engine computes what transformers computes, however the scheduler cuts the work."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvmesh.protocol.messages import SamplingParams  # noqa: E402
from kvmesh.workers.engines.torch.executor import TorchExecutor  # noqa: E402
from kvmesh.workers.executor import Embedded, Row, Sampled  # noqa: E402

BLOCK_SIZE = 4
VOCAB_SIZE = 97
NEW_TOKENS = 6
PROMPT_LENGTHS = (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE, 61)
EVERY_LOGPROB = SamplingParams(temperature=0.0, top_logprobs=VOCAB_SIZE)

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "eos_token_id": None,
    "bos_token_id": None,
}
LLAMA3_ROPE = {  # of the four frequencies one is short, two are blended, one is long
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama-tied": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-biases": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama-llama3-rope": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "llama-linear-rope": lambda: transformers.LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 5_000.0, "factor": 2.0}
    ),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False),
    "qwen3-tied-biases": lambda: transformers.Qwen3Config(
        **SIZES, head_dim=8, tie_word_embeddings=True, attention_bias=True
    ),
}

NEEDS_CUDA = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)]


@dataclass
class Stream:
    """A sequence as a scheduler sees it, and the tokens that came out of it."""

    prompt: list[int]
    block_table: list[int]
    output: list[int] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)  # per output token, by token id
    computed: int = 0

    def row(self, chunk: int) -> Row:
        """Compute at most `chunk` more tokens."""
        tokens = (self.prompt + self.output)[self.computed :][:chunk]
        row = Row(
            request_id=f"prompt of {len(self.prompt)}",
            token_ids=tokens,
            start=self.computed,
            block_table=self.block_table,
            sample=self.computed + len(tokens) == len(self.prompt) + len(self.output),
            sampling=EVERY_LOGPROB,
            prompt=self.prompt,
            output=self.output,
        )
        self.computed += len(tokens)
        return row

    def take(self, sampled: Sampled | None) -> None:
        if sampled is None:
            return
        self.output.append(sampled.token_id)
        assert sampled.logprob is not None
        self.logprobs.append([logprob for _, logprob in sorted(sampled.logprob.top)])


@dataclass
class Model:
    folder: Path
    config: Any
    reference: Any  # transformers' model, float32 on the CPU

    def prompts(self) -> list[list[int]]:
        generator = torch.Generator().manual_seed(5)
        return [torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]

    def expected(self, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
        """Greedy tokens, and the logprobs of every step: [NEW_TOKENS, vocab]."""
        answer = self.reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return answer.sequences[0, len(prompt) :].tolist(), torch.cat(answer.logits).log_softmax(-1)


def make_model(folder: Path, config: Any) -> Model:
    """A checkpoint whose random weights are large enough for clear differences between logits."""
    generator = torch.Generator().manual_seed(11)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            parameter.data = 0.2 * noise + (0.0 if name.endswith("bias") else 1.0)
        elif "embed" in name:
            parameter.data = 0.4 * noise
        else:
            parameter.data = 1.5 * noise * parameter.shape[1] ** -0.5
    model.tie_weights()
    model.save_pretrained(folder)
    # Loaded anew: the buffers made on the meta device hold nothing.
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    return Model(folder, config, reference.float().eval())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    made: dict[str, Model] = {}

    def get(name: str) -> Model:
        if name not in made:
            made[name] = make_model(tmp_path_factory.mktemp(name), MODELS[name]())
        return made[name]

    return get


def started_with_memory(
    folder: Path, device: str = "cpu", dtype: str = "float32", num_blocks: int = 80
) -> tuple[TorchExecutor, torch.Tensor]:
    """An executor and its blocks, which hold NaN: what a sequence has not written must not reach it."""
    executor = TorchExecutor(folder, device=device, dtype=dtype, block_size=BLOCK_SIZE)
    executor.load()
    blocks = executor.allocate_kv(num_blocks, None).owner
    assert isinstance(blocks, torch.Tensor)
    return executor, blocks.fill_(float("nan"))


def started(folder: Path, device: str = "cpu", dtype: str = "float32", num_blocks: int = 80) -> TorchExecutor:
    return started_with_memory(folder, device, dtype, num_blocks)[0]


def scattered_streams(prompts: Sequence[list[int]], num_blocks: int = 80) -> list[Stream]:
    """Block tables in random order, no two sharing a block."""
    free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(3)).tolist()
    streams = []
    for prompt in prompts:
        count = -(-(len(prompt) + NEW_TOKENS) // BLOCK_SIZE)
        streams.append(Stream(prompt, [free.pop() for _ in range(count)]))
    return streams


def run(executor: TorchExecutor, streams: Sequence[Stream], chunks: Sequence[int]) -> None:
    """Step all streams together until each has NEW_TOKENS tokens; step n computes chunks[n] tokens a row."""
    step = 0
    while unfinished := [stream for stream in streams if len(stream.output) < NEW_TOKENS]:
        rows = [stream.row(chunks[(step + i) % len(chunks)]) for i, stream in enumerate(unfinished)]
        for stream, sampled in zip(unfinished, executor.execute(rows), strict=True):
            stream.take(sampled)
        step += 1


def assert_equals_reference(model: Model, stream: Stream, atol: float = 1e-4) -> None:
    tokens, logprobs = model.expected(stream.prompt)
    assert stream.output == tokens
    assert torch.allclose(torch.tensor(stream.logprobs), logprobs, atol=atol, rtol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_and_logprobs_equal_those_of_transformers(
    models: Callable[[str], Model], name: str, device: str
) -> None:
    model = models(name)
    executor = started(model.folder, device)
    for stream in scattered_streams(model.prompts()):
        run(executor, [stream], chunks=[1000])
        assert_equals_reference(model, stream, atol=1e-4 if device == "cpu" else 2e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_chunks_of_odd_sizes_in_a_mixed_batch_change_nothing(
    models: Callable[[str], Model], name: str, device: str
) -> None:
    model = models(name)
    streams = scattered_streams(model.prompts())
    run(started(model.folder, device), streams, chunks=[3, 1, 7, 2, 5, 13])
    for stream in streams:
        assert_equals_reference(model, stream, atol=1e-4 if device == "cpu" else 2e-3)


def test_test_models_are_no_trivial_ones(models: Callable[[str], Model]) -> None:
    """Answers are not constant, and have no ties that rounding could decide."""
    for name in MODELS:
        model = models(name)
        answers = [model.expected(prompt) for prompt in model.prompts()]
        assert len({token for tokens, _ in answers for token in tokens}) > 8, name
        best = torch.cat([logprobs for _, logprobs in answers]).topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > 1e-3, name


def test_a_prefix_computed_by_one_sequence_serves_another(models: Callable[[str], Model]) -> None:
    model = models("qwen3")
    executor = started(model.folder)
    prefix = model.prompts()[4]
    first, second = scattered_streams([[*prefix, 8], [*prefix, 9, 10]])
    shared = len(prefix) // BLOCK_SIZE
    run(executor, [first], chunks=[1000])
    second.block_table[:shared] = first.block_table[:shared]
    second.computed = shared * BLOCK_SIZE
    run(executor, [second], chunks=[1000])
    assert_equals_reference(model, second)


def test_blocks_copied_to_another_worker_continue_there(models: Callable[[str], Model]) -> None:
    model = models("llama")
    prefill, source = started_with_memory(model.folder)
    decode, target = started_with_memory(model.folder)
    prompt = model.prompts()[-1]
    stream, continued = scattered_streams([prompt, prompt])
    stream.take(prefill.execute([stream.row(1000)])[0])
    for there, here in zip(stream.block_table, continued.block_table, strict=True):
        target[here] = source[there]
    continued.computed, continued.output = stream.computed, list(stream.output)
    continued.logprobs = list(stream.logprobs)
    run(decode, [continued], chunks=[1000])
    assert_equals_reference(model, continued)


def test_rows_of_very_different_lengths_decode_in_one_step(models: Callable[[str], Model]) -> None:
    model = models("llama")
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(VOCAB_SIZE, (n,), generator=generator).tolist() for n in (2, 200, 9, 90, 41, 1, 150)]
    streams = scattered_streams(prompts, num_blocks=160)
    executor = started(model.folder, num_blocks=160)
    run(executor, streams, chunks=[1000])
    for stream in streams:
        assert_equals_reference(model, stream)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_as_accurate_as_in_transformers(
    models: Callable[[str], Model], dtype: str, device: str
) -> None:
    model = models("qwen3")
    half = transformers.AutoModelForCausalLM.from_pretrained(
        model.folder, attn_implementation="eager", dtype=getattr(torch, dtype)
    ).to(device)
    executor = started(model.folder, device, dtype)
    for stream in scattered_streams(model.prompts()):
        stream.take(executor.execute([stream.row(1000)])[0])
        prompt = torch.tensor([stream.prompt])
        with torch.inference_mode():
            truth = model.reference(prompt).logits[0, -1].log_softmax(-1)
            theirs = half(prompt.to(device)).logits[0, -1].float().log_softmax(-1).cpu()
        error = (torch.tensor(stream.logprobs[0]) - truth).abs().mean()
        assert error <= 2 * (theirs - truth).abs().mean() + 0.01


def test_an_old_config_file_means_the_same(models: Callable[[str], Model], tmp_path: Path) -> None:
    model = models("llama-llama3-rope")
    for file in model.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    config["rope_scaling"] = scaling
    (tmp_path / "config.json").write_text(json.dumps(config))
    (stream,) = scattered_streams(model.prompts()[-1:])
    run(started(tmp_path), [stream], chunks=[1000])
    assert_equals_reference(model, stream)


def test_a_sharded_checkpoint_is_read_whole(models: Callable[[str], Model], tmp_path: Path) -> None:
    model = models("qwen2")
    model.reference.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    (stream,) = scattered_streams(model.prompts()[-1:])
    run(started(tmp_path), [stream], chunks=[1000])
    assert_equals_reference(model, stream)


# embeddings


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("chunk", [5, 1000])
def test_a_vector_is_the_last_state_of_the_last_token(models: Callable[[str], Model], name: str, chunk: int) -> None:
    """The state is that of transformers after the final norm, scaled to length 1; other rows do not matter."""
    model = models(name)
    executor = started(model.folder)
    streams = scattered_streams(model.prompts())
    vectors: dict[int, Any] = {}
    while len(vectors) < len(streams):
        rows = []
        for stream in streams:
            if stream.computed < len(stream.prompt):
                row = stream.row(chunk)
                row.embed = True
                rows.append(row)
        for row, result in zip(rows, executor.execute(rows), strict=True):
            if isinstance(result, Embedded):
                vectors[len(row.prompt)] = torch.frombuffer(bytearray(result.vector), dtype=torch.float32)
    for prompt in model.prompts():
        states = model.reference.model(torch.tensor([prompt])).last_hidden_state
        expected = torch.nn.functional.normalize(states[0, -1], dim=-1)
        assert torch.allclose(vectors[len(prompt)], expected, atol=2e-5)


def test_a_step_may_answer_and_embed(models: Callable[[str], Model]) -> None:
    model = models("qwen3")
    alone = started(model.folder).execute([s.row(1000) for s in scattered_streams(model.prompts())])
    rows = [stream.row(1000) for stream in scattered_streams(model.prompts())]
    for row in rows[::2]:
        row.embed = True
    for i, (result, token) in enumerate(zip(started(model.folder).execute(rows), alone, strict=True)):
        assert isinstance(result, Embedded if i % 2 == 0 else Sampled)
        assert isinstance(token, Sampled)
        assert i % 2 == 0 or result.token_id == token.token_id


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_bfloat16_chooses_the_likeliest_token_within_its_rounding(models: Callable[[str], Model], name: str) -> None:
    """The reference is float32 over the tokens that bfloat16 chose, so that one difference does not lead to others."""
    model = models(name)
    streams = scattered_streams(model.prompts())
    run(started(model.folder, dtype="bfloat16"), streams, chunks=[7])
    behind = []
    for stream in streams:
        with torch.inference_mode():
            logits = model.reference(torch.tensor([stream.prompt + stream.output])).logits[0]
        expected = logits.log_softmax(-1)[len(stream.prompt) - 1 : -1]
        chosen = expected.gather(-1, torch.tensor(stream.output)[:, None])[:, 0]
        behind += (expected.amax(-1) - chosen).tolist()
    assert max(behind) < 0.2
    assert sum(each == 0 for each in behind) >= 0.9 * len(behind)
