"""Make the environments of `make test-clients`: one folder of .venv-clients for each file of pins, and Node's packages.

Called by the Makefile with a bare Python >= 3.11; nothing beyond the standard library is used. An environment whose
pins have not changed stays as it is. uv installs several times faster than pip, and environments share equal files.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLIENTS = ROOT / "tests" / "clients"
NODE = CLIENTS / "node"
LOCKS = [folder / "package-lock.json" for folder in (NODE, NODE / "agents", NODE / "promptfoo")]
ENVIRONMENTS = ROOT / ".venv-clients"
UV_ENVIRONMENT = ENVIRONMENTS / "uv"
UV = "uv==0.13.9"
CPU_INDEX = ["--extra-index-url", "https://download.pytorch.org/whl/cpu", "--index-strategy", "unsafe-best-match"]
PIP_SETTINGS = {"global.index-url": "UV_DEFAULT_INDEX", "global.find-links": "UV_FIND_LINKS"}  # uv does not read pip's


def main() -> int:
    began = time.monotonic()
    variables = uv_variables()
    for name, steps in plans():
        print(f"{name} ...", flush=True)
        for argv in steps:
            if subprocess.run(argv, env=variables, stdin=subprocess.DEVNULL, check=False).returncode:
                print(f"FAILED: {' '.join(argv)}; what it said stands above", file=sys.stderr)
                return 1
        done_mark(name).write_text(pins_of(name))
    print(f"the clients are installed in .venv-clients, {time.monotonic() - began:.0f} s")
    return 0


def plans() -> Iterator[tuple[str, list[list[str]]]]:
    """Yield each environment that is missing or has other pins, and the commands that make it anew."""
    if not (UV_ENVIRONMENT / "bin" / "uv").exists():
        yield "uv", [[sys.executable, "-m", "venv", str(UV_ENVIRONMENT)], [*pip(), "install", "--quiet", UV]]
    for file in sorted((CLIENTS / "requirements").glob("*.txt")):
        if not is_done(file.stem):
            yield file.stem, [*python_steps(file), *(node_steps() if file.stem == "node" else [])]


def python_steps(file: Path) -> list[list[str]]:
    folder = ENVIRONMENTS / file.stem
    uv = [str(UV_ENVIRONMENT / "bin" / "uv"), "--quiet"]
    index = [*CPU_INDEX] if "+cpu" in pins_of(file.stem) else []
    return [
        [*uv, "venv", "--clear", "--python", sys.executable, str(folder)],
        [*uv, "pip", "install", "--python", str(folder), "--no-deps", *index, "--requirements", str(file)],
    ]


def node_steps() -> list[list[str]]:
    """Return how to install Node's packages, with the Node and the npm of the environment."""
    path = f"PATH={ENVIRONMENTS / 'node' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    flags = ["--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error"]
    return [["env", path, "npm", "--prefix", str(lock.parent), "ci", *flags] for lock in LOCKS]


def pip() -> list[str]:
    return [str(UV_ENVIRONMENT / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]


def uv_variables() -> dict[str, str]:
    """Return this process's variables, and the package index that pip is set to, if uv has none of its own."""
    found = dict(os.environ)
    for setting, name in PIP_SETTINGS.items():
        argv = [sys.executable, "-m", "pip", "config", "get", setting]
        said = subprocess.run(argv, capture_output=True, text=True, check=False)
        if said.returncode == 0 and name not in found:
            found[name] = said.stdout.strip()
    return found


def pins_of(name: str) -> str:
    """Return the pins of an environment as they are now."""
    if name == "uv":
        return UV
    pins = (CLIENTS / "requirements" / f"{name}.txt").read_text()
    return pins + "".join([lock.read_text() for lock in LOCKS]) if name == "node" else pins


def done_mark(name: str) -> Path:
    return ENVIRONMENTS / name / ".installed-pins"


def is_done(name: str) -> bool:
    return done_mark(name).exists() and done_mark(name).read_text() == pins_of(name)


if __name__ == "__main__":
    sys.exit(main())
