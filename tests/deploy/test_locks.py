"""The lock files name every package at one version with hashes, and follow from pyproject.toml and constraints.txt."""

import importlib.util
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / "deploy" / "locks"
RELOCK = "run `make lock`"
OTHERWISE = {"torch"}  # installed by itself, because each build of it has other files


def lock_writer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lock_writer", ROOT / "deploy" / "lock.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LOCK = lock_writer()
NAMES = (*LOCK.SETS, "nixl")


def locked(name: str) -> list[Requirement]:
    """Return the requirements of a lock."""
    text = (LOCKS / f"{name}.txt").read_text()
    return [Requirement(block.split("\\", 1)[0].split(" --hash", 1)[0].strip()) for block in LOCK.blocks(text)]


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def wanted(name: str) -> Iterator[Requirement]:
    """Return what a set asks for itself, with the extras of kvmesh that it names."""
    extras = [extra for flag, extra in zip(LOCK.SETS[name], LOCK.SETS[name][1:], strict=False) if flag == "--extra"]
    waiting = [
        *project()["dependencies"],
        *(line for extra in extras for line in project()["optional-dependencies"][extra]),
    ]
    while waiting:
        requirement = Requirement(waiting.pop())
        if requirement.name == "kvmesh":
            waiting += [line for extra in requirement.extras for line in project()["optional-dependencies"][extra]]
        elif requirement.name not in OTHERWISE:
            yield requirement


@pytest.mark.parametrize("name", NAMES)
def test_a_lock_follows_from_the_dependencies_of_now(name: str) -> None:
    assert LOCK.digest_of((LOCKS / f"{name}.txt").read_text()) == LOCK.inputs_digest(), RELOCK


@pytest.mark.parametrize("name", NAMES)
def test_each_package_has_one_version_and_hashes(name: str) -> None:
    blocks = list(LOCK.blocks((LOCKS / f"{name}.txt").read_text()))
    assert blocks
    for block in blocks:
        assert re.match(r"[a-z0-9._-]+==\S+", block), block
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", block), block
    here = [r.name for r in locked(name) if r.marker is None or Marker(str(r.marker)).evaluate()]
    assert len(here) == len(set(here))


@pytest.mark.parametrize("name", LOCK.SETS)
def test_what_is_asked_for_is_locked_at_a_version_that_fits(name: str) -> None:
    versions = {LOCK.name_of(r.name): next(iter(r.specifier)).version for r in locked(name)}
    for requirement in wanted(name):
        version = versions.get(LOCK.name_of(requirement.name))
        assert version is not None and requirement.specifier.contains(version, prereleases=True), (requirement, RELOCK)


@pytest.mark.parametrize("name", NAMES)
def test_a_lock_has_the_versions_of_constraints_txt(name: str) -> None:
    pinned = dict(line.split("==") for line in LOCK.constraints())
    pinned = {LOCK.name_of(package): version for package, version in pinned.items()}
    for requirement in locked(name):
        [specifier] = requirement.specifier
        assert pinned.get(LOCK.name_of(requirement.name), specifier.version) == specifier.version, RELOCK


@pytest.mark.parametrize("name", NAMES)
def test_no_lock_brings_cuda_or_another_index(name: str) -> None:
    text = (LOCKS / f"{name}.txt").read_text()
    assert not re.search(r"^(torch|triton|nvidia-|cuda-)", text, re.MULTILINE)
    assert not re.search(r"^-|://", text, re.MULTILINE)
