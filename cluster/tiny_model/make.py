"""Make the checkpoint: `python -m cluster.tiny_model.make [--steps N] [--out DIR]`.

Trains a byte-level BPE tokenizer (2048 tokens) and a Qwen3 model (2.0 million weights) on the text of `corpus`,
and writes a Hugging Face folder of about 4 MB: config.json, generation_config.json, model.safetensors (bfloat16),
tokenizer.json, tokenizer_config.json, special_tokens_map.json, chat_template.jinja and README.md. Then it loads the
folder again and prints greedy answers to a few prompts, which also go into the README.

The default --steps takes about 23 minutes on two x86 cores with AVX512-BF16, and reads no file and no network. The
weights are float32 during training and rounded to bfloat16 at the end; matrix products run in bfloat16 all along.
The seed is fixed, so the text is always the same; sums in floating point may still differ between machines.
"""

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from cluster.tiny_model import CHECKPOINT_DIR
from cluster.tiny_model.corpus import END_OF_TEXT, SPECIAL_TOKENS, TURN_END, documents
from cluster.tiny_model.model_card import SAMPLES, model_card

SEED = 20
VOCAB_SIZE = 2048
CONTEXT_TOKENS = 2048
TOKENIZER_DOCUMENTS = 20_000
BATCH_TOKENS = 4096
# row lengths and their part of the batches: mostly short rows, some as long as the context
ROW_TOKENS = (512, 1024, 2048)
ROW_TOKENS_WEIGHTS = (0.75, 0.15, 0.10)
DEFAULT_STEPS = 3600
WARMUP_STEPS = 100
PEAK_LEARNING_RATE = 3e-3
LOG_EVERY_STEPS = 50

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] or [] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def main() -> None:
    flags = parsed_flags()
    torch.manual_seed(SEED)
    torch.set_num_threads(flags.threads)
    tokenizer = train_tokenizer()
    model = Qwen3ForCausalLM(model_config(tokenizer))
    started_s = time.monotonic()
    loss = train(model, tokenizer, flags.steps, flags.out, flags.save_every)
    minutes = (time.monotonic() - started_s) / 60
    save(model, tokenizer, flags.out)
    answers = [greedy_answers(flags.out, questions) for questions in SAMPLES]
    card = model_card(flags.steps, flags.steps * BATCH_TOKENS, minutes, loss, answers)
    (flags.out / "README.md").write_text(card, encoding="utf-8")
    print(card)


def parsed_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m cluster.tiny_model.make", description="Make the tiny chat model.")
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS, help=f"training steps of {BATCH_TOKENS} tokens")
    parser.add_argument("--out", type=Path, default=CHECKPOINT_DIR, help="folder of the checkpoint")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads to train with")
    parser.add_argument("--save-every", type=int, default=0, help="also save after each N steps; 0: at the end only")
    return parser.parse_args()


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
    tokenizer.train_from_iterator(itertools.islice(documents(SEED), TOKENIZER_DOCUMENTS), trainer)
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


def train(model: Qwen3ForCausalLM, tokenizer: Tokenizer, steps: int, out: Path, save_every: int) -> float:
    """Train in place and return the mean loss [nats per token] of the last logged steps."""
    optimizer = make_optimizer(model)
    losses: list[float] = []
    mean_loss = math.nan
    started_s = time.monotonic()
    for step, rows in zip(range(1, steps + 1), batches(tokenizer), strict=False):
        losses.append(train_step(model, optimizer, rows, learning_rate(step, steps)))
        if step % LOG_EVERY_STEPS == 0 or step == steps:
            mean_loss = sum(losses) / len(losses)
            tokens_per_s = step * BATCH_TOKENS / (time.monotonic() - started_s)
            print(f"step {step}/{steps} loss {mean_loss:.4f} {tokens_per_s:.0f} tokens/s", flush=True)
            losses.clear()
        if save_every and step % save_every == 0:
            save(model, tokenizer, out)
    return mean_loss


def make_optimizer(model: Qwen3ForCausalLM) -> torch.optim.AdamW:
    """AdamW that lets the norms and the embedding keep their size: only matrices inside the layers decay."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95), fused=True)


def train_step(model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, rows: torch.Tensor, rate: float) -> float:
    """Make one step on `rows`: int64 [num_rows, row_tokens]; return its loss [nats per token]."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def learning_rate(step: int, steps: int) -> float:
    """Linear warmup, then half a cosine down to a fiftieth of the peak."""
    warmup = min(1.0, step / WARMUP_STEPS)
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return PEAK_LEARNING_RATE * warmup * (0.02 + 0.98 * cosine)


def batches(tokenizer: Tokenizer) -> Iterator[torch.Tensor]:
    """Yield training batches, int64 [num_rows, row_tokens], each of BATCH_TOKENS tokens in total."""
    texts = documents(SEED + 1)
    shape = torch.Generator().manual_seed(SEED)
    weights = torch.tensor(ROW_TOKENS_WEIGHTS)
    while True:
        row_tokens = ROW_TOKENS[int(torch.multinomial(weights, 1, generator=shape))]
        yield torch.tensor([packed_row(tokenizer, texts, row_tokens) for _ in range(BATCH_TOKENS // row_tokens)])


def packed_row(tokenizer: Tokenizer, texts: Iterator[str], row_tokens: int) -> list[int]:
    """Return whole documents until the row is full; the last is cut, so that no row starts inside one."""
    row: list[int] = []
    while len(row) < row_tokens:
        row += tokenizer.encode(next(texts)).ids
    return row[:row_tokens]


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
