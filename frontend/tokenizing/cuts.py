"""Find where a text may be cut so that its pieces, tokenized one by one, give exactly the tokens of the whole. Pure.

Two kinds of places, both found from the `tokenizer.json` alone; where nothing can be proven there is no cut.

**Before an added token** (`<|im_start|>`). The tokenizer takes added tokens out first and treats the text between
them separately, so what stands before one never meets what follows. Only tokens count that are looked up in the raw
text, as they are (not `normalized`, `lstrip`, `single_word`), and whose beginning stands nowhere inside an added
token, so that no other token can lie across the cut.

**In plain text**, between a character `left` and a character `right` (`JOINTS`: a word and the space or the line end
after it, a Chinese or Japanese character and the comma after it). The steps of the tokenizer are followed:

1. no added token holds `left` and `right` next to each other, so none lies across the cut;
2. the normalizer has steps only that act on each character by itself there (no composition goes over these pairs),
   or on runs that cannot hold the pair; and a pair stays a pair;
3. each pre-tokenizer splits between the two whatever stands around them, or never joins them (`patterns.py`);
4. if one splits there, no model ever sees both. If none does, the model has to be a BPE without word affixes in whose
   vocabulary no token holds `left` and `right` next to each other: then no merge goes over the cut.

Tokenizers that write a sign for the space before every text (`Prepend`) do so for every piece, too; there the space at
the cut is dropped, and the sign that is put before the piece stands for it.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from string import ascii_letters, digits
from typing import Any

from kvmesh.frontend.tokenizing.byte_level import written
from kvmesh.frontend.tokenizing.patterns import Joint, UnknownPattern, joint

Step = dict[str, Any]

WORD = ascii_letters + digits
CJK = "的了是人中上大一不在有はがをにのてでたるすとも"  # common ones: some stand before a comma in every paragraph
JOINTS = ((WORD, " "), (WORD, "\n"), (CJK, "，"), (CJK, "。"), (CJK, "、"))

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
MAX_TRIES = 32  # per piece and first character of an added token: `<` is common in code
SPLITS_AT_SPACE = {"Whitespace", "WhitespaceSplit", "BertPreTokenizer"}
ACT_PER_CHARACTER = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer", "Precompiled", "Nmt"}


@dataclass(frozen=True, slots=True)
class CutRules:
    """Says where the texts of one tokenizer may be cut."""

    plain: re.Pattern[str] | None = None  # a match starts at a cut in plain text
    dropped_chars: int = 0  # after a cut in plain text
    anchor: re.Pattern[str] | None = None  # matches where an added token starts before which a cut is
    anchor_chars: str = ""  # what such tokens start with
    either: re.Pattern[str] | None = None  # `plain`, as a group, or `anchor`

    def __bool__(self) -> bool:
        return self.plain is not None or self.anchor is not None

    def pieces(self, text: str, least_chars: int, most_chars: int) -> list[str]:
        """Return `text` in pieces: cut before an added token after `least_chars`, else in plain text after
        `most_chars`.

        Where a piece ends depends only on the text before and a few characters after: equal beginnings give equal
        pieces. A piece is longer where there is no place for a cut. Each character is looked at once or twice.
        """
        pieces: list[str] = []
        start = 0
        while self.either is not None and len(text) - start > most_chars:
            end = self._anchor_at(text, start + least_chars, start + most_chars)
            dropped_chars = 0
            if end < 0:
                found = self.either.search(text, start + most_chars)
                if found is None:
                    break
                end = found.start()
                dropped_chars = self.dropped_chars if found.lastgroup else 0
            pieces.append(text[start:end])
            start = end + dropped_chars
        pieces.append(text[start:] if start else text)
        return pieces

    def _anchor_at(self, text: str, start: int, end: int) -> int:
        """Return where the first added token starts in text[start:end], -1 if none does."""
        first = -1
        for char in self.anchor_chars:
            if (at := self._find(text, char, start, end)) >= 0:
                first = end = at
        return first

    def _find(self, text: str, char: str, start: int, end: int) -> int:
        assert self.anchor is not None
        for _ in range(MAX_TRIES):
            at = text.find(char, start, end)
            if at < 0 or self.anchor.match(text, at):
                return at
            start = at + 1
        return -1


def cut_rules(spec: dict[str, Any], normalize: Callable[[str], str]) -> CutRules:
    """The rules for a tokenizer.json. `normalize` is its normalizer as a function."""
    model = spec.get("model") or {}
    added = spec.get("added_tokens") or []
    if model.get("dropout") or any(token["single_word"] for token in added):
        return CutRules()
    anchors = _anchors(added)
    plain, dropped_chars = _plain_cuts(spec, normalize)
    anchor = any_of(anchors) if anchors else None
    return CutRules(
        plain=plain,
        dropped_chars=dropped_chars,
        anchor=anchor,
        anchor_chars="".join(sorted({token[0] for token in anchors})),
        either=_either(plain, anchor),
    )


def _either(plain: re.Pattern[str] | None, anchor: re.Pattern[str] | None) -> re.Pattern[str] | None:
    patterns = [f"(?P<plain>{plain.pattern})"] if plain is not None else []
    patterns += [anchor.pattern] if anchor is not None else []
    return re.compile("|".join(patterns)) if patterns else None


# --- before added tokens ------------------------------------------------------------------------------

MAX_ANCHOR_CHARS = 3  # different first characters; each costs a search


def _anchors(added: Sequence[Step]) -> list[str]:
    """The added tokens before which a cut is exact, the special ones first."""
    anchors: list[str] = []
    first_chars: set[str] = set()
    contents = [token["content"] for token in added]
    inner_pairs = {first + second for text in contents for first, second in pairwise(text[1:])}
    last_chars = {text[-1] for text in contents if len(text) > 1}
    for token in sorted(added, key=lambda token: not token["special"]):
        content = token["content"]
        if token["normalized"] or token["lstrip"] or len(content) < 2:
            continue
        if content[:2] in inner_pairs or content[0] in last_chars:
            continue  # another one may lie across its beginning
        if content[0] not in first_chars and len(first_chars) == MAX_ANCHOR_CHARS:
            continue
        first_chars.add(content[0])
        anchors.append(content)
    return anchors


def any_of(texts: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern for each of `texts`; it fails fast, at the first two characters, even if there are hundreds."""
    endings: dict[str, list[str]] = {}
    for text in texts:
        endings.setdefault(text[:2], []).append(re.escape(text[2:]))
    return re.compile("|".join([f"{re.escape(start)}(?:{'|'.join(rest)})" for start, rest in endings.items()]))


# --- in plain text ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Pair:
    """A kind of place, followed through the steps of a tokenizer."""

    right: str
    spelled: dict[str, str] = field(default_factory=dict)  # what may stand before -> how the text spells it
    split: bool = False  # some pre-tokenizer splits between the two, always

    @property
    def left(self) -> str:
        return "".join(self.spelled)


class _NoCut(Exception):
    """Raised where it cannot be proven that a cut at such a pair is exact."""


def _plain_cuts(spec: dict[str, Any], normalize: Callable[[str], str]) -> tuple[re.Pattern[str] | None, int]:
    added = spec.get("added_tokens") or []
    prover = _Prover(
        normalize=normalize,
        normalizers=steps(spec, "normalizer", "normalizers"),
        pre_tokenizers=steps(spec, "pre_tokenizer", "pretokenizers"),
        model=spec["model"],
        added_texts="\0".join([text for token in added for text in (token["content"], normalize(token["content"]))]),
        greedy_ends={
            text[-1:] for token in added if token["rstrip"] for text in (token["content"], normalize(token["content"]))
        },
    )
    cuts: list[str] = []
    for left, right in JOINTS:
        try:
            safe = prover.safe_left(left, right)
        except (_NoCut, UnknownPattern):
            continue
        if safe:
            cuts.append(f"{right}(?<=[{safe}]{right})")
    if not cuts:
        return None, 0
    if not prover.prepends:
        return re.compile("|".join(cuts)), 0
    starts = {token["content"][:1] for token in added}
    follows = "".join(char for char in WORD if char not in starts)  # so that the piece begins with plain text
    return (re.compile(f"{cuts[0]}(?=[{follows}])"), 1) if follows else (None, 0)


@dataclass(frozen=True)
class _Prover:
    """Follows pairs of characters through the steps of one tokenizer."""

    normalize: Callable[[str], str]
    normalizers: list[Step]
    pre_tokenizers: list[Step]
    model: Step
    added_texts: str
    greedy_ends: set[str]  # of added tokens that take the white space behind them

    @cached_property
    def prepends(self) -> bool:
        return any(step["type"] == "Prepend" for step in self.normalizers)

    @cached_property
    def _vocab_text(self) -> str:
        return "\0".join(self.model["vocab"])

    def safe_left(self, left: str, right: str) -> str:
        """Return those of `left` after which, and before `right`, a cut is exact. Raise _NoCut if that cannot be
        told."""
        if self.prepends and right != " ":
            raise _NoCut
        pair = self._normalized(left, right)
        for step in self.pre_tokenizers:
            _follow(pair, step)
        return "".join(pair.spelled.values()) if pair.split else self._unmerged(pair)

    def _normalized(self, left: str, right: str) -> _Pair:
        prefix = self.normalize("a")[:-1]  # what Prepend puts before
        pair = _Pair("")
        for char in left:
            text = self.normalize(char + right + char)
            if len(text) != len(prefix) + 3 or not text.startswith(prefix) or text[-1] != text[-3]:
                continue
            if self._in_added_tokens(char, right) or self._in_added_tokens(text[-1], text[-2]):
                continue
            if pair.right not in ("", text[-2]):
                raise _NoCut
            pair.right = text[-2]
            pair.spelled[text[-1]] = pair.spelled.get(text[-1], "") + char
        if not pair.spelled or prefix not in ("", pair.right):
            raise _NoCut
        for place, step in enumerate(self.normalizers):
            _check_normalizer(step, place, left + pair.left, right, pair.right)
        return pair

    def _in_added_tokens(self, left: str, right: str) -> bool:
        return left + right in self.added_texts or left in self.greedy_ends

    def _unmerged(self, pair: _Pair) -> str:
        """Return those on the left which no token of a BPE holds directly before the right."""
        model = self.model
        if model.get("type") != "BPE" or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
            raise _NoCut
        bytes_written = any(step["type"] == "ByteLevel" for step in self.pre_tokenizers)
        first = written(pair.right)[0] if bytes_written else pair.right
        if first not in model["vocab"]:
            raise _NoCut  # unknown characters in a row become one token
        lasts = {char: written(char)[-1] if bytes_written else char for char in pair.spelled}
        before = re.compile(f"[{re.escape(''.join(lasts.values()))}](?={re.escape(first)})")
        merged = set(before.findall(self._vocab_text))
        safe = [char for char, last in lasts.items() if last in model["vocab"] and last not in merged]
        return "".join([pair.spelled[char] for char in safe])


def steps(spec: dict[str, Any], kind: str, members: str) -> list[Step]:
    """Return the steps of `spec[kind]`, in order, sequences unfolded."""
    step = spec.get(kind)
    if step is None:
        return []
    if step["type"] == "Sequence":
        return [inner for member in step[members] for inner in steps({kind: member}, kind, members)]
    return [step]


def _check_normalizer(step: Step, place: int, left: str, right: str, normal_right: str) -> None:
    """Raises unless `step` acts on both sides of the pair as if each stood alone."""
    match step:
        case {"type": kind} if kind in ACT_PER_CHARACTER:
            return
        case {"type": "Prepend"} if place == 0 and right == " ":
            return
        case {"type": "Strip", "strip_left": False}:  # takes white space off the end, and no piece but the last has it
            return
        case {"type": "Replace", "pattern": {"String": str(text)}}:
            rights = right + normal_right
            if not any(a in left and b in rights for a, b in pairwise(text)):
                return
        case {"type": "Replace", "pattern": {"Regex": str(pattern)}}:
            if not any(_never_joined(pattern, left, char).empty for char in {right, normal_right}):
                return
    raise _NoCut


def _never_joined(pattern: str, left: str, right: str) -> Joint:
    found = joint(pattern, left, right)
    if found.joins:
        raise _NoCut
    return found


def _follow(pair: _Pair, step: Step) -> None:
    """Follow what pre-tokenizer `step` does to the pair. Raise _NoCut if it may join the two, or is not known."""
    left, right = pair.left, pair.right
    match step:
        case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": str(behavior), "invert": False}:
            _follow_split(pair, pattern, behavior)
        case {"type": "Split", "pattern": {"String": str(text)}, "behavior": str(behavior), "invert": False}:
            _follow_split(pair, re.escape(text), behavior)
        case {"type": "ByteLevel"}:
            if step.get("add_prefix_space") and right != " ":
                raise _NoCut  # it would put a space before the piece
            if step.get("use_regex", True):
                _follow_split(pair, GPT2_PATTERN, "Isolated")
        case {"type": "Metaspace", "replacement": str(sign)}:
            if right == " ":
                pair.right = sign
            if pair.right != sign and step.get("prepend_scheme", "always") != "never":
                raise _NoCut
            pair.split = pair.split or (pair.right == sign and step.get("split", True))
        case {"type": kind} if kind in SPLITS_AT_SPACE:
            pair.split = pair.split or right.isspace()
            if not right.isspace():
                raise _NoCut
        case {"type": "Digits"}:
            pass  # splits between digits and others
        case {"type": "Punctuation"} if right in " \n▁":
            pass  # splits around punctuation, which neither is
        case {"type": "CharDelimiterSplit", "delimiter": str(char)} if char not in left:
            pair.split = pair.split or char == right
        case _:
            raise _NoCut


def _follow_split(pair: _Pair, pattern: str, behavior: str) -> None:
    found = joint(pattern, pair.left, pair.right)
    if found.joins or found.empty:
        raise _NoCut
    if behavior == "Isolated":
        pair.split = pair.split or found.alone
    elif found.starts or found.ends:  # matches are joined with their neighbours, or left out
        raise _NoCut
