"""Texts by which two ways to tokenize are compared."""

from collections.abc import Sequence


def probes(special: Sequence[str]) -> list[str]:
    """Texts that are hard to tokenize alike: alone, in front of and behind each other and of special tokens."""
    hard = list(HARD_TEXTS)
    hard += [f"{one}{other}" for one in HARD_TEXTS[:JOINED_TEXTS] for other in HARD_TEXTS[:JOINED_TEXTS]]
    hard += [text for token in special for text in (token, f"a{token}b", f" {token} \n", f"{token}{token}", token[:-1])]
    return [*hard, "".join(HARD_TEXTS), " ".join(HARD_TEXTS), "\n".join([*special, *HARD_TEXTS])]


JOINED_TEXTS = 24  # the first of them, which are short
HARD_TEXTS = (
    "", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n ", "a", "A", " a", "1", " 1", "12345", ".", " .", "'s", "'S",
    "é", "e\u0301", "你好", "，", "🦊",
    "Hello, world!", "I'm you're WE'LL they'd've it's 'tis", "don’t", "snake_case camelCase HTTPServer2",
    "1234567890 3.14159 1,000,000 ١٢٣ ½ Ⅷ ²", "x = y[0]->z(); // a++ && b!=c",
    "def f(a):\n    return a  # ok\n\n\n\tx\n", '{"a": [1, 2.5e-3, null], "b": "c\\n"}', "<p class='x'>&nbsp;</p>",
    "https://a.b/c?d=e&f=%20#g", "a@b.co", "......!!!???---===", "    indented\n        more", "trailing   ",
    "\u00a0nbsp\u2003em\u3000cjk\u200bzero\ufeffbom", "naïve café Grüße Ελληνικά Москва ИЖ",
    "Ǆ ǅ ß ẞ ﬁ Å \u212b Ω \u2126", "e\u0301e\u0323\u0301 \u0301a ñ n\u0303", "日本語のテキスト、カタカナ。ｶﾅ",
    "中文，没有空格。《书》", "한국어 조선말 \u1112\u1161\u11ab", "हिन्दी नमस्ते க்ஷ ไทย", "עברית العربية",
    "👩‍👩‍👧‍👦🏳️‍🌈👍🏽🇩🇪 ☺️", "\U0001d54f\U0002070e\U0010ffff\ufffd", "\x00a\x00\x01\x1f\x7f\x85\u2028\u2029",
    "a" * 300, " " * 300, "ab" * 150, "é" * 200, "中" * 200, "🦊" * 100, "\n" * 100, "0" * 100,
    "<|", "|>", "<|im", "▁", "▁a▁", "Ġ", "Ċ", "<0x0A>", "<unk>", "[UNK]", "##a",
)  # fmt: skip
