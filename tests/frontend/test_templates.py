"""Chat templates: the same text as transformers, errors as 400."""

import gc
import json
import weakref
from pathlib import Path

import pytest

from kvmesh.frontend.openai.parameters import parse_chat
from kvmesh.frontend.templates import ChatTemplate
from kvmesh.protocol.errors import ConfigError, InvalidRequestError
from tests.frontend import tiny

CHECKPOINT = Path(__file__).parents[2] / "kvmesh" / "tiny_model" / "checkpoint"
TURNS = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "Grüße 🦊"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": "<b>"}}}]},
    {"role": "tool", "content": "42", "tool_call_id": "c1"},
    {"role": "user", "content": "and?"},
]  # fmt: skip
EXTENSIONS = """
{{- bos_token }}
{%- set ns = namespace(count=0) %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {% generation %}[{{ message.role }}|{{ message.content }}]{% endgeneration %}
    {%- if message.tool_calls %}{{ message.tool_calls | tojson }}{{ message | tojson(indent=2) }}{% endif %}
{%- endfor %}
{{ ns.count }} {{ dict(a=1) }} {{ strftime_now('%Y') }} {{ eos_token }} {{ tools is none }} {{ pad_token }}
{% if add_generation_prompt %}go{% endif %}
"""


def transformers_text(folder: Path, messages: list[dict[str, object]]) -> str:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def load(folder: Path) -> ChatTemplate:
    template = ChatTemplate.load(folder)
    assert template is not None
    return template


def test_equals_transformers_with_all_extensions(tmp_path: Path) -> None:
    folder = tiny.save_model(tmp_path, EXTENSIONS)
    assert load(folder).render(TURNS) == transformers_text(folder, TURNS)


@pytest.mark.skipif(not CHECKPOINT.is_dir(), reason="the tiny checkpoint is not built")
def test_equals_transformers_on_the_tiny_model() -> None:
    turns = [turn for turn in TURNS if turn["role"] in ("system", "user")]
    assert load(CHECKPOINT).render(turns[:2]) == transformers_text(CHECKPOINT, turns[:2])


@pytest.mark.parametrize(
    "value",
    ["{{ eos_token }}", [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "{{ eos_token }}"}]],
)  # fmt: skip
def test_the_template_may_stand_in_the_config(tmp_path: Path, value: object) -> None:
    folder = tiny.save_model(tmp_path, template=None)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": value}))
    assert load(folder).render(TURNS[:1]) == "</s>"


def test_a_file_wins_over_the_config(tmp_path: Path) -> None:
    folder = tiny.save_model(tmp_path, "from file")
    (folder / "tokenizer_config.json").write_text('{"chat_template": "from config"}')
    assert load(folder).render(TURNS) == "from file"


def test_a_model_without_a_template_has_none(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None


def test_developer_is_system_to_templates_that_do_not_know_it() -> None:
    turn = [{"role": "developer", "content": "x"}]
    assert ChatTemplate("{{ messages[0].role }}", {}).render(turn) == "system"
    assert ChatTemplate("{# developer #}{{ messages[0].role }}", {}).render(turn) == "developer"


def test_thoughts_have_the_name_that_the_template_reads() -> None:
    turn = [{"role": "assistant", "content": "x", "reasoning_content": "Hm."}]
    for source in (
        "{{ messages[0].reasoning }}",
        "{{ messages[0]['reasoning'] }}",
        '{{ messages[0].get("reasoning") }}',
        "{{ messages[0].reasoning_content }}",
    ):
        assert ChatTemplate(source, {}).render(turn) == "Hm."
    assert ChatTemplate("{# reasoning #}{{ messages[0] | length }}", {}).render(turn) == "3"


CALL_BY_CALL = "{%- for call in messages[-1].tool_calls %}{% set call = call.function %}"
WRITTEN_AS = {  # how templates of known models write the arguments of a call, and what cut-off arguments become
    "qwen3": (
        "{% if call.arguments is string %}{{ call.arguments }}{% else %}{{ call.arguments | tojson }}{% endif %}",
        '{"city": "Par',
    ),
    "hermes": ("{% set args = call.arguments %}{{ args | tojson(indent=2) }}", '{"city": "Par'),
    "print": ("{{ call.arguments }}", '{"city": "Par'),
    "join": ("{{ 'x' ~ call.arguments }}", 'x{"city": "Par'),
    "qwen3-coder": (
        "{% for name, value in call.arguments | items %}<parameter={{ name }}>{{ value }}</parameter>{% endfor %}",
        '<parameter=arguments>{"city": "Par</parameter>',
    ),
    "unsloth": (
        "{% if call.arguments is mapping %}{% for name in call.arguments %}"
        "{{ name }}={{ call.arguments[name] | tojson }}{% endfor %}{% endif %}",
        'arguments="{\\"city\\": \\"Par"',
    ),
    "glm": (
        "{% for name, value in call.arguments.items() %}{{ name }}: "
        "{{ value | tojson if value is not string else value }}{% endfor %}",
        'arguments: {"city": "Par',
    ),
    "gemma": (
        "{% for name, value in call.arguments | dictsort %}{{ name }}:{{ value }}{% endfor %}",
        'arguments:{"city": "Par',
    ),
    "whole": ("{{ call | tojson }}", '{"name": "f", "arguments": {"arguments": "{\\"city\\": \\"Par"}}'),
}


@pytest.mark.parametrize(("source", "text"), WRITTEN_AS.values(), ids=WRITTEN_AS)
def test_arguments_that_are_no_object_are_rendered_by_every_template(source: str, text: str) -> None:
    template = ChatTemplate(CALL_BY_CALL + source + "{% endfor %}", {})

    def rendered(arguments: str | None) -> str:
        called = {"tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        body = {"model": "m", "messages": [{"role": "assistant"} | called]}
        messages = parse_chat(json.dumps(body).encode()).messages
        assert messages is not None
        return template.render(messages)

    assert rendered('{"city": "Par') == text
    assert "Paris" in rendered('{"city": "Paris"}')
    for arguments in ("[]", "null", '"Paris"', "Paris", "{}{}", '{"a":' * 10_000):
        assert rendered(arguments)
    assert rendered("") == rendered(None) == rendered("{}")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages[0].nothing.at_all }}", "nothing"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% set n = namespace(_x=1) %}", "_x"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_what_a_template_cannot_render_is_the_callers_error(source: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])
    assert caught.value.param == "messages"


def test_any_name_may_be_an_option() -> None:
    template = ChatTemplate("{{ effort }}{{ this }}", {})
    assert template.render([{"role": "user", "content": "x"}], options={"effort": 1, "this": 2, "self": 3}) == "12"


@pytest.mark.parametrize("source", ["{{ raise_exception('no') }}", "{{ messages[0].content + 1 }}"])
def test_the_error_names_where_the_messages_came_from(source: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}], param="input")
    assert caught.value.param == "input"


def test_a_broken_template_or_config_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="compile"):
        ChatTemplate("{% for %}", {})
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="tokenizer_config"):
        ChatTemplate.load(tmp_path)


def test_an_error_names_the_line_of_the_template(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="does not compile at line 2"):
        ChatTemplate("a\n{% if %}\n", {})
    macro = "{% macro add(x) %}\n{{ x + 1 }}\n{% endmacro %}\n{{ add('a') }}"
    failing = {"a\n\n{{ 1 / 0 }}": 3, macro: 2, "{# #}\n{{ messages[5].x }}": 2, "\n\n{{ raise_exception('no') }}": 3}
    for source, line in failing.items():
        with pytest.raises(InvalidRequestError, match=f"these messages at line {line}: "):
            ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}])
    assert "chat template failed at line 3" in caplog.text


class _Text(str):
    """A text whose end can be watched."""


@pytest.mark.parametrize("ending", ["", "{{ raise_exception('no') }}"])
def test_rendered_messages_are_freed_without_the_cycle_collector(ending: str) -> None:
    """A macro refers to its context: 5 MB stayed in memory for each chat of that size."""
    source = "{% macro shown(m) %}{{ m.content }}{% endmacro %}{% for m in messages %}{{ shown(m) }}{% endfor %}"
    template = ChatTemplate(source + ending, {})
    content = _Text("hello")
    freed = weakref.ref(content)
    gc.disable()
    try:
        if ending:
            with pytest.raises(InvalidRequestError):
                template.render([{"role": "user", "content": content}])
        else:
            assert template.render([{"role": "user", "content": content}]) == "hello"
        del content
        assert freed() is None
    finally:
        gc.enable()
