"""Test that no program of ours runs data as code. Advisories of SGLang, vLLM and Mooncake were pickles from a port."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOT_OURS = ("tests", "ui", "docs")
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"}
BUILTINS = {"eval", "exec", "compile"}
METHODS = {"recv_pyobj", "send_pyobj", "unsafe_load", "full_load"}
FLAGS = {"allow_pickle", "trust_remote_code", "shell"}
SUSPICIOUS = re.compile("|".join([*MODULES, *METHODS, *FLAGS, *(rf"\b{name}\(" for name in BUILTINS), r"\.load\w*\("]))


def unsafe(source: str) -> Iterator[str]:
    """Yield what in a module could run code that comes as data."""
    if not SUSPICIOUS.search(source):  # most modules: parsing all takes seconds
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            yield node.module or ""
        elif isinstance(node, ast.Call):
            yield from _unsafe_call(node)


def _unsafe_call(node: ast.Call) -> Iterator[str]:
    called = ast.unparse(node.func)
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    if called in BUILTINS or called.rpartition(".")[2] in METHODS:
        yield called
    if called == "torch.load" and given.get("weights_only") != "True":
        yield "torch.load without weights_only"
    if called in ("yaml.load", "yaml.load_all") and "Safe" not in ast.unparse(node):
        yield f"{called} without a safe loader"
    if any(given.get(flag) == "True" for flag in FLAGS):
        yield f"{called} with a flag that runs code"


def ours() -> list[Path]:
    """Return the modules of all packages that are installed or part of an image."""
    folders = [path for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "." and path.name not in NOT_OURS]
    return [path for folder in folders for path in sorted(folder.rglob("*.py"))]


def test_no_module_loads_data_as_code() -> None:
    modules = ours()
    assert len(modules) > 500
    assert [f"{path}: {what}" for path in modules for what in unsafe(path.read_text())] == []


@pytest.mark.parametrize(
    "source",
    [
        *("import pickle", "from pickle import loads", "import cloudpickle as p", "eval(text)", "exec(text)"),
        *("socket.recv_pyobj()", "torch.load(path)", "torch.load(path, weights_only=False)", "yaml.load(text)"),
        *("np.load(path, allow_pickle=True)", "from_pretrained(x, trust_remote_code=True)", "run(text, shell=True)"),
    ],
)
def test_the_check_sees_each_way(source: str) -> None:
    assert list(unsafe(source))
