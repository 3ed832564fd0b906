"""Guides for engines that use xgrammar are compiled with it first, under limits."""

import json
from collections.abc import AsyncIterator

import pytest

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.protocol.errors import InvalidRequestError
from kvmesh.protocol.messages import Guide, GuideKind
from kvmesh.workers.engines.external.guide_trial import GuideTrial
from kvmesh.workers.guide_messages import XgrammarForm
from kvmesh.workers.trial_process import compiled_by

xgrammar = pytest.importorskip("xgrammar")

MODEL = str(CHECKPOINT_DIR)


def schema(value: object) -> Guide:
    return Guide(kind=GuideKind.JSON_SCHEMA, value=json.dumps(value))


def regex(value: str) -> Guide:
    return Guide(kind=GuideKind.REGEX, value=value)


TEXT = {"type": "string"}
NAMES = {f"p{i}": TEXT for i in range(200)}
COUNTED = "|".join(f"[^{chr(97 + i % 26)}]{{0,400}}[^{chr(98 + i % 24)}]{{0,400}}" for i in range(200))
CHAIN = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(8000)} | {"d8000": TEXT}
ORDINARY = [
    schema({"type": "object", "properties": {"name": TEXT, "age": {"type": "integer"}}, "required": ["name"]}),
    schema({"if": {}, "format": "what is that"}),
    regex("(red|green)-[0-9]{3}"),
    Guide(kind=GuideKind.GRAMMAR, value='root ::= "a" | "b"'),
    Guide(kind=GuideKind.GRAMMAR, value='start: "a" | "b"'),
    Guide(kind=GuideKind.GRAMMAR, value="of no known notation"),
    Guide(kind=GuideKind.CHOICE, value=json.dumps(["yes", 'with "quotes", a \\ and\n a line \x01'])),
]


@pytest.fixture(params=["vllm", "sglang"])
async def trial(request: pytest.FixtureRequest) -> AsyncIterator[GuideTrial]:
    made = GuideTrial()
    made.xgrammar = request.param
    yield made
    made.close()


@pytest.mark.parametrize(
    ("guide", "reason"),
    [
        (regex(f"({COUNTED})*"), r"the regular expression took longer than 0\.5 s"),
        (
            schema({"type": "object", "properties": NAMES, "minProperties": 50, "maxProperties": 100}),
            "JSON schema took",
        ),
        (schema({"$defs": CHAIN, "$ref": "#/$defs/d0"}), "or it is nested too deeply"),
    ],
)
async def test_a_guide_that_only_xgrammar_finds_costly_is_refused(
    trial: GuideTrial, guide: Guide, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmesh.workers.guides.TRIAL_COMPILE_S", 0.5)
    for _ in range(2):  # the second answer is remembered
        with pytest.raises(InvalidRequestError, match=reason):
            await trial.check(guide, MODEL, "")


async def test_ordinary_guides_pass_and_leave_no_process(trial: GuideTrial) -> None:
    for guide in ORDINARY:
        await trial.check(guide, MODEL, "")
    assert trial._guides is not None and trial._guides.num_processes == 0


async def test_a_guide_is_compiled_once(trial: GuideTrial, monkeypatch: pytest.MonkeyPatch) -> None:
    await trial.check(ORDINARY[0], MODEL, "")
    monkeypatch.setattr("kvmesh.workers.guides.Guides._compiled", None)
    await trial.check(ORDINARY[0], MODEL, "another tenant")


@pytest.mark.parametrize("form", ["vllm", "sglang"])
def test_choices_are_compiled_literally(form: XgrammarForm) -> None:
    vocabulary = xgrammar.TokenizerInfo([chr(n) for n in range(256)], stop_token_ids=[0])
    compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1)
    choices = ["yes", 'a "b" \\n [c]*', "two\nlines\t\x01"]
    compiled = compiled_by(compiler, Guide(kind=GuideKind.CHOICE, value=json.dumps(choices)), form)
    for text, is_taken in [*((choice, True) for choice in choices), ("no", False)]:
        assert xgrammar.GrammarMatcher(compiled).accept_string(text) == is_taken
