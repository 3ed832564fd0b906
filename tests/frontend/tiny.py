"""Small tokenizers of the real types, and a folder that looks like a checkpoint."""

import json
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import Role, WorkerCard

CORPUS = [
    "Once upon a time there was a little fox who lived at the edge of the forest.",
    "The quick brown fox jumps over the lazy dog, again and again; how vexingly quick!",
    "Grüße aus Köln: naïve café, 東京 and Москва, 🦊🎉 and 👩‍👩‍👧.",
    "def main():\n    print('hello')\n\n",
]
SPECIAL = ["<|im_start|>", "<|im_end|>", "<s>", "</s>"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@cache
def byte_level() -> Tokenizer:
    """Return a tokenizer as of GPT-2, Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("two words", special=False)])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return tokenizer


@cache
def metaspace() -> Tokenizer:
    """Return a tokenizer as of T5: pieces with a sign for the space, no bytes."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", *SPECIAL], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_fallback(*, strip: bool = True) -> Tokenizer:
    """Return a tokenizer as of Llama 2 (`strip`) and Gemma: pieces, and bytes for what no piece covers."""
    vocab = {token: n for n, token in enumerate(["<unk>", *SPECIAL])}
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    for piece in ["▁", "h", "e", "l", "o", "a", "▁a", "ll", "▁▁", "é", "fox", "▁fox", "\n"]:
        vocab.setdefault(piece, len(vocab))
    merges = [("▁", "a"), ("l", "l"), ("▁", "▁")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def byte_fallback_unstripped() -> Tokenizer:
    return byte_fallback(strip=False)


@cache
def word_piece() -> Tokenizer:
    """Return a tokenizer as of BERT: a decoder that is not known by name."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", *SPECIAL], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def save_model(folder: Path, template: str | None = CHATML, tokenizer: Tokenizer | None = None) -> Path:
    """A folder with tokenizer.json, tokenizer_config.json and maybe a template."""
    folder.mkdir(parents=True, exist_ok=True)
    (tokenizer or byte_level()).save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def card(worker: str, role: Role = Role.AGGREGATED, model: str = "tiny", path: Path | str = "/none",
         block_size: int = 16, context_tokens: int = 512) -> WorkerCard:  # fmt: skip
    return WorkerCard(
        worker_id=WorkerId(worker),
        name=worker,
        role=role,
        model=model,
        model_path=str(path),
        address="127.0.0.1:1",
        block_size=block_size,
        total_blocks=64,
        context_tokens=context_tokens,
    )
