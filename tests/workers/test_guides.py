"""An answer under a guide: whatever the model would like to say, what comes out is in the language."""

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("llguidance")
pytest.importorskip("torch")

from tokenizers import Tokenizer

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.mesh.jobs.places import Places
from kvmesh.protocol.errors import ConfigError, EngineError, InvalidRequestError
from kvmesh.protocol.messages import Guide, GuideKind
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.engines.registry import EngineName
from kvmesh.workers.engines.torch.executor import TorchExecutor
from kvmesh.workers.engines.torch.opening import open_engine
from kvmesh.workers.executor import Executor, Sampled
from kvmesh.workers.guide_checks import MAX_GUIDE_BYTES, check_guide
from kvmesh.workers.guides import MOST_ANSWERS, Guides, Matcher, follow_guides, open_guides
from kvmesh.workers.schemas import MAX_TEXT, GuideWhitespace
from tests.support.budget import examples

VOCAB_SIZE, EOS = 2048, 2
TOKENIZER = Tokenizer.from_file(str(CHECKPOINT_DIR / "tokenizer.json"))
MOST_TOKENS = 3000
MAX_OPTIONAL = 980  # properties of one object: 4 items each of a row of the parser
T = TypeVar("T")


@pytest.fixture(scope="module")
def guides() -> Iterator[Guides]:
    yield from opened("compact")


def opened(whitespace: GuideWhitespace) -> Iterator[Guides]:
    made = open_guides(CHECKPOINT_DIR, VOCAB_SIZE, [EOS], whitespace)
    assert made is not None
    yield made
    on_loop(closed(made))


@cache
def runner() -> asyncio.Runner:
    return asyncio.Runner()


def on_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run on the loop that the guides of this module belong to."""
    return runner().run(work)


async def closed(guides: Guides) -> None:
    guides.close()


def open_now(guides: Guides, guide: Guide, generated: list[int] | None = None) -> Matcher:
    return on_loop(guides.open(guide, generated or []))


def take(matcher: Matcher, token_id: int) -> None:
    on_loop(taken(matcher, token_id))


async def taken(matcher: Matcher, token_id: int) -> None:
    if (answer := matcher.take(token_id)) is not None:
        await asyncio.wait([answer])


def schema(value: object) -> Guide:
    return Guide(kind=GuideKind.JSON_SCHEMA, value=json.dumps(value))


def babble(matcher: Matcher, seed: int, most: int = MOST_TOKENS) -> list[int]:
    """Return the output of a model without any sense under the guide: any allowed token, each equally often."""
    rng = random.Random(seed)
    said: list[int] = []
    while not matcher.is_complete and len(said) < most:
        allowed = matcher.allowed()
        assert allowed is not None, matcher.failure
        said.append(rng.choice(np.flatnonzero(allowed).tolist()))
        take(matcher, said[-1])
        assert not matcher.failure
    return said


def text(token_ids: list[int]) -> str:
    return TOKENIZER.decode([t for t in token_ids if t != EOS], skip_special_tokens=False)


# --- what comes out ---------------------------------------------------------------------------------------------------

leaves = st.sampled_from(
    [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": -5, "maximum": 120},
        {"type": "string", "maxLength": 6},
        {"enum": ["red", "green", 3, None]},
        {"const": "é"},
    ]
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def of(properties: dict[str, Any]) -> dict[str, Any]:
        required = sorted(properties)[::2]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    return st.one_of(
        st.dictionaries(st.sampled_from(["a", "b c", "ü", 'x"y']), inner, max_size=3).map(of),
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 3}, inner),
        st.builds(lambda first, second: {"anyOf": [first, second]}, inner, inner),
    )


def fits(value: Any, rule: dict[str, Any]) -> bool:
    """Return whether `value` is valid by the few keywords that these tests use."""
    if "anyOf" in rule:
        return any(fits(value, other) for other in rule["anyOf"])
    if "enum" in rule or "const" in rule:
        return any(type(value) is type(one) and value == one for one in rule.get("enum", [rule.get("const")]))
    match rule["type"]:
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "integer":
            return type(value) is int and rule["minimum"] <= value <= rule["maximum"]
        case "string":
            return isinstance(value, str) and len(value) <= rule["maxLength"]
        case "array":
            return isinstance(value, list) and len(value) <= 3 and all(fits(item, rule["items"]) for item in value)
        case _:
            rules = rule["properties"]
            return (
                isinstance(value, dict)
                and set(rule["required"]) <= set(value)
                and all(name in rules and fits(item, rules[name]) for name, item in value.items())
            )


@settings(max_examples=examples(60))
@given(rule=st.recursive(leaves, containers, max_leaves=5), seed=st.integers(0, 2**32))
def test_an_answer_under_a_schema_is_valid_json(guides: Guides, rule: dict[str, Any], seed: int) -> None:
    matcher = open_now(guides, schema(rule))
    said = babble(matcher, seed)
    assert matcher.is_complete
    assert fits(json.loads(text(said)), rule)


@pytest.mark.parametrize("seed", range(5))
def test_an_answer_in_json_begins_an_object(guides: Guides, seed: int) -> None:
    said = babble(open_now(guides, Guide(kind=GuideKind.JSON)), seed, 40)
    assert text(said).startswith("{")


ONES = schema({"type": "array", "items": {"const": {"a": 1}}, "minItems": 3, "maxItems": 9})


@pytest.mark.parametrize("seed", range(5))
def test_json_is_compact(guides: Guides, seed: int) -> None:
    said = text(babble(open_now(guides, ONES), seed))
    assert said == json.dumps(json.loads(said), separators=(",", ":"))
    assert re.match(r'\{("|\})', text(babble(open_now(guides, Guide(kind=GuideKind.JSON)), seed, 40)))


@pytest.fixture(scope="module")
def flexible() -> Iterator[Guides]:
    yield from opened("flexible")


def test_the_setting_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("kvmesh.workers.engines.torch.executor.open_guides", lambda *given: opened.append(given[-1]))
    TorchExecutor(CHECKPOINT_DIR, guide_whitespace="flexible").load()
    assert opened == ["flexible"]
    executors: list[Executor] = []
    monkeypatch.setattr(
        "kvmesh.workers.engines.torch.opening.open_step_engine", lambda _, make: executors.append(make())
    )
    open_engine(WorkerConfig(model_path=str(CHECKPOINT_DIR), guide_whitespace="flexible"))
    executors[0].load()
    assert opened == ["flexible", "flexible"]


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm", "mock", "attach"])
def test_an_engine_that_would_not_heed_the_setting_refuses_it(engine: EngineName) -> None:
    with pytest.raises(ConfigError, match=f"--guide-whitespace is not for the engine {engine}"):
        WorkerConfig(model_path="m", engine=engine, guide_whitespace="flexible")


def test_json_may_have_whitespace_where_that_is_asked_for(flexible: Guides) -> None:
    said = [text(babble(open_now(flexible, ONES), seed)) for seed in range(5)]
    runs = [len(run) for answer in said for run in re.findall(r"\s+", answer)]
    assert runs
    assert max(runs) <= 64
    assert all(isinstance(json.loads(answer), list) for answer in said)


@pytest.mark.parametrize("seed", range(5))
def test_a_regular_expression_is_matched_whole(guides: Guides, seed: int) -> None:
    pattern = r"[a-f]{2,4}-(0|[1-9][0-9]{0,3})(é|😀)?"
    said = babble(open_now(guides, Guide(kind=GuideKind.REGEX, value=pattern)), seed)
    assert re.fullmatch(pattern, text(said))


CHOICES = ["yes", "yes, but", 'say "no"\n', "日本 😀", "\\u0041", "/a/i"]


@pytest.mark.parametrize("seed", range(20))
def test_one_of_the_choices_comes_out(guides: Guides, seed: int) -> None:
    said = babble(open_now(guides, Guide(kind=GuideKind.CHOICE, value=json.dumps(CHOICES))), seed)
    assert text(said) in CHOICES


@pytest.mark.parametrize("seed", range(5))
def test_a_grammar_in_larks_notation_is_kept_to(guides: Guides, seed: int) -> None:
    grammar = 'start: pair ("," pair){0,2}\npair: NAME "=" NUMBER\nNAME: /[a-z]{1,3}/\nNUMBER: /[0-9]{1,2}/'
    said = babble(open_now(guides, Guide(kind=GuideKind.GRAMMAR, value=grammar)), seed)
    assert re.fullmatch(r"[a-z]{1,3}=\d{1,2}(,[a-z]{1,3}=\d{1,2}){0,2}", text(said))


# --- where an answer stands -------------------------------------------------------------------------------------------


def test_an_answer_ends_where_nothing_may_follow_and_not_before(guides: Guides) -> None:
    matcher = open_now(guides, Guide(kind=GuideKind.REGEX, value="ab?"))
    [first] = TOKENIZER.encode("a", add_special_tokens=False).ids
    take(matcher, first)
    allowed = matcher.allowed()
    assert allowed is not None
    assert allowed[EOS]
    assert not matcher.is_complete
    take(matcher, EOS)
    assert matcher.is_complete


@settings(max_examples=examples(30))
@given(seed=st.integers(0, 2**32), cut=st.integers(0, 40))
def test_a_moved_answer_may_continue_as_before(guides: Guides, seed: int, cut: int) -> None:
    guide = schema({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]})
    stays = open_now(guides, guide)
    said = babble(stays, seed, cut)
    moved = open_now(guides, guide, said)
    assert moved.is_complete == stays.is_complete
    assert np.array_equal(moved.allowed(), stays.allowed())  # type: ignore[arg-type]


def test_two_answers_under_one_guide_do_not_disturb_each_other(guides: Guides) -> None:
    guide = Guide(kind=GuideKind.CHOICE, value='["one", "two"]')
    first, second = open_now(guides, guide), open_now(guides, guide)
    babble(first, 1)
    assert first.is_complete
    assert not second.is_complete


def test_a_token_outside_the_guide_is_a_failure(guides: Guides) -> None:
    matcher = open_now(guides, Guide(kind=GuideKind.REGEX, value="a"))
    take(matcher, 1500)
    assert matcher.failure
    assert matcher.allowed() is None
    assert not matcher.is_complete


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("guide", "says"),
    [
        (schema({"if": {"type": "string"}}), "'if' is not supported"),
        (schema({"$ref": "http://example.com/x.json"}), r"'\$ref' cannot be followed: resource 'http"),
        (schema({"$ref": "#"}), r"'\$ref' cannot be followed: the schema refers to itself, and an answer would never"),
        (
            schema({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
            "the schema cannot be followed: it is too complex to follow; check that no part of it must contain itself",
        ),
        (Guide(kind=GuideKind.GRAMMAR, value="start: start"), "grammar cannot be followed: no text fits: a part of it"),
        (Guide(kind=GuideKind.JSON_SCHEMA, value="{"), "JSON schema cannot be read"),
        (Guide(kind=GuideKind.JSON_SCHEMA, value='{"items":' * 10_000 + "1" + "}" * 10_000), "JSON schema"),
        (Guide(kind=GuideKind.REGEX, value="("), "regular expression cannot be followed: .*"),
        (Guide(kind=GuideKind.REGEX, value="(" * 4000 + ")" * 4000), "regular expression cannot be followed"),
        (Guide(kind=GuideKind.GRAMMAR, value="start: nowhere"), "grammar cannot be followed: .*nowhere"),
        (Guide(kind=GuideKind.GRAMMAR, value="start: " + "(" * 8000 + '"a"' + ")" * 8000), "grammar cannot be"),
        (Guide(kind=GuideKind.CHOICE, value="[]"), "there must be a choice"),
        (Guide(kind=GuideKind.CHOICE, value='["a", ""]'), "none may be empty"),
        (Guide(kind=GuideKind.CHOICE, value='["a", 1]'), "not a JSON list of strings"),
        (Guide(kind=GuideKind.JSON, value="x"), "the JSON guide has 1 bytes, at most 0 are taken"),
    ],
)
def test_an_impossible_guide_is_refused_with_the_reason(guides: Guides, guide: Guide, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says) as refused:
        open_now(guides, guide)
    assert refused.value.param == ("guide#" if guide.kind is GuideKind.JSON_SCHEMA else "guide")
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    ("part", "place", "says"),
    [
        ({"if": {}}, "", "'if' is not supported"),
        ({"pattern": "a(b"}, "", "'pattern' cannot be followed: unclosed group, at character 2 of 'a.b'"),
        ({"type": "array", "items": {"type": "strin"}}, "/items", "'type' cannot be followed: invalid type: strin"),
        ({"type": "array", "uniqueItems": True}, "", "'uniqueItems' is supported only for"),
        ({"minimum": 2, "maximum": 1, "type": "integer"}, "", "minimum .2. is greater than maximum"),
        ({"$ref": "#/$defs/none"}, "", "'.ref' cannot be followed: pointer '/.defs/none' does not exist"),
    ],
)
def test_a_refused_schema_names_the_place(guides: Guides, part: Any, place: str, says: str) -> None:
    for root, where in (
        ({"type": "object", "properties": {"a": part}, "required": ["a"]}, "/properties/a"),
        ({"type": "array", "items": {"type": "array", "items": part, "minItems": 1}, "minItems": 1}, "/items/items"),
    ):
        with pytest.raises(InvalidRequestError, match=says) as refused:
            open_now(guides, schema(root))
        assert refused.value.param == f"guide#{where}{place}"


@pytest.mark.parametrize("seed", range(examples(10)))
def test_unique_items_differ(guides: Guides, seed: int) -> None:
    rule = {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 2}
    items = json.loads(text(babble(open_now(guides, schema(rule)), seed)))
    assert len(items) >= 2
    assert len(set(items)) == len(items)


@pytest.mark.parametrize("seed", range(examples(30)))
def test_excluded_texts_and_numbers_never_come(guides: Guides, seed: int) -> None:
    excluded = ["", "a", 'a"', "\\", "\n", "é"]
    letters = {"type": "string", "maxLength": 1, "not": {"enum": excluded}}
    numbers = {"type": "integer", "minimum": 1, "maximum": 5, "not": {"enum": [1, 2, 4]}}
    assert json.loads(text(babble(open_now(guides, schema(letters)), seed))) not in excluded
    assert json.loads(text(babble(open_now(guides, schema(numbers)), seed))) in (3, 5)


def test_the_longest_excluded_text_is_no_deeper_than_a_pattern_may_be(guides: Guides) -> None:
    excluded = {"type": "string", "not": {"enum": ["x" * MAX_TEXT, "y" * MAX_TEXT]}}
    assert open_now(guides, schema(excluded)).allowed() is not None
    with pytest.raises(InvalidRequestError, match="'not' is supported only for"):
        open_now(guides, schema({"type": "string", "not": {"const": "x" * (MAX_TEXT + 1)}}))


@pytest.mark.parametrize("kind", list(GuideKind))
def test_a_large_guide_is_refused_before_it_is_parsed(guides: Guides, kind: GuideKind) -> None:
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_GUIDE_BYTES[kind]} are taken"):
        open_now(guides, Guide(kind=kind, value="[" * (MAX_GUIDE_BYTES[kind] + 1)))


def test_tokens_that_break_the_guide_cannot_be_continued(guides: Guides) -> None:
    guide = Guide(kind=GuideKind.REGEX, value="[0-9]+")
    for generated in ([1500], [VOCAB_SIZE], [-1]):
        with pytest.raises(InvalidRequestError) as refused:
            open_now(guides, guide, generated)
        assert refused.value.param == "generated"


def chain_of_rules(length: int) -> str:
    return "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(length)), f'r{length}: "a"'])


def chain_of_terminals(length: int) -> str:
    return "\n".join(["start: R0", *(f'R{i}: R{i + 1} "b"' for i in range(length)), f'R{length}: "a"'])


def chain_of_references(length: int) -> str:
    links = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(length)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": links | {f"d{length}": {"type": "null"}}})


@pytest.mark.parametrize(
    ("kind", "chain"),
    [
        (GuideKind.GRAMMAR, chain_of_rules),
        (GuideKind.GRAMMAR, chain_of_terminals),
        (GuideKind.JSON_SCHEMA, chain_of_references),
    ],
)
def test_a_long_chain_of_definitions_does_not_exhaust_the_stack(
    guides: Guides, kind: GuideKind, chain: Callable[[int], str]
) -> None:
    length = 100
    while len(chain(length + 100)) <= min(MAX_GUIDE_BYTES[kind], 128 << 10):
        length += 100
    matcher = open_now(guides, Guide(kind=kind, value=chain(length)))
    assert matcher.allowed() is not None


def many_properties(count: int) -> Guide:
    return schema({"type": "object", "properties": {f"k{i}": {} for i in range(count)}})


def test_as_many_optional_properties_as_the_limit_says_can_be_followed(guides: Guides) -> None:
    for count in (600, MAX_OPTIONAL):
        matcher = open_now(guides, many_properties(count))
        [brace] = TOKENIZER.encode("{", add_special_tokens=False).ids
        take(matcher, brace)
        assert matcher.allowed() is not None


def test_too_many_optional_properties_are_refused_before_the_first_token(guides: Guides) -> None:
    with pytest.raises(InvalidRequestError, match="max is 4000") as refused:
        open_now(guides, many_properties(MAX_OPTIONAL + 30))
    assert refused.value.param == "guide#"


# --- what is costly ---------------------------------------------------------------------------------------------------


def patterns_together(prefix: str, count: int) -> Guide:
    """Return a grammar whose derivative behind `prefix` takes minutes: `count` patterns hold for one text."""
    patterns = " & ".join(f"/{prefix}(y|x.*a.{{{i}}}b.*)/" for i in range(1, count))
    return Guide(kind=GuideKind.GRAMMAR, value=f"start: A\nA: {patterns}")


@pytest.mark.parametrize(
    ("rule", "pointer"),
    [
        ({"type": "integer", "multipleOf": 9_999_991}, "/properties/n"),
        ({"allOf": [{"type": "integer", "multipleOf": 9973}, {"allOf": [{"multipleOf": 9967}]}]}, "/properties/n"),
        ({"items": {"multipleOf": 0.1234567}}, "/properties/n/items"),
    ],
)
def test_divisors_that_make_too_many_states_are_refused_before_compiling(rule: Any, pointer: str) -> None:
    with pytest.raises(InvalidRequestError, match="'multipleOf' is too costly") as refused:
        check_guide(schema({"properties": {"n": rule}}))
    assert refused.value.param == f"guide#{pointer}"


@pytest.mark.parametrize("divisor", [1, 7, 0.01, 0.25, 1000, 5_000_000, 1_000_000_000, 99_991, True, -3, 10**400])
def test_other_divisors_pass_the_check(divisor: float) -> None:
    check_guide(schema({"type": "number", "multipleOf": divisor}))


async def refusal_of(guides: Guides, guide: Guide, key: str = "") -> str:
    try:
        matcher = await guides.open(guide, key=key)
    except InvalidRequestError as error:
        return str(error)
    matcher.close()
    return ""


@pytest.fixture
async def own_guides() -> AsyncIterator[Guides]:
    made = open_guides(CHECKPOINT_DIR, VOCAB_SIZE, [EOS])
    assert made is not None
    yield made
    made.close()


async def test_a_guide_that_takes_too_long_to_compile_is_refused_and_remembered(
    own_guides: Guides, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_guides, "compile_s", 0.2)
    bomb = schema({"type": "integer", "multipleOf": 999_983})
    assert "took longer than 0.2 s to compile; make it simpler" in await refusal_of(own_guides, bomb)
    assert own_guides.num_processes == 0
    monkeypatch.setattr(own_guides, "_compile", None)
    assert "took longer than 0.2 s to compile" in await refusal_of(own_guides, bomb)


async def test_a_guide_that_takes_too_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmesh.workers.guides.PROCESS_BYTES", 32 << 20)
    guides = open_guides(CHECKPOINT_DIR, VOCAB_SIZE, [EOS])
    assert guides is not None
    refusal = await refusal_of(guides, schema({"type": "integer", "multipleOf": 99_991}))
    assert "took more than 32 MiB of memory to compile" in refusal
    assert not await refusal_of(guides, schema({"type": "null"}))
    guides.close()


async def test_bombs_of_one_tenant_do_not_delay_the_guides_of_another(
    own_guides: Guides, monkeypatch: pytest.MonkeyPatch
) -> None:
    bombs = [schema({"type": "integer", "multipleOf": 999_000 + n}) for n in (983, 959, 953, 917)]
    sent = [asyncio.create_task(own_guides.open(bomb, key="mallory")) for bomb in bombs]
    assert not await refusal_of(own_guides, schema({"type": "null"}), key="alice")
    assert not any(task.done() for task in sent)
    own_guides.close()
    outcomes = await asyncio.gather(*sent, return_exceptions=True)
    assert all(isinstance(outcome, EngineError) for outcome in outcomes)
    with pytest.raises(EngineError, match="stopping"):
        await own_guides.open(bombs[0])


async def test_a_tenant_that_waits_for_processes_holds_no_place_to_compile(
    own_guides: Guides, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_guides, "_processes", Places(4, 2))
    guides = [Guide(kind=GuideKind.REGEX, value=f"a{i}") for i in range(8)]
    held = [await own_guides.open(guide, key="mallory") for guide in guides[:2]]
    waiting = [asyncio.create_task(own_guides.open(guide, key="mallory")) for guide in guides[2:]]
    assert not await refusal_of(own_guides, guides[-1], key="alice")  # although mallory waits for the same guide
    assert not any(task.done() for task in waiting[:-1])
    for matcher in held:
        matcher.close()
    for task in waiting:
        (await task).close()


async def test_an_answer_whose_next_token_is_too_costly_fails_alone(
    own_guides: Guides, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmesh.workers.guides.MASK_S", 0.2)
    costly = await own_guides.open(patterns_together("[yz]{20}", 40))
    other = await own_guides.open(Guide(kind=GuideKind.REGEX, value="[0-9]+"))
    [letter] = TOKENIZER.encode("z", add_special_tokens=False).ids
    for _ in range(25):
        await taken(costly, letter)
        if costly.failure:
            break
    assert costly.failure == "its next token took longer than 0.2 s to find"
    assert costly.allowed() is None
    [digit] = TOKENIZER.encode("7", add_special_tokens=False).ids
    await taken(other, digit)
    assert other.allowed() is not None
    costly.close()
    other.close()
    assert own_guides.num_processes == 1


async def test_a_step_does_not_wait_for_a_costly_guide(own_guides: Guides, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmesh.workers.guides.MASK_S", 0.2)
    costly = await own_guides.open(patterns_together("[yz]{20}", 40))
    [letter] = TOKENIZER.encode("z", add_special_tokens=False).ids
    late = asyncio.Event()
    row = SimpleNamespace(guide=costly)
    for _ in range(25):
        await follow_guides([row, SimpleNamespace(guide=None)], [Sampled(letter), Sampled(1)], late.set)
        if costly.is_waiting:
            await late.wait()
            assert not costly.is_waiting
            late.clear()
    assert costly.failure


# --- what is kept -----------------------------------------------------------------------------------------------------


async def test_idle_processes_are_kept_up_to_a_number(own_guides: Guides, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmesh.workers.guides.MOST_IDLE", 3)
    for i in range(6):
        (await own_guides.open(Guide(kind=GuideKind.REGEX, value=f"a{i}"))).close()
    assert own_guides.num_processes == 3


async def test_above_the_limit_of_memory_idle_processes_end_before_others(
    own_guides: Guides, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_use = await own_guides.open(schema({"type": "integer", "multipleOf": 20_011}))
    (await own_guides.open(Guide(kind=GuideKind.REGEX, value="b"))).close()
    assert own_guides.num_processes == 2
    monkeypatch.setattr("kvmesh.workers.guides.MOST_BYTES", own_guides.grown_bytes)
    third = await own_guides.open(Guide(kind=GuideKind.REGEX, value="c"))
    assert own_guides.num_processes == 2
    monkeypatch.setattr("kvmesh.workers.guides.MOST_BYTES", 1)
    third.close()
    [digit] = TOKENIZER.encode("0", add_special_tokens=False).ids
    await taken(in_use, digit)
    assert "its process was ended" in in_use.failure
    in_use.close()


async def test_a_process_holds_a_limited_number_of_answers(own_guides: Guides) -> None:
    guide = Guide(kind=GuideKind.REGEX, value="a")
    answers = await asyncio.gather(*[own_guides.open(guide) for _ in range(MOST_ANSWERS + 1)])
    assert own_guides.num_processes == 2
    for answer in answers:
        answer.close()


def test_a_folder_without_a_tokenizer_guides_nothing(tmp_path: Any) -> None:
    assert open_guides(tmp_path, VOCAB_SIZE, [EOS]) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    assert open_guides(tmp_path, VOCAB_SIZE, [EOS]) is None
