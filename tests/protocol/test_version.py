"""Test which releases work together, and what is said of those that do not."""

import re
import tomllib
from pathlib import Path

import msgspec
import pytest
import yaml

from kvmesh.protocol.errors import WireError
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import Feature, Role, WorkerCard, decode, decode_card, encode, encode_card
from kvmesh.protocol.version import OURS, RELEASE, VersionError, Versions, common_version

ROOT = Path(__file__).parents[2]
CARD = WorkerCard(
    worker_id=WorkerId("w-1"), name="w", role=Role.DECODE, model="m", model_path="", address="h:1", block_size=16,
    total_blocks=8, context_tokens=64,
)  # fmt: skip


@pytest.mark.parametrize(
    ("theirs", "spoken"),
    [
        (Versions(), 1),  # names none: 0.1.0
        (Versions(1, 1), 1),
        (Versions(2, 1), 2),
        (Versions(3, 2), 2),  # the next release
        (Versions(9, 1), 2),
    ],
)
def test_the_newest_version_of_both_is_spoken(theirs: Versions, spoken: int) -> None:
    ours = Versions(2, 1, "0.2.0")
    assert common_version(theirs, ours) == common_version(ours, theirs) == spoken


@pytest.mark.parametrize(
    ("theirs", "ours"), [(Versions(99, 98), Versions(2, 1)), (Versions(), Versions(3, 2)), (Versions(0, 0), Versions())]
)
def test_a_version_that_one_side_does_not_understand_is_refused(theirs: Versions, ours: Versions) -> None:
    for one, other in ((theirs, ours), (ours, theirs)):
        with pytest.raises(VersionError):
            common_version(one, other)


def test_a_refusal_names_both_versions_and_what_to_do() -> None:
    with pytest.raises(VersionError) as refused:
        common_version(Versions(99, 98, "9.9.9"), Versions(2, 1, "0.2.0"))
    assert str(refused.value) == (
        "it speaks protocol 99, and 98 or newer of its peers (kvmesh 9.9.9), this process protocol 2, and 1 or newer "
        "of its peers (kvmesh 0.2.0); run releases together that are next to each other: docs/releasing.md"
    )


@pytest.mark.parametrize("release", ["\x1b[31mred", "<script>", "a" * 33, "1 2"])
def test_a_release_that_is_none_is_not_shown(release: str) -> None:
    assert str(Versions(2, 1, release)).endswith("(an unreadable release)")


def test_a_card_carries_the_versions_of_its_process() -> None:
    assert decode_card(encode_card(CARD), WorkerCard).versions == OURS


def test_a_card_without_a_version_is_of_the_first_protocol() -> None:
    assert decode_card(encode(CARD), WorkerCard).versions == Versions(1, 1, "")


def test_the_version_is_judged_before_the_rest_of_a_card() -> None:
    card = {"protocol": 99, "oldest_protocol": 98, "worker_id": {"of": "another shape"}}
    with pytest.raises(VersionError, match=r"protocol 99.*protocol 2"):
        decode_card(msgspec.msgpack.encode(card), WorkerCard)


@pytest.mark.parametrize(
    "fields", [{"protocol": "2"}, {"protocol": 2.5}, {"release": "x" * 65}, {"oldest_protocol": None}]
)
def test_a_version_that_cannot_be_read_is_no_version(fields: dict[str, object]) -> None:
    with pytest.raises(WireError) as unreadable:
        decode_card(msgspec.msgpack.encode({**msgspec.to_builtins(CARD), **fields}), WorkerCard)
    assert not isinstance(unreadable.value, VersionError)


def test_fields_and_features_of_a_newer_release_are_ignored() -> None:
    newer = {**msgspec.to_builtins(CARD), "protocol": 3, "oldest_protocol": 2, "colour": "red"}
    newer["features"] = [Feature.GUIDED.value, "telepathy"]
    card = decode_card(msgspec.msgpack.encode(newer), WorkerCard)
    assert Feature.GUIDED in card.features
    assert decode(encode(card), WorkerCard) == card


def test_each_place_that_names_the_release_names_the_same() -> None:
    assert "version" in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dynamic"]
    for path in ("docker-compose.yml", "deploy/Dockerfile", *ROOT.glob("deploy/helm/kvmesh/values*.yaml")):
        tags = re.findall(r"\bkvmesh/[a-z]+:([0-9][\w.]*)", (ROOT / path).read_text())
        assert set(tags) <= {RELEASE}, path
    assert set(re.findall(r"^ARG VERSION=(.*)$", (ROOT / "deploy/Dockerfile").read_text(), re.MULTILINE)) == {RELEASE}
    chart = yaml.safe_load((ROOT / "deploy/helm/kvmesh/Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (RELEASE, RELEASE)
    assert re.search(rf"^## ({re.escape(RELEASE)}|Unreleased)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
