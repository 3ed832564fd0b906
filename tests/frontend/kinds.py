"""Small tokenizers of every type that language models use, trained on this repository, and two real ones."""

from collections.abc import Callable
from functools import cache
from importlib import resources
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.frontend import tiny

ROOT = Path(__file__).parents[2]
SPECIAL = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]"]
OTHERS = (
    "Grüße aus Köln, naïve café. 人工智能的发展，非常快。これは、日本語です。 "
    "Привет, мир! 🦊👩‍👩‍👧 e\u0301 1234567 it's we'll\n"
)

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
QWEN35 = QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}"
    rf"|\p{{N}}{{1,3}}{_TAIL}"
)
TEKKEN = O200K.replace(_SUFFIX, "").replace("{1,3}", "")
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@cache
def corpus() -> list[str]:
    files = [*sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("protocol/*.py"))]
    return [OTHERS * 20, *[file.read_text() for file in files]]


def _trained(tokenizer: Tokenizer, trainer: trainers.Trainer) -> Tokenizer:
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def byte_level(*patterns: str, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    """Byte-pair encoding of bytes, behind splits at `patterns`; without any, of GPT-2's."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    byte_steps = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not patterns)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_steps])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _trained(tokenizer, trainers.BpeTrainer(
        vocab_size=1500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    ))  # fmt: skip
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("two words", normalized=True)])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return tokenizer


def prefix_space() -> Tokenizer:
    """Return a tokenizer as of older GPT-2 and RoBERTa models: a space is put before every text."""
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def whole_lines() -> Tokenizer:
    """A byte-level encoding that is not split at all."""
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return tokenizer


def sentence_pieces(*, prepend: bool) -> Tokenizer:
    """Return a tokenizer as of Llama 2 (`prepend`) and Gemma: byte-pair encoding of characters in whole texts, bytes
    for the rest."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    bytes_and_more = [f"<0x{byte:02X}>" for byte in range(256)]
    _trained(tokenizer, trainers.BpeTrainer(
        vocab_size=2000, special_tokens=["<unk>", *SPECIAL, *bytes_and_more], show_progress=False, limit_alphabet=150
    ))  # fmt: skip
    sign = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), sign]) if prepend else sign
    tokenizer.pre_tokenizer = None
    if not prepend:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prepend else steps)
    spec = tokenizer.to_str()  # the bytes are tokens of the vocabulary, not special ones
    return Tokenizer.from_str(_without_added(spec, bytes_and_more))


def _without_added(spec: str, names: list[str]) -> str:
    import json

    fields = json.loads(spec)
    fields["added_tokens"] = [token for token in fields["added_tokens"] if token["content"] not in names]
    return json.dumps(fields)


def metaspace(scheme: str, *, split: bool) -> Tokenizer:
    """Return a tokenizer as newer ones that are like Llama 2's."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=True)
    _trained(tokenizer, trainers.BpeTrainer(
        vocab_size=1000, special_tokens=["<unk>", *SPECIAL], show_progress=False
    ))  # fmt: skip
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return tokenizer


def unigram() -> Tokenizer:
    """Return a tokenizer as of T5 and XLM-R."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([
        normalizers.NFKC(), normalizers.Strip(left=False, right=True), normalizers.Replace(Regex(" {2,}"), " ")
    ])  # fmt: skip
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _trained(tokenizer, trainers.UnigramTrainer(
        vocab_size=600, special_tokens=["<unk>", *SPECIAL], unk_token="<unk>", show_progress=False
    ))  # fmt: skip


def bert() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return _trained(tokenizer, trainers.WordPieceTrainer(
        vocab_size=800, special_tokens=["[UNK]", *SPECIAL], show_progress=False
    ))  # fmt: skip


def greedy_added() -> Tokenizer:
    """Added tokens that take the white space around them, or lie across each other."""
    tokenizer = byte_level(LLAMA3)
    tokenizer.add_tokens([
        AddedToken("<mask>", lstrip=True, normalized=False), AddedToken("<sep>", rstrip=True, normalized=False),
        AddedToken("e f", normalized=False), AddedToken("word", rstrip=True), AddedToken("x<|im", normalized=False),
    ])  # fmt: skip
    return tokenizer


def single_words() -> Tokenizer:
    tokenizer = byte_level(GPT2)
    tokenizer.add_tokens([AddedToken("cat", single_word=True)])
    return tokenizer


def packaged(package: str, file: str) -> Tokenizer:
    """The tokenizer.json that a Python package ships."""
    return tokenizers.Tokenizer.from_file(str(resources.files(package).joinpath(file)))


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": byte_level,
    "gpt2 pattern": lambda: byte_level(GPT2),
    "gpt2, prefix space": prefix_space,
    "llama3": lambda: byte_level(LLAMA3),
    "qwen2": lambda: byte_level(QWEN2, normalizer=normalizers.NFC()),
    "qwen3.5": lambda: byte_level(QWEN35, normalizer=normalizers.NFC()),
    "o200k": lambda: byte_level(O200K),
    "tekken": lambda: byte_level(TEKKEN),
    "deepseek": lambda: byte_level(*DEEPSEEK),
    "bytes, not split": whole_lines,
    "greedy added tokens": greedy_added,
    "single words": single_words,
    "llama2": lambda: sentence_pieces(prepend=True),
    "gemma": lambda: sentence_pieces(prepend=False),
    "metaspace, always": lambda: metaspace("always", split=True),
    "metaspace, first, not split": lambda: metaspace("first", split=False),
    "metaspace, never": lambda: metaspace("never", split=False),
    "unigram": unigram,
    "bert": bert,
    "tiny byte fallback": tiny.byte_fallback,
    "tiny word piece": tiny.word_piece,
}
