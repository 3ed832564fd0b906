"""Guides for engines of other projects are tried first, under limits that those engines do not have."""

import json
from collections.abc import AsyncIterator

import pytest

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.protocol.errors import EngineError, InvalidRequestError
from kvmesh.protocol.messages import Guide, GuideKind
from kvmesh.workers.engines.external.guide_trial import GuideTrial
from kvmesh.workers.guide_checks import may_be_costly
from kvmesh.workers.guides import Guides

pytest.importorskip("llguidance")

MODEL = str(CHECKPOINT_DIR)


def schema(value: object) -> Guide:
    return Guide(kind=GuideKind.JSON_SCHEMA, value=json.dumps(value))


BOMB = schema({"allOf": [{"type": "string", "pattern": f".*a.{{{i}}}b.*"} for i in range(1, 61)]})


@pytest.fixture
async def trial() -> AsyncIterator[GuideTrial]:
    made = GuideTrial()
    yield made
    made.close()


async def test_a_guide_that_passes_a_limit_is_refused(trial: GuideTrial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmesh.workers.guides.TRIAL_COMPILE_S", 0.2)
    with pytest.raises(InvalidRequestError, match=r"took longer than 0\.2 s to compile"):
        await trial.check(BOMB, MODEL, "")


@pytest.mark.parametrize(
    "guide",
    [
        schema({"pattern": "^a+$", "type": "string"}),
        schema({"if": {}, "format": "what is that"}),
        Guide(kind=GuideKind.GRAMMAR, value='root ::= "a" | "b"'),  # of another notation
    ],
)
async def test_other_guides_pass_whether_we_can_compile_them_or_not(trial: GuideTrial, guide: Guide) -> None:
    await trial.check(guide, MODEL, "")


async def test_a_guide_of_certain_cost_is_refused(trial: GuideTrial) -> None:
    with pytest.raises(InvalidRequestError, match="'multipleOf' is too costly here"):
        await trial.check(schema({"type": "integer", "multipleOf": 9_999_991}), MODEL, "")


async def test_a_lost_process_fails_its_request_and_ends_no_trial(
    trial: GuideTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = schema({"type": "string", "pattern": "^a+$"})

    async def lose(home: object, digest: bytes) -> None:
        raise EngineError("the process has ended")

    with monkeypatch.context() as patch:
        patch.setattr(Guides, "_begin", staticmethod(lose))
        with pytest.raises(EngineError):
            await trial.check(guide, MODEL, "")
    monkeypatch.setattr(trial._guides, "compile_s", 0.2)
    with pytest.raises(InvalidRequestError, match="took longer"):
        await trial.check(BOMB, MODEL, "")


async def test_without_our_compiler_every_guide_passes(trial: GuideTrial, tmp_path: object) -> None:
    await trial.check(BOMB, str(tmp_path), "")
    broken = f"{tmp_path}/tokenizer.json"
    with open(broken, "w") as file:
        file.write("{}")
    await trial.check(BOMB, str(tmp_path), "")


def test_simple_schemas_are_not_tried() -> None:
    assert not may_be_costly(schema({"type": "object", "properties": {"a": {"type": "integer"}}}))
    assert not may_be_costly(Guide(kind=GuideKind.JSON))
    assert may_be_costly(schema({"multipleOf": 3}))
    assert may_be_costly(schema({"enum": ["x" * 20_000]}))
    assert may_be_costly(Guide(kind=GuideKind.REGEX, value="a"))
