"""The small corpus in the repository, and every input that was ever found, keep the promises of their surface.

`make fuzz` searches for more (CONTRIBUTING.md).
"""

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.fuzz.names import NATIVE, PYTHON_NAMES
from tests.fuzz.seeds import seeds
from tests.fuzz.surfaces import PYTHON

CORPUS = Path(__file__).parent / "corpus"
MAX_CORPUS_BYTES = 400 << 10
MOST_S = 20.0  # for one input, on a machine that does something else: a hang is a finding


@pytest.mark.parametrize("surface", PYTHON_NAMES)
def test_each_known_input_keeps_the_promises(surface: str) -> None:
    inputs = [*sorted((CORPUS / surface).glob("*")), None]
    for file in inputs:
        began = time.monotonic()
        PYTHON[surface](file.read_bytes() if file else b"")
        assert time.monotonic() - began < MOST_S, file


def test_every_example_of_a_message_is_sound() -> None:
    for surface, inputs in seeds().items():
        for data in inputs.values():
            if surface in PYTHON:
                PYTHON[surface](data)


@pytest.mark.parametrize("surface", NATIVE)
def test_known_inputs_keep_the_promises_of_native_code(surface: str, tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler is here")
    program = tmp_path / surface
    folder = Path(__file__).parent / "native"
    sources = [str(folder / f"{surface}.cpp"), str(folder / "replay.cpp")]
    flags = ["-std=c++17", "-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    built = subprocess.run(
        [compiler, *flags, *sources, "-o", str(program)], capture_output=True, text=True, check=False
    )
    if "asan" in built.stderr or "ubsan" in built.stderr:
        pytest.skip("the compiler has no sanitizers here")
    assert built.returncode == 0, built.stderr
    files = sorted(str(file) for file in (CORPUS / surface).iterdir())
    done = subprocess.run([str(program), *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def test_the_corpus_is_small_and_belongs_to_surfaces() -> None:
    assert {folder.name for folder in CORPUS.iterdir()} <= {*PYTHON_NAMES, *NATIVE}
    assert sum(file.stat().st_size for file in CORPUS.rglob("*") if file.is_file()) < MAX_CORPUS_BYTES
