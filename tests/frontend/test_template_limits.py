"""A chat template is a program that comes with a model: whatever it does ends soon and takes bounded memory."""

import time
import tracemalloc

import pytest

from kvmesh.frontend.template_limits import MAX_SOURCE_CHARS
from kvmesh.frontend.templates import ChatTemplate
from kvmesh.protocol.errors import ConfigError, InvalidRequestError
from tests.support.patience import PATIENCE_S

MOST_BYTES = 400 << 20
DOUBLE = "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x }}"


def doubling(start: str, step: str) -> str:
    return DOUBLE.replace("START", start).replace("STEP", step)


HOSTILE = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that write": "{% for a in range(9999) %}{% for b in range(99999) %}xxxxxxxx{% endfor %}{% endfor %}",
    "a macro that calls itself": "{% macro f(n) %}{% if n %}{{ f(n-1)+f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a recursive loop": "{% for a in range(999) recursive %}{{ loop(range(999)) }}{% endfor %}",
    "text times a number": "{{ messages[0].content * 999999999 }}",
    "a constant times a number": "{{ 'a' * 999999999 }}",
    "a list times a number": "{{ [0] * 999999999 }}",
    "a power": "{{ 9 ** 99999999 }}",
    "powers of powers": "{{ 9 ** (9 ** (9 ** 9)) }}",
    "text that doubles": doubling("'aa'", "ns.x + ns.x"),
    "text joined to itself": doubling("'aa'", "ns.x ~ ns.x"),
    "lists in lists": doubling("[0]", "[ns.x, ns.x]"),
    "tuples in tuples": doubling("(0, 1)", "(ns.x, ns.x)"),
    "dicts in dicts": doubling("{'a': 0}", "{'a': ns.x, 'b': ns.x}"),
    "made by dict()": doubling("dict(a=0)", "dict(a=ns.x, b=ns.x)"),
    "lists compared": DOUBLE.split("{{")[0].replace("START", "[0]").replace("STEP", "[ns.x, ns.x]")
    + "{{ ns.x == [ns.x] }}",
    "a width": "{{ 'a'.center(999999999) }}",
    "a width of a filter": "{{ 'a' | center(999999999) }}",
    "a width of %": "{{ '%999999999d' % 1 }}",
    "a width by star": "{{ '%*d' % (999999999, 1) }}",
    "a width of format": "{{ '{:999999999}'.format(1) }}",
    "a width within format": "{{ '{:{w}}'.format(1, w=999999999) }}",
    "a width of format_map": "{{ '{a:999999999}'.format_map({'a': 1}) }}",
    "zeros": "{{ '1'.zfill(999999999) }}",
    "tabs": "{{ ('\t' * 9999).expandtabs(99999) }}",
    "an indent": "{{ tools | tojson(indent=999999999) }}",
    "replaced by more": "{{ ('a' * 9999).replace('', 'b' * 9999).replace('', 'c' * 9999) }}",
    "joined with much": "{{ ('a' * 999999).join(range(99999)) }}",
    "joined by a filter": "{{ range(99999) | join('a' * 999999) }}",
    "the same text in a list": "{{ (['a' * 9999999] * 99999) | join }}",
    "batches": "{{ [1] | batch(999999999, 0) | list }}",
    "slices": "{{ [1] | slice(999999999) | list }}",
    "words of lipsum": "{{ lipsum(n=99999) }}",
    "an open parenthesis": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "a deep expression": "{{ " + "not " * 50_000 + "1 }}",
    "more than any template has": "a" * (MAX_SOURCE_CHARS + 1),
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_template_is_refused_soon_and_takes_little(source: str) -> None:
    began = time.monotonic()
    tracemalloc.start(1)
    try:
        with pytest.raises((ConfigError, InvalidRequestError)):
            ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}], tools=[{"a": 1}])
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < MOST_BYTES
    assert time.monotonic() - began < PATIENCE_S


def test_a_namespace_that_holds_itself_is_written_as_a_name() -> None:
    source = "{% set a = namespace() %}{% set a.x = [a, a] %}{{ a.x }}{{ 'text' ~ a }}"
    assert ChatTemplate(source, {}).render([]) == "[<Namespace>, <Namespace>]text<Namespace>"


def test_a_long_chat_with_many_tools_is_within_the_limits() -> None:
    source = (
        "{% for tool in tools %}{{ tool | tojson(indent=2) }}{% endfor %}"
        "{% for m in messages %}{{ '<' ~ m.role ~ '>' + m.content | trim }}{% for c in m.content.split() %}"
        "{% if c == 'x' %}{{ c }}{% endif %}{% endfor %}{% endfor %}"
    )
    tools = [
        {"name": f"f{n}", "parameters": {"properties": {f"p{i}": {"type": "string"} for i in range(20)}}}
        for n in range(50)
    ]
    messages = [{"role": "user", "content": "word " * 40}] * 2000
    assert len(ChatTemplate(source, {}).render(messages, tools=tools)) > 400_000
