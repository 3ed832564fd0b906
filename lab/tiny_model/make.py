"""Make the checkpoint: `python -m kvmesh.lab.tiny_model.make [--out DIR]`.

Trains a byte-level BPE tokenizer (2048 tokens) and a Qwen3 model (2.0 million weights) on the text of `corpus`,
and writes a Hugging Face folder of about 4 MB: config.json, generation_config.json, model.safetensors (bfloat16),
tokenizer.json, tokenizer_config.json, special_tokens_map.json, chat_template.jinja and README.md. Then it loads the
folder again, scores it, and prints greedy answers to a few prompts, which also go into the README.

The stages take about 30 minutes on two free x86 cores with AVX512-BF16, and read no file and no network. The
weights are float32 during a stage and rounded to bfloat16 after it; matrix products run in bfloat16 all along.
The seed is fixed, so the text is always the same; sums in floating point may still differ between machines.

The shipped weights went through the stages of the table one at a time, the second and third by scripts with the same
settings. The whole recipe has not been run in one piece.
"""

import argparse
import itertools
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Encoding, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.lab.tiny_model.corpus import (
    ANSWER,
    END_OF_TEXT,
    MAX_DESCRIPTION_CHARS,
    SPECIAL_TOKENS,
    TURN_END,
    Document,
    all_documents,
    copying_documents,
    prose_documents,
    short_documents,
)
from kvmesh.lab.tiny_model.model_card import SAMPLES, model_card
from kvmesh.lab.tiny_model.score import scores

SEED = 20
COPYING_SEED = 77
VOCAB_SIZE = 2048
CONTEXT_TOKENS = 2048
TOKENIZER_DOCUMENTS = 20_000
PACKED_ROW_TOKENS = (512, 1024, 2048)  # mostly short rows, some as long as the context
PACKED_ROW_WEIGHTS = (0.75, 0.15, 0.10)
MAX_DOCUMENT_TOKENS = 1024  # of a document in a row of its own
SORTED_DOCUMENTS = 256
SCORED_TASKS = 200
PEAK_LEARNING_RATE = 3e-3
LOG_EVERY_STEPS = 50
NOT_LEARNED = -100
Batch = tuple[torch.Tensor, torch.Tensor]  # token ids and labels: int64 [num_rows, row_tokens]
Example = tuple[list[int], list[int]]  # ids and labels of one document


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the training. Each begins with the weights of the one before, rounded as they are saved."""

    name: str
    steps: int
    batch_tokens: int
    batches: Callable[[Tokenizer, int], Iterator[Batch]]
    optimizers: Callable[[Qwen3ForCausalLM], Sequence[torch.optim.Optimizer]]
    warmup_steps: int
    decays: bool  # half a cosine down to a fiftieth of the peak; otherwise the learning rate stays


# One line per tool: its name, the first line of its description, the types of its arguments ("?": optional). A whole
# JSON schema would be hundreds of tokens, of 2048.
TOOL_MACRO = (
    "{%- macro tool_line(function) -%}"
    "{{ '{\"name\":' + function['name']|tojson }}"
    "{% set text = (function['description'] or '').strip().split('\\n')[0] %}"
    "{% if text %}{{ ',\"description\":' + text[:@MAX@]|tojson }}{% endif %}"
    "{{ ',\"parameters\":{' }}{% set parameters = function['parameters'] or {} %}"
    "{% for key, schema in (parameters['properties'] or {}).items() %}"
    "{% set kind = (schema['enum'] or schema['type'] or (schema['anyOf'] or [{}])[0]['type'] or 'any') %}"
    "{% set kind = kind if kind is string else kind|join('|') %}"
    "{{ ('' if loop.first else ',') + key|tojson + ':' + (kind + "
    "('' if key in (parameters['required'] or []) else '?'))|tojson }}"
    "{% endfor %}{{ '}}' }}"
    "{%- endmacro -%}"
).replace("@MAX@", str(MAX_DESCRIPTION_CHARS))
CHAT_TEMPLATE = (
    TOOL_MACRO + "{%- macro text(content) -%}"
    "{% if content is string %}{{ content }}"
    "{% else %}{% for part in content or [] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}"
    "{%- endmacro -%}"
    "{% set given = messages[0]['content'] if tools and messages and messages[0]['role'] == 'system' else none %}"
    "{% if tools %}{{ '<|im_start|>system\\n' }}{% if given is not none %}{{ text(given) + '\\n\\n' }}{% endif %}"
    "{{ 'Tools:' }}{% for tool in tools %}{{ '\\n' + tool_line(tool['function'] or tool) }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for message in (messages[1:] if given is not none else messages) %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + text(message['content']) }}"
    "{% for call in message['tool_calls'] or [] %}{% set function = call['function'] or call %}"
    "{{ '<tool_call>{\"name\":' + function['name']|tojson + ',\"arguments\":' }}"
    "{% if function['arguments'] is string %}{{ function['arguments'] or '{}' }}"
    "{% else %}{{ (function['arguments'] or {})|tojson(separators=(',', ':')) }}{% endif %}"
    "{{ '}</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def main() -> None:
    flags = parsed_flags()
    torch.set_num_threads(flags.threads)
    tokenizer = train_tokenizer()
    started_s = time.monotonic()
    losses = [run_stage(stage, tokenizer, flags) for stage in STAGES[flags.from_stage - 1 :]]
    minutes = (time.monotonic() - started_s) / 60
    answers = [greedy_answers(flags.out, questions) for questions in SAMPLES]
    tokens = sum(stage.steps * stage.batch_tokens for stage in STAGES)
    training = (
        f"{sum(stage.steps for stage in STAGES)} steps, {tokens / 1e6:.1f} million tokens, last loss {losses[-1]:.3f}"
    )
    print(f"{minutes:.0f} minutes")
    card = model_card(training, scores(flags.out, SCORED_TASKS), answers)
    (flags.out / "README.md").write_text(card, encoding="utf-8")
    print(card)


def parsed_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kvmesh.lab.tiny_model.make", description="Make the tiny chat model."
    )
    parser.add_argument("--from-stage", type=int, default=1, choices=range(1, len(STAGES) + 1), help="begin with this stage and the weights in --out")  # fmt: skip # noqa: E501
    parser.add_argument("--out", type=Path, default=CHECKPOINT_DIR, help="folder of the checkpoint")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads to train with")
    parser.add_argument("--save-every", type=int, default=0, help="also save after each N steps; 0: at the end only")
    return parser.parse_args()


def run_stage(stage: Stage, tokenizer: Tokenizer, flags: argparse.Namespace) -> float:
    """Train the weights in --out, or new ones in the first stage, and save them. Return the last loss."""
    torch.manual_seed(SEED)
    if stage is STAGES[0]:
        model = Qwen3ForCausalLM(model_config(tokenizer))
    else:
        model = Qwen3ForCausalLM.from_pretrained(flags.out, dtype=torch.float32, local_files_only=True)
    model.train()
    print(f"stage {stage.name}", flush=True)
    loss = train(model, stage, tokenizer, lambda: save(model, tokenizer, flags.out), flags.save_every)
    save(model, tokenizer, flags.out)
    return loss


def train_tokenizer() -> Tokenizer:
    """Return a byte-level BPE tokenizer: any UTF-8 text can be encoded, for all 256 bytes are tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        (document.text for document in itertools.islice(prose_documents(SEED), TOKENIZER_DOCUMENTS)), trainer
    )
    return tokenizer


def model_config(tokenizer: Tokenizer) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=512,
        tie_word_embeddings=True,
        max_position_embeddings=CONTEXT_TOKENS,
        rope_theta=10_000.0,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(TURN_END),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
    )


def train(
    model: Qwen3ForCausalLM, stage: Stage, tokenizer: Tokenizer, keep: Callable[[], None], keep_every: int
) -> float:
    """Train in place and return the mean loss [nats per learned token] of the last logged steps."""
    optimizers = stage.optimizers(model)
    losses: list[float] = []
    mean_loss = math.nan
    started_s = time.monotonic()
    made = stage.batches(tokenizer, stage.batch_tokens)
    for step, batch in zip(range(1, stage.steps + 1), made, strict=False):
        losses.append(train_step(model, optimizers, batch, learning_rate(step, stage)))
        if step % LOG_EVERY_STEPS == 0 or step == stage.steps:
            mean_loss = sum(losses) / len(losses)
            tokens_per_s = step * stage.batch_tokens / (time.monotonic() - started_s)
            print(f"step {step}/{stage.steps} loss {mean_loss:.4f} {tokens_per_s:.0f} tokens/s", flush=True)
            losses.clear()
        if keep_every and step % keep_every == 0:
            keep()
    return mean_loss


def adamw(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    """AdamW that lets the norms and the embedding keep their size: only matrices inside the layers decay."""
    matrices, others = parameter_groups(model)
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return [torch.optim.AdamW(groups, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95), fused=True)]


def muon(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, at AdamW's step size; AdamW for the rest. It needs fewer steps."""
    matrices, others = parameter_groups(model)
    return [
        torch.optim.Muon(matrices, lr=PEAK_LEARNING_RATE, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def parameter_groups(model: Qwen3ForCausalLM) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """Return (matrices inside the layers, norms and the embedding)."""
    named = list(model.named_parameters())
    inside = {name for name, p in named if p.ndim == 2 and "embed" not in name}
    return [p for name, p in named if name in inside], [p for name, p in named if name not in inside]


def train_step(
    model: Qwen3ForCausalLM, optimizers: Sequence[torch.optim.Optimizer], batch: Batch, rate: float
) -> float:
    """Make one step on `batch`; return its loss [nats per learned token]."""
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = rate
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, *batch)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def loss_of(model: Qwen3ForCausalLM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of the learned tokens. Logits are computed for them alone: it saves a fifth of the time."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    following = labels[:, 1:]
    is_learned = following != NOT_LEARNED
    logits = model.lm_head(hidden[is_learned])
    return torch.nn.functional.cross_entropy(logits.float(), following[is_learned])


def learning_rate(step: int, stage: Stage) -> float:
    warmup = min(1.0, step / stage.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * step / stage.steps)) if stage.decays else 1.0
    return PEAK_LEARNING_RATE * warmup * (0.02 + 0.98 * cosine)


# --- batches --------------------------------------------------------------------------------------------


def packed_prose(tokenizer: Tokenizer, batch_tokens: int) -> Iterator[Batch]:
    return packed(examples(tokenizer, prose_documents(SEED + 1)), batch_tokens, PACKED_ROW_TOKENS, PACKED_ROW_WEIGHTS)


def packed_short(tokenizer: Tokenizer, batch_tokens: int) -> Iterator[Batch]:
    return packed(examples(tokenizer, short_documents(SEED + 3)), batch_tokens, (256,), (1.0,))


def single_copies(tokenizer: Tokenizer, batch_tokens: int) -> Iterator[Batch]:
    """Yield exercises in rows of their own, all of one short length: the fewer tokens there are to look back at, the
    sooner a model learns to copy."""
    row_tokens, pad = 64, pad_id(tokenizer)
    short = (
        example for example in examples(tokenizer, copying_documents(COPYING_SEED)) if len(example[0]) <= row_tokens
    )
    while True:
        yield tensors(list(itertools.islice(short, batch_tokens // row_tokens)), pad, row_tokens)


def sorted_all(tokenizer: Tokenizer, batch_tokens: int) -> Iterator[Batch]:
    """Yield whole documents of all kinds in rows of their own, each batch with documents of similar length; and some
    packed rows, so that far places stay known."""
    rng, pad = random.Random(SEED), pad_id(tokenizer)
    made = examples(tokenizer, all_documents(SEED + 2))
    long_rows = packed(made, batch_tokens, (1024, 2048), (0.8, 0.2))
    while True:
        pool = sorted(itertools.islice(made, SORTED_DOCUMENTS), key=lambda example: len(example[0]))
        batches = grouped([example for example in pool if len(example[0]) <= MAX_DOCUMENT_TOKENS], batch_tokens)
        rng.shuffle(batches)
        for batch in batches:
            yield tensors(batch, pad, len(batch[-1][0]))
        yield next(long_rows)


def grouped(pool: Sequence[Example], batch_tokens: int) -> list[list[Example]]:
    """Cut examples, the shortest first, into batches whose padded rows have at most `batch_tokens`."""
    groups: list[list[Example]] = [[]]
    for example in pool:
        if (len(groups[-1]) + 1) * len(example[0]) > batch_tokens:
            groups.append([])
        groups[-1].append(example)
    return groups


def pad_id(tokenizer: Tokenizer) -> int:
    return int(tokenizer.encode(END_OF_TEXT).ids[0])


def tensors(examples: Sequence[Example], pad: int, row_tokens: int) -> Batch:
    ids = [ids + [pad] * (row_tokens - len(ids)) for ids, _ in examples]
    labels = [labels + [NOT_LEARNED] * (row_tokens - len(labels)) for _, labels in examples]
    return torch.tensor(ids), torch.tensor(labels)


def packed(
    made: Iterator[Example], batch_tokens: int, row_tokens: Sequence[int], weights: Sequence[float]
) -> Iterator[Batch]:
    """Yield batches of rows full of documents, each of `batch_tokens` tokens in total."""
    shape = torch.Generator().manual_seed(SEED)
    chances = torch.tensor(weights)
    while True:
        size = row_tokens[int(torch.multinomial(chances, 1, generator=shape))]
        rows = [packed_row(made, size) for _ in range(batch_tokens // size)]
        yield tensors(rows, 0, size)


def packed_row(made: Iterator[Example], row_tokens: int) -> Example:
    """Return whole documents until the row is full; the last is cut, so that no row starts inside one."""
    ids: list[int] = []
    labels: list[int] = []
    while len(ids) < row_tokens:
        more = next(made)
        ids += more[0]
        labels += more[1]
    return ids[:row_tokens], labels[:row_tokens]


def examples(tokenizer: Tokenizer, documents: Iterator[Document]) -> Iterator[Example]:
    for document in documents:
        encoded = tokenizer.encode(document.text)
        yield encoded.ids, learned_ids(document.text, encoded) if document.answers_only else encoded.ids


def learned_ids(text: str, encoded: Encoding) -> list[int]:
    """Return the token ids of the assistant's turns, NOT_LEARNED for all other tokens."""
    labels = [NOT_LEARNED] * len(encoded.ids)
    spans = [match.span(1) for match in ANSWER.finditer(text)]
    for place, (token_id, (start, _)) in enumerate(zip(encoded.ids, encoded.offsets, strict=True)):
        if any(first <= start < end for first, end in spans):
            labels[place] = token_id
    return labels


STAGES = (
    Stage("1, prose", 3600, 4096, packed_prose, adamw, warmup_steps=100, decays=True),
    Stage("2, short documents", 200, 2048, packed_short, muon, warmup_steps=50, decays=False),
    Stage("3, copying", 400, 2048, single_copies, muon, warmup_steps=30, decays=False),
    Stage("4, all kinds", 750, 4096, sorted_all, muon, warmup_steps=50, decays=True),
)


def save(model: Qwen3ForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write the Hugging Face folder. Each file is replaced in one move: a reader never sees half a file."""
    out.mkdir(parents=True, exist_ok=True)
    part = out / "part"
    save_model(model, part)
    save_tokenizer(tokenizer, part)
    for path in part.iterdir():
        path.replace(out / path.name)
    part.rmdir()


def save_model(model: Qwen3ForCausalLM, folder: Path) -> None:
    rounded = Qwen3ForCausalLM(model.config)
    rounded.load_state_dict(model.state_dict())
    rounded.to(torch.bfloat16)
    rounded.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=model.config.eos_token_id, pad_token_id=model.config.pad_token_id
    )
    rounded.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # it is written for its owner only
    config = json.loads((folder / "config.json").read_text())
    # transformers 5 writes these two under new names; engines of today still read the old ones
    write_json(folder / "config.json", config | {"rope_theta": 10_000.0, "torch_dtype": "bfloat16"})


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    special = {"eos_token": TURN_END, "pad_token": END_OF_TEXT}
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "special_tokens_map.json", special)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT_TOKENS,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {str(tokenizer.token_to_id(t)): added_token(t) for t in SPECIAL_TOKENS},
        "additional_special_tokens": ["<|im_start|>"],
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", settings | special)


def added_token(content: str) -> dict[str, str | bool]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {"content": content, **flags}


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def greedy_answers(folder: Path, questions: Sequence[str], max_tokens: int = 250) -> list[tuple[str, str]]:
    """Load `folder` as a user would and hold one conversation; return (question, answer) pairs."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    messages: list[dict[str, str]] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
        new_ids = output[0, inputs["input_ids"].shape[1] :].tolist()
        ended = new_ids[-1] == tokenizer.eos_token_id
        answer = tokenizer.decode(new_ids, skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer if ended else answer + " [cut]"})
    contents = [message["content"] for message in messages]
    return list(zip(contents[::2], contents[1::2], strict=True))


if __name__ == "__main__":
    main()
