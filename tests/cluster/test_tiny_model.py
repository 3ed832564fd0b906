"""The committed checkpoint is a complete Hugging Face folder, and its corpus can be made again."""

import itertools
import json
import random

import pytest

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.frontend.parsers.tools import guess_tool_format
from kvmesh.frontend.templates import ChatTemplate
from kvmesh.lab.tiny_model.chats import conversation
from kvmesh.lab.tiny_model.corpus import ANSWER, SPECIAL_TOKENS, all_documents, prose_documents, render
from kvmesh.lab.tiny_model.grammar import expand
from kvmesh.lab.tiny_model.tool_chats import offered, tool_conversation
from kvmesh.lab.tiny_model.tool_tasks import draw_task, same_purpose
from tests.support.budget import examples

tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizers.Tokenizer.from_file(str(CHECKPOINT_DIR / "tokenizer.json"))


def test_the_seed_decides_the_corpus() -> None:
    first, again, other = (list(itertools.islice(all_documents(seed), 50)) for seed in (7, 7, 8))
    assert first == again
    assert first != other


def test_no_document_has_an_open_choice_or_slot() -> None:
    for document in itertools.islice(prose_documents(1), 500):
        text = document.text
        for token in SPECIAL_TOKENS:
            text = text.replace(token, "")
        assert not set(text) & set("{}[]|")


def test_an_article_fits_the_word_that_follows() -> None:
    assert expand(random.Random(0), "A [animal] and a user", {"animal": "owl"}) == "An owl and a user"


def test_a_conversation_alternates_and_ends_with_an_answer() -> None:
    rng = random.Random(5)
    for _ in range(100):
        roles = [m["role"] for m in conversation(rng) if m["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert 1 <= len(roles) // 2 <= 4


def test_config_tokenizer_and_special_tokens_agree(tokenizer) -> None:
    config = json.loads((CHECKPOINT_DIR / "config.json").read_text())
    settings = json.loads((CHECKPOINT_DIR / "tokenizer_config.json").read_text())
    assert tokenizer.get_vocab_size() == config["vocab_size"] == 2048
    assert settings["eos_token"] == "<|im_end|>"
    assert tokenizer.token_to_id("<|im_end|>") == config["eos_token_id"]
    for token in SPECIAL_TOKENS:
        assert tokenizer.encode(token).ids == [tokenizer.token_to_id(token)]


TEXTS = ["Hello there.", "  two  spaces\n\ttab", "naïve café", "🙂👩‍🚀", "你好，世界", "\x00\x7f"]


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_survives_the_tokenizer(tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_every_byte_is_a_token(tokenizer) -> None:
    vocab = tokenizer.get_vocab()
    assert all(letter in vocab for letter in tokenizers.pre_tokenizers.ByteLevel.alphabet())


def rendered(messages: list[dict], tools: list[dict] | None = None, **options: bool) -> str:
    template = ChatTemplate.load(CHECKPOINT_DIR)
    assert template is not None
    return template.render(messages, tools=tools, **({"add_generation_prompt": False} | options))


def test_the_chat_template_writes_chatml_with_system_messages_anywhere() -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Bye"}]},
    ]
    assert rendered(messages, add_generation_prompt=True) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>system\nBe kind.<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_corpus_is_rendered_as_the_chat_template_does() -> None:
    messages = conversation(random.Random(3))
    assert rendered(messages) == render(messages)


@pytest.mark.budget
def test_chats_with_tools_are_rendered_as_the_chat_template_does() -> None:
    rng = random.Random(4)
    for _ in range(examples(200)):
        messages, tools = tool_conversation(rng)
        assert rendered(messages, tools) == render(messages, tools)
        offers = [{"type": "function", "function": tool} for tool in tools]
        written = [as_a_client_sends(message) for message in messages]
        assert rendered(written, offers) == render(messages, tools)


def as_a_client_sends(message: dict) -> dict:
    """The arguments of calls are JSON in a string, and the content of a call is null."""
    calls = [call["function"] for call in message.get("tool_calls", [])]
    texts = [json.dumps(f["arguments"], ensure_ascii=False, separators=(",", ":")) for f in calls]
    sent = [{"function": f | {"arguments": text}} for f, text in zip(calls, texts, strict=True)]
    return message | ({"tool_calls": sent, "content": None} if sent else {})


def test_the_template_shows_what_any_tool_is_without_its_whole_schema() -> None:
    parameters = {
        "properties": {
            "a": {"anyOf": [{"type": "integer"}, {"type": "null"}], "description": "long"},
            "b": True,
            "c": {"type": ["string", "null"]},
            "d": {"$ref": "#/$defs/x"},
            "e": {"enum": ["x", 5]},
        },
        "required": ["c", "e"],
    }
    tools = [
        {"type": "function", "function": {"name": "f", "description": "\n  One.\nTwo.", "parameters": parameters}},
        {"type": "function", "function": {"name": "g", "description": "d" * 500}},
    ]
    assert rendered([{"role": "system", "content": "Hi."}, {"role": "user", "content": "x"}], tools) == (
        "<|im_start|>system\nHi.\n\nTools:\n"
        '{"name":"f","description":"One.","parameters":'
        '{"a":"integer?","b":"any?","c":"string|null","d":"any?","e":"x|5"}}\n'
        f'{{"name":"g","description":"{"d" * 120}","parameters":{{}}}}<|im_end|>\n'
        "<|im_start|>user\nx<|im_end|>\n"
    )


def test_calls_of_the_shipped_model_are_read_without_a_setting() -> None:
    assert guess_tool_format((CHECKPOINT_DIR / "chat_template.jinja").read_text(encoding="utf-8")) == "hermes"


def test_tools_that_would_answer_the_same_question_are_not_offered_together() -> None:
    rng = random.Random(6)
    for _ in range(200):
        task = draw_task(rng)
        tools = offered(rng, [task])
        assert [tool["name"] for tool in tools].count(task.tool["name"]) == 1
        assert all(f"'{key}': " in str(task.tool) for key in task.arguments)
    assert same_purpose("sum +", "sum")
    assert not same_purpose("sum +", "sum *")


def test_only_the_assistants_words_are_learned_of_a_chat_with_tools() -> None:
    text = render([{"role": "user", "content": "a"}, {"role": "assistant", "content": "é b"}])
    assert [match[1] for match in ANSWER.finditer(text)] == ["é b<|im_end|>"]


def test_both_copies_of_the_chat_template_are_the_same() -> None:
    settings = json.loads((CHECKPOINT_DIR / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == (CHECKPOINT_DIR / "chat_template.jinja").read_text(encoding="utf-8")


def test_the_folder_stays_small() -> None:
    assert sum(path.stat().st_size for path in CHECKPOINT_DIR.iterdir()) < 5_000_000


def test_the_weights_are_bfloat16_with_the_configs_shapes() -> None:
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(CHECKPOINT_DIR / "model.safetensors", framework="np") as weights:
        names = set(weights.keys())
        embedding = weights.get_slice("model.embed_tokens.weight")
        assert (embedding.get_shape(), embedding.get_dtype()) == ([2048, 192], "BF16")
    assert "lm_head.weight" not in names  # tied to the embedding
    assert {f"model.layers.{i}.self_attn.q_norm.weight" for i in range(4)} <= names
