"""Make the environments of `make test-clients`: one folder of .venv-clients for each file of pins, and Node's packages.

Called by the Makefile with a bare Python >= 3.11; nothing beyond the standard library is used. An environment whose
pins have not changed stays as it is. uv installs several times faster than pip, and environments share equal files.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLIENTS = ROOT / "tests" / "clients"
NODE = CLIENTS / "node"
ENVIRONMENTS = ROOT / ".venv-clients"
UV_ENVIRONMENT = ENVIRONMENTS / "uv"
UV = "uv==0.13.9"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PIP_SETTINGS = {"global.index-url": "UV_DEFAULT_INDEX", "global.find-links": "UV_FIND_LINKS"}  # uv does not read pip's


def main() -> int:
    began = time.monotonic()
    variables = uv_variables()
    for title, steps in plans():
        print(f"{title} ...", flush=True)
        for argv in steps:
            if subprocess.run(argv, env=variables, stdin=subprocess.DEVNULL, check=False).returncode:
                print(f"FAILED: {' '.join(argv)}; what it said stands above", file=sys.stderr)
                return 1
        done_mark(title).write_text(pins_of(title))
    print(f"the clients are installed in .venv-clients, {time.monotonic() - began:.0f} s")
    return 0


def plans() -> Iterator[tuple[str, list[list[str]]]]:
    """Yield each environment that is missing or has other pins, and the commands that make it anew."""
    if not UV_ENVIRONMENT.exists():
        yield "uv", [[sys.executable, "-m", "venv", str(UV_ENVIRONMENT)], [*pip(), "install", "--quiet", UV]]
    for file in sorted((CLIENTS / "requirements").glob("*.txt")):
        if not is_done(file.stem):
            yield file.stem, python_steps(file)
    if (NODE / "package-lock.json").exists() and shutil.which("npm") and not is_done("node"):
        yield "node", [["npm", "--prefix", str(NODE), "ci", "--no-audit", "--no-fund", "--loglevel=error"]]


def python_steps(file: Path) -> list[list[str]]:
    folder = ENVIRONMENTS / file.stem
    uv = [str(UV_ENVIRONMENT / "bin" / "uv"), "--quiet"]
    index = (
        ["--extra-index-url", CPU_INDEX, "--index-strategy", "unsafe-best-match"]
        if "+cpu" in pins_of(file.stem)
        else []
    )
    return [
        [*uv, "venv", "--clear", "--python", sys.executable, str(folder)],
        [*uv, "pip", "install", "--python", str(folder), "--no-deps", *index, "--requirements", str(file)],
    ]


def pip() -> list[str]:
    return [str(UV_ENVIRONMENT / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]


def uv_variables() -> dict[str, str]:
    """Return this process's variables, and the package index that pip is set to, if uv has none of its own."""
    found = dict(os.environ)
    for setting, name in PIP_SETTINGS.items():
        said = subprocess.run(
            [sys.executable, "-m", "pip", "config", "get", setting], capture_output=True, text=True, check=False
        )
        if said.returncode == 0 and name not in found:
            found[name] = said.stdout.strip()
    return found


def pins_of(title: str) -> str:
    """Return the hash, or for a Python environment the text, that its pins have now."""
    if title == "uv":
        return UV
    if title == "node":
        return hashlib.sha256((NODE / "package-lock.json").read_bytes()).hexdigest()
    return (CLIENTS / "requirements" / f"{title}.txt").read_text()


def done_mark(title: str) -> Path:
    return (NODE / "node_modules" if title == "node" else ENVIRONMENTS / title) / ".installed-pins"


def is_done(title: str) -> bool:
    return done_mark(title).exists() and done_mark(title).read_text() == pins_of(title)


if __name__ == "__main__":
    sys.exit(main())
